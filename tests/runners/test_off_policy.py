"""Runs from a replay buffer: what they store, and what they learn from."""

import errno
import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlinf_lite.runners import OffPolicyRunner
from rlinf_lite.runners.full_disk import DiskFullError
from rlinf_lite.training.replay import ReplayBuffer
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
    buffer.go_back(state["end"], buffer.load(state))
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


def test_each_observation_is_stored_once(start):
    result = start(small=COUNTING, config="gym_pendulum_sac_mlp", workers=OFF_POLICY_WORKERS,
                   runner_class=OffPolicyRunner).run()  # fmt: skip
    buffer = replay_of(result.checkpoint)
    [files] = (result.run_dir / "replay").glob("steps_*")
    sizes = {file.name: file.stat() for file in files.iterdir()}
    assert sizes["next.state"].st_size == sizes["obs.state"].st_size, "its places are as many"
    assert sum(x.st_blocks for x in sizes.values()) * 512 < 400 * len(buffer.pool("online")) + 4096 * 2 * len(sizes)
    assert np.array_equal(buffer.pool("online"), np.sort(buffer.pool("online")))


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
        with pytest.raises(
            DiskFullError, match=r"the replay buffer has no room: .* bytes are free\. Make room, or lower"
        ):
            runner.run()
    assert runner.store.newest().name == "step_000002"
    start.stop()
    resumed = begin("full", "runner.resume=auto").run()
    found, expected = (load_file(x.checkpoint / "policy" / "model.safetensors") for x in (resumed, whole))
    assert all(torch.equal(found[name], x) for name, x in expected.items())
