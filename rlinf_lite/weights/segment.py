"""A segment of shared memory with one full set of weights, for the receivers of one node."""

from __future__ import annotations

import errno
import math
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_lite.scheduler.errors import SchedulerError
from rlinf_lite.scheduler.segments import no_room
from rlinf_lite.scheduler.shared_memory import as_bytes
from rlinf_lite.weights.pages import lock_pages

_ALIGNMENT = 64
_PIECE_BYTES = 4 * 2**20
"""Bytes that a copying thread takes at a time. Torch's own threads would halve each tensor, and the slower half would
delay it."""


@dataclass(frozen=True)
class Entry:
    """The place of a tensor in a segment."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int  # in bytes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def layout(tensors: Iterable[tuple[str, torch.Size, torch.dtype]]) -> list[Entry]:
    """Entries that place these tensors one after the other."""
    entries, offset = [], 0
    for name, shape, dtype in tensors:
        entries.append(Entry(name, tuple(shape), dtype, offset))
        offset += -(-entries[-1].num_bytes // _ALIGNMENT) * _ALIGNMENT
    return entries


class Segment:
    """Tensors in a file of shared memory. Its owner unlinks the file as soon as every receiver has mapped it."""

    def __init__(self, path: str, entries: list[Entry], create: bool, lock: bool) -> None:
        """`lock`: lock its pages, for a GPU of this process. Raises SchedulerError if shared memory is full."""
        self.path, self.entries = path, entries
        num_bytes = max(entries[-1].offset + entries[-1].num_bytes, 1)
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            if create:  # fails if shared memory is full, where writing would raise a bus error
                os.posix_fallocate(descriptor, 0, num_bytes)
            memory = mmap.mmap(descriptor, num_bytes)
        except OSError as error:
            if not create:
                raise
            os.unlink(path)
            if error.errno != errno.ENOSPC:
                raise
            raise no_room(path, "weights for the rollout workers of this node", num_bytes) from error
        finally:
            os.close(descriptor)
        whole = np.frombuffer(memory, np.uint8)
        if lock:
            lock_pages(whole, "Shared memory for weights")
        self.tensors: dict[str, Tensor] = {}
        for entry in entries:
            tensor = torch.empty(0, dtype=entry.dtype)
            if entry.num_bytes:
                raw = whole[entry.offset : entry.offset + entry.num_bytes]
                tensor = torch.from_numpy(raw).view(entry.dtype)
            self.tensors[entry.name] = tensor.view(entry.shape)

    def write(self, bucket: Mapping[str, Tensor], run_all: Callable[..., Iterable[Any]] = map) -> None:
        """Copy tensors to their places, and wait for it. `run_all`: like `map`, on several threads."""
        for name, tensor in bucket.items():
            room = self.tensors[name]
            if (room.shape, room.dtype) != (tensor.shape, tensor.dtype):
                was, now = (f"{list(x.shape)} {x.dtype}" for x in (room, tensor))
                raise SchedulerError(f"{name} was {was} when the weights were first sent, and is {now} now")
        on_gpu = [name for name, tensor in bucket.items() if not in_host_memory(tensor)]
        for name in on_gpu:
            self.tensors[name].copy_(bucket[name], non_blocking=True)
        here = [name for name in bucket if name not in on_gpu]
        targets = [piece for name in here for piece in _pieces(self.tensors[name])]
        sources = [piece for name in here for piece in _pieces(bucket[name])]
        is_small = sum(source.nbytes for source in sources) <= _PIECE_BYTES
        list((map if is_small else run_all)(np.copyto, targets, sources))
        if on_gpu:
            torch.cuda.synchronize()


def in_host_memory(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _pieces(tensor: Tensor) -> Sequence[np.ndarray]:
    """The bytes of a contiguous tensor in host memory, in pieces of `_PIECE_BYTES`."""
    raw = as_bytes(tensor)
    return [raw[start : start + _PIECE_BYTES] for start in range(0, len(raw), _PIECE_BYTES)]
