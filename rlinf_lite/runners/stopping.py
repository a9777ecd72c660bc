"""Stopping a run with Ctrl-C, SIGTERM or `rlinf-lite job stop`, and the result of a run.

The first request is noted. It takes effect where the runner waits for workers, between two complete operations, so
that no file is half written and no update half submitted. The second request raises StoppedAtOnce immediately.
"""

from __future__ import annotations

import json
import logging
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rlinf_lite.metrics import EvalSummary
from rlinf_lite.scheduler import Handle, wait_all
from rlinf_lite.script import own_command, shown_path

log = logging.getLogger(__name__)

SAME_REQUEST_S = 1.0
"""Signals within this time count as one request: a terminal, make and a batch system may each pass it on."""
STOP_TIMEOUT_S = 5.0
"""Longest wait, after Ctrl-C, for a running update, and for workers to abort their methods. Batch systems kill after
30 s, and saving takes part of that."""
_SAY_AFTER_S = 30.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """The run was asked to stop, and is at a point where it can stop."""


class StoppedAtOnce(KeyboardInterrupt):
    """The run was asked to stop a second time, at an arbitrary point."""


class StopRequest:
    """Notes stop requests (SIGINT, SIGTERM) inside `with stop:` in the main thread of a process, and only there."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: longest wait for calls."""
        self.limit_s = limit_s
        self._since: float | None = None
        self._raises = False

    @property
    def requested(self) -> bool:
        return self._since is not None

    def check(self, grace_s: float = 0.0) -> None:
        """Raise Stopped if the run was asked to stop at least `grace_s` ago."""
        if self._since is not None and time.monotonic() - self._since >= grace_s:
            raise Stopped("the run is being stopped")

    def wait(
        self,
        *handles: Handle,
        what: str,
        grace_s: float = 0.0,
        alone: bool = False,
        says_so: bool = False,
        num_phases: int = 1,
    ) -> list[Any]:
        """Wait for calls, and return their results. If the run is asked to stop meanwhile, it waits `grace_s` longer
        and then raises Stopped. `alone`: leave failures of other calls to the next wait. `says_so`: log the unfinished
        groups after 30 s and each time the wait has doubled; for waits outside steps. `num_phases`: the limit is so
        many times `runner.phase_timeout_s`; for calls of many phases whose workers wait for each other's messages, so
        that one which hangs is noticed earlier."""
        started, say_at, limit_s = time.monotonic(), _SAY_AFTER_S, num_phases * self.limit_s

        def check() -> None:
            nonlocal say_at
            self.check(grace_s)
            if says_so and (waited_s := time.monotonic() - started) >= say_at:
                say_at = 2 * waited_s
                if who := ", ".join(dict.fromkeys(handle.group.name for handle in handles if not handle.done())):
                    log.warning("%s: %.0f s so far, not done: %s (limit: %g s)", what, waited_s, who, limit_s)

        return wait_all(*handles, timeout_s=limit_s, what=what, check=check, alone=alone)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A context in which the first request raises Stopped immediately, for long work after which nothing can be
        saved."""
        self.check()
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def __enter__(self) -> StopRequest:
        self._since = None
        is_main = threading.current_thread() is threading.main_thread()  # False in a job's trainer; its master stops it
        self._before = [(number, signal.signal(number, self._note)) for number in _SIGNALS if is_main]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
            if self._raises:
                raise Stopped("the run is being stopped")
        elif now - self._since > SAME_REQUEST_S:
            raise StoppedAtOnce


def command_on(run_dir: Path) -> str:
    """The command that resumes a run from its newest checkpoint."""
    return f"{own_command('rlinf-lite', 'rlinf_lite.cli')} train {shlex.quote(shown_path(run_dir))}"


@dataclass(frozen=True)
class RunResult:
    """The result of a run."""

    completed_steps: int
    interrupted: bool
    run_dir: Path
    checkpoint: Path | None
    total_steps: int
    evals: list[EvalSummary]
    report: Path | None
    program: bool = False
    """Whether the run needs classes or functions of its own program, so that no command line can resume it."""
    imitation: bool = False
    """Whether the run learned from demonstrations."""

    @property
    def first_eval(self) -> EvalSummary | None:
        return self.evals[0] if self.evals else None

    @property
    def last_eval(self) -> EvalSummary | None:
        return self.evals[-1] if self.evals else None

    def describe(self) -> str:
        """A text with the results, the paths, and the commands to go on."""
        verb = "stopped" if self.interrupted else "finished"
        lines = [f"{verb} after {self.completed_steps} of {self.total_steps} steps"]
        first, last = self.first_eval, self.last_eval
        if first is not None and last is not None:
            lines += [f"  before: {first.headline()}"] if first is not last else []
            lines.append(f"  reached: {last.headline()}")
            lines += [f"    {row}" for row in last.task_lines(first)] if len(last.tasks) > 1 else []
        lines += [f"  report: {shown_path(self.report)}"] if self.report is not None else []
        lines.append(f"  metrics: {shown_path(self.run_dir / 'metrics.jsonl')}")
        run, own = shlex.quote(shown_path(self.run_dir)), own_command("rlinf-lite", "rlinf_lite.cli")
        lines.append(f"  curves: {own_command('tensorboard', 'tensorboard.main')} --logdir {run}")
        if self.checkpoint is not None:
            from rlinf_lite.config.loading import as_override  # loads Hydra

            checkpoint = shown_path(self.checkpoint)
            lines.append(f"  checkpoint: {checkpoint}")
            steps = "" if self.completed_steps < self.total_steps else f"runner.max_steps={2 * self.total_steps or 1}"
            if self.program:
                more = "".join(f', "{step}"' for step in steps.split())
                load = "rlinf_lite.load_config(..., [...,"
                keys = ("runner.resume", "actor.checkpoint_load_path")
                resume, weights = (json.dumps(as_override(key, checkpoint), ensure_ascii=False) for key in keys)
                lines.append(f"  go on: in this program, rlinf_lite.train({load} {resume}{more}]))")
                lines.append(f"  measure: in this program, rlinf_lite.evaluate({load} {weights}]))")
            else:
                lines.append(f"  go on: {command_on(self.run_dir)} {steps}".rstrip())
                lines.append(f"  measure: {own} eval {run}")
            if self.imitation:
                policy = shlex.quote(as_override("actor.checkpoint_load_path", str(self.checkpoint)))
                lines.append(f"  reinforcement learning from here: {policy}")
        return "\n".join(lines)
