"""gymnasium's card: options are the arguments of `gymnasium.make`, and tasks are all that are registered there."""

from __future__ import annotations

from typing import Any

from rlinf_lite.cards import EnvCard, Observed, Task


class Gymnasium(EnvCard):
    """Any environment of gymnasium with continuous actions."""

    simulator = "rlinf_lite.envs.gymnasium.simulator:make_simulator"
    tasks = {"Pendulum-v1": Task(200, 3, 1)}
    has_other_tasks = True
    simulator_bytes = (8 * 2**20, 4096)

    def observed(self, task: str, options: dict[str, Any]) -> Observed | None:
        return None if options else super().observed(task, options)

    def lacks_expert(self, task: str, options: dict[str, Any]) -> str:
        return "gymnasium has no expert of its own"
