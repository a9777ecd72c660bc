"""Passes recorded as CUDA graphs. A pass is hundreds of small operations, which a GPU does faster than Python launches
them; a recorded one is launched as a whole."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from contextvars import ContextVar
from functools import cache
from itertools import chain
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

log = logging.getLogger(__name__)

enabled = True
"""Of this process; workers set it to `rollout.cuda_graphs`."""

Pass = Callable[[], Any]
"""What it returns is tensors, in tuples and dicts of whatever depth."""

_under_way = ContextVar("under_way", default=False)
_KEPT = 8
"""Recorded calls of a model: a shape of training's, of an evaluation's, and some to spare."""
_LAUNCHED = 2
"""Times that the same pass is not recorded yet: it may never come again."""
_capturing = Lock()  # torch has one stream for all recordings of a process

_aten = torch.ops.aten
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
_COPYING = (_aten.copy_.default, _aten._to_copy.default)
_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def can_record(device: torch.device) -> bool:
    """Not where something watches each operation, such as a count of FLOPs."""
    return enabled and device.type == "cuda" and _get_current_dispatch_mode() is None


def record(work: Pass, pool: Any = None) -> Pass:
    """`work`, recorded: what is returned does the same operations on the same memory, and returns the same tensor with
    new numbers, which the next call overwrites. Numbers and shapes that Python knows stay what they are now, and so
    must the memory of all that `work` reads, weights included. It is called twice, and must write the same each time.
    Where it cannot be recorded, since it waits for the GPU on its way, say, that is logged, and `work` itself is
    returned.

    `pool`, a `torch.cuda.graph_pool_handle()`: recordings of one pool share the memory of what they compute, and any of
    them overwrites what another has returned.
    """
    under_way = _under_way.set(True)
    try:
        with _Unrecordable():  # what libraries set up when first called is not to be recorded either
            work()
        return _captured(work, pool)
    except RuntimeError as error:
        _warn(str(error))
        return work
    finally:
        _under_way.reset(under_way)


def is_recording() -> bool:
    """Whether what is computed now is being recorded, so that nothing may be looked up in the GPU's memory."""
    return not torch.compiler.is_compiling() and _under_way.get()


class Recordings:
    """Recorded passes by `key`, whatever Python knows of them, of which one runs at a time. The first few are launched:
    recording costs about as much. Once the weights lie elsewhere, passes are recorded again."""

    _passes: dict[Hashable, Pass]
    _uses: Counter[Hashable]
    _can_record: bool
    _pool: Any
    _where: tuple[int, ...] | None = None

    def run(self, key: Hashable, work: Pass, weights: Iterable[Tensor]) -> Any:
        """What `work`, which reads `weights`, returns, by a recording of it if there can be one; see `record`."""
        where = addresses(weights)
        if where != self._where:
            self._start_over(where)
        self._uses[key] += 1
        if key not in self._passes and self._can_record and self._uses[key] > _LAUNCHED:
            recorded = record(work, self._pool)
            self._can_record = recorded is not work
            if self._can_record:
                self._passes[key] = recorded
        return self._passes.get(key, work)()

    def forget(self, key: Hashable) -> None:
        self._passes.pop(key, None)
        self._uses.pop(key, None)

    def _start_over(self, where: tuple[int, ...]) -> None:
        self._where, self._passes, self._can_record, self._uses = where, {}, True, Counter()
        self._pool = torch.cuda.graph_pool_handle()  # one that no recording has any more cannot be used again


class Calls:
    """Calls of a model's functions, each recorded by its name and what Python knows of its arguments. What is copied or
    saved with the model is none of them."""

    def __init__(self) -> None:
        self._lock = Lock()  # threads that act with one model would write to the same memory
        self.clear()

    def __reduce__(self) -> tuple[type[Calls], tuple[()]]:
        return Calls, ()

    def clear(self) -> None:
        """Give back the memory of all."""
        self._recordings = Recordings()
        self._kept: OrderedDict[Hashable, tuple[list[Tensor], Pass]] = OrderedDict()

    def __call__(self, model: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, without gradients, by a recording if there can be one. Tensors that the function reads
        besides `args` must be the model's, and what it does follow from nothing else that changes."""
        flat, structure = tree_flatten(args)
        given = [x for x in flat if isinstance(x, Tensor)]
        device = next(model.parameters()).device
        # hooks are to be called each time
        if torch.is_grad_enabled() or not can_record(device) or any(map(_has_hooks, model.modules())):
            return function(*args)
        kinds = tuple((x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x for x in flat)
        autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        key = function.__name__, kinds, str(structure), autocast
        # memory that stays is written to by later calls, in inference mode or not
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if key not in self._kept:
                self._kept[key] = self._new(function, flat, structure)
            self._kept.move_to_end(key)
            if len(self._kept) > _KEPT:
                self._recordings.forget(self._kept.popitem(last=False)[0])
            own, work = self._kept[key]
            for kept, new in zip(own, given, strict=True):
                kept.copy_(new)
            weights = chain(model.parameters(), model.buffers())
            return tree_map_only(Tensor, torch.clone, self._recordings.run(key, work, weights))

    def _new(self, function: Callable[..., Any], flat: list[Any], structure: TreeSpec) -> tuple[list[Tensor], Pass]:
        """The memory of a recording's own that stands for the tensors in `flat`, and the call with it."""
        own = [torch.empty_like(x) if isinstance(x, Tensor) else x for x in flat]
        return [x for x in own if isinstance(x, Tensor)], lambda: function(*tree_unflatten(own, structure))


def _has_hooks(module: nn.Module) -> bool:
    """Or compiled code, which may be recorded itself."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._compiled_call_impl)


def addresses(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Where they are: what is recorded with them holds no longer than these stay the same."""
    return tuple(tensor.data_ptr() for tensor in tensors)


def _captured(work: Pass, pool: Any) -> Pass:
    pool = pool or torch.cuda.graph_pool_handle()
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    torch.clear_autocast_cache()  # weights cast before would be read, and those cast now be kept
    try:
        # other threads of this process may use the GPU meanwhile
        with _capturing, torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
            result = work()
    except BaseException:  # Ctrl-C too: torch would go on to allocate for the broken recording, on its stream
        with suppress(RuntimeError):  # it had ended already
            torch._C._cuda_endAllocateToPool(before.device_index, pool)
            torch._C._cuda_releasePool(before.device_index, pool)
        torch.cuda.set_stream(before)
        raise
    finally:
        torch.clear_autocast_cache()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


class _Unrecordable(TorchDispatchMode):
    """Raises RuntimeError for operations that wait for the GPU: in a recording they would break more than itself."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # in inference mode, operations that consist of others arrive whole
            found = func.decompose(*args, **(kwargs or {}))
        if found is not NotImplemented:
            return found
        if func in _INDEXING:  # by a mask: how many it marks is looked up, unless all become one number
            waits = any(x is not None and x.dtype == torch.bool for x in args[1])
            waits &= func is _INDEXING[0] or args[2].numel() > 1
        else:
            waits = bool(_WAITING & set(func.tags))
        if waits:
            raise RuntimeError(f"{func} waits for the GPU")
        found = func(*args, **(kwargs or {}))
        if func in _COPYING:
            ends = {x.device for x in tree_leaves((args, found)) if isinstance(x, Tensor)}
            if len(ends) > 1:
                raise RuntimeError(f"{func} from or to {' and '.join(sorted(map(str, ends)))} waits for the GPU")
        return found


@cache
def _warn(reason: str) -> None:
    log.warning("A pass cannot be recorded as a CUDA graph, and is launched piece by piece: %s", reason)
