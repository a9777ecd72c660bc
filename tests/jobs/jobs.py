"""A small job: every step calls all roles, and is written down: a trainer that starts again goes on from there."""

import json
import os
import time
from pathlib import Path
from typing import ClassVar

from rlinf_lite.jobs import BaseTrainer, BaseWorkload, trainer_invocation

ROLES = ("actor", "rollout", "reward")


class Held(BaseWorkload):
    """Holds state with the other ranks: they start again together."""

    failover: ClassVar = "group"

    def init(self, start: int) -> None:
        self.calls, self.start = 0, start
        trap = self.config.get("trap_init")
        if trap and self.role == trap["role"] and Path(trap["armed"]).exists() and not Path(trap["sprung"]).exists():
            Path(trap["sprung"]).touch()
            os.kill(os.getpid(), 9)

    @trainer_invocation(timeout=60)
    def work(self, step: int) -> tuple[int, int]:
        self.calls += 1
        hang = self.config.get("hang")
        if hang and (self.role, self.rank, step) == (hang["role"], hang["rank"], hang["step"]):
            marker = Path(hang["marker"])
            if not marker.exists():
                marker.touch()
                time.sleep(3600)
        time.sleep(self.config["step_s"])
        return self.rank, step


class Alone(Held):
    """Does its part alone."""

    failover: ClassVar = "worker"


class StepByStep(BaseTrainer):
    def init(self) -> None:
        state = Path(self.config["state"])
        self.start = json.loads(state.read_text())["done"] if state.exists() else 0
        for group in self.groups.values():
            group.init(self.start)

    def fit(self) -> None:
        for step in range(self.start, self.config["steps"]):
            for role, group in self.groups.items():
                answers = group.work(step)
                assert answers == [(rank, step) for rank in range(len(group))], (role, answers)
            if self.config.get("raise") == [step, self.restart_count]:
                raise RuntimeError("the trainer stumbled")
            self._write_down(step)
            self.report_progress(step + 1)

    def is_recoverable(self) -> bool:
        return bool(self.config.get("recoverable"))

    def _write_down(self, step: int) -> None:
        with open(self.config["log"], "a") as log:
            log.write(f"{step}\n")
        partial = Path(self.config["state"] + ".partial")
        partial.write_text(json.dumps({"done": step + 1}))
        partial.rename(self.config["state"])
