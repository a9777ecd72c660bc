"""Runs from a replay buffer: what they store, and what they learn from."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlinf_lite.cli.collect import collect
from rlinf_lite.config import ConfigError
from rlinf_lite.data.demonstrations import DemonstrationError
from rlinf_lite.data.lerobot.frames import Frames
from rlinf_lite.models import load_policy
from rlinf_lite.runners import AsyncOffPolicyRunner, OffPolicyRunner
from rlinf_lite.runners.full_disk import DiskFullError
from rlinf_lite.training.replay import DemonstratedTransitions, ReplayBuffer
from rlinf_lite.workers import OffPolicyActor
from tests.runners.conftest import OFF_POLICY_WORKERS, SMALL_SAC, read_metrics
from tests.runners.counting_env import LENGTHS, LIMIT

GAMMA, NUM_ENVS, T = 0.9, 4, 5
COUNTING = [
    *(x for x in SMALL_SAC if not x.startswith(("env.", "rollout.num_chunks", "cluster.component"))),
    "env.id=tests.runners.counting_env:make_env",
    "env.task=''",
    f"env.train.num_envs={NUM_ENVS}",
    "env.eval={num_envs: 2, num_episodes: 2}",
    f"rollout.num_chunks={T}",
    "model.num_action_chunks=3",
    f"off_policy.gamma={GAMMA}",
    "off_policy.random_steps=100",
    "replay.capacity=1000",
    "runner.max_steps=4",
    "runner.save_interval=2",
    "cluster.component_placement={actor: '0', rollout: 0-1, env: '0'}",
]


def replay_of(checkpoint, rows=slice(0, NUM_ENVS)):
    state = json.loads((checkpoint / "training_state" / "replay.json").read_text())
    buffer = ReplayBuffer(checkpoint.parents[1] / "replay", NUM_ENVS, rows, T, 1000, GAMMA)
    buffer.go_back(state["first"], buffer.load(state))
    return buffer


@pytest.mark.parametrize("auto_reset", [True, False])
@pytest.mark.parametrize("ignore_terminations", [True, False])
def test_transitions_are_those_of_a_loop_over_episodes(start, auto_reset, ignore_terminations):
    rules = [f"env.train.auto_reset={auto_reset}", f"env.train.ignore_terminations={ignore_terminations}"]
    result = start(*rules, small=COUNTING, config="gym_pendulum_sac_mlp", workers=OFF_POLICY_WORKERS,
                   runner_class=OffPolicyRunner).run()  # fmt: skip
    buffer = replay_of(result.checkpoint)
    places = buffer.pool("online")
    found = buffer.read(places)
    outcomes = {name: set(buffer.pool(name).tolist()) for name in ("successes", "failures")}
    kinds = {"termination": 0, "time limit": 0, "cut": 0, "goes on": 0}
    for i, place in enumerate(places.tolist()):
        seed, t, total = found.inputs["state"][i].tolist()
        length = LENGTHS[int(seed) % 3]
        last = LIMIT if ignore_terminations else min(length, LIMIT)
        executed = min(3, last - int(t))
        terminated = not ignore_terminations and int(t) + executed >= length
        kind = "termination" if terminated else "time limit" if int(t) + executed == last else "goes on"
        kinds[kind] += 1
        kinds["cut"] += executed < 3
        assert found.mask[i].tolist() == [step < executed for step in range(3)]
        rewards = [GAMMA**step * (t + 1 + step + 10) for step in range(executed)]
        assert float(found.rewards[i]) == pytest.approx(sum(rewards), rel=1e-6)
        assert float(found.discounts[i]) == pytest.approx(0 if terminated else GAMMA**executed, rel=1e-6)
        following = [seed, t + executed, total + float(found.actions[i, :executed].sum())]
        assert found.next_inputs["state"][i].tolist() == pytest.approx(following, abs=1e-5)
        succeeds = min(length, LIMIT) == length
        known = [name for name in outcomes if place in outcomes[name]]
        assert known in ([], ["successes" if succeeds else "failures"])
        assert known or auto_reset  # else every episode ends within its step
    assert (
        all(kinds[kind] for kind in ("time limit", "cut", "goes on"))
        and bool(kinds["termination"]) != ignore_terminations
    )
    assert outcomes["successes"] and outcomes["failures"]
    num_decisions = sum(line["replay/online"] for line in read_metrics(result.run_dir)[-1:] if "replay/online" in line)
    assert len(places) == num_decisions


def test_an_observation_behind_a_decision_is_stored_where_it_is_no_decisions(start):
    result = start(small=COUNTING, config="gym_pendulum_sac_mlp", workers=OFF_POLICY_WORKERS,
                   runner_class=OffPolicyRunner).run()  # fmt: skip
    [files] = (result.run_dir / "replay").glob("steps_*")
    shapes = json.loads((files / "fields.json").read_text())

    def field(name):
        shape, dtype = shapes[name]
        return np.fromfile(files / name, dtype).reshape(shape)[: result.completed_steps]

    written, wanted = field("next.state").any(-1), field("has_next")
    assert np.array_equal(written, wanted) and wanted[:, :, -1].all() and 0 < wanted[:, :, :-1].mean() < 1
    places = np.prod(shapes["next.state"][0][:3]) * 12
    assert (files / "next.state").stat().st_size == places > 100 * (files / "next.state").stat().st_blocks * 512


def test_a_full_disk_ends_the_run_in_one_sentence_and_a_resume_ends_as_if_nothing_had_been(
    start, monkeypatch, tmp_path
):
    settings = [*SMALL_SAC, "runner.max_steps=4", "runner.save_interval=1"]

    def begin(name, *more):
        return start(f"runner.logger.log_path={tmp_path / name}", *more, small=settings, config="gym_pendulum_sac_mlp",
                     workers=OFF_POLICY_WORKERS, runner_class=OffPolicyRunner)  # fmt: skip

    whole = begin("whole").run()
    start.stop()
    runner, write = begin("full"), os.pwrite

    def full(file, content, offset):
        if runner.completed_steps == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, content, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(DiskFullError, match=r"the replay buffer has no room: .* bytes are free\. Make room"):
            runner.run()
    assert runner.store.newest().name == "step_000002"
    start.stop()
    resumed = begin("full", "runner.resume=auto").run()
    found, expected = (load_file(x.checkpoint / "policy" / "model.safetensors") for x in (resumed, whole))
    assert all(torch.equal(found[name], x) for name, x in expected.items())


class FullOnOneRank(OffPolicyActor):
    """Its second rank has no room from the third step on."""

    def store_transitions(self, step):
        if self.rank == 1 and step == 2:
            add, self.replay.add = self.replay.add, self._full
            try:
                return super().store_transitions(step)
            finally:
                self.replay.add = add
        return super().store_transitions(step)

    def _full(self, *arguments):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_disk_that_is_full_for_one_of_two_ranks_costs_no_completed_step(start, mode):
    two = ["cluster.component_placement={actor: 0-1, rollout: 0-1, env: 0-1}", "actor.strategy=replicated"]
    runner = start(*two, f"runner.mode={mode}", "runner.max_steps=4", "runner.save_interval=4", small=SMALL_SAC,
                   config="gym_pendulum_sac_mlp", workers={**OFF_POLICY_WORKERS, "actor": FullOnOneRank},
                   runner_class=AsyncOffPolicyRunner if mode == "async" else OffPolicyRunner)  # fmt: skip
    with pytest.raises(DiskFullError, match=r"the replay buffer has no room"):
        runner.run()
    assert runner.store.newest().name == "step_000002"


def test_no_outcome_is_that_of_another_steps_episode(start):
    """Every step begins new episodes, and cuts those that are not at their end."""
    result = start("env.train.auto_reset=false", "rollout.num_chunks=2", small=COUNTING, config="gym_pendulum_sac_mlp",
                   workers=OFF_POLICY_WORKERS, runner_class=OffPolicyRunner).run()  # fmt: skip
    state = json.loads((result.checkpoint / "training_state" / "replay.json").read_text())
    buffer = ReplayBuffer(result.run_dir / "replay", NUM_ENVS, slice(0, NUM_ENVS), 2, 1000, GAMMA)
    buffer.go_back(state["first"], buffer.load(state))
    seeds = buffer.read(buffer.pool("successes")).inputs["state"][:, 0].long()
    assert len(seeds) and {LENGTHS[int(seed) % 3] for seed in seeds} <= {3, 5}
    assert not len(buffer.pool("failures"))


def begin_rlpd(start, *more):
    """A short run from demonstrations of Tabletop's expert, and what it plays itself."""
    settings = [x for x in SMALL_SAC if not x.startswith(("env.", "rollout.num_chunks"))]
    own = [
        "env.id=tabletop",
        "env.task=pick",
        "env.options.obs_mode=state",
        "env.train.num_envs=4",
        "rollout.num_chunks=2",
    ]
    own += ["model.num_action_chunks=4", "replay.shares={demonstrations: 0.5, online: 0.5}", "data.num_episodes=8"]
    return start(*own, "env.eval={num_envs: 4, num_episodes: 4}", *more, small=settings, config="gym_pendulum_sac_mlp",
                 workers=OFF_POLICY_WORKERS, runner_class=OffPolicyRunner)  # fmt: skip


def test_demonstrations_are_transitions_with_their_rewards_and_a_resume_reads_the_same(start, tmp_path):
    saved = ["runner.save_interval=1", "off_policy.actor_interval=2", "off_policy.algorithm=td3_bc"]
    whole = begin_rlpd(start, *saved, "runner.max_steps=3", f"runner.logger.log_path={tmp_path / 'whole'}").run()
    start.stop()
    begin_rlpd(start, *saved, "runner.max_steps=2", f"runner.logger.log_path={tmp_path / 'half'}").run()
    start.stop()
    resume = ["runner.resume=auto", "runner.max_steps=3", f"runner.logger.log_path={tmp_path / 'half'}"]
    resumed = begin_rlpd(start, *saved, *resume).run()
    for name in ("policy", "training_state/critics/model"):
        found, expected = (load_file(x.checkpoint / name / "model.safetensors") for x in (resumed, whole))
        assert all(torch.equal(found[key], x) for key, x in expected.items())

    frames = Path(json.loads((whole.run_dir / "replay" / "demonstrations.json").read_text())["frames"])
    policy = load_policy(whole.checkpoint)
    found, demos = Frames(frames), DemonstratedTransitions(frames, 4, GAMMA, policy, False)
    batch, at = demos.read(np.arange(len(demos))), 0
    for first, length in found.episodes.tolist():
        for t in range(length):
            executed = min(4, length - t)
            rewards = [GAMMA**i * float(found.rewards[first + t + i]) for i in range(executed)]
            assert float(batch.rewards[at]) == pytest.approx(sum(rewards), rel=1e-5)
            ends = t + 4 >= length
            assert float(batch.discounts[at]) == pytest.approx(0 if ends else GAMMA**4)
            assert batch.mask[at].tolist() == [i < executed for i in range(4)]
            np.testing.assert_array_equal(batch.inputs["state"][at], found.state[first + t])
            if not ends:
                np.testing.assert_array_equal(batch.next_inputs["state"][at], found.state[first + t + 4])
            at += 1
    assert at == len(demos) and float(batch.rewards.max()) > 0


def test_demonstrations_with_noise_are_refused(start, tmp_path):
    with pytest.raises(
        ConfigError, match=r"data\.action_noise: is 0\.2, and demonstrations hold the actions without it"
    ):
        begin_rlpd(start, "data.action_noise=0.2")
    words = ["--env", "tabletop", "--task", "pick", "--out", str(tmp_path / "noisy"), "--episodes", "4"]
    assert collect([*words, "env.options.obs_mode=state", "data.action_noise=0.1"]) == 0
    folder = ["data.source=folder", f"data.demos_dir={tmp_path / 'noisy'}"]
    with pytest.raises(
        DemonstrationError, match=r"noisy was played with noise on the actions \(data\.action_noise=0\.1\)"
    ):
        begin_rlpd(start, *folder).run()


def test_nothing_trains_while_the_pools_that_batches_draw_from_are_empty(start):
    own = ["off_policy.random_steps=0", "replay.min_size=1", "replay.shares={successes: 1.0, demonstrations: 0.0}"]
    result = start(*own,
                   small=SMALL_SAC, config="gym_pendulum_sac_mlp", workers=OFF_POLICY_WORKERS,
                   runner_class=OffPolicyRunner).run()  # fmt: skip
    lines = [line for line in read_metrics(result.run_dir) if "replay/successes" in line]
    assert len(lines) == 3 and not any("train/critic/critic_loss" in line or line["replay/successes"] for line in lines)
