"""Passes recorded as CUDA graphs. A pass of one token is hundreds of small operations, which a GPU does faster than
Python launches them; a recorded one is launched as a whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

log = logging.getLogger(__name__)

enabled = True
"""Of this process; workers set it to `rollout.cuda_graphs`."""

Pass = Callable[[], Tensor]


def can_record(device: torch.device) -> bool:
    return enabled and device.type == "cuda"


def record(work: Pass) -> Pass:
    """`work`, recorded: what is returned does the same operations on the same memory, and returns the same tensor with
    new numbers, which the next call overwrites. Numbers and shapes that Python knows stay what they are now, and so
    must the memory of all that `work` reads, weights included. It is called three times, and must write the same each
    time. Where it cannot be recorded, since it waits for the GPU on its way, say, that is logged, and `work` itself is
    returned.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what libraries set up when first called is not to be recorded
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph, caches = torch.cuda.CUDAGraph(), torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # weights cast before would be read, and those cast now be kept
    try:
        # other threads of this process may use the GPU meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = work()
    except RuntimeError as error:
        log.warning("A pass cannot be recorded as a CUDA graph, and is launched piece by piece: %s", error)
        return work
    finally:
        torch.set_autocast_cache_enabled(caches)

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def addresses(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Where they are: what is recorded with them holds no longer than these stay the same."""
    return tuple(tensor.data_ptr() for tensor in tensors)
