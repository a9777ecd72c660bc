"""Heartbeats: every 2 s a process reports what its workers do. Needs neither ray nor torch."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

_FILE_PROGRESS_BYTES = 2**20
"""File traffic between two beats that counts as progress: more than a heartbeat causes, less than a slow disk gives."""

BEAT_S = 2.0  # not shorter: every beat wakes threads, which take time from computing ones


@dataclass(frozen=True)
class Beat:
    """The state of one worker at one moment."""

    group: str
    rank: int
    pid: int
    doing: str | None  # the running method
    waiting_for: str | None  # the sender whose message that method waits for
    stuck_s: float
    """Seconds since its last progress: a method that began or ended, a message, a timer, `report_progress`, or files
    read or written."""
    busy_s: float  # seconds spent in methods so far, without waiting for messages
    sent_to: tuple[str, ...]  # groups that it has sent messages to
    memory_bytes: int  # resident memory of the process
    oom_kills: int  # processes that this machine's kernel has killed so far because memory ran out


@dataclass
class Activity:
    """A worker's current activity, noted by its own thread with cheap assignments."""

    doing: str | None = None
    waiting_for: str | None = None
    progress: int = 0  # counts events of progress
    busy_s: float = 0.0
    sent_to: set[str] = field(default_factory=set)
    _since: float = field(default_factory=time.monotonic)

    def made_progress(self) -> None:
        self.progress += 1

    @contextmanager
    def method(self, name: str) -> Iterator[None]:
        """A context for running a method."""
        self.doing, self._since = name, time.monotonic()
        self.progress += 1
        _this_thread.activity = self
        try:
            yield
        finally:
            _this_thread.activity = None
            self.busy_s += time.monotonic() - self._since
            self.doing = None
            self.progress += 1

    @contextmanager
    def waiting(self, source: str) -> Iterator[None]:
        """A context for waiting for a message."""
        started = time.monotonic()
        self.waiting_for = source
        try:
            yield
        finally:
            self.waiting_for = None
            self._since += time.monotonic() - started
            self.progress += 1


_this_thread = threading.local()  # `activity`: of the worker whose method the thread runs
_of_process = Activity()  # progress of the worker that runs in this process: only one runs at a time


def report_progress() -> None:
    """Report that the running method makes progress, from code without access to the worker: an environment, a reward,
    a model. Outside a worker it does nothing."""
    _of_process.made_progress()


def waits_for(source: str) -> AbstractContextManager[None]:
    """A context for waiting for a message, in code without access to the worker. Outside a worker's method it does
    nothing."""
    activity: Activity | None = getattr(_this_thread, "activity", None)
    return nullcontext() if activity is None else activity.waiting(source)


class Heartbeat:
    """A thread that calls `report` with the beats of a process's workers every `beat_s` seconds until the process
    ends."""

    def __init__(
        self, workers: Sequence[tuple[str, int, Activity]], report: Callable[[list[Beat]], None], beat_s: float = BEAT_S
    ) -> None:
        self._workers, self._report, self._beat_s = workers, report, beat_s
        self._seen = [(-1, 0.0)] * len(workers)
        self._file_bytes = 0
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def beats(self) -> list[Beat]:
        now = time.monotonic()
        with open("/proc/self/statm") as file:
            memory_bytes = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        oom_kills = num_oom_kills()
        # large files are loaded and saved by one call of a library, which cannot report progress
        before, self._file_bytes = self._file_bytes, file_bytes()
        uses_files = self._file_bytes - before >= _FILE_PROGRESS_BYTES
        found = []
        for index, (group, rank, activity) in enumerate(self._workers):
            progress, since = self._seen[index]
            if uses_files or activity.progress + _of_process.progress != progress:
                self._seen[index] = progress, since = activity.progress + _of_process.progress, now
            runs = activity.doing is not None and activity.waiting_for is None
            busy_s = activity.busy_s + (now - activity._since if runs else 0.0)
            now_in = (activity.doing, activity.waiting_for, now - since, busy_s, tuple(sorted(activity.sent_to)))
            found.append(Beat(group, rank, os.getpid(), *now_in, memory_bytes, oom_kills))
        return found

    def _run(self) -> None:
        while True:
            self._report(self.beats())
            time.sleep(self._beat_s)


def file_bytes() -> int:
    """Bytes that this process has read from and written to files so far, mapped files included; 0 if the kernel does
    not report it. Messages are not counted."""
    try:
        with open("/proc/self/io") as file:
            counts = dict(line.split(": ") for line in file)
    except OSError:
        return 0
    return sum(int(counts[name]) for name in ("rchar", "wchar", "read_bytes"))


def num_oom_kills() -> int:
    """Number of processes that this machine's kernel has killed since it started because memory ran out."""
    with open("/proc/vmstat") as file:
        return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
