"""Demonstrations: what is collected comes back from disk, whoever collected it; what does not fit is refused."""

import numpy as np
import pytest
import torch

from rlinf_lite.config import ConfigError, load_config
from rlinf_lite.data.demonstrations import (
    DemonstrationError,
    Demonstrations,
    batch_indices,
    check_provenance,
    decode_frames,
    open_dataset,
    read_provenance,
    recipe,
    stride_of,
)
from rlinf_lite.data.lerobot import writer
from rlinf_lite.data.lerobot.layout import LeRobotError
from rlinf_lite.data.lerobot.reader import LeRobotDataset
from rlinf_lite.envs import ChunkedEnv, RenderUnavailableError, env_seed, get_env_spec, make_env
from rlinf_lite.models import MLPGaussianPolicy
from rlinf_lite.workers.collecting import Collector, complete, fps_of
from tests.envs.toy import ToySimulator

SMALL = ["env.options.obs_mode=rgb+state", "env.train.max_episode_steps=8", "data.num_episodes=40"]


def opened(cfg, directory, spec):
    frames = decode_frames(cfg, open_dataset(cfg, directory, spec), spec)
    return Demonstrations(frames, cfg.model.num_action_chunks, stride_of(cfg))


def collect(directory, *overrides, splits=((0, 20), (20, 40))):
    """Collect as two env workers would; `splits` are the episodes of each."""
    cfg = load_config("embodiment/tabletop_sft_mlp", [*SMALL, *overrides])
    writer.begin(directory)
    results = []
    for rank, (first, last) in enumerate(splits):
        env = make_env(cfg.env, "train", last - first)
        obs = env.reset()
        collector = Collector(cfg, env, obs, directory, rank, "cpu")
        collector.play(env, np.arange(first, last))
        results.append(collector.finish())
    spec = get_env_spec(env, obs)
    complete(cfg, directory, spec, results, 0.0)
    return cfg, [record for found in results for record in found["episodes"]], opened(cfg, directory, spec)


def played(found, records):
    """The number under which every kept episode was played."""
    kept = sorted(record.env_id for record in records if record.success_once)
    return np.array(kept)[found.episodes(np.arange(len(found)))]


def test_a_batch_holds_what_the_expert_did_where_it_was(tmp_path):
    cfg, records, found = collect(tmp_path)
    indices = np.random.default_rng(0).permutation(len(found))[:7]
    obs, actions = found.read(indices)
    (camera,) = obs["images"]
    assert obs["images"][camera].dtype == np.uint8 and obs["images"][camera].shape == (7, 64, 64, 3)
    assert obs["state"].dtype == np.float32 and actions.dtype == torch.float32 and actions.shape == (7, 4, 3)
    everything, all_actions = found.read(np.arange(len(found)))
    assert np.array_equal(everything["images"][camera][indices], obs["images"][camera])
    assert [everything["instruction"][i] for i in indices] == obs["instruction"] and all(obs["instruction"])

    # the first decision of an episode, played again
    env = make_env(cfg.env, "train", 1)
    first = np.flatnonzero(played(found, records) == 5)[0]
    again = env.reset([env_seed(cfg.data.seed, 5)])
    assert np.array_equal(again["state"][0], everything["state"][first])
    executed = found.mask(np.array([first]))[0]
    assert np.array_equal(env.expert_actions(4)[0][executed], all_actions[first].numpy()[executed])


def test_what_is_collected_does_not_depend_on_the_workers(tmp_path, monkeypatch):
    _, _, one = collect(tmp_path / "one", splits=((0, 40),))
    monkeypatch.setattr(writer, "DATA_FILE_MB", 0.05)
    _, _, two = collect(tmp_path / "two")
    assert len(list((tmp_path / "two" / "data").glob("*/*"))) > 2 and len(one) == len(two)
    indices = np.arange(len(one))
    (obs, actions), (other_obs, other_actions) = one.read(indices), two.read(indices)
    assert torch.equal(actions, other_actions) and np.array_equal(obs["state"], other_obs["state"])
    assert obs["instruction"] == other_obs["instruction"]
    assert np.array_equal(one.mask(indices), two.mask(indices))
    assert np.array_equal(obs["images"]["top"], other_obs["images"]["top"])
    [stats, other_stats] = [(tmp_path / name / "meta" / "stats.json").read_text() for name in ("one", "two")]
    assert stats == other_stats


def test_noise_moves_the_states_and_not_the_labels(tmp_path):
    _, of_clean, clean = collect(tmp_path / "clean", "data.action_noise=0")
    cfg, of_noisy, noisy = collect(tmp_path / "noisy", "data.action_noise=0.6")
    states = [found.read(np.arange(len(found)))[0]["state"] for found in (clean, noisy)]
    assert len(noisy) != len(clean) or not np.array_equal(*states)
    env = make_env(cfg.env, "train", 40)
    env.reset([env_seed(cfg.data.seed, episode) for episode in range(40)])
    wanted = env.expert_actions(4)
    for found, records in ((clean, of_clean), (noisy, of_noisy)):
        episodes = played(found, records)
        starts = np.flatnonzero(np.diff(episodes, prepend=-1))
        executed = found.mask(starts)
        assert np.array_equal(found.read(starts)[1].numpy()[executed], wanted[episodes[starts]][executed])


def test_only_successes_are_kept_unless_asked_for_all(tmp_path):
    hard = ["data.action_noise=1.5", "env.train.max_episode_steps=4"]
    _, records, kept = collect(tmp_path / "kept", *hard)
    succeeded = {record.env_id for record in records if record.success_once}
    assert 0 < len(succeeded) < len(records) == 40
    assert set(played(kept, records)) == succeeded
    table = LeRobotDataset(tmp_path / "kept")
    assert table.info.num_episodes == len(succeeded)
    _, _, everything = collect(tmp_path / "all", *hard, "data.keep_failures=true")
    assert set(everything.episodes(np.arange(len(everything)))) == set(range(40))


def test_frames_say_from_which_action_on_the_episode_has_succeeded(tmp_path):
    _, records, _ = collect(tmp_path, "env.train.ignore_terminations=true", "data.keep_failures=true")
    dataset = LeRobotDataset(tmp_path)
    found = np.concatenate([rows["next.success"][:, 0] for _, rows in dataset.rows(["next.success"])])
    first = [record.steps_to_success or record.length + 1 for record in sorted(records, key=lambda x: x.env_id)]
    assert found.tolist() == [step >= x for x in first for step in range(1, 9)]
    assert any(found) and not all(found)


def test_steps_after_the_end_of_an_episode_are_masked(tmp_path):
    _, records, found = collect(tmp_path, "env.train.auto_reset=true")
    kept = [record for record in records if record.success_once]
    lengths = dict(enumerate(record.length for record in sorted(kept, key=lambda record: record.env_id)))
    indices = np.arange(len(found))
    for episode in np.unique(found.episodes(indices)):
        mask = found.mask(indices[found.episodes(indices) == episode])
        assert mask.sum() == lengths[episode] and mask[:, 0].all()


def test_a_teacher_with_shorter_chunks_is_asked_within_the_students(tmp_path):
    cfg = load_config("embodiment/tabletop_sft_mlp", SMALL)
    env = make_env(cfg.env, "train", 3)
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
    assert read_provenance(tmp_path / "demos")["made_from"]["data.teacher_dir"].startswith("sha256:")


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
    assert check_provenance(tmp_path, recipe(cfg))["counts"]["num_episodes"] == 40
    other = load_config("embodiment/tabletop_sft_mlp", [*SMALL, "data.seed=1", "env.options.num_wordings=2"])
    with pytest.raises(DemonstrationError, match=r"env\.options.*data\.seed is 0 there and 1 here.*source=folder"):
        check_provenance(tmp_path, recipe(other))
    evaluation = load_config("embodiment/tabletop_sft_mlp", [*SMALL, "env.options.eval_pairs=held_out"])
    check_provenance(tmp_path, recipe(evaluation))


def test_damage_is_named(tmp_path):
    cfg, _, _ = collect(tmp_path)
    [data] = (tmp_path / "data").glob("*/*")
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(LeRobotError, match=f"{data.name} cannot be read"):
        open_dataset(cfg, tmp_path, None)
    (tmp_path / "meta" / "rlinf_lite.json").unlink()
    with pytest.raises(DemonstrationError, match=r"no meta/rlinf_lite\.json.*data\.source=folder"):
        open_dataset(cfg, tmp_path, None)


def test_shards_of_earlier_versions_are_to_be_collected_again(tmp_path):
    (tmp_path / "meta.json").write_text('{"format": 1}')
    with pytest.raises(DemonstrationError, match=r"before LeRobot datasets.*run the same command again"):
        open_dataset(load_config("embodiment/tabletop_sft_mlp", SMALL), tmp_path, None)


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
    assert sorted(problem.split(":")[0] for problem in found) == [
        "actor.global_batch_size",
        "data.teacher_dir",
        "runner.max_steps",
    ]
    assert "no policy" in problems(f"data.teacher_dir={tmp_path}")[0]
    (tmp_path / "config.json").write_text('{"num_action_chunks": 3}')
    assert "4 / 3" in problems(f"data.teacher_dir={tmp_path}")[0]
    odd = [
        "env.id=metaworld",
        "env.task=reach-v3",
        "env.options={obs_mode: rgb+state, camera_size: [96, 65]}",
        "data.pictures=video",
    ]
    [problem] = problems(*odd)
    assert problem.startswith("data.pictures: video has pictures of even height and width, and those of corner2 have")
    load_config("embodiment/tabletop_sft_mlp", odd[:3])
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
    cfg = load_config("embodiment/tabletop_sft_mlp", ["data.num_episodes=8", "model.num_action_chunks=2"])
    writer.begin(tmp_path)
    env = ChunkedEnv(Reticent(8), auto_reset=False, max_episode_steps=2)
    obs = env.reset()
    collector = Collector(cfg, env, obs, tmp_path, 0, "cpu")
    collector.play(env, np.arange(8))
    found = collector.finish()
    solved = [record.env_id for record in found["episodes"] if record.success_once]
    assert 0 < len(solved) < len(found["episodes"]) == 8
    spec = get_env_spec(env, obs)
    complete(cfg, tmp_path, spec, [found], 0.0)
    demos = opened(cfg, tmp_path, spec)
    assert set(played(demos, found["episodes"]).tolist()) == set(solved)


def test_frames_per_second_are_those_of_the_environment_unless_said() -> None:
    def rate(*overrides):
        return fps_of(load_config("tabletop_sft_mlp", overrides, elsewhere=True))

    teacher = ["model.options={}", "data.teacher_dir=assets/tabletop_vla"]
    assert rate() == 10 and rate("data.fps=7") == 7, "tabletop has no clock"
    assert rate(*teacher, "env.id=gymnasium", "env.task=Pendulum-v1") == 30  # its metadata
    assert rate(*teacher, "env.id=maniskill", "env.task=PushCube-v1") == 20
    assert rate(*teacher, "env.id=metaworld", "env.task=reach-v3", "data.fps=5") == 5
