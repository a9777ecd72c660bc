"""Chunks, episodes, seeds and resume of `ChunkedEnv`, against a loop that steps one environment at a time."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest

from rlinf_lite.envs import (
    ChunkedEnv,
    EnvContractError,
    EpisodeRecord,
    NonFiniteError,
    env_seed,
    episode_seed,
    get_env_spec,
)
from rlinf_lite.envs.simulator import StepOutputs
from tests.envs.toy import ToySimulator

NUM_ENVS, NUM_STEPS, LIMIT = 5, 4, 7
RULES = list(itertools.product([True, False], [True, False]))


class SlowRow:
    """One row by the book: the rule table of ChunkedEnv in plain ifs."""

    def __init__(
        self, row: int, first_seed: int, auto_reset: bool, ignore_terminations: bool, limit: int = LIMIT
    ) -> None:
        self.row, self.first_seed, self.auto_reset, self.ignore = row, first_seed, auto_reset, ignore_terminations
        self.simulator, self.index, self.limit = ToySimulator(1), -1, limit
        self.next_episode()

    def next_episode(self) -> None:
        self.index += 1
        self.seed = episode_seed(self.first_seed, self.index)
        self.simulator.reset(np.array([0]), [self.seed])
        self.length, self.total, self.once, self.at_end, self.over = 0, 0.0, False, False, False
        self.succeeded_after = None

    def observe(self) -> Any:
        return self.simulator.observe(np.array([0]))["state"][0]

    def chunk(self, actions: Any) -> dict[str, Any]:
        steps: list[tuple[float, bool, bool, bool]] = []
        final, episodes, out = None, [], StepOutputs.empty(1)
        for action in actions:
            if self.over:
                steps.append((0.0, False, False, False))
                continue
            self.simulator.step(np.array([0]), np.clip(action, -1, 1)[None], out)
            self.length += 1
            self.total += float(out.reward[0])
            self.at_end = bool(out.success[0])
            if self.at_end and not self.once:
                self.succeeded_after = self.length
            self.once = self.once or self.at_end
            terminated = bool(out.terminated[0]) and not self.ignore
            truncated = self.length == self.limit and not terminated
            steps.append((float(out.reward[0]), terminated, truncated, True))
            if terminated or truncated:
                self.over, final = True, self.observe()
                record = (self.row, "toy", self.seed, self.length, self.total, self.once, self.at_end)
                record = (*record, self.succeeded_after)
                episodes.append(EpisodeRecord(*record))
        if self.over and self.auto_reset:
            self.next_episode()
        return {"steps": steps, "final": final, "episodes": episodes, "obs": self.observe()}


def actions_of(chunk: int, num_envs: int = NUM_ENVS, num_steps: int = NUM_STEPS) -> Any:
    return np.random.default_rng(chunk).uniform(-0.5, 2.0, (num_envs, num_steps, 1)).astype(np.float32)


@pytest.mark.parametrize(("auto_reset", "ignore_terminations"), RULES)
def test_rule_table(auto_reset: bool, ignore_terminations: bool) -> None:
    env = ChunkedEnv(
        ToySimulator(NUM_ENVS),
        auto_reset=auto_reset,
        ignore_terminations=ignore_terminations,
        max_episode_steps=LIMIT,
    )
    seeds = [11, 12, 13, 14, 15]
    rows = [SlowRow(row, seed, auto_reset, ignore_terminations) for row, seed in enumerate(seeds)]
    obs = env.reset(seeds=seeds)
    np.testing.assert_array_equal(obs["state"], [row.observe() for row in rows])
    flags = set()
    for chunk in range(12):
        actions = actions_of(chunk)
        result = env.chunk_step(actions)
        slow = [row.chunk(actions[i]) for i, row in enumerate(rows)]
        for i, one in enumerate(slow):
            got = zip(result.rewards[i], result.terminated[i], result.truncated[i], result.executed[i], strict=True)
            assert [(float(r), bool(te), bool(tr), bool(e)) for r, te, tr, e in got] == one["steps"]
        np.testing.assert_array_equal(result.obs["state"], [one["obs"] for one in slow])
        ended = [i for i, one in enumerate(slow) if one["final"] is not None]
        assert ended == ([] if result.final_obs is None else result.final_obs[0].tolist())
        if result.final_obs is not None:
            np.testing.assert_array_equal(result.final_obs[1]["state"], [slow[i]["final"] for i in ended])
        by_row = sorted(result.episodes, key=lambda record: record.env_id)
        assert by_row == [record for one in slow for record in one["episodes"]]
        flags |= {"terminated"} if result.terminated.any() else set()
        flags |= {"truncated"} if result.truncated.any() else set()
    assert flags == ({"truncated"} if ignore_terminations else {"terminated", "truncated"})
    if not auto_reset:
        assert not env.chunk_step(actions_of(0)).executed.any()  # all rows are frozen by now
        assert env.chunk_step(actions_of(0)).obs["state"].tolist() == result.obs["state"].tolist()


def test_observes_once_per_chunk() -> None:
    simulator = ToySimulator(NUM_ENVS)
    env = ChunkedEnv(simulator, max_episode_steps=100, ignore_terminations=True)
    env.reset()
    simulator.num_observed = 0
    env.chunk_step(actions_of(0, num_steps=8))
    assert simulator.num_observed == NUM_ENVS


def test_chunks_do_not_change_what_happens() -> None:
    outcomes = []
    for num_steps in (1, 3, 6):
        env = ChunkedEnv(ToySimulator(NUM_ENVS), max_episode_steps=6, ignore_terminations=True)
        env.reset(seeds=range(NUM_ENVS))
        actions = actions_of(0, num_steps=12)
        results = [env.chunk_step(actions[:, i : i + num_steps]) for i in range(0, 12, num_steps)]
        outcomes.append((np.concatenate([one.rewards for one in results], 1), results[-1].obs["state"]))
    for rewards, state in outcomes[1:]:
        np.testing.assert_array_equal(rewards, outcomes[0][0])
        np.testing.assert_array_equal(state, outcomes[0][1])


def test_a_simulators_own_time_limit_truncates() -> None:
    env = ChunkedEnv(ToySimulator(2, own_limit=3), max_episode_steps=100, ignore_terminations=True)
    env.reset()
    result = env.chunk_step(np.zeros((2, 5, 1), np.float32))
    assert result.truncated.tolist() == [[False, False, True, False, False]] * 2
    assert [record.length for record in result.episodes] == [3, 3]


def test_seeds_depend_on_nothing_but_seed_and_index() -> None:
    assert env_seed(3, 7) == env_seed(3, 7)
    seeds = {env_seed(seed, env) for seed in range(50) for env in range(200)}
    assert len(seeds) == 10_000 and max(seeds) < 2**31 and min(seeds) >= 0
    assert episode_seed(42, 0) == 42
    assert len({episode_seed(42, k) for k in range(1000)}) == 1000


def test_rows_play_the_same_episodes_wherever_they_are() -> None:
    def episodes(rows: list[int]) -> dict[int, list[tuple[int, float]]]:
        env = ChunkedEnv(ToySimulator(len(rows)), max_episode_steps=LIMIT)
        env.reset(seeds=[env_seed(0, row) for row in rows])
        played: dict[int, list[tuple[int, float]]] = {row: [] for row in rows}
        for chunk in range(8):
            for record in env.chunk_step(actions_of(chunk)[rows]).episodes:
                played[rows[record.env_id]].append((record.seed, record.return_))
        return played

    together = episodes([0, 1, 2, 3, 4])
    apart = episodes([3, 1]) | episodes([4, 0, 2])
    assert together == apart


def test_reset_of_some_rows_leaves_the_others() -> None:
    env = ChunkedEnv(ToySimulator(NUM_ENVS), max_episode_steps=50, ignore_terminations=True)
    env.reset(seeds=range(NUM_ENVS))
    before = env.chunk_step(actions_of(0)).obs["state"]
    kept = before.copy()
    after = env.reset(seeds=[1], env_ids=[3])["state"]
    np.testing.assert_array_equal(before, kept)  # what was handed out is not written to
    np.testing.assert_array_equal(after[[0, 1, 2, 4]], before[[0, 1, 2, 4]])
    np.testing.assert_array_equal(
        after[3], ChunkedEnv(ToySimulator(1), max_episode_steps=9).reset(seeds=[1])["state"][0]
    )


@pytest.mark.parametrize(("auto_reset", "ignore_terminations"), RULES)
def test_resume_is_exact_row_by_row(auto_reset: bool, ignore_terminations: bool) -> None:
    def make(num_envs: int) -> ChunkedEnv:
        return ChunkedEnv(
            ToySimulator(num_envs),
            auto_reset=auto_reset,
            ignore_terminations=ignore_terminations,
            max_episode_steps=LIMIT,
        )

    env = make(NUM_ENVS)
    env.reset(seeds=range(NUM_ENVS))
    for chunk in range(3):
        pending = env.chunk_step(actions_of(chunk, num_steps=3)).obs
    saved = env.state_dict()
    assert json.dumps([{key: value for key, value in row.items() if key != "actions"} for row in saved])
    order = [4, 2, 0, 3, 1]  # saved rows go to other rows of two other environments
    parts = [make(2), make(3)]
    resumed = [parts[0].load_state_dict([saved[i] for i in order[:2]])]
    resumed.append(parts[1].load_state_dict([saved[i] for i in order[2:]]))
    np.testing.assert_array_equal(np.concatenate([one["state"] for one in resumed]), pending["state"][order])
    assert [text for one in resumed for text in one["instruction"]] == [pending["instruction"][i] for i in order]
    for chunk in range(3, 8):
        actions = actions_of(chunk, num_steps=3)
        expected = env.chunk_step(actions)
        got = [part.chunk_step(actions[rows]) for part, rows in zip(parts, (order[:2], order[2:]), strict=True)]
        for name in ("rewards", "terminated", "truncated", "executed"):
            both = np.concatenate([getattr(one, name) for one in got])
            np.testing.assert_array_equal(both, getattr(expected, name)[order])
        np.testing.assert_array_equal(np.concatenate([one.obs["state"] for one in got]), expected.obs["state"][order])
        ours = sorted((record.seed, record.length, record.return_) for one in got for record in one.episodes)
        assert ours == sorted((record.seed, record.length, record.return_) for record in expected.episodes)


def test_resume_says_when_a_simulator_does_not_repeat_itself(caplog: pytest.LogCaptureFixture) -> None:
    class Drifting(ToySimulator):
        def step(self, rows: Any, actions: Any, out: StepOutputs) -> None:
            super().step(rows, actions, out)
            out.reward[rows] += np.random.default_rng().normal(size=len(rows))

    env = ChunkedEnv(Drifting(2), max_episode_steps=50, ignore_terminations=True)
    env.reset()
    env.chunk_step(actions_of(0, 2))
    ChunkedEnv(Drifting(2), max_episode_steps=50, ignore_terminations=True).load_state_dict(env.state_dict())
    assert "2 of 2 rows replayed their episode to another return" in caplog.text


def test_refusals_say_what_to_do() -> None:
    env = ChunkedEnv(ToySimulator(2), max_episode_steps=9)
    with pytest.raises(EnvContractError, match=r"set max_episode_steps in env\.train and env\.eval"):
        ChunkedEnv(ToySimulator(2))
    with pytest.raises(RuntimeError, match="before the first reset"):
        env.chunk_step(np.zeros((2, 1, 1), np.float32))
    with pytest.raises(ValueError, match="first reset must be of all rows"):
        env.reset(seeds=[1], env_ids=[0])
    with pytest.raises(ValueError, match="1 seeds for 2 rows"):
        env.reset(seeds=[1])
    env.reset()
    with pytest.raises(ValueError, match=r"\[B=2, C, D=1\], got \[2, 3, 2\]"):
        env.chunk_step(np.zeros((2, 3, 2), np.float32))
    for value in (np.nan, np.inf):  # infinity would be clipped to the bound
        with pytest.raises(
            NonFiniteError, match=rf"row 1, step 1 .* dimension 0 of the action is {value}.*diverged, or what it"
        ):
            env.chunk_step(np.array([[[0.0]], [[value]]], np.float32))


def test_actions_are_clipped_to_the_bounds() -> None:
    states = []
    for scale in (1.0, 5.0):
        env = ChunkedEnv(ToySimulator(1), max_episode_steps=9, ignore_terminations=True)
        env.reset(seeds=[1])
        states.append(env.chunk_step(np.full((1, 2, 1), scale, np.float32)).obs["state"])
    np.testing.assert_array_equal(states[0], states[1])


def test_env_spec() -> None:
    env = ChunkedEnv(ToySimulator(2), max_episode_steps=9)
    spec = get_env_spec(env, env.reset())
    assert (spec.action_dim, spec.state_dim, spec.cameras, spec.max_episode_steps) == (1, 3, {}, 9)
    assert (spec.action_low, spec.action_high, spec.has_instruction) == ([-1.0], [1.0], True)


def test_records_name_the_task_that_the_row_has_now() -> None:
    """A reset may deal tasks out by seed, into a list of its own."""

    class Dealt(ToySimulator):
        task_ids: list[str] = ["none"] * NUM_ENVS

        def reset(self, rows: Any, seeds: list[int]) -> None:
            super().reset(rows, seeds)
            self.task_ids = [f"task{seed}" for seed in seeds]

    env = ChunkedEnv(Dealt(NUM_ENVS), auto_reset=False, max_episode_steps=2)
    env.reset(seeds=list(range(NUM_ENVS)))
    records = env.chunk_step(np.zeros((NUM_ENVS, 2, 1), np.float32)).episodes
    assert [record.task_id for record in records] == [f"task{record.seed}" for record in records]
