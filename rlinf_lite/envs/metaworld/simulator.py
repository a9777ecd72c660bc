"""MetaWorld's tasks as a `Simulator`. Its rows are separate MuJoCo simulations, which one process steps in turn."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlinf_lite.envs.base import FloatArray, IntArray, Obs
from rlinf_lite.envs.errors import MissingExtraError, RowError
from rlinf_lite.envs.metaworld.card import CAMERA
from rlinf_lite.envs.metaworld.painter import CAMERA_POSITION, painter_of, picture
from rlinf_lite.envs.metaworld.tasks import MAX_STEPS, OWN_STATE_DIM, SENTENCES, tasks_of
from rlinf_lite.envs.painter import Painter
from rlinf_lite.envs.simulator import StepOutputs

if TYPE_CHECKING:
    from rlinf_lite.config import EnvConfig


class MetaWorldSimulator:
    """B rows. If `env.task` names several tasks, the seed of an episode selects its task, and states end in a one-hot
    of the task."""

    reports_success = True

    def __init__(self, num_envs: int, cfg: EnvConfig) -> None:
        """Raises UnknownEnvError for an unknown task, MissingExtraError, RenderUnavailableError."""
        import_metaworld()
        self.num_envs, self.task_id = num_envs, cfg.task
        self.task_ids = [""] * num_envs
        self.max_episode_steps: int | None = MAX_STEPS
        self.action_low, self.action_high = -np.ones(4, np.float32), np.ones(4, np.float32)
        self._options, self._tasks = cfg.options, tasks_of(cfg.task)
        self._has_one_hot = len(self._tasks) > 1
        self._worlds: list[World] = []
        self._idle: dict[str, list[World]] = {task: [] for task in self._tasks}
        self._painters: dict[str, Painter] = {}
        if cfg.options.obs_mode != "state":
            # so that a missing driver is found before training
            self._idle[self._tasks[0]].append(self._new_world(self._tasks[0]))

    def reset(self, rows: IntArray, seeds: list[int]) -> None:
        if not self._worlds:
            self._worlds = [self._take_world(self._tasks[seed % len(self._tasks)]) for seed in seeds]
        for row, seed in zip(rows.tolist(), seeds, strict=True):
            task = self._tasks[seed % len(self._tasks)]
            try:
                if self._worlds[row].task != task:
                    self._idle[self._worlds[row].task].append(self._worlds[row])
                    self._worlds[row] = self._take_world(task)
                self._worlds[row].reset(seed)
            except (Exception, SystemExit) as error:  # any error of the task's own code
                raise RowError(row) from error
            self.task_ids[row] = task

    def step(self, rows: IntArray, actions: FloatArray, out: StepOutputs) -> None:
        is_dense = self._options.reward_mode == "dense"
        for row in rows.tolist():
            world = self._worlds[row]
            try:
                world.obs, reward, _, _, info = world.env.step(actions[row])
            except (Exception, SystemExit) as error:  # any error of the task's own code
                raise RowError(row) from error
            succeeded = info["success"] == 1.0
            out.reward[row] = reward / 10 if is_dense else succeeded and not world.solved
            out.success[row] = out.terminated[row] = succeeded
            world.solved |= succeeded

    def observe(self, rows: IntArray) -> Obs:
        worlds = [self._worlds[row] for row in rows.tolist()]
        obs: Obs = {"instruction": [SENTENCES[world.task] for world in worlds]}
        state = np.stack([world.obs for world in worlds]).astype(np.float32)
        if self._options.obs_mode == "rgb":
            state = state[:, :OWN_STATE_DIM].copy()
        elif self._has_one_hot:
            which = [self._tasks.index(world.task) for world in worlds]
            state = np.concatenate([state, np.eye(len(self._tasks), dtype=np.float32)[which]], axis=1)
        obs["state"] = state
        if self._options.obs_mode != "state":
            obs["images"] = {CAMERA: np.stack([world.picture(self._painters[world.task]) for world in worlds])}
        return obs

    def expert_actions(self, num_actions: int) -> FloatArray:
        """The next action [B, 1, 4] of the library's scripted expert, which needs a new observation after each."""
        return np.stack([world.expert_action()[None] for world in self._worlds])

    def state_key(self, column: int) -> str:
        part = ("hand and objects", "hand and objects one step before")[column // 18] if column < 36 else "goal"
        return part if column < 39 else "one-hot of the task"

    def close(self) -> None:
        for painter in self._painters.values():
            painter.close()
        self._painters = {}

    def _take_world(self, task: str) -> World:
        return self._idle[task].pop() if self._idle[task] else self._new_world(task)

    def _new_world(self, task: str) -> World:
        world = World(task)
        if self._options.obs_mode != "state" and task not in self._painters:
            self._painters[task] = painter_of(world.env.model, self._options)
        return world


class World:
    """One simulation of one task, which any row may use for an episode: `reset` removes all traces of earlier ones."""

    def __init__(self, task: str) -> None:
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS
        from metaworld.policies import ENV_POLICY_MAP

        self.task = task
        self.env: Any = ALL_V3_ENVIRONMENTS[task]()
        self.env._set_task_called = True
        self.env._freeze_rand_vec, self.env.seeded_rand_vec = False, True  # initial states are drawn from env.seed
        self.env._partially_observable = False  # the goal is in the observation, as in MT1, MT10 and MT50
        del self.env.sawyer_observation_space  # cached; it depends on the line above
        self.env.max_path_length = sys.maxsize  # ChunkedEnv keeps the time limit
        self.env.model.camera(CAMERA).pos = CAMERA_POSITION
        experts: Any = ENV_POLICY_MAP  # typed as classes of an abstract policy
        self.expert = experts[task]()
        self.obs: NDArray[np.float64] = np.zeros(0)
        self.solved, self._is_new = False, False

    def reset(self, seed: int) -> None:
        self.env.seed(seed)
        self.obs, _ = self.env.reset()
        self.solved, self._is_new = False, True

    def picture(self, painter: Painter) -> NDArray[np.uint8]:
        if self._is_new:
            import mujoco

            # a reset of the library moves goals and bodies after it has last computed positions
            mujoco.mj_kinematics(self.env.model, self.env.data)
            mujoco.mj_camlight(self.env.model, self.env.data)
            self._is_new = False
        return picture(painter, self.env.data)

    def expert_action(self) -> FloatArray:
        """The expert's next action [4]."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning that actions are clipped
            action: FloatArray = np.clip(self.expert.get_action(self.obs), -1, 1).astype(np.float32)
        return action


def import_metaworld() -> None:
    """Import metaworld without its warnings. Raises MissingExtraError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import metaworld  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "metaworld", "metaworld") from error
