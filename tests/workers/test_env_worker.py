"""The env worker by itself; this process plays the policy."""

from itertools import pairwise

import numpy as np
import pytest

from rlinf_lite.cards import EnvCard
from rlinf_lite.config import Config, load_config
from rlinf_lite.config.rounds import DaggerConfig
from rlinf_lite.envs import ChunkResult, EnvContractError, EpisodeRecord, StepRewardError
from rlinf_lite.envs.observations import take_rows
from rlinf_lite.runners.run_config import write_config
from rlinf_lite.runners.simulation import load_env_states, save_env_states
from rlinf_lite.scheduler import AbortedError
from rlinf_lite.workers import EnvWorker
from rlinf_lite.workers.layout import Layout
from rlinf_lite.workers.messages import ActionMessage


class Played(EnvWorker):
    """Two rollout workers serve halves of its one stage; `answers` says whose half of which decision comes next."""

    def send(self, obj, group, rank, tag=None):
        self.sent.append(obj)

    def recv_any(self, group, timeout_s=None, tag=None):
        half = next(self.answers)
        if half is None:
            raise AbortedError("a worker is being started again")
        observed = [message for message in self.sent if message.start == 4 * half][-1]
        actions = np.full((4, 1, 1), np.tanh(observed.obs["state"][:, :1].sum() + observed.t), np.float32)
        return half, ActionMessage(0, 4 * half, actions)


def worker_of(num_envs, *more):
    sizes = [f"env.train.num_envs={num_envs}", "rollout.num_chunks=4", f"actor.global_batch_size={4 * num_envs}", *more]
    worker = Played(load_config("embodiment/gym_pendulum_ppo_mlp", sizes))
    worker.name, worker.rank, worker.sent = "env", 0, []
    worker.init(Layout(num_envs, 1, 1, rollout_nodes=(0, 0), actor_nodes=(0,)))
    return worker


def assert_same(rows, others):
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        assert all(np.array_equal(row[key], other[key]) for key in row)


def test_environments_without_a_saved_state_start_anew(caplog):
    worker = worker_of(8)
    fresh = worker.state_dict()
    worker.answers = iter([0, 1] * 4)
    worker.interact(0)
    played = worker.state_dict()
    more = worker_of(12)
    new = more.state_dict()[8:]
    assert_same(more.load_state_dict(played), [*played, *new])
    assert_same(more.state_dict(), [*played, *new])
    assert "4 environments have no saved state and start again: [8, 9, 10, 11]" in caplog.text
    assert_same(worker_of(4).load_state_dict(played), played[:4])
    assert_same(worker.load_state_dict([]), fresh)


@pytest.mark.parametrize(
    ("now", "is_same"),
    [
        *((Config(), True), (Config(env={"train": {"num_envs": 3}}, algorithm={"gamma": 0.5}), True)),
        *((Config(runner={"seed": 5}), False), (Config(env={"id": "gymnasium", "options": {"g": 9.0}}), False)),
        (Config(env={"train": {"max_episode_steps": 7}}), False),
    ],
)
def test_the_states_of_other_episodes_are_not_taken(tmp_path, caplog, now, is_same):
    write_config(Config(), tmp_path)
    rows = [{"env_id": i, "actions": np.zeros((2, 1), np.float32)} for i in range(2)]
    save_env_states(rows, tmp_path)
    assert_same(load_env_states(tmp_path, now), rows if is_same else [])
    assert ("unfinished episodes start again" in caplog.text) != is_same


def test_half_an_answer_is_forgotten_with_the_phase_that_was_given_up():
    worker = worker_of(8)
    start = worker.state_dict()
    worker.answers = iter([0, 1] * 4)
    worker.interact(0)
    observed = worker.sent

    worker.load_state_dict(start)
    worker.sent, worker.answers = [], iter([0, 1, 0, 1, 0, None])
    with pytest.raises(AbortedError):
        worker.interact(0)
    worker.load_state_dict(start)
    worker.sent, worker.answers = [], iter([1, 0] * 4)
    worker.interact(0)
    for one, other in zip(observed, worker.sent, strict=True):
        assert (one.start, one.t) == (other.start, other.t)
        np.testing.assert_array_equal(one.obs["state"], other.obs["state"])


def test_a_run_of_evaluations_makes_no_environments_of_training():
    sizes = ["env.eval.num_envs=8", "env.eval.num_episodes=8", "env.eval.max_episode_steps=5"]
    found = []
    for worker in (worker_of(8, *sizes), worker_of(1, *sizes, "runner.task_type=eval")):
        worker.sent, worker.answers = [], iter([0, 1] * 5)
        found.append(worker.evaluate()["episodes"])
    assert worker.stages is worker.eval_stages
    assert len(found[0]) == 8 and found[1] == found[0]


@pytest.mark.parametrize(("num_scenes", "auto_reset"), [(4, True), (4, False), (3, True)])
def test_rows_keep_their_scene_where_scenes_can_be_divided_evenly(monkeypatch, num_scenes, auto_reset):
    monkeypatch.setattr(EnvCard, "num_scenes", lambda card, task: num_scenes)
    worker = worker_of(8, "env.train.max_episode_steps=2", f"env.train.auto_reset={auto_reset}")
    simulator = worker.stages[0].env.simulator
    played = [set() for _ in range(8)]
    reset = simulator.reset

    def noting(rows, seeds):
        for row, seed in zip(rows.tolist(), seeds, strict=True):
            played[row].add(seed % num_scenes)
        reset(rows, seeds)

    monkeypatch.setattr(simulator, "reset", noting)
    for step in range(6):
        worker.answers = iter([0, 1] * 4)
        worker.interact(step)
    if 8 % num_scenes:
        assert max(map(len, played)) > 1 and set.union(*played) == set(range(num_scenes))
    else:
        assert played == [{row % num_scenes} for row in range(8)]


def test_training_is_rewarded_by_a_function_of_observations_and_an_evaluation_is_not():
    sizes = ["env.eval.num_envs=8", "env.eval.num_episodes=8", "env.eval.max_episode_steps=3"]
    sizes += ["env.train.max_episode_steps=3", "env.train.ignore_terminations=true"]
    found = []
    for reward in ([], ["env.train.reward={id: tests.envs.test_rewards:clock, relative: true}"]):
        worker = worker_of(8, *sizes, *reward)
        worker.answers = iter([0, 1] * 4)
        played = worker.interact(0)["episodes"]
        sent, worker.sent, worker.answers = worker.sent, [], iter([0, 1] * 3)
        found.append((played, worker.evaluate()["episodes"], sent))
    (plain, evaluated_plain, _), (judged, evaluated_judged, sent) = found
    assert judged == plain and evaluated_judged == evaluated_plain and len(plain) == 8
    for half in (0, 4):
        messages = [message for message in sent if message.start == half]
        for before, after in pairwise(messages):
            seen = after.obs["state"].copy()
            if after.result.final_obs is not None:
                seen[after.result.final_rows] = after.result.final_obs["state"]
            np.testing.assert_allclose(after.result.rewards[:, 0], seen[:, 1] - before.obs["state"][:, 1], atol=1e-6)


def test_a_function_that_cannot_judge_is_refused_before_anything_is_played():
    reward = ["env.train.ignore_terminations=true", "env.train.reward.id=tests.envs.test_rewards:column"]
    with pytest.raises(StepRewardError, match=r"the function returned float32 \[8, 1\]"):
        worker_of(8, *reward)


class Own:
    """A VecEnv of one's own that resets by itself; a row's episodes take `lengths[row]` env steps, within the limit or
    not."""

    auto_reset, action_dim, max_episode_steps = True, 1, 5

    def __init__(self, lengths):
        self.lengths, self.num_envs = np.array(lengths), len(lengths)

    def reset(self, seeds=None, env_ids=None):
        self.t = 0
        return {"state": np.zeros((self.num_envs, 3), np.float32)}

    def chunk_step(self, actions):
        self.t += 1
        ended = self.t % self.lengths == 0
        records = [
            EpisodeRecord(row, "own", row, self.t, 0.0, self.t == 2, self.t == 2)
            for row in np.flatnonzero(ended).tolist()
        ]
        shape = (self.num_envs, 1)
        obs = {"state": np.zeros((self.num_envs, 3), np.float32)}
        no, yes = np.zeros(shape, np.bool_), np.ones(shape, np.bool_)
        rows = np.flatnonzero(ended)
        final_obs = (rows, take_rows(obs, rows)) if rows.size else None
        return ChunkResult(obs, np.zeros(shape, np.float32), ended[:, None], no, yes, final_obs, records)


def evaluated(lengths):
    worker = worker_of(8, "env.eval.num_envs=8", "env.eval.num_episodes=8", "env.eval.max_episode_steps=5")
    worker.eval_stages = worker._build_stages("eval", worker.eval_layout)
    worker.eval_stages[0].env = Own(lengths)
    worker.sent, worker.answers = [], iter([0, 1] * 5)
    return worker.evaluate()["episodes"]


def test_an_evaluation_counts_each_episode_once():
    found = evaluated([2, 2, 5, 5, 5, 5, 5, 5])
    assert sorted((record.env_id, record.length) for record in found) == [
        (0, 2),
        (1, 2),
        *((i, 5) for i in range(2, 8)),
    ]


def test_an_episode_that_never_ends_is_no_evaluation():
    with pytest.raises(EnvContractError, match=r"no episode of row 1 ended within max_episode_steps=5; set truncated"):
        evaluated([2, 7, 5, 5, 5, 5, 5, 5])


def test_imitation_of_a_folder_builds_the_environments_of_its_evaluation_only():
    sizes = ["env.train.num_envs=8", "env.eval.num_envs=2", "rollout.pipeline_stage_num=1"]
    dagger, never = DaggerConfig(rounds=1, interval=1), ["runner.val_check_interval=-1"]
    folder = {"source": "folder"}
    cases = [([], {}, 8), ([], folder, 2), ([], {**folder, "dagger": dagger}, 8), (never, folder, 8)]
    for settings, more, built in cases:
        cfg = load_config("embodiment/tabletop_sft_mlp", [*sizes, *settings])
        worker = Played(cfg.model_copy(update={"data": cfg.data.model_copy(update=more)}))
        worker.name, worker.rank, worker.sent = "env", 0, []
        worker.init(Layout(8, 1, 1, rollout_nodes=(0, 0), actor_nodes=(0,)))
        assert [stage.env.num_envs for stage in worker.stages] == [built]
