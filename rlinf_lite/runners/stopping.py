"""How a run is asked to stop, by Ctrl-C, SIGTERM or `rlinf-lite job stop`, and where it takes notice; how it ended.

The first request is noted and taken where the runner waits for workers, between one completed operation and the next:
no file is left half written, and no update half submitted. The second one raises StoppedAtOnce on the spot.
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
"""A terminal, make and a batch system may each pass on one and the same request."""
STOP_TIMEOUT_S = 5.0
"""Longest wait, after Ctrl-C, for an update that is under way, and for workers to give up what they do. Batch systems
give 30 s before they kill, and saving takes some of them too."""
_SAY_AFTER_S = 30.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """The run was asked to stop, and is at a point where it can."""


class StoppedAtOnce(KeyboardInterrupt):
    """The run was asked a second time, and is wherever it was then."""


class StopRequest:
    """Notes requests inside `with stop:`, in a process's main thread. Outside of it nothing is ever requested."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: longest wait."""
        self.limit_s = limit_s
        self._since: float | None = None
        self._raises = False

    @property
    def requested(self) -> bool:
        return self._since is not None

    def check(self, grace_s: float = 0.0) -> None:
        """Raise Stopped where the run was asked to stop, `grace_s` ago or earlier."""
        if self._since is not None and time.monotonic() - self._since >= grace_s:
            raise Stopped("the run is being stopped")

    def wait(
        self, *handles: Handle, what: str, grace_s: float = 0.0, alone: bool = False, says_so: bool = False
    ) -> list[Any]:
        """Results of calls. If the run is asked to stop meanwhile, it waits `grace_s` longer, then raises Stopped.
        `alone`: the failure of another call is for the next wait. `says_so`: log who is waited for after a while, and
        again when that time has doubled; for waits outside of steps."""
        started, say_at = time.monotonic(), _SAY_AFTER_S

        def check() -> None:
            nonlocal say_at
            self.check(grace_s)
            if says_so and (waited_s := time.monotonic() - started) >= say_at:
                say_at = 2 * waited_s
                if who := ", ".join(dict.fromkeys(handle.group.name for handle in handles if not handle.done())):
                    log.warning("%s: %.0f s so far, not done: %s (limit: %g s)", what, waited_s, who, self.limit_s)

        return wait_all(*handles, timeout_s=self.limit_s, what=what, check=check, alone=alone)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, the first request raises Stopped on the spot: for what may take long and leaves nothing to save."""
        self.check()
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def __enter__(self) -> StopRequest:
        self._since = None
        is_main = threading.current_thread() is threading.main_thread()  # a job's trainer is not, whose master stops it
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
    """What goes on with a run from its newest checkpoint."""
    return f"{own_command('rlinf-lite', 'rlinf_lite.cli')} train {shlex.quote(shown_path(run_dir))}"


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    completed_steps: int
    interrupted: bool
    run_dir: Path
    checkpoint: Path | None
    total_steps: int
    evals: list[EvalSummary]
    report: Path | None
    program: bool = False
    """Whether it needs what its own program defines, so that no other command can go on with it."""
    imitation: bool = False
    """Whether it learned from demonstrations."""

    @property
    def first_eval(self) -> EvalSummary | None:
        return self.evals[0] if self.evals else None

    @property
    def last_eval(self) -> EvalSummary | None:
        return self.evals[-1] if self.evals else None

    def describe(self) -> str:
        """What was reached, and how to go on."""
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
