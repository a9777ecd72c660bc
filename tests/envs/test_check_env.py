"""check_env finds each of a set of mistakes, and says so in a sentence."""

from __future__ import annotations

import pickle
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlinf_lite.envs import ChunkedEnv, ChunkResult, EnvContractError, check_env, ensure_valid_env
from tests.envs.broken_envs import CASES, Good, StateAlone
from tests.envs.toy import ToySimulator


def test_good_environments_pass() -> None:
    assert check_env(Good()) == []
    assert check_env(lambda num_envs, cfg: Good(), num_envs=3) == []
    assert check_env(gymnasium.make("Pendulum-v1")) == []
    for auto_reset in (True, False):
        env = ChunkedEnv(ToySimulator(3), auto_reset=auto_reset, max_episode_steps=6)
        assert check_env(env) == []
        ensure_valid_env(env)


@pytest.mark.parametrize(("broken", "sentence"), CASES, ids=[case[0].__name__ for case in CASES])
def test_each_mistake_is_named(broken: Any, sentence: str) -> None:
    problems = check_env(lambda num_envs, cfg: broken())
    assert any(sentence in problem for problem in problems), problems


def test_a_class_that_is_no_make_env_is_told_of_one() -> None:
    [problem] = check_env(Good)
    assert problem == "Good is an environment; name a function: def make_env(num_envs, cfg): return Good()"


def test_a_vec_env_by_hand_is_told_every_shape() -> None:
    problems = "\n".join(check_env(StateAlone()))
    assert "reset returns unknown keys ['pixels']" in problems
    assert "state from reset is float64 of shape (3,); return float32 [B, S]" in problems
    assert "chunk_step returns a builtins.tuple; return a rlinf_lite.envs.ChunkResult" in problems


class Endless(Good):
    def __init__(self) -> None:
        self.spec = None


class EndlessAndBlind(Endless):
    def observe(self) -> Any:
        return np.zeros(3, np.float32)


def test_an_environment_without_a_time_limit_is_checked_but_for_its_end() -> None:
    limit, skipped = check_env(lambda num_envs, cfg: Endless())
    assert "has no time limit of its own: set max_episode_steps" in limit
    assert skipped == "how episodes end was not checked, as there is no time limit."
    blind = check_env(lambda num_envs, cfg: EndlessAndBlind())
    assert blind[0].startswith("other seeds gave the same first observations") and blind[1:] == [
        limit.replace("Endless", "EndlessAndBlind"),
        skipped,
    ]


class Mischief(ChunkedEnv):
    """A correct environment whose results are spoilt on their way out."""

    def __init__(self, spoil: Any, **rules: Any) -> None:
        super().__init__(ToySimulator(2), max_episode_steps=3, ignore_terminations=True, **rules)
        self.spoil = spoil

    def chunk_step(self, actions: Any) -> ChunkResult:
        result = super().chunk_step(actions)
        self.spoil(result)
        return result


def wrong_type(result: ChunkResult) -> None:
    result.rewards = result.rewards.astype(np.float64)


def both_flags(result: ChunkResult) -> None:
    result.terminated = result.truncated = np.ones_like(result.truncated)


def no_final_obs(result: ChunkResult) -> None:
    result.final_obs = None


def no_records(result: ChunkResult) -> None:
    result.episodes = []


def never_ends(result: ChunkResult) -> None:
    result.truncated = np.zeros_like(result.truncated)


def other_shape(result: ChunkResult) -> None:
    result.obs = {**result.obs, "state": np.zeros((2, 9), np.float32)}


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (wrong_type, "rewards from chunk_step is float64 of shape (2, 1); return float32 of shape (2, 1)"),
        (both_flags, "a step is both terminated and truncated"),
        (no_final_obs, "final_obs must hold these rows"),
        (no_records, "episodes has records of rows []"),
        (never_ends, "no episode ended within max_episode_steps=3 steps"),
        (other_shape, "observations change shape"),
    ],
)
def test_mistakes_in_results(spoil: Any, sentence: str) -> None:
    problems = check_env(Mischief(spoil))
    assert any(sentence in problem for problem in problems), problems


def test_bounds_are_finite_as_float32_too_which_actions_are() -> None:
    env = Mischief(lambda result: None)
    env.action_low, env.action_high = -np.full(1, 1e39), np.full(1, 1e39)
    assert check_env(env) == ["action bounds must be finite, with low below high in every dimension."]


def test_wrong_auto_reset() -> None:
    env = Mischief(lambda result: None, auto_reset=False)
    env.auto_reset = True
    env.simulator.reset(np.array([0, 1]), [1, 2])
    env._finish = lambda rows, result: setattr(result, "final_obs", (rows, env.simulator.observe(rows)))
    assert any("were not stepped after their end" in problem for problem in check_env(env))


def test_ensure_valid_env_raises_all_sentences_and_travels_between_processes() -> None:
    with pytest.raises(EnvContractError, match="puck breaks the environment contract in 3 way") as caught:
        ensure_valid_env(StateAlone(), "puck")
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.problems == caught.value.problems and str(again) == str(caught.value)
