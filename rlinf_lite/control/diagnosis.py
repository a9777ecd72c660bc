"""Finds workers that hang, are slow or have died, and the reasons, from their heartbeats and Ray's reports."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from rlinf_lite.control.context import WorkerRecord
from rlinf_lite.scheduler.heartbeat import BEAT_S, Beat

SILENT_S = 5.0
"""A worker without heartbeats for this long counts as silent, and after the hang limit as hung."""
_LATE_S = 2.5 * BEAT_S  # age of the last heartbeat from which on a beat is missing
_STALL_S = 30.0  # longest time without progress of any worker before the stall is reported
_NAMED_WORKERS = 8
_SHOWN_FRAMES = 3
_SLOW_WINDOW_S = 60.0
_SLOW_MIN_SHARE = 0.3
_SLOW_AGAIN_S = 600.0


@dataclass(frozen=True)
class Finding:
    """One worker's problem, with its evidence."""

    kind: str  # crashed, hung, slow, out_of_memory, node_lost or raised
    group: str
    rank: int
    evidence: str

    @property
    def worker(self) -> str:
        return f"{self.group}[{self.rank}]"


class DiagnosisManager:
    """Keeps the last heartbeats of every worker, and finds workers that crashed, hang, are slow, ran out of memory or
    lost their node.

    `now` is in seconds of `time.monotonic()`; None: the present time."""

    def __init__(self, hang_timeout_s: float, slow_factor: float) -> None:
        self._hang_timeout_s, self._slow_factor = hang_timeout_s, slow_factor
        self.last_beats: dict[str, Beat] = {}  # by worker
        self._heard: dict[str, float] = {}  # time of the last beat, by worker
        self._waited: dict[str, float] = {}  # time when a rank was last seen waiting for a message, by group
        self._busy: dict[str, deque[tuple[float, float]]] = {}  # (time, seconds computed so far), by worker
        self._reported_slow: dict[str, float] = {}
        self._hang_clock_start, self._last_check = -math.inf, math.inf
        self._report_stall_at = 0.0

    def record(self, beats: list[Beat], now: float | None = None) -> None:
        """Record the heartbeats of a process's workers."""
        now = time.monotonic() if now is None else now
        for beat in beats:
            name = f"{beat.group}[{beat.rank}]"
            if name in self.last_beats and self.last_beats[name].pid != beat.pid:
                self._busy.pop(name, None)  # the worker has been replaced
            self.last_beats[name], self._heard[name] = beat, now
            if beat.waiting_for is not None:
                self._waited[beat.group] = now
            busy = self._busy.setdefault(name, deque())
            busy.append((now, beat.busy_s))
            while busy[0][0] < now - _SLOW_WINDOW_S:
                busy.popleft()

    def forget(self, record: WorkerRecord) -> None:
        """Forget the state of a worker that has been replaced; its silence is counted from now on."""
        for known in (self.last_beats, self._busy, self._reported_slow):
            known.pop(record.name, None)
        self._heard[record.name] = time.monotonic()

    def sent_to(self) -> set[tuple[str, str]]:
        """Pairs (a, b): workers of group a have sent messages to group b."""
        return {(beat.group, other) for beat in self.last_beats.values() for other in beat.sent_to}

    def notice_pause(self, now: float | None = None) -> None:
        """Restart the hang limit after a pause between two checks, which should come every second. During the pause the
        caller was stopped, and most likely the workers too, as when a machine or container is suspended.
        """
        now = time.monotonic() if now is None else now
        if now - self._last_check >= SILENT_S:
            self._heard = dict.fromkeys(self._heard, now)
            self.restart_hang_limit(now)
        self._last_check = now

    def restart_hang_limit(self, now: float | None = None) -> None:
        """Report no worker as hung before the hang limit has passed again: a failure and its recovery may have held up
        all workers."""
        self._hang_clock_start = time.monotonic() if now is None else now

    def find_hung(self, record: WorkerRecord, now: float | None = None) -> Finding | None:
        """The finding for a living worker that has made no progress, or sent no heartbeat, for too long; else None."""
        now = time.monotonic() if now is None else now
        if now - self._hang_clock_start < self._hang_timeout_s:
            return None
        beat, silent = self.last_beats.get(record.name), now - self._heard.setdefault(record.name, now)
        if silent >= max(self._hang_timeout_s, SILENT_S):
            evidence = f"no heartbeat for {silent:.1f} s; its process (pid {record.pid}) {_process_state(record.pid)}"
        elif (
            beat is not None
            and beat.pid == record.pid
            and beat.doing is not None
            and beat.waiting_for is None
            and beat.stuck_s + silent >= self._hang_timeout_s
            # ranks in a collective operation wait for a rank that waits for a message; their beats differ in time
            and now - self._waited.get(record.group, -math.inf) >= self._hang_timeout_s
        ):
            evidence = f"{beat.doing} has made no progress for {beat.stuck_s + silent:.1f} s, and waits for no message"
            if silent > _LATE_S:
                evidence += f"; no heartbeat for {silent:.1f} s: its process {_process_state(record.pid)}"
        else:
            return None
        evidence += f" (control.hang_timeout_s: {self._hang_timeout_s:g})"
        return Finding("hung", record.group, record.rank, evidence)

    def describe_stall(self, workers: Iterable[str], now: float | None = None) -> str:
        """A line on what each of these workers does, if none has made progress for long and some are in a method or
        silent; else "". After a line, the next one comes when the time without progress has doubled."""
        now = time.monotonic() if now is None else now
        known = {name: self.last_beats.get(name) for name in workers if name in self._heard}  # None: no heartbeat yet
        since = [self._heard[name] - (beat.stuck_s if beat else 0.0) for name, beat in known.items()]
        stuck_s = now - max([self._hang_clock_start, *since])
        first_s = min(_STALL_S, self._hang_timeout_s / 2)
        if stuck_s < first_s:
            self._report_stall_at = first_s
        doing: dict[str, list[str]] = {}
        for name, beat in known.items():
            if now - self._heard[name] > _LATE_S:
                doing.setdefault("no heartbeat (stopped, or in code that holds Python's lock)", []).append(name)
            elif beat is not None and beat.doing is not None:
                doing.setdefault(describe(beat), []).append(name)
        if stuck_s < self._report_stall_at or not doing:
            return ""
        self._report_stall_at = 2 * stuck_s
        parts = []
        for what, names in doing.items():
            more = f" and {len(names) - _NAMED_WORKERS} more" if len(names) > _NAMED_WORKERS else ""
            parts.append(f"{', '.join(names[:_NAMED_WORKERS])}{more}: {what}")
        limit = f"control.hang_timeout_s: {self._hang_timeout_s:g}"
        return f"no worker has made progress for {stuck_s:.0f} s ({limit}): {'; '.join(parts)}"

    def find_slow(self, records: list[WorkerRecord], now: float | None = None) -> list[Finding]:
        """Findings for ranks that compute much longer than the other ranks of their group; for the same rank at most
        every 10 minutes."""
        now = time.monotonic() if now is None else now
        spent: dict[str, dict[int, float]] = {}
        for record in records:
            busy = self._busy.get(record.name)
            if busy and busy[-1][0] - busy[0][0] >= _SLOW_WINDOW_S / 2:
                share = (busy[-1][1] - busy[0][1]) / (busy[-1][0] - busy[0][0])
                spent.setdefault(record.group, {})[record.rank] = share
        found = []
        for group, shares in spent.items():
            for rank, share in shares.items():
                others = [other for other_rank, other in shares.items() if other_rank != rank]
                if not others or share < max(_SLOW_MIN_SHARE, self._slow_factor * statistics.median(others)):
                    continue
                name = f"{group}[{rank}]"
                if now - self._reported_slow.get(name, -_SLOW_AGAIN_S) >= _SLOW_AGAIN_S:
                    self._reported_slow[name] = now
                    usual = statistics.median(others)
                    evidence = f"computes {100 * share:.0f}% of the time, the other ranks of {group} {100 * usual:.0f}%"
                    found.append(Finding("slow", group, rank, evidence))
        return found

    def explain_death(self, record: WorkerRecord, reason: str, node_alive: bool, oom_kills: int | None) -> Finding:
        """The finding for a worker whose process is gone; `reason`: Ray's reason. `oom_kills`: the number of processes
        on its node that the kernel has killed so far because memory ran out; None if unknown."""

        def found(kind: str, evidence: str) -> Finding:
            return Finding(kind, record.group, record.rank, evidence)

        beat = self.last_beats.get(record.name)
        doing = f"; last seen in {beat.doing}" if beat is not None and beat.doing else ""
        memory = f"; it had {beat.memory_bytes / 2**20:.0f} MiB" if beat is not None else ""
        if not node_alive:
            return found("node_lost", f"Ray has lost its node {record.node}{doing}")
        if "OutOfMemory" in reason or "low memory" in reason or "running low on memory" in reason:
            return found("out_of_memory", f"Ray killed it for want of memory{memory}: {reason}")
        if beat is not None and oom_kills is not None and oom_kills > beat.oom_kills:
            return found("out_of_memory", f"the kernel's out-of-memory killer struck its node{memory}")
        return found("crashed", f"{reason}{doing}{memory}")


def describe(beat: Beat) -> str:
    """A text on what a worker does, and which sender it waits for."""
    if beat.doing is None:
        return f"idle for {beat.stuck_s:.0f} s"
    return beat.doing if beat.waiting_for is None else f"{beat.doing}, waits for {beat.waiting_for}"


def innermost_frames(log: str) -> str:
    """The innermost frames of the main thread, which runs the methods, in one line. They come from the stacks that
    `dump_stacks` wrote to the end of a log; "" if there are none."""
    _, found, main = log.rpartition("hread 0x")
    frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', main, re.MULTILINE)[:_SHOWN_FRAMES] if found else []
    return ", from ".join(f"{path}:{line} in {function}" for path, line, function in frames)


def explain_error(group: str, rank: int, summary: str, origin: str = "") -> Finding:
    """The finding for a worker that raised an exception."""
    kind = "out_of_memory" if summary.startswith(("OutOfMemoryError", "MemoryError")) else "raised"
    first, *more = summary.split("\n")
    return Finding(kind, group, rank, "\n".join([f"{first} ({origin})" if origin else first, *more]))


def _process_state(pid: int) -> str:
    """The state of a process of this machine, from the kernel."""
    try:
        with open(f"/proc/{pid}/status") as file:
            state = next(line.split("\t", 1)[1].strip() for line in file if line.startswith("State:"))
    except (OSError, StopIteration):
        return "is on another machine, or gone"
    return f"is in state {state}"
