"""Shared memory for what goes from process to process on a node, written again once nobody reads it any more.

Memory that is new costs a page fault for every 4 KiB in both processes: several times a copy. So a process keeps the
segments that it has written, each for the inbox that it was for, and the reader keeps them mapped.

A segment has a name only until the process that reads the inbox has opened it; from then on the kernel frees it with
the last process that has it open, whoever is killed. Its first byte says whether its message has been opened. Who
opens one holds a lock on the file until the last array in it is gone, or the process is; then it is written again.
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
"""Most that a process keeps to write it again; in all at most a 16th of the shared memory there is."""
KEPT_SEGMENTS = 64  # each is an open file of two processes

_HEADER_BYTES = mmap.PAGESIZE
_UNREAD, _OPENED, _RETIRED = b"\0", b"\1", b"\2"  # the first byte

_counter = itertools.count()
_lock = threading.RLock()
_written: dict[str, list[_Written]] = {}  # what this process keeps, by the inbox that it is for
_mapped: dict[str, Mapped] = {}  # what other processes keep and this one has opened, by name

Chunk = tuple[int, memoryview]  # an offset, and what is to lie there


class Place(NamedTuple):
    """Where a message's bulk lies, as its reader is told."""

    name: str
    path: str
    writer: int  # process id
    is_kept: bool


def write(chunks: Sequence[Chunk], num_bytes: int, directory: str, inbox: str) -> Place:
    """Put `chunks` into `num_bytes` of shared memory for who reads `inbox` (a path; "": for whoever maps it once).

    Raises OSError, of which ENOSPC says that the memory is full.
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
    """A segment that its writer keeps. The first call of a process opens it and removes its name."""
    with _lock:
        if place.name not in _mapped:
            forget_writers()
            _mapped[place.name] = Mapped(place)
        return _mapped[place.name]


def map_once(place: Place) -> memoryview:
    """One that is written once; removes its name. The memory lives as long as the view does."""
    fd = os.open(place.path, os.O_RDWR)
    try:
        os.unlink(place.path)
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        return memoryview(mmap.mmap(fd, 0, flags=flags))[_HEADER_BYTES:]
    finally:
        os.close(fd)


def forget_inbox(inbox: str) -> None:
    """Nobody reads it any more: let go of what is kept for it."""
    with _lock:
        for segment in _written.pop(inbox, []):
            segment.retire()


def forget_writers() -> None:
    """Let go of segments that are never written again: of processes that have ended, and those given up."""
    with _lock:
        for name in [name for name, segment in _mapped.items() if segment.is_over()]:
            del _mapped[name]


def forget_all() -> None:
    """This process leaves its cluster."""
    with _lock:
        for inbox in list(_written):
            forget_inbox(inbox)
        _mapped.clear()


class Mapped:
    """A segment in a process that reads it."""

    def __init__(self, place: Place) -> None:
        self._place, self._fd = place, os.open(place.path, os.O_RDWR)
        self._memory = mmap.mmap(self._fd, 0)
        os.unlink(place.path)

    def __del__(self) -> None:
        with suppress(AttributeError):  # it could not be opened
            os.close(self._fd)

    def open(self) -> memoryview:
        """The message's bulk, which nobody writes as long as the view lives, or anything that is made of it."""
        fcntl.flock(self._fd, fcntl.LOCK_SH)
        self.discard()
        view = np.frombuffer(self._memory, np.uint8, offset=_HEADER_BYTES)
        weakref.finalize(view, self._close, os.getpid()).atexit = False
        return view.data

    def discard(self) -> None:
        """Say that the message is open, or need not be opened."""
        if os.pread(self._fd, 1, 0) == _UNREAD:
            os.pwrite(self._fd, _OPENED, 0)

    def is_over(self) -> bool:
        state = os.pread(self._fd, 1, 0)
        return state in (b"", _RETIRED) or (state == _OPENED and not os.path.exists(f"/proc/{self._place.writer}"))

    def _close(self, process: int) -> None:
        if os.getpid() == process:  # a forked child has the same lock, and the parent may read on
            fcntl.flock(self._fd, fcntl.LOCK_UN)


class _Written:
    """A segment in the process that writes it."""

    def __init__(self, path: str, size: int, num_bytes: int, is_kept: bool) -> None:
        self.place = Place(os.path.basename(path), path, os.getpid(), is_kept)
        self.size = size
        self.num_bytes = num_bytes  # of its largest message: what it takes, since memory is what has been written
        self._filled = 0
        self._memory: mmap.mmap | None = None
        self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        os.ftruncate(self._fd, _HEADER_BYTES + size)

    def __del__(self) -> None:  # not before the last thread has written to it
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
        """Whether its message has been opened, and nothing of it is left."""
        if os.pread(self._fd, 1, 0) != _OPENED:
            return False
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return True

    def retire(self) -> None:
        """Write it no more; what nobody reads is freed at once, though readers have it mapped."""
        with suppress(FileNotFoundError):  # its name is gone where it was opened
            os.unlink(self.place.path)
        if self.is_free():
            os.ftruncate(self._fd, 0)
        elif self._filled:
            os.pwrite(self._fd, _RETIRED, 0)

    def give_up(self) -> bool:
        """Its message is not sent; whether it can take another one."""
        if self.place.is_kept and self._filled:
            os.pwrite(self._fd, _OPENED, 0)
            return True
        self.retire()
        return False


def _claim(num_bytes: int, directory: str, inbox: str) -> _Written:
    """A segment that nobody reads, for one message; a new one where there is none of the size, kept where it may be."""
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
        # whose it is tells who removes it; no other segment has the name, ever
        name = f"{os.path.basename(inbox)}.{os.getpid()}-{next(_counter)}-{time.monotonic_ns():x}"
        segment = _Written(os.path.join(directory, name), size if is_kept else num_bytes, num_bytes, is_kept)
        if is_kept:
            shelf.append(segment)
        return segment


def _shrink(most_bytes: int, most_segments: int) -> bool:
    """Retire free segments until no more than this is kept; whether enough were free."""
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
    """Whether what all processes keep leaves half of the shared memory to what comes and goes."""
    usage = shutil.disk_usage(directory)
    return usage.free - num_bytes >= usage.total // 2


@functools.cache
def _most_kept(directory: str) -> int:
    if not os.path.isdir("/proc/self"):  # whether a writer lives is read there
        return 0
    return min(KEPT_BYTES, shutil.disk_usage(directory).total // 16)


def as_bytes(tensor: Any) -> Any:
    """The memory of a contiguous tensor on the host, without a gradient, as an array. Its strides may be any where it
    has one element or none, such as a column of a batch of one."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(sys.modules["torch"].uint8).numpy()
