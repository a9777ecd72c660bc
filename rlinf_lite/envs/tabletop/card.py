"""Tabletop's card: options, tasks, and checks of a config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rlinf_lite.cards import EnvCard, Int, Observed, Problem, Section, Task

if TYPE_CHECKING:
    from rlinf_lite.config import Config

NumBlocks = Annotated[Int, Field(ge=1, le=3)]
CAMERA = {"top": (64, 64)}
ACTION_NAMES = ("x", "y", "close")
OWN_STATE_NAMES = ("x", "y", "closed", "holding")
STATE_NAMES = (
    *OWN_STATE_NAMES,
    *("is_pick", "is_push", "is_place", "side"),
    *("block_x", "block_y", "goal_x", "goal_y"),
    *("second_x", "second_y", "third_x", "third_y"),
)


class TabletopOptions(Section):
    obs_mode: Literal["rgb", "state", "rgb+state"] = "rgb"
    """Observations of the policy. rgb: pictures and the robot's own state; state: everything, as numbers."""
    reward_mode: Literal["sparse", "dense"] = "sparse"
    """sparse: 1 at success; dense: also, at each step, the decrease of the distance to the goal."""
    num_blocks: tuple[NumBlocks, NumBlocks] = (3, 3)
    """Fewest and most blocks on the table, drawn per episode (a push has at most 2, a place at least 2)."""
    num_wordings: Annotated[Int, Field(ge=1, le=4)] = 4
    """Number of wordings of each instruction."""
    eval_pairs: Literal["train", "held_out", "all"] = "train"
    """Colours that instructions name in evaluations. Training never names one colour of each family; held_out: only
    that one."""
    shuffle_instructions: bool = False
    """Give every episode the instruction of another one, to measure how much the policy uses language."""


class Tabletop(EnvCard):
    """A small vectorised world for vision-language-action policies, written in NumPy only."""

    Options = TabletopOptions
    simulator = "rlinf_lite.envs.tabletop.simulator:TabletopSimulator"
    tasks = {
        "pick": Task(24, 16, 3, 4, CAMERA),
        "push": Task(40, 16, 3, 4, CAMERA),
        "place": Task(32, 16, 3, 4, CAMERA),
        "all": Task(40, 16, 3, 4, CAMERA),
    }
    simulator_bytes = (0, 4096)
    free_options = ("eval_pairs",)

    def observed(self, task: str, options: TabletopOptions) -> Observed | None:
        found = self.tasks.get(task)
        if found is None:
            return None
        names = OWN_STATE_NAMES if options.obs_mode == "rgb" else STATE_NAMES
        cameras = {} if options.obs_mode == "state" else dict(found.cameras)
        return Observed(found.action_dim, len(names), cameras, state_names=names, action_names=ACTION_NAMES)

    def lacks_state(self, options: TabletopOptions) -> Problem | None:
        return Problem("env.options.obs_mode", "rgb has no blocks in its state") if options.obs_mode == "rgb" else None

    def problems(self, config: Config) -> Iterator[Problem]:
        fewest, most = config.env.options.num_blocks
        if fewest > most:
            yield Problem("env.options.num_blocks", f"fewest {fewest} is more than most {most}. Use [{most}, {fewest}]")
