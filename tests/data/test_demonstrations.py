"""Demonstrations: what is collected comes back from disk, whoever collected it; what does not fit is refused."""

import json

import numpy as np
import pytest
import torch

from rlinf_lite.config import ConfigError, load_config
from rlinf_lite.data import demonstrations
from rlinf_lite.data.demonstrations import (
    DemonstrationError,
    Demonstrations,
    batch_indices,
    check_meta,
    read_meta,
    recipe,
    write_meta,
)
from rlinf_lite.envs import ChunkedEnv, RenderUnavailableError, env_seed, get_env_spec, make_vec_env
from rlinf_lite.models import MLPGaussianPolicy
from rlinf_lite.workers.collecting import Collector
from tests.envs.toy import ToySimulator

SMALL = ["env.options.obs_mode=rgb+state", "env.train.max_episode_steps=8", "data.num_episodes=40"]


def collect(directory, *overrides, splits=((0, 20), (20, 40))):
    """Collect as two env workers would; `splits` are the episodes of each."""
    cfg = load_config("embodiment/tabletop_sft_mlp", [*SMALL, *overrides])
    shards, records = [], []
    for rank, (first, last) in enumerate(splits):
        env = make_vec_env(cfg.env, "train", last - first)
        obs = env.reset()
        collector = Collector(cfg, env, obs, directory, rank, "cpu")
        collector.play(env, np.arange(first, last))
        found = collector.finish()
        shards, records = shards + found["shards"], records + found["episodes"]
    write_meta(directory, recipe(cfg), get_env_spec(env, obs), shards, {"num_episodes": len(records)})
    return cfg, records, Demonstrations(directory)


def test_a_batch_holds_what_the_expert_did_where_it_was(tmp_path):
    cfg, _, found = collect(tmp_path)
    indices = np.random.default_rng(0).permutation(len(found))[:7]
    obs, actions = found.read(indices)
    (camera,) = obs["images"]
    assert obs["images"][camera].dtype == np.uint8 and obs["images"][camera].shape == (7, 64, 64, 3)
    assert obs["state"].dtype == np.float32 and actions.dtype == torch.float32 and actions.shape == (7, 4, 3)
    everything, all_actions = found.read(np.arange(len(found)))
    assert np.array_equal(everything["images"][camera][indices], obs["images"][camera])
    assert [everything["instruction"][i] for i in indices] == obs["instruction"] and all(obs["instruction"])

    # the first decision of an episode, played again
    env = make_vec_env(cfg.env, "train", 1)
    first = np.flatnonzero(found.episodes(np.arange(len(found))) == 5)[0]
    again = env.reset([env_seed(cfg.data.seed, 5)])
    assert np.array_equal(again["state"][0], everything["state"][first])
    assert np.array_equal(env.expert_actions(4)[0], all_actions[first].numpy())


def test_what_is_collected_does_not_depend_on_the_workers(tmp_path, monkeypatch):
    _, _, one = collect(tmp_path / "one", splits=((0, 40),))
    monkeypatch.setattr(demonstrations, "SHARD_BYTES", 200_000)
    _, _, two = collect(tmp_path / "two")
    assert len(two.meta["shards"]) > 2 and len(one) == len(two)
    indices = np.arange(len(one))
    (obs, actions), (other_obs, other_actions) = one.read(indices), two.read(indices)
    assert torch.equal(actions, other_actions) and np.array_equal(obs["state"], other_obs["state"])
    assert obs["instruction"] == other_obs["instruction"]
    assert np.array_equal(one.mask(indices), two.mask(indices))


def test_noise_moves_the_states_and_not_the_labels(tmp_path):
    _, _, clean = collect(tmp_path / "clean", "data.action_noise=0")
    cfg, _, noisy = collect(tmp_path / "noisy", "data.action_noise=0.6")
    states = [found.read(np.arange(len(found)))[0]["state"] for found in (clean, noisy)]
    assert len(noisy) != len(clean) or not np.array_equal(*states)
    env = make_vec_env(cfg.env, "train", 40)
    env.reset([env_seed(cfg.data.seed, episode) for episode in range(40)])
    wanted = env.expert_actions(4)
    for found in (clean, noisy):
        episodes = found.episodes(np.arange(len(found)))
        starts = np.flatnonzero(np.diff(episodes, prepend=-1))
        assert np.array_equal(found.read(starts)[1].numpy(), wanted[episodes[starts]])


def test_only_successes_are_kept_unless_asked_for_all(tmp_path):
    hard = ["data.action_noise=1.5", "env.train.max_episode_steps=4"]
    _, records, kept = collect(tmp_path / "kept", *hard)
    succeeded = {record.env_id for record in records if record.success_once}
    assert 0 < len(succeeded) < len(records) == 40
    assert set(kept.episodes(np.arange(len(kept)))) == succeeded
    _, _, everything = collect(tmp_path / "all", *hard, "data.keep_failures=true")
    assert set(everything.episodes(np.arange(len(everything)))) == set(range(40))


def test_steps_after_the_end_of_an_episode_are_masked(tmp_path):
    _, records, found = collect(tmp_path, "env.train.auto_reset=true")
    lengths = {record.env_id: record.length for record in records}
    indices = np.arange(len(found))
    for episode in np.unique(found.episodes(indices)):
        mask = found.mask(indices[found.episodes(indices) == episode])
        assert mask.sum() == lengths[episode] and mask[:, 0].all()


def test_a_teacher_with_shorter_chunks_is_asked_within_the_students(tmp_path):
    cfg = load_config("embodiment/tabletop_sft_mlp", SMALL)
    env = make_vec_env(cfg.env, "train", 3)
    obs = env.reset()
    spec = get_env_spec(env, obs)
    torch.manual_seed(0)
    teacher = MLPGaussianPolicy(spec.state_dim, spec.action_low, spec.action_high, 2, hidden_sizes=(16,))
    teacher.save_pretrained(tmp_path / "teacher")
    settings = [f"data.teacher_dir={tmp_path / 'teacher'}", "data.keep_failures=true", "data.num_episodes=3"]
    _, _, found = collect(tmp_path / "demos", *settings, splits=((0, 3),))
    obs, actions = found.read(np.arange(3) * 2)  # two decisions of four actions in each episode of eight
    wanted = teacher.predict_action_batch(obs, "greedy").actions
    assert torch.allclose(actions[:, :2], wanted, atol=1e-6)
    assert not torch.allclose(actions[:, 2:], wanted, atol=1e-4)
    assert read_meta(tmp_path / "demos")["made_from"]["data.teacher_dir"].startswith("sha256:")


@pytest.mark.parametrize("obs_mode", ["state", "rgb+state"])
def test_a_state_policy_demonstrates_in_maniskill(tmp_path, obs_mode):
    """For example to a student that sees pictures: the demonstrations hold whatever the environment gives."""
    torch.manual_seed(0)
    teacher = MLPGaussianPolicy(35, [-1.0] * 8, [1.0] * 8, hidden_sizes=(16,))
    teacher.save_pretrained(tmp_path / "teacher")
    task = ["env.id=maniskill", "env.task=PushCube-v1", f"env.options.obs_mode={obs_mode}"]
    settings = [f"data.teacher_dir={tmp_path / 'teacher'}", "data.keep_failures=true", "data.num_episodes=2"]
    try:
        _, records, found = collect(tmp_path / "demos", *task, *settings, splits=((0, 2),))
    except RenderUnavailableError as error:
        pytest.skip(f"no Vulkan device: {error}")
    obs, actions = found.read(np.arange(len(found)))
    assert [record.length for record in records] == [8, 8] and actions.shape == (4, 4, 8)
    assert obs["state"].shape == (4, 35) and ("images" in obs) == ("rgb" in obs_mode)
    assert obs["state"][1, 0] != obs["state"][0, 0]


def test_other_demonstrations_are_refused_with_every_difference(tmp_path):
    cfg, _, _ = collect(tmp_path)
    assert check_meta(tmp_path, recipe(cfg))["counts"] == {"num_episodes": 40}
    other = load_config("embodiment/tabletop_sft_mlp", [*SMALL, "data.seed=1", "env.options.num_wordings=2"])
    with pytest.raises(DemonstrationError, match=r"env\.options.*data\.seed is 0 there and 1 here"):
        check_meta(tmp_path, recipe(other))
    evaluation = load_config("embodiment/tabletop_sft_mlp", [*SMALL, "env.options.eval_pairs=held_out"])
    check_meta(tmp_path, recipe(evaluation))


def test_damage_is_named(tmp_path):
    collect(tmp_path)
    shard = tmp_path / json.loads((tmp_path / "meta.json").read_text())["shards"][1]["file"]
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(DemonstrationError, match=shard.name):
        Demonstrations(tmp_path)
    (tmp_path / "meta.json").unlink()
    with pytest.raises(DemonstrationError, match=r"meta\.json"):
        Demonstrations(tmp_path)


def test_batches_are_passes_over_everything_in_a_new_order_each():
    stream = np.concatenate([batch_indices(10, 4, seed=3, step=step) for step in range(10)])
    passes = stream.reshape(4, 10)
    assert all(sorted(part) == list(range(10)) for part in passes)
    assert not np.array_equal(passes[0], passes[1])
    assert not np.array_equal(stream[:10], np.concatenate([batch_indices(10, 4, 4, step) for step in range(3)])[:10])
    assert len(batch_indices(3, 8, seed=0, step=1)) == 8


def problems(*overrides):
    with pytest.raises(ConfigError) as error:
        load_config("embodiment/tabletop_sft_mlp", overrides)
    return error.value.problems


def test_what_cannot_work_is_said_before_anything_starts(tmp_path):
    two_actors = ["cluster.num_gpus_per_node=2", "cluster.component_placement.actor=0-1"]
    pendulum = ["env.id=gymnasium", "env.task=Pendulum-v1"]
    found = problems(*pendulum, "runner.max_steps=-1", "actor.global_batch_size=255", *two_actors)
    assert [problem.split(":")[0] for problem in found] == [
        "actor.global_batch_size",
        "runner.max_steps",
        "data.teacher_dir",
    ]
    assert "no policy" in problems(f"data.teacher_dir={tmp_path}")[0]
    (tmp_path / "config.json").write_text('{"num_action_chunks": 3}')
    assert "4 / 3" in problems(f"data.teacher_dir={tmp_path}")[0]
    # what only matters to reinforcement learning does not
    load_config("embodiment/tabletop_sft_mlp", ["model.value_type=action_level", "algorithm.adv_type=grpo"])


class Reticent(ToySimulator):
    """Says nothing of success but where there is one."""

    def step(self, rows, actions, out):
        super().step(rows, actions, out)
        out.success[rows] = np.where(out.success[rows] == 1, 1, -1)

    def expert_actions(self, num_actions):
        return np.ones((self.num_envs, num_actions, 1), np.float32)


def test_episodes_that_say_nothing_of_success_are_failures(tmp_path):
    cfg = load_config("embodiment/tabletop_sft_mlp", ["data.num_episodes=8"])
    env = ChunkedEnv(Reticent(8), auto_reset=False, max_episode_steps=2)
    collector = Collector(cfg, env, env.reset(), tmp_path, 0, "cpu")
    collector.play(env, np.arange(8))
    found = collector.finish()
    solved = [record.env_id for record in found["episodes"] if record.success_once]
    assert 0 < len(solved) < len(found["episodes"]) == 8
    write_meta(tmp_path, recipe(cfg), get_env_spec(env, env.reset()), found["shards"], {})
    demos = Demonstrations(tmp_path)
    assert set(demos.episodes(np.arange(len(demos))).tolist()) == set(solved)
