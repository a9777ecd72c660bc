"""Tabletop: a small vectorised world for vision-language-action policies, in NumPy alone.

A robot's end effector moves over a table with coloured blocks and squares, seen from above, and an instruction says
what to do. Three families of tasks: pick up a block, push it onto a square, put it beside another block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rlinf_lite.envs.errors import UnknownEnvError
from rlinf_lite.envs.simulator import Simulator

if TYPE_CHECKING:
    from rlinf_lite.config import EnvConfig


def make_env(num_envs: int, cfg: EnvConfig, split: Literal["train", "eval"]) -> Simulator:
    """Builds `num_envs` tables of task `cfg.task`: pick, push, place, or all. Raises UnknownEnvError for another."""
    from rlinf_lite.envs.tabletop.simulator import MAX_EPISODE_STEPS, TabletopSimulator

    if cfg.task not in MAX_EPISODE_STEPS:
        raise UnknownEnvError("env.task", cfg.task, MAX_EPISODE_STEPS)
    pairs = cfg.tabletop.eval_pairs if split == "eval" else "train"
    return TabletopSimulator(num_envs, cfg.task, cfg.tabletop, pairs)
