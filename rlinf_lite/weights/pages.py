"""Host memory that a GPU reads and writes by itself: its pages are locked in place."""

from __future__ import annotations

import logging
import weakref
from contextlib import suppress

import numpy as np
import torch

log = logging.getLogger(__name__)


def lock_pages(memory: np.ndarray, what: str) -> bool:
    """Until nothing has `memory` any more. A GPU otherwise copies by way of memory of its driver's, piece by piece.

    `memory`: a mapping of its own, as pages are locked once only. Returns whether they are; that they are not is
    logged, with `what` is in them.
    """
    runtime, address = torch.cuda.cudart(), memory.ctypes.data
    code = int(runtime.cudaHostRegister(address, memory.nbytes, 0))
    if code:
        log.warning("%s cannot be page-locked (CUDA error %d): GPUs copy it slowly", what, code)
        with suppress(RuntimeError):  # the next operation on the GPU would raise that error as its own
            torch.zeros(1, device="cuda")
        return False
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return True
