"""What goes wrong inside an environment says where: environment, row, step, seed, key and value."""

from __future__ import annotations

import pickle
import sys
import traceback
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlinf_lite.cards import EnvCard
from rlinf_lite.config import Config
from rlinf_lite.envs import (
    ChunkedEnv,
    EpisodeContractError,
    EpisodeError,
    NonFiniteError,
    SimulatorError,
    check_env,
    episode_seed,
)
from rlinf_lite.envs.base import first_non_finite
from rlinf_lite.envs.check import check_finite
from rlinf_lite.envs.gymnasium.simulator import GymnasiumSimulator
from rlinf_lite.envs.trial import problems_of
from rlinf_lite.scheduler.host import Host
from rlinf_lite.workers import EnvWorker
from rlinf_lite.workers.layout import Layout
from tests.envs.toy import ToySimulator

FIRST_SEEDS = [31, 32, 33]


class Fragile(gymnasium.Env[Any, Any]):
    """Goes wrong at the fourth step of the second episode, in the way that `how` says."""

    observation_space: Any = gymnasium.spaces.Dict(
        {"arm": gymnasium.spaces.Box(-9, 9, (2,)), "gripper": gymnasium.spaces.Box(-9, 9, (3,))}
    )
    action_space: Any = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, how: str = "") -> None:
        self.how, self.episode, self.clock = how, -1, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode, self.clock = self.episode + 1, 0
        if self.how == "reset" and self.episode == 1:
            raise LookupError("no such scene")
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.clock += 1
        if self.how == "step" and self.here():
            raise ZeroDivisionError("the simulator fell over")
        if self.how == "exit" and self.here():
            sys.exit("no licence")
        reward = float("-inf") if self.how == "reward" and self.here() else 1.0
        terminated = np.zeros(2, np.bool_) if self.how == "flag" and self.here() else False
        return self.observe(), reward, terminated, False, {}

    def here(self) -> bool:
        return self.episode == 1 and self.clock == 4

    def observe(self) -> Any:
        gripper = np.zeros(3, np.float32)
        if self.how == "state" and self.here():
            gripper[1] = np.nan
        if self.how == "shape" and self.here():
            gripper = np.zeros(4, np.float32)
        return {"arm": np.zeros(2, np.float32), "gripper": gripper}


def play(how: str, num_steps: int = 2) -> EpisodeError:
    """Of three rows the last goes wrong; episodes last five steps."""
    env = ChunkedEnv(GymnasiumSimulator([Fragile(), Fragile(), Fragile(how)], "fragile"), max_episode_steps=5)
    env.reset(seeds=FIRST_SEEDS)
    with pytest.raises(EpisodeError) as caught:
        for _ in range(10):
            env.chunk_step(np.zeros((3, num_steps, 1), np.float32))
    return caught.value


WHERE = f"row 2, step 4 of the episode with seed {episode_seed(33, 1)}: "


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("reward", NonFiniteError, f"{WHERE}the reward is -inf: look for"),
        ("state", NonFiniteError, f"{WHERE}state[3] (gripper) is nan: look for"),
        ("step", SimulatorError, f"{WHERE}step raised ZeroDivisionError: the simulator fell over"),
        ("exit", SimulatorError, f"{WHERE}step raised SystemExit: no licence"),
        ("shape", EpisodeContractError, f"{WHERE}observation 'gripper' is shape (4,) where observation_space promises"),
        ("flag", EpisodeContractError, f"{WHERE}terminated is array([False, False]); return True or False, one"),
        ("reset", SimulatorError, WHERE.replace("step 4", "at the start") + "reset raised LookupError: no such scene"),
    ],
)
@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_row_step_key_value_and_seed(how: str, kind: type, message: str, num_steps: int) -> None:
    error = play(how, num_steps)
    assert type(error) is kind and str(error).startswith(message)
    error.number([10, 11, 12])
    again = pickle.loads(pickle.dumps(error))  # between processes
    assert type(again) is kind and str(again) == str(error)
    assert str(again).startswith(f"environment 12 ({message.partition(',')[0]}), ")


def test_the_traceback_goes_down_to_where_it_was_raised_and_the_summary_says_which_row() -> None:
    error = play("step")
    text = "".join(traceback.format_exception(error))
    assert 'raise ZeroDivisionError("the simulator fell over")' in text and "RowError" not in text
    failure = Host("env", 1)._failure("env", "interact", error)
    assert str(failure).splitlines()[0] == f"env[1].interact raised SimulatorError: {error}"
    assert failure.pickled is not None


def test_a_batch_that_is_stepped_at_once_names_its_rows() -> None:
    class Falls(ToySimulator):
        def step(self, rows: Any, actions: Any, out: Any) -> None:
            raise RuntimeError("lost the device")

    env = ChunkedEnv(Falls(3), max_episode_steps=4)
    env.reset(seeds=FIRST_SEEDS)
    with pytest.raises(SimulatorError) as caught:
        env.chunk_step(np.zeros((3, 1, 1), np.float32))
    caught.value.number([6, 7, 8])
    expected = "environments 6 to 8 (rows 0 to 2, one of them): step raised RuntimeError: lost the device"
    assert str(caught.value) == expected

    class NoMemory(ToySimulator):
        def step(self, rows: Any, actions: Any, out: Any) -> None:
            raise MemoryError

    env = ChunkedEnv(NoMemory(1), max_episode_steps=4)
    env.reset(seeds=[1])
    with pytest.raises(MemoryError):  # no episode's fault, and the watchdog knows it by its name
        env.chunk_step(np.zeros((1, 1, 1), np.float32))


class Bare:
    """A VecEnv that is no ChunkedEnv, and lets through what comes."""

    def __init__(self, env: ChunkedEnv) -> None:
        self.env, self.num_envs, self.action_dim = env, env.num_envs, env.action_dim
        self.max_episode_steps, self.spoil = env.max_episode_steps, ""

    def reset(self, seeds: Any = None, env_ids: Any = None) -> Any:
        return self.env.reset(seeds, env_ids)

    def chunk_step(self, actions: Any) -> Any:
        result = self.env.chunk_step(actions)
        if self.spoil == "exit":
            sys.exit("no licence")
        if self.spoil == "reward":
            result.rewards[1, 1] = np.nan
        if self.spoil == "ends":
            result.truncated[1, 1] = True
        if self.spoil == "extra":
            result.final_obs = np.array([2]), {"state": np.zeros((1, 3), np.float32)}
        if self.spoil == "obs":
            result.obs = {**result.obs, "state": np.where(np.arange(9).reshape(3, 3) == 4, np.nan, 0.0)}
        return result


def make_bare(num_envs: int, cfg: Any) -> Bare:
    return Bare(ChunkedEnv(ToySimulator(num_envs), max_episode_steps=6))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("ends", "environment 4 (row 1): rows [1] ended in chunk 1 since the phase began (terminated or truncated)"),
        ("extra", "environment 5 (row 2): rows [] ended in chunk 1 since"),
        ("exit", "environments 3 to 5 (rows 0 to 2, one of them): Bare raised SystemExit: no licence"),
        ("reward", "environment 4 (row 1): the reward of action 2 in chunk 1 since the phase began is nan"),
        ("obs", "environment 4 (row 1): state[1] in chunk 1 since the phase began is nan"),
    ],
)
def test_environments_that_do_not_check_themselves_are_checked_by_the_worker(spoil: str, message: str) -> None:
    cfg = Config.model_validate({"env": {"id": "tests.envs.test_named_errors:make_bare", "train": {"num_envs": 6}}})
    worker = EnvWorker(cfg)
    worker.rank = 1
    worker.init(Layout(6, 2, 1, (0,), (0,)))
    (stage,) = worker.stages
    assert isinstance(stage.env, Bare)
    stage.begin()
    stage.env.spoil = spoil
    with pytest.raises(EpisodeError) as caught:
        stage.step(np.zeros((3, 2, 1), np.float32))
    assert str(caught.value).startswith(message)


def make_exit(num_envs: int, cfg: Any) -> Any:
    sys.exit("no licence")


def test_an_exit_where_environments_are_made_is_said_and_ends_no_worker() -> None:
    here = "tests.envs.test_named_errors:make_exit"
    cfg = Config.model_validate({"env": {"id": here, "train": {"num_envs": 2}}})
    with pytest.raises(SimulatorError, match=f"{here} raised SystemExit: no licence"):
        EnvWorker(cfg).init(Layout(2, 1, 1, (0,), (0,)))
    assert check_env(make_exit) == ["making the environment raised SystemExit: no licence"]
    [problem] = problems_of(EnvCard.of(make_exit, "exit"), cfg.env, "train", 2)
    assert problem.text.startswith("exit cannot be made: SystemExit: no licence, at ")


def test_last_observations_are_checked_too() -> None:
    env = ChunkedEnv(ToySimulator(2), max_episode_steps=2)
    env.reset(seeds=[1, 2])
    result = env.chunk_step(np.zeros((2, 2, 1), np.float32))
    check_finite("now", result.obs, result)
    assert result.final_obs is not None
    rows, _ = result.final_obs
    result.final_obs = rows[1:], {"state": np.array([[0.0, np.inf, 0.0]], np.float32)}
    with pytest.raises(NonFiniteError, match=r"row 1: state\[1\] in final_obs now is inf"):
        check_finite("now", result.obs, result)


def test_finite_numbers_of_any_size_pass() -> None:
    for dtype in (np.float32, np.float64):
        array = np.full((3, 4), np.finfo(dtype).max)
        assert first_non_finite(array) is None and first_non_finite(-array.T) is None
        for value in (np.nan, np.inf, -np.inf):
            array[1, 2] = value
            assert first_non_finite(array) == (1, 2)
    assert first_non_finite(np.zeros((0, 3), np.float32)) is None
