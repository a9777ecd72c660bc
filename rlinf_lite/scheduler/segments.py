"""Encoding of objects that are sent between processes of one node: a pickle, with large buffers in shared memory, which
are written once and read in place.

Pickle protocol 5 with out-of-band buffers. Dense torch tensors are sent as their bytes (so bfloat16 works); a CUDA
tensor goes through host memory and arrives on the receiver's GPU, or on its CPU if it has none. Gradients are not sent.
Rebuilt arrays and tensors use the received buffers as their memory, and are writable if those are.
"""

from __future__ import annotations

import errno
import functools
import importlib
import io
import os
import pickle
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlinf_lite.scheduler import shared_memory
from rlinf_lite.scheduler.errors import SchedulerError, SharedMemoryFullError
from rlinf_lite.scheduler.scratch import SHM_ROOT
from rlinf_lite.scheduler.shared_memory import Mapped, Place

Buffer = bytes | bytearray | memoryview
BULK_BYTES = 64 * 1024  # buffers of at least this size go through shared memory, smaller ones inside the message

_ALIGNMENT = 64


@dataclass
class Parcel:
    """An encoded object: the pickle, its small buffers, and the place of the large ones in shared memory."""

    head: bytes
    small: list[Any]
    place: Place | None
    spans: list[tuple[int, int] | None]
    """For each buffer its start and stop in the shared memory; None: it is the next one of `small`."""
    mapped: Mapped | None = None
    """The shared memory, if the writer keeps it and this process has opened it."""

    def arrive(self) -> None:
        """Open shared memory that the writer keeps; if that fails, `open_buffers` raises the error later."""
        if self.place is not None and self.place.is_kept:
            with suppress(OSError):
                self.mapped = shared_memory.map_kept(self.place)


def store(head: bytes, buffers: Sequence[memoryview], directory: str, inbox: str) -> Parcel:
    """Make a parcel of the result of `encode`: large buffers are written to shared memory. Raises
    SharedMemoryFullError."""
    spans: list[tuple[int, int] | None] = []
    stop = 0
    for buffer in buffers:
        is_bulk = buffer.nbytes >= BULK_BYTES
        start = -(-stop // _ALIGNMENT) * _ALIGNMENT
        spans.append((start, start + buffer.nbytes) if is_bulk else None)
        stop = start + buffer.nbytes if is_bulk else stop
    small = [buffer for buffer in buffers if buffer.nbytes < BULK_BYTES]
    chunks = [(span[0], buffer) for span, buffer in zip(spans, buffers, strict=True) if span is not None]
    try:
        place = shared_memory.write(chunks, stop, directory, inbox) if chunks else None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        instead = "or send smaller messages (fewer environments per worker)"
        raise no_room(os.path.join(directory, "messages"), "a message", stop, instead) from error
    return Parcel(head, small, place, spans)


def unpack(parcel: Parcel) -> Any:
    """Rebuild the object in the shared memory. Arrays and tensors are writable and belong to the caller alone."""
    return pickle.loads(parcel.head, buffers=open_buffers(parcel))


def open_buffers(parcel: Parcel) -> list[Buffer]:
    """The buffers of a parcel, which can be opened once. The shared memory is freed after the last buffer. Raises
    SchedulerError."""
    view, small = memoryview(b""), iter(parcel.small)
    if parcel.place is not None:
        try:
            kept = parcel.mapped or (shared_memory.map_kept(parcel.place) if parcel.place.is_kept else None)
            view = shared_memory.map_once(parcel.place) if kept is None else kept.open()
        except OSError as error:
            raise SchedulerError(
                f"the shared memory of a message cannot be opened: {error}. Has the process that had it ended?"
            ) from error
    return [bytearray(next(small)) if span is None else view[span[0] : span[1]] for span in parcel.spans]


def discard(parcel: Parcel) -> None:
    """Free the shared memory of a parcel that will not be opened."""
    if parcel.mapped is not None:
        parcel.mapped.discard()
    elif parcel.place is not None:
        with suppress(FileNotFoundError):
            os.unlink(parcel.place.path)


def no_room(path: str, what: str, needed_bytes: int, instead: str = "") -> SharedMemoryFullError:
    """The error for full shared memory: `what` needs `needed_bytes` at `path`."""
    directory = os.path.dirname(path)
    usage, needed, suggested = shutil.disk_usage(directory), needed_bytes / 2**20, 8
    while suggested * 2**30 < usage.total + 2 * needed_bytes:
        suggested *= 2
    return SharedMemoryFullError(
        f"shared memory is full: {path} ({what}) needs {needed:.1f} MiB, and {usage.free / 2**20:.1f} of "
        f"{usage.total / 2**20:.1f} MiB are free in {directory}. Give it more room (in a container: docker run "
        f"--shm-size={suggested}g; on a machine: mount -o remount,size={suggested}g {SHM_ROOT}){', ' * bool(instead)}"
        f"{instead}."
    )


def encode(obj: Any) -> tuple[bytes, list[memoryview]]:
    """Pickle an object. Returns the pickle and the buffers that it refers to (views of the object's own memory)."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _pickler(cloudpickle())(stream, protocol=5, buffer_callback=buffers.append).dump(obj)
    return stream.getvalue(), [buffer.raw() for buffer in buffers]


def cloudpickle() -> Any:
    """The cloudpickle module, which can pickle classes of `__main__`. If Ray is loaded it is Ray's own copy: each copy
    rebuilds its own version of such classes, and Ray's calls and our messages must have the same ones."""
    return importlib.import_module("ray.cloudpickle" if "ray" in sys.modules else "cloudpickle")


@functools.cache
def _pickler(module: Any) -> type[Any]:
    class Pickler(module.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            kind = type(obj)
            if kind is np.ndarray:
                if obj.dtype.hasobject or (obj.flags.forc and obj.flags.writeable):
                    return NotImplemented
                return writable(obj if obj.flags.forc else np.ascontiguousarray(obj)).__reduce_ex__(5)
            torch = sys.modules.get("torch")
            if torch is not None and kind is torch.Tensor and _is_dense(obj, torch):
                host = obj.detach().cpu().resolve_conj().resolve_neg().contiguous()
                raw = pickle.PickleBuffer(shared_memory.as_bytes(host))
                return _rebuild_tensor, (raw, str(obj.dtype).removeprefix("torch."), tuple(obj.shape), obj.is_cuda)
            return super().reducer_override(obj)

    return Pickler


def _is_dense(tensor: Any, torch: Any) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


class _WritableInterface:
    """Declares an array writable, so that pickle does not mark its copy at the receiver read-only."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        interface = array.__array_interface__ | {"data": (array.__array_interface__["data"][0], False)}
        self.__array_interface__ = {name: x for name, x in interface.items() if name != "descr"}  # knows no padding


def writable(array: np.ndarray) -> np.ndarray:
    """The same memory as an array that is declared writable; writing to it changes a read-only array."""
    return array if array.flags.writeable else np.asarray(_WritableInterface(array)).view(array.dtype)


def _rebuild_tensor(raw: Buffer, dtype: str, shape: tuple[int, ...], was_cuda: bool) -> Any:
    import torch

    kind = getattr(torch, dtype)
    tensor = torch.empty(shape, dtype=kind) if 0 in shape else torch.frombuffer(raw, dtype=kind).reshape(shape)
    return tensor.cuda() if was_cuda and torch.cuda.is_available() else tensor
