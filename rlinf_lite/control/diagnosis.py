"""What is wrong with a worker, and how that is known."""

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
"""A worker that has not been heard of for so long is said to be silent, and after the hang limit, hung."""
_LATE_S = 2.5 * BEAT_S
_STUCK_S = 30.0  # without progress of any worker, until that is said, at the latest
_NAMED_WORKERS = 8
_SHOWN_FRAMES = 3
_SLOW_WINDOW_S = 60.0
_SLOW_MIN_SHARE = 0.3
_SLOW_AGAIN_S = 600.0


@dataclass(frozen=True)
class Finding:
    """What is the matter with one worker."""

    kind: str  # crashed, hung, slow, out_of_memory, node_lost or raised
    group: str
    rank: int
    evidence: str

    @property
    def worker(self) -> str:
        return f"{self.group}[{self.rank}]"


class DiagnosisManager:
    """Keeps the last beats of every worker, and tells crashed, hung, slow, out of memory and lost ones apart."""

    def __init__(self, hang_timeout_s: float, slow_factor: float) -> None:
        self._hang_timeout_s, self._slow_factor = hang_timeout_s, slow_factor
        self.last_beats: dict[str, Beat] = {}  # by worker
        self._heard: dict[str, float] = {}
        self._waited: dict[str, float] = {}  # when any rank of a group was last seen to wait for a message
        self._busy: dict[str, deque[tuple[float, float]]] = {}
        self._said_slow: dict[str, float] = {}
        self._excused_since, self._looked = -math.inf, math.inf
        self._say_stuck_at = 0.0

    def hear(self, beats: list[Beat], now: float | None = None) -> None:
        """Take what a process says of its workers."""
        now = time.monotonic() if now is None else now
        for beat in beats:
            name = f"{beat.group}[{beat.rank}]"
            if name in self.last_beats and self.last_beats[name].pid != beat.pid:
                self._busy.pop(name, None)  # it has been replaced
            self.last_beats[name], self._heard[name] = beat, now
            if beat.waiting_for is not None:
                self._waited[beat.group] = now
            busy = self._busy.setdefault(name, deque())
            busy.append((now, beat.busy_s))
            while busy[0][0] < now - _SLOW_WINDOW_S:
                busy.popleft()

    def forget(self, record: WorkerRecord) -> None:
        """A worker has been replaced; its successor is heard from now on."""
        for known in (self.last_beats, self._busy, self._said_slow):
            known.pop(record.name, None)
        self._heard[record.name] = time.monotonic()

    def sent_to(self) -> set[tuple[str, str]]:
        """(a, b) where workers of group a have sent messages to group b."""
        return {(beat.group, other) for beat in self.last_beats.values() for other in beat.sent_to}

    def notice_pause(self, now: float | None = None) -> None:
        """To be called before every look for hung workers, of which there is one a second. After a longer pause, who
        watches was stopped itself, and who is watched most likely too: as when a machine or a container is suspended.
        """
        now = time.monotonic() if now is None else now
        if now - self._looked >= SILENT_S:
            self._heard = dict.fromkeys(self._heard, now)
            self.excuse(now)
        self._looked = now

    def excuse(self, now: float | None = None) -> None:
        """Take nobody for hung until the hang limit has passed again: a failure is being dealt with, or was until now,
        which may have held up all who made no progress."""
        self._excused_since = time.monotonic() if now is None else now

    def find_hung(self, record: WorkerRecord, now: float | None = None) -> Finding | None:
        """Whether a living worker has made no progress, or has not been heard of, for too long."""
        now = time.monotonic() if now is None else now
        if now - self._excused_since < self._hang_timeout_s:
            return None
        beat, silent = self.last_beats.get(record.name), now - self._heard.setdefault(record.name, now)
        if silent >= max(self._hang_timeout_s, SILENT_S):
            evidence = f"not heard of for {silent:.1f} s; its process (pid {record.pid}) {_process_state(record.pid)}"
        elif (
            beat is not None
            and beat.pid == record.pid
            and beat.doing is not None
            and beat.waiting_for is None
            and beat.stuck_s + silent >= self._hang_timeout_s
            # ranks in a collective operation wait for one that waits for a message; beats are of different moments
            and now - self._waited.get(record.group, -math.inf) >= self._hang_timeout_s
        ):
            evidence = f"{beat.doing} has made no progress for {beat.stuck_s + silent:.1f} s, and waits for no message"
            if silent > _LATE_S:
                evidence += f"; not heard of for {silent:.1f} s: its process {_process_state(record.pid)}"
        else:
            return None
        evidence += f" (control.hang_timeout_s: {self._hang_timeout_s:g})"
        return Finding("hung", record.group, record.rank, evidence)

    def say_stuck(self, workers: Iterable[str], now: float | None = None) -> str:
        """Who does what, in a line, where these have made no progress for long though some are in a method, or silent;
        empty elsewhere, and until that time has doubled."""
        now = time.monotonic() if now is None else now
        known = {name: self.last_beats.get(name) for name in workers if name in self._heard}  # None: no beat yet
        since = [self._heard[name] - (beat.stuck_s if beat else 0.0) for name, beat in known.items()]
        stuck_s = now - max([self._excused_since, *since])
        first_s = min(_STUCK_S, self._hang_timeout_s / 2)
        if stuck_s < first_s:
            self._say_stuck_at = first_s
        doing: dict[str, list[str]] = {}
        for name, beat in known.items():
            if now - self._heard[name] > _LATE_S:
                doing.setdefault("not heard of (stopped, or in code that holds Python's lock)", []).append(name)
            elif beat is not None and beat.doing is not None:
                doing.setdefault(describe(beat), []).append(name)
        if stuck_s < self._say_stuck_at or not doing:
            return ""
        self._say_stuck_at = 2 * stuck_s
        parts = []
        for what, names in doing.items():
            more = f" and {len(names) - _NAMED_WORKERS} more" if len(names) > _NAMED_WORKERS else ""
            parts.append(f"{', '.join(names[:_NAMED_WORKERS])}{more}: {what}")
        limit = f"control.hang_timeout_s: {self._hang_timeout_s:g}"
        return f"no worker has made progress for {stuck_s:.0f} s ({limit}): {'; '.join(parts)}"

    def find_slow(self, records: list[WorkerRecord], now: float | None = None) -> list[Finding]:
        """Ranks that compute much longer than the others of their group do for the same calls."""
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
                if now - self._said_slow.get(name, -_SLOW_AGAIN_S) >= _SLOW_AGAIN_S:
                    self._said_slow[name] = now
                    usual = statistics.median(others)
                    evidence = f"computes {100 * share:.0f}% of the time, the other ranks of {group} {100 * usual:.0f}%"
                    found.append(Finding("slow", group, rank, evidence))
        return found

    def explain_death(self, record: WorkerRecord, reason: str, node_alive: bool, oom_kills: int | None) -> Finding:
        """Why a worker's process is gone. `oom_kills`: of its node, now; None where that cannot be read."""

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
    """What a worker does, and whose message it waits for."""
    if beat.doing is None:
        return f"idle for {beat.stuck_s:.0f} s"
    return beat.doing if beat.waiting_for is None else f"{beat.doing}, waits for {beat.waiting_for}"


def stood_at(log: str) -> str:
    """The innermost frames of the main thread, which runs the methods, in a line, from the stacks at the end of a log
    (`dump_stacks`); empty where there are none."""
    _, found, main = log.rpartition("hread 0x")
    frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', main, re.MULTILINE)[:_SHOWN_FRAMES] if found else []
    return ", from ".join(f"{path}:{line} in {function}" for path, line, function in frames)


def explain_error(group: str, rank: int, summary: str, origin: str = "") -> Finding:
    """What a worker's own exception says."""
    kind = "out_of_memory" if summary.startswith(("OutOfMemoryError", "MemoryError")) else "raised"
    first, *more = summary.split("\n")
    return Finding(kind, group, rank, "\n".join([f"{first} ({origin})" if origin else first, *more]))


def _process_state(pid: int) -> str:
    """What the kernel says of a process of this machine."""
    try:
        with open(f"/proc/{pid}/status") as file:
            state = next(line.split("\t", 1)[1].strip() for line in file if line.startswith("State:"))
    except (OSError, StopIteration):
        return "is on another machine, or gone"
    return f"is in state {state}"
