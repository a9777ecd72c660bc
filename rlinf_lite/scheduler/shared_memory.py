"""Shared memory for messages between processes of a node. A segment is used again once no process reads it.

New memory costs a page fault for every 4 KiB in both processes, which takes several times as long as a copy. So a
process keeps the segments that it has written, by inbox, and the reader keeps them mapped.

A segment has a file name only until the process that reads the inbox has opened it; from then on the kernel frees it
when the last process that has it open ends, even if that is killed. Its first byte says whether its message has been
opened. The reader holds a lock on the file until the last array in it is gone, or the reader ends; then the writer may
use the segment again.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import itertools
import mmap
import os
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

KEPT_BYTES = 2**30
"""Most bytes that a process keeps for reuse; never more than 1/16 of the node's shared memory."""
KEPT_SEGMENTS = 64  # most segments that a process keeps; each is an open file of two processes

_HEADER_BYTES = mmap.PAGESIZE
_UNREAD, _OPENED, _RETIRED = b"\0", b"\1", b"\2"  # the first byte

_counter = itertools.count()
_lock = threading.RLock()
_written: dict[str, list[_Written]] = {}  # segments that this process keeps, by inbox
_mapped: dict[str, Mapped] = {}  # segments that other processes keep and this one has opened, by name

Chunk = tuple[int, memoryview]  # an offset, and the data to write there


class Place(NamedTuple):
    """The place of a message's large buffers, sent to the reader."""

    name: str
    path: str
    writer: int  # process id
    is_kept: bool


def write(chunks: Sequence[Chunk], num_bytes: int, directory: str, inbox: str) -> Place:
    """Write `chunks` into `num_bytes` of shared memory for the reader of `inbox` (a path; "": for one reader that maps
    it once).

    Raises OSError; ENOSPC means that the shared memory is full.
    """
    segment = _claim(num_bytes, directory, inbox)
    try:
        try:
            segment.write(chunks, num_bytes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            with _lock:
                _shrink(0, 0)
            segment.write(chunks, num_bytes)
    except BaseException:
        with _lock:
            if not segment.give_up() and segment in _written.get(inbox, ()):
                _written[inbox].remove(segment)
        raise
    return segment.place


def map_kept(place: Place) -> Mapped:
    """Open a segment that its writer keeps. The first call in a process opens the file and removes its name."""
    with _lock:
        if place.name not in _mapped:
            forget_writers()
            _mapped[place.name] = Mapped(place)
        return _mapped[place.name]


def map_once(place: Place) -> memoryview:
    """Open a segment that is written once, and remove its name. The memory is freed with the view."""
    fd = os.open(place.path, os.O_RDWR)
    try:
        os.unlink(place.path)
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        return memoryview(mmap.mmap(fd, 0, flags=flags))[_HEADER_BYTES:]
    finally:
        os.close(fd)


def forget_inbox(inbox: str) -> None:
    """Release the segments kept for an inbox that is no longer read."""
    with _lock:
        for segment in _written.pop(inbox, []):
            segment.retire()


def forget_writers() -> None:
    """Release opened segments that will not be written again: those retired, and those of processes that have ended."""
    with _lock:
        for name in [name for name, segment in _mapped.items() if segment.is_over()]:
            del _mapped[name]


def forget_all() -> None:
    """Release all segments, when this process leaves its cluster."""
    with _lock:
        for inbox in list(_written):
            forget_inbox(inbox)
        _mapped.clear()


class Mapped:
    """A segment, in the process that reads it."""

    def __init__(self, place: Place) -> None:
        self._place, self._fd = place, os.open(place.path, os.O_RDWR)
        self._memory = mmap.mmap(self._fd, 0)
        os.unlink(place.path)

    def __del__(self) -> None:
        with suppress(AttributeError):  # opening it failed
            os.close(self._fd)

    def open(self) -> memoryview:
        """The message's buffers. They are not overwritten while the view, or an array made from it, exists."""
        fcntl.flock(self._fd, fcntl.LOCK_SH)
        self.discard()
        view = np.frombuffer(self._memory, np.uint8, offset=_HEADER_BYTES)
        weakref.finalize(view, self._close, os.getpid()).atexit = False
        return view.data

    def discard(self) -> None:
        """Mark the message as opened, or as not needed."""
        if os.pread(self._fd, 1, 0) == _UNREAD:
            os.pwrite(self._fd, _OPENED, 0)

    def is_over(self) -> bool:
        state = os.pread(self._fd, 1, 0)
        return state in (b"", _RETIRED) or (state == _OPENED and not os.path.exists(f"/proc/{self._place.writer}"))

    def _close(self, process: int) -> None:
        if os.getpid() == process:  # a forked child shares the lock, and the parent may still read
            fcntl.flock(self._fd, fcntl.LOCK_UN)


class _Written:
    """A segment, in the process that writes it."""

    def __init__(self, path: str, size: int, num_bytes: int, is_kept: bool) -> None:
        self.place = Place(os.path.basename(path), path, os.getpid(), is_kept)
        self.size = size
        self.num_bytes = num_bytes  # of its largest message: only bytes that were written take memory
        self._filled = 0
        self._memory: mmap.mmap | None = None
        self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        os.ftruncate(self._fd, _HEADER_BYTES + size)

    def __del__(self) -> None:  # runs only after the last thread has written to it
        with suppress(AttributeError):
            os.close(self._fd)

    def claim(self, num_bytes: int) -> None:
        os.pwrite(self._fd, _UNREAD, 0)
        self.num_bytes = max(self.num_bytes, num_bytes)

    def write(self, chunks: Sequence[Chunk], num_bytes: int) -> None:
        if num_bytes <= self._filled:
            self._memory = self._memory or mmap.mmap(self._fd, 0)
            for start, data in chunks:
                room = np.frombuffer(self._memory, np.uint8, data.nbytes, _HEADER_BYTES + start)
                np.copyto(room, np.frombuffer(data, np.uint8))
            return
        # new memory: write() needs no page fault per 4 KiB, and fails with ENOSPC instead of SIGBUS
        os.pwrite(self._fd, _UNREAD, 0)
        for start, data in chunks:
            done = 0
            while done < data.nbytes:
                done += os.pwrite(self._fd, data[done:], _HEADER_BYTES + start + done)
        self._filled = num_bytes

    def is_free(self) -> bool:
        """Whether its message has been opened and no array of it remains."""
        if os.pread(self._fd, 1, 0) != _OPENED:
            return False
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return True

    def retire(self) -> None:
        """Stop using the segment. Memory that is not being read is freed at once, even if the reader has it mapped."""
        with suppress(FileNotFoundError):  # the name is gone if the segment was opened
            os.unlink(self.place.path)
        if self.is_free():
            os.ftruncate(self._fd, 0)
        elif self._filled:
            os.pwrite(self._fd, _RETIRED, 0)

    def give_up(self) -> bool:
        """Cancel its message. Returns whether the segment can take another one."""
        if self.place.is_kept and self._filled:
            os.pwrite(self._fd, _OPENED, 0)
            return True
        self.retire()
        return False


def _claim(num_bytes: int, directory: str, inbox: str) -> _Written:
    """A free segment for one message: a kept one of the size, else a new one, which is kept if there is room for it."""
    size = 1 << (num_bytes - 1).bit_length()
    with _lock:
        shelf = _written.setdefault(inbox, []) if inbox else []
        for segment in shelf:
            if segment.size == size and segment.is_free():
                segment.claim(num_bytes)
                return segment
        most_bytes = _most_kept(directory) - num_bytes
        is_kept = bool(inbox) and most_bytes >= 0 and _shrink(most_bytes, KEPT_SEGMENTS - 1)
        is_kept = is_kept and _is_half_free(directory, num_bytes)
        # the owner's process id shows who may remove it; the name is never used again
        name = f"{os.path.basename(inbox)}.{os.getpid()}-{next(_counter)}-{time.monotonic_ns():x}"
        segment = _Written(os.path.join(directory, name), size if is_kept else num_bytes, num_bytes, is_kept)
        if is_kept:
            shelf.append(segment)
        return segment


def _shrink(most_bytes: int, most_segments: int) -> bool:
    """Retire free segments until no more than this is kept. Returns whether enough segments were free."""
    kept = [(segment, shelf) for shelf in _written.values() for segment in shelf]
    num_bytes, num_segments = sum(segment.num_bytes for segment, _ in kept), len(kept)
    for segment, shelf in kept:
        if num_bytes <= most_bytes and num_segments <= most_segments:
            break
        if segment.is_free():
            shelf.remove(segment)
            segment.retire()
            num_bytes, num_segments = num_bytes - segment.num_bytes, num_segments - 1
    return num_bytes <= most_bytes and num_segments <= most_segments


def _is_half_free(directory: str, num_bytes: int) -> bool:
    """Whether at least half of the shared memory stays free after `num_bytes` more."""
    usage = shutil.disk_usage(directory)
    return usage.free - num_bytes >= usage.total // 2


@functools.cache
def _most_kept(directory: str) -> int:
    if not os.path.isdir("/proc/self"):  # readers look there whether a writer lives
        return 0
    return min(KEPT_BYTES, shutil.disk_usage(directory).total // 16)


def as_bytes(tensor: Any) -> Any:
    """The memory of a contiguous tensor on the CPU, without a gradient, as an array of bytes. `as_strided`, because a
    tensor of one element or none may have arbitrary strides, such as a column of a batch of one."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(sys.modules["torch"].uint8).numpy()
