"""Objects between processes of one node: pickled, with their bulk in a file in shared memory, which is written once,
mapped and unlinked by its reader.

Pickle protocol 5 with out-of-band buffers. Dense torch tensors travel as their bytes (so bfloat16 works); a CUDA tensor
goes through host memory and arrives on the receiver's GPU, or on its CPU where it has none. Gradients do not travel.
What is rebuilt lies in the buffers that were sent, and is writable where they are.
"""

from __future__ import annotations

import errno
import io
import itertools
import mmap
import os
import pickle
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray import cloudpickle

from rlinf_lite.scheduler.errors import SchedulerError
from rlinf_lite.scheduler.scratch import SHM_ROOT

Buffer = bytes | bytearray | memoryview
BULK_BYTES = 64 * 1024  # buffers from this size on go through a segment, smaller ones inside the message

_ALIGNMENT = 64
_counter = itertools.count()


@dataclass
class Parcel:
    """An encoded object: the pickle, its small buffers, and where the large ones lie."""

    head: bytes
    small: list[Any]
    segment: str | None
    spans: list[tuple[int, int] | None]
    """For each buffer, start and stop in the segment; None: it is the next of `small`."""


def pack(obj: Any, directory: str) -> Parcel:
    """Encode an object, with its bulk in one new segment under `directory`."""
    return store(*encode(obj), directory)


def store(head: bytes, buffers: Sequence[memoryview], directory: str) -> Parcel:
    """A parcel of what `encode` gave."""
    spans: list[tuple[int, int] | None] = []
    start = 0
    for buffer in buffers:
        is_bulk = buffer.nbytes >= BULK_BYTES
        spans.append((start, start + buffer.nbytes) if is_bulk else None)
        start += -(-buffer.nbytes // _ALIGNMENT) * _ALIGNMENT if is_bulk else 0
    small = [buffer for buffer in buffers if buffer.nbytes < BULK_BYTES]
    return Parcel(head, small, _write(buffers, spans, directory) if start else None, spans)


def unpack(parcel: Parcel) -> Any:
    """Rebuild the object on the mapped segment. Arrays and tensors are writable and belong to the caller alone."""
    return pickle.loads(parcel.head, buffers=open_buffers(parcel))


def open_buffers(parcel: Parcel) -> list[Buffer]:
    """Map the segment and unlink it; the memory lives as long as the buffers do."""
    view, small = memoryview(b""), iter(parcel.small)
    if parcel.segment is not None:
        fd = os.open(parcel.segment, os.O_RDWR)
        try:
            os.unlink(parcel.segment)
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            view = memoryview(mmap.mmap(fd, os.fstat(fd).st_size, flags=flags))
        finally:
            os.close(fd)
    return [bytearray(next(small)) if span is None else view[span[0] : span[1]] for span in parcel.spans]


def discard(parcel: Parcel) -> None:
    """Free the bulk of a parcel that nobody will open."""
    if parcel.segment is not None:
        with suppress(FileNotFoundError):
            os.unlink(parcel.segment)


def no_room(path: str, what: str, needed_bytes: int, instead: str = "") -> SchedulerError:
    """The error for shared memory that is full: `what` takes so much at `path`, which cannot be written whole."""
    directory = os.path.dirname(path)
    usage, needed, suggested = shutil.disk_usage(directory), needed_bytes / 2**20, 8
    while suggested * 2**30 < usage.total + 2 * needed_bytes:
        suggested *= 2
    return SchedulerError(
        f"shared memory is full: {path} ({what}) needs {needed:.1f} MiB, and {usage.free / 2**20:.1f} of "
        f"{usage.total / 2**20:.1f} MiB are free in {directory}. Give it more room (in a container: docker run "
        f"--shm-size={suggested}g; on a machine: mount -o remount,size={suggested}g {SHM_ROOT}){', ' * bool(instead)}"
        f"{instead}."
    )


def _write(buffers: Sequence[memoryview], spans: Sequence[tuple[int, int] | None], directory: str) -> str:
    path = os.path.join(directory, f"{os.getpid()}-{next(_counter)}")
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        for buffer, span in zip(buffers, spans, strict=True):
            done = 0
            # write() into tmpfs rather than a mapping: no page fault per 4 KiB, and ENOSPC instead of SIGBUS
            while span is not None and done < buffer.nbytes:
                done += os.pwrite(fd, buffer[done:], span[0] + done)
    except OSError as error:
        os.unlink(path)
        if error.errno != errno.ENOSPC:
            raise
        needed = sum(buffer.nbytes for buffer in buffers)
        raise no_room(path, "a message", needed, "or send smaller messages (fewer environments per worker)") from error
    finally:
        os.close(fd)
    return path


def encode(obj: Any) -> tuple[bytes, list[memoryview]]:
    """A pickle, and the buffers that it refers to (views of the object's own memory)."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(obj)
    return stream.getvalue(), [buffer.raw() for buffer in buffers]


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is np.ndarray:
            if obj.dtype.hasobject or (obj.flags.forc and obj.flags.writeable):
                return NotImplemented
            return writable(obj if obj.flags.forc else np.ascontiguousarray(obj)).__reduce_ex__(5)
        torch = sys.modules.get("torch")
        if torch is not None and kind is torch.Tensor and obj.layout is torch.strided and not obj.is_quantized:
            host = obj.detach().cpu().resolve_conj().resolve_neg().contiguous()
            raw = pickle.PickleBuffer(host.reshape(-1).view(torch.uint8).numpy())
            return _rebuild_tensor, (raw, str(obj.dtype).removeprefix("torch."), tuple(obj.shape), obj.is_cuda)
        return super().reducer_override(obj)


class _WritableInterface:
    """Says of an array that it is writable, so that pickle does not mark its copy on the other side read-only."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__ | {"data": (array.__array_interface__["data"][0], False)}


def writable(array: np.ndarray) -> np.ndarray:
    """The same memory, said to be writable; whoever writes to it must know what they do."""
    return array if array.flags.writeable else np.asarray(_WritableInterface(array))


def _rebuild_tensor(raw: Buffer, dtype: str, shape: tuple[int, ...], was_cuda: bool) -> Any:
    import torch

    kind = getattr(torch, dtype)
    tensor = torch.empty(shape, dtype=kind) if 0 in shape else torch.frombuffer(raw, dtype=kind).reshape(shape)
    return tensor.cuda() if was_cuda and torch.cuda.is_available() else tensor
