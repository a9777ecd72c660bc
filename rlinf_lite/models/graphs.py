"""Passes recorded as CUDA graphs. A pass of one token is hundreds of small operations, which a GPU does faster than
Python launches them; a recorded one is launched as a whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

log = logging.getLogger(__name__)

enabled = True
"""Of this process; workers set it to `rollout.cuda_graphs`."""

Pass = Callable[[], Tensor]

_aten = torch.ops.aten
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
_COPYING = (_aten.copy_.default, _aten._to_copy.default)
_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def can_record(device: torch.device) -> bool:
    return enabled and device.type == "cuda"


def record(work: Pass, pool: Any = None) -> Pass:
    """`work`, recorded: what is returned does the same operations on the same memory, and returns the same tensor with
    new numbers, which the next call overwrites. Numbers and shapes that Python knows stay what they are now, and so
    must the memory of all that `work` reads, weights included. It is called twice, and must write the same each time.
    Where it cannot be recorded, since it waits for the GPU on its way, say, that is logged, and `work` itself is
    returned.

    `pool`, a `torch.cuda.graph_pool_handle()`: recordings of one pool share the memory of what they compute, and any of
    them overwrites what another has returned.
    """
    try:
        with _Unrecordable():  # what libraries set up when first called is not to be recorded either
            work()
        return _captured(work, pool)
    except RuntimeError as error:
        _warn(str(error))
        return work


class Recordings:
    """Recorded passes by `key`, whatever Python knows of them, of which one runs at a time. They read `tensors`
    (weights) where these are; once they lie elsewhere, passes are recorded again."""

    _passes: dict[Hashable, Pass]
    _can_record: bool
    _pool: Any

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._start_over(addresses(self._tensors))

    def run(self, key: Hashable, work: Pass) -> Tensor:
        """What `work` returns, by a recording of it if there can be one; see `record`."""
        where = addresses(self._tensors)
        if where != self._where:
            self._start_over(where)
        if key not in self._passes and self._can_record:
            recorded = record(work, self._pool)
            self._can_record = recorded is not work
            if self._can_record:
                self._passes[key] = recorded
        return self._passes.get(key, work)()

    def _start_over(self, where: tuple[int, ...]) -> None:
        self._where, self._passes, self._can_record = where, {}, True
        self._pool = torch.cuda.graph_pool_handle()  # one that no recording has any more cannot be used again


def addresses(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Where they are: what is recorded with them holds no longer than these stay the same."""
    return tuple(tensor.data_ptr() for tensor in tensors)


def _captured(work: Pass, pool: Any) -> Pass:
    graph, caches = torch.cuda.CUDAGraph(), torch.is_autocast_cache_enabled()
    before = torch.cuda.current_stream()
    torch.set_autocast_cache_enabled(False)  # weights cast before would be read, and those cast now be kept
    try:
        # other threads of this process may use the GPU meanwhile
        with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
            result = work()
    finally:
        torch.set_autocast_cache_enabled(caches)
        torch.cuda.set_stream(before)  # which a recording that broke off has not left

    def replay() -> Tensor:
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
