"""Bulk data between processes of one node: a file in shared memory, written once, mapped and unlinked by its reader."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlinf_lite.scheduler.codec import Buffer, decode, encode
from rlinf_lite.scheduler.errors import SchedulerError

BULK_BYTES = 64 * 1024
"""Buffers from this size on go through a segment, smaller ones inside the message."""

SHM_ROOT = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
_ALIGNMENT = 64
_counter = itertools.count()


@dataclass
class Parcel:
    """An encoded object: the pickle, its small buffers, and where its bulk lies."""

    head: bytes
    inline: list[Any]
    """Small buffers, in order; None where the buffer lies in the segment."""
    segment: str | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Offset and length of each bulk buffer."""
    node_id: str = ""


def pack(obj: Any, directory: str, node_id: str = "") -> Parcel:
    """Encode an object, with its bulk in one new segment under `directory`."""
    head, buffers = encode(obj)
    return pack_buffers(head, buffers, directory, node_id)


def pack_buffers(head: bytes, buffers: Sequence[memoryview], directory: str, node_id: str = "") -> Parcel:
    bulk = [buffer for buffer in buffers if buffer.nbytes >= BULK_BYTES]
    inline = [None if buffer.nbytes >= BULK_BYTES else bytes(buffer) for buffer in buffers]
    if not bulk:
        return Parcel(head, inline, None, [], node_id)
    path, spans = _write(bulk, directory)
    return Parcel(head, inline, path, spans, node_id)


def unpack(parcel: Parcel) -> Any:
    """Rebuild the object on the mapped segment. Arrays and tensors are writable and belong to the caller alone."""
    bulk = iter(open_segment(parcel.segment, parcel.spans) if parcel.segment else ())
    return decode(parcel.head, [next(bulk) if small is None else bytearray(small) for small in parcel.inline])


def open_segment(path: str, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
    """Map a segment, unlink it, and return its buffers; the memory lives as long as they do."""
    fd = os.open(path, os.O_RDWR)
    try:
        os.unlink(path)
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        view = memoryview(mmap.mmap(fd, os.fstat(fd).st_size, flags=flags))
    finally:
        os.close(fd)
    return [view[offset : offset + length] for offset, length in spans]


def discard(parcel: Parcel) -> None:
    """Free the bulk of a parcel that nobody will open."""
    if parcel.segment and os.path.exists(parcel.segment):
        os.unlink(parcel.segment)


def _write(buffers: Sequence[memoryview], directory: str) -> tuple[str, list[tuple[int, int]]]:
    path = os.path.join(directory, f"{os.getpid()}-{next(_counter)}")
    spans: list[tuple[int, int]] = []
    offset = 0
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        for buffer in buffers:
            spans.append((offset, buffer.nbytes))
            _write_all(fd, buffer, offset)
            offset += -(-buffer.nbytes // _ALIGNMENT) * _ALIGNMENT
    except OSError as error:
        os.unlink(path)
        if error.errno != errno.ENOSPC:
            raise
        raise SchedulerError(
            f"{directory} is full: a message of {sum(b.nbytes for b in buffers) / 2**20:.0f} MiB does not fit. "
            "Give it more room (docker run --shm-size=8g) or send smaller messages (fewer environments per worker)."
        ) from error
    finally:
        os.close(fd)
    return path, spans


def _write_all(fd: int, buffer: Buffer, offset: int) -> None:
    # write() into tmpfs rather than a mapping: no page fault per 4 KiB, and ENOSPC instead of SIGBUS
    view = memoryview(buffer)
    done = 0
    while done < view.nbytes:
        done += os.pwrite(fd, view[done:], offset + done)
