"""Page-locked host memory, which a GPU reads and writes directly."""

from __future__ import annotations

import logging
import weakref
from contextlib import suppress

import numpy as np
import torch

log = logging.getLogger(__name__)


def lock_pages(memory: np.ndarray, what: str) -> bool:
    """Lock the pages of `memory` until it is freed. Otherwise a GPU copies it in pieces through its driver's memory.

    `memory` must be a whole mapping, as a page can be locked only once. Returns whether it was locked; if not, a
    warning names `what` it holds.
    """
    runtime, address = torch.cuda.cudart(), memory.ctypes.data
    code = int(runtime.cudaHostRegister(address, memory.nbytes, 0))
    if code:
        log.warning("%s cannot be page-locked (CUDA error %d): GPUs copy it slowly", what, code)
        with suppress(RuntimeError):  # clears the error, which the next operation on the GPU would raise
            torch.zeros(1, device="cuda")
        return False
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return True
