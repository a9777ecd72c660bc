"""Rewards by a function of observations: which observation is judged, at which step it counts, and what stays."""

import pickle

import numpy as np
import pytest

from rlinf_lite.config.schema import StepRewardConfig
from rlinf_lite.envs import ChunkedEnv, StepRewardError
from rlinf_lite.envs.rewards import ObservedReward
from rlinf_lite.registry import PartError, UnknownRewardError
from tests.envs.toy import ToySimulator


def clock(obs):
    """The number of env steps of the episode that an observation of the toy is of."""
    return obs["state"][:, 1]


class Scaled:
    def __init__(self, settings):
        self.factor = settings.threshold

    def __call__(self, obs):
        return self.factor * clock(obs)


def own(name, **more):
    return ObservedReward(StepRewardConfig(id=f"{__name__}:{name}", **more))


@pytest.mark.parametrize(("auto_reset", "relative"), [(True, False), (False, False), (True, True)])
def test_only_the_last_executed_step_of_a_chunk_is_rewarded_by_the_observation_after_it(auto_reset, relative):
    played = []
    for reward in (None, own("clock", relative=relative)):
        env = ChunkedEnv(ToySimulator(3), auto_reset=auto_reset, ignore_terminations=True, max_episode_steps=8)
        obs = env.reset([1, 2, 3])
        rows = []
        for chunk in range(5):
            before = None if reward is None else reward.before(obs)
            result = env.chunk_step(np.full((3, 3, 1), 0.9 - 0.4 * chunk, np.float32))
            rows.append(result if reward is None else reward.judged(result, before))
            obs = result.obs
        played.append(rows)
    steps = np.zeros(3, int)  # of the present episode, by a loop
    for plain, found in zip(*played, strict=True):
        expected = np.zeros((3, 3))
        for row in range(3):
            last, first = None, steps[row] if relative else 0
            for step in range(3):
                if plain.executed[row, step]:
                    steps[row] += 1
                    last = step
            if last is not None:
                expected[row, last] = steps[row] - first
            if (plain.terminated | plain.truncated)[row].any():
                steps[row] = 0
        np.testing.assert_array_equal(found.rewards, expected)
        assert found.rewards.dtype == np.float32 and found.episodes == plain.episodes  # true return and success
        np.testing.assert_array_equal(found.obs["state"], plain.obs["state"])
    ends = [record for found in played[1] for record in found.episodes]
    assert ends and all(record.success_once is not None and record.return_ < 8 for record in ends)
    if auto_reset and not relative:
        ended = next(found for found in played[1] if found.final_obs is not None)
        assert (ended.obs["state"][:, 1] == 0).all() and ended.rewards.max() == 8, "judged by final_obs, not by obs"


def test_a_class_is_built_with_the_settings():
    reward = own("Scaled", threshold=0.25)
    assert reward.of({"state": np.full((2, 3), 8.0, np.float32)}).tolist() == [2.0, 2.0]


def scalar(obs):
    return 1.0


def column(obs):
    return obs["state"][:, :1]


def beyond_float32(obs):
    return np.full(len(obs["state"]), 1e300)


def not_a_number(obs):
    return np.full(len(obs["state"]), np.nan)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("beyond_float32", r"\[1e\+300, 1e\+300\]"),
        ("scalar", r"float64 \[\]"),
        ("column", r"float32 \[2, 1\]"),
        ("not_a_number", r"\[nan, nan\]"),
    ],
)
def test_what_is_no_number_per_row_is_refused(name, said):
    with pytest.raises(StepRewardError, match=rf"env.train.reward.id: the function returned {said}. Return 2 finite"):
        own(name).of({"state": np.zeros((2, 3), np.float32)})
    assert isinstance(pickle.loads(pickle.dumps(StepRewardError("x"))), StepRewardError)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("success_classifer", "nothing is registered as 'success_classifer'. Did you mean success_classifier?"),
        (f"{__name__}:clok", "Did you mean clock?"),
    ],
)
def test_a_name_that_stands_for_nothing_is_refused(name, said):
    with pytest.raises(PartError, match=r"env\.train\.reward\.id: ") as raised:
        ObservedReward(StepRewardConfig(id=name))
    assert said in str(raised.value) and isinstance(raised.value, UnknownRewardError)
