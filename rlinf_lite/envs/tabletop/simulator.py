"""`TabletopSimulator`: the tabletop as a `Simulator`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from rlinf_lite.envs.base import FloatArray, IntArray, Obs
from rlinf_lite.envs.simulator import StepOutputs
from rlinf_lite.envs.tabletop.card import ACTION_NAMES, CAMERA, OWN_STATE_NAMES, STATE_NAMES, Tabletop
from rlinf_lite.envs.tabletop.episodes import draw
from rlinf_lite.envs.tabletop.expert import expert_action
from rlinf_lite.envs.tabletop.language import FAMILIES
from rlinf_lite.envs.tabletop.physics import NUM_BLOCKS, Scene, advance, goals, remaining
from rlinf_lite.envs.tabletop.render import render
from rlinf_lite.registry import UnknownEnvError, did_you_mean

if TYPE_CHECKING:
    from rlinf_lite.config import EnvConfig


class TabletopSimulator:
    """B tables, all stepped at once. `cfg.task` is a family, or "all": then each episode draws one."""

    reports_success = True

    def __init__(self, num_envs: int, cfg: EnvConfig, split: Literal["train", "eval"]) -> None:
        """Raises UnknownEnvError for a task that the card does not have."""
        task, options = cfg.task, cfg.options
        if task not in Tabletop.tasks:
            known = did_you_mean(task, Tabletop.tasks)
            raise UnknownEnvError(f"there is no environment {task!r}. {known}", "env.task")
        self.num_envs = num_envs
        self.task_id = task
        self.task_ids = [""] * num_envs
        self.max_episode_steps: int | None = Tabletop.tasks[task].max_episode_steps
        self.action_low, self.action_high = -np.ones(3, np.float32), np.ones(3, np.float32)
        self.action_names = ACTION_NAMES
        self.state_names = OWN_STATE_NAMES if options.obs_mode == "rgb" else STATE_NAMES
        self._options = options
        self._families = tuple(range(len(FAMILIES))) if task == "all" else (FAMILIES.index(task),)
        self._pairs = options.eval_pairs if split == "eval" else "train"
        self._scene = Scene.empty(num_envs)
        self._sentences = [""] * num_envs

    def reset(self, rows: IntArray, seeds: list[int]) -> None:
        scene, sentences, task_ids = draw(seeds, self._families, self._pairs, self._options)
        self._scene.put(rows, scene)
        for row, text, task_id in zip(rows.tolist(), sentences, task_ids, strict=True):
            self._sentences[row], self.task_ids[row] = text, task_id

    def step(self, rows: IntArray, actions: FloatArray, out: StepOutputs) -> None:
        """Step all tables. Sparse reward: 1 at the step that succeeds. Dense: also the decrease of the distance."""
        scene, undecided = self._scene, self._scene.outcome == 0
        before = remaining(scene) if self._options.reward_mode == "dense" else None
        advance(scene, actions)
        succeeded = scene.outcome > 0
        out.reward[:] = undecided & succeeded
        if before is not None:
            out.reward += before - remaining(scene)
        out.terminated[:] = scene.outcome != 0
        out.success[:] = succeeded

    def observe(self, rows: IntArray) -> Obs:
        obs: Obs = {"instruction": [self._sentences[row] for row in rows.tolist()]}
        obs["state"] = self._proprio(rows) if self._options.obs_mode == "rgb" else self._state(rows)
        if self._options.obs_mode != "state":
            obs["images"] = dict.fromkeys(CAMERA, render(self._scene, rows))
        return obs

    def expert_actions(self, num_actions: int) -> FloatArray:
        """The scripted expert's next actions [B, C, 3], without stepping; zeros once the outcome is decided."""
        scene = self._scene.moving_copy()
        actions = np.empty((self.num_envs, num_actions, 3), np.float32)
        for step in range(num_actions):
            actions[:, step] = expert_action(scene)
            advance(scene, actions[:, step])
        return actions

    def close(self) -> None:
        pass

    def _proprio(self, rows: IntArray) -> FloatArray:
        """The robot's own state [B, 4]: x, y, gripper closed, holding something."""
        scene = self._scene
        gripper = np.stack([scene.closed[rows], scene.held[rows] >= 0], axis=1)
        return np.concatenate([scene.effector[rows], gripper], axis=1, dtype=np.float32)

    def _state(self, rows: IntArray) -> FloatArray:
        """The whole state [B, 16]: proprioception 4, one-hot of the family 3, side 1, named block 2, its goal 2, other
        blocks 4 (0 if absent). Positions are relative to the effector."""
        scene = self._scene
        effector = scene.effector[rows]
        blocks = scene.blocks[rows] - effector[:, None]
        blocks[scene.block_colours[rows] < 0] = 0
        parts = [
            self._proprio(rows),
            np.eye(len(FAMILIES), dtype=np.float32)[scene.family[rows]],
            scene.side[rows, None],
            blocks[:, 0],
            goals(scene)[rows] - effector,
            blocks[:, 1:].reshape(-1, 2 * (NUM_BLOCKS - 1)),
        ]
        return np.concatenate(parts, axis=1, dtype=np.float32)
