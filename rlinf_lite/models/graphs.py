"""Forward passes recorded as CUDA graphs. A pass is hundreds of small operations, which a GPU computes faster than
Python launches them; a recorded pass is launched as a whole."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
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
"""Whether this process records passes; workers set it to `rollout.cuda_graphs`."""

Pass = Callable[[], Any]
"""A function without arguments that returns tensors, in nested tuples and dicts."""

_KEPT = 8
"""Recorded calls that are kept per model: the shapes of training and of evaluation, and some more."""
_LAUNCHED = 2
"""A pass is recorded after it was launched this many times, as most passes that come once never come again."""
_capturing = Lock()  # torch has one stream for all recordings of a process

_aten = torch.ops.aten
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
_COPYING = (_aten.copy_.default, _aten._to_copy.default)
_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def can_record(device: torch.device) -> bool:
    """Whether passes on `device` can be recorded; not while a dispatch mode, such as a FLOP counter, is active."""
    return enabled and device.type == "cuda" and _get_current_dispatch_mode() is None


def record(work: Pass, pool: Any = None) -> Pass:
    """A function that replays the operations of `work` on the same memory. It returns the same tensors each time, with
    new numbers, which the next call overwrites.

    Python's numbers and shapes stay as they are now. All memory that `work` reads, weights included, must stay in
    place. `work` is called twice here and must write the same each time. If it cannot be recorded, for example because
    it waits for the GPU, a warning is logged and `work` itself is returned.

    `pool`: a `torch.cuda.graph_pool_handle()`. Recordings of one pool share memory, and each overwrites the results of
    the others.
    """
    try:
        with Unwaiting():  # this call also does the libraries' one-time setup, which must not be recorded
            work()
        return _captured(work, pool)
    except RuntimeError as error:
        _warn(str(error))
        return work


class Recordings:
    """Recorded passes by `key`, which must differ wherever Python's numbers or shapes do. One runs at a time. The first
    `_LAUNCHED` calls of a pass are not recorded. When the weights move to other memory, passes are recorded again."""

    _passes: dict[Hashable, Pass]
    _uses: Counter[Hashable]
    _can_record: bool
    _pool: Any
    _where: tuple[int, ...] | None = None

    def run(self, key: Hashable, work: Pass, weights: Iterable[Tensor]) -> Any:
        """The result of `work`, which reads `weights`; by a recording of it if possible (see `record`)."""
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
        self._pool = torch.cuda.graph_pool_handle()  # a pool without recordings cannot be used again


class Calls:
    """Recorded calls of a model's functions, by function name and by shapes, types and Python values of the arguments.
    Recordings are not copied or saved with the model."""

    def __init__(self) -> None:
        self._lock = Lock()  # threads that act with one model would write to the same memory
        self.clear()

    def __reduce__(self) -> tuple[type[Calls], tuple[()]]:
        return Calls, ()

    def clear(self) -> None:
        """Free the memory of all recordings."""
        self._recordings = Recordings()
        self._kept: OrderedDict[Hashable, tuple[list[Tensor], Pass]] = OrderedDict()

    def __call__(self, model: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, without gradients, by a recording if possible. Besides `args` the function may read only
        the model's tensors, and Python values that never change."""
        flat, structure = tree_flatten(args)
        given = [x for x in flat if isinstance(x, Tensor)]
        device = next(model.parameters()).device
        # hooks are to be called each time
        if torch.is_grad_enabled() or not can_record(device) or any(map(_has_hooks, model.modules())):
            return function(*args)
        kinds = tuple((x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x for x in flat)
        autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        key = function.__name__, kinds, str(structure), autocast
        # outside inference mode: later calls, in that mode or not, write to the memory that is kept
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
        """New tensors that replace those in `flat`, and a call of the function with them."""
        own = [torch.empty_like(x) if isinstance(x, Tensor) else x for x in flat]
        return [x for x in own if isinstance(x, Tensor)], lambda: function(*tree_unflatten(own, structure))


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def addresses(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Memory addresses of the tensors; a recording that reads the tensors is valid while these stay the same."""
    return tuple(tensor.data_ptr() for tensor in tensors)


def _captured(work: Pass, pool: Any) -> Pass:
    pool = pool or torch.cuda.graph_pool_handle()
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    torch.clear_autocast_cache()  # the recording must not read weights cast before, nor leave its own to others
    try:
        # other threads of this process may use the GPU meanwhile
        with _capturing, torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
            result = work()
    except BaseException:  # Ctrl-C too: otherwise torch keeps allocating from the broken recording's pool and stream
        with suppress(RuntimeError):  # the recording had ended already
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


class Unwaiting(TorchDispatchMode):
    """A mode in which operations that wait for the GPU raise RuntimeError: in a recording they break the process's CUDA
    state, in training the GPU idles meanwhile. It sees on a CPU too what reads numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # in inference mode, composite operations arrive here as one
            found = func.decompose(*args, **(kwargs or {}))
        if found is not NotImplemented:
            return found
        if func in _INDEXING:  # a mask's count is read back, unless all marked elements become one number
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
    log.warning("A pass cannot be recorded as a CUDA graph; its operations are launched one by one: %s", reason)
