"""The SFT stage: demonstrations, training on them, and a checkpoint that reinforcement learning starts from."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from rlinf_lite.cli.collect import collect
from rlinf_lite.config import load_config
from rlinf_lite.data.demonstrations import DemonstrationError, check_demonstrations, read_provenance
from rlinf_lite.data.lerobot.layout import LeRobotError
from rlinf_lite.envs import balanced_seed, make_env
from rlinf_lite.models import NOISE_KEY, load_policy
from rlinf_lite.models.sampling import noise_keys
from rlinf_lite.runners import EmbodiedRunner, SFTRunner
from rlinf_lite.scheduler.handle import wait_all
from tests.data.lerobot_folders import put_in_order
from tests.runners.conftest import read_metrics, starting

CONFIG = "tabletop_sft_mlp"
SMALL = [
    "env.train.num_envs=16",
    "env.eval.num_envs=16",
    "env.eval.num_episodes=32",
    "env.eval.num_videos=0",
    "rollout.pipeline_stage_num=1",
    "data.num_episodes=200",
    "actor.global_batch_size=64",
    "actor.micro_batch_size=64",
    "actor.optim.lr_scheduler=constant",  # else the learning rate depends on max_steps
    "runner.val_check_interval=-1",
    "runner.save_interval=-1",
    "runner.phase_timeout_s=60",
    "cluster.num_gpus_per_node=2",
    "cluster.component_placement={actor: '0', rollout: '0', env: '0'}",
]


@pytest.fixture
def start_sft(start):
    return starting(start, config=CONFIG, small=SMALL, runner_class=SFTRunner)


def weights(checkpoint):
    return load_file(checkpoint / "policy" / "model.safetensors")


def test_imitation_succeeds_and_reinforcement_learning_starts_there(start, start_sft):
    result = start_sft("runner.max_steps=150", "runner.val_check_interval=150", "runner.save_interval=150").run()
    assert result.first_eval.total.success_once < 0.2
    assert result.last_eval.total.success_once > 0.8 and "reinforcement learning from here" in result.describe()
    lines = [line for line in read_metrics(result.run_dir) if "train/actor/sft_loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 151))
    assert lines[-1]["train/actor/sft_loss"] < 0.5 * lines[0]["train/actor/sft_loss"]
    assert lines[0]["train/actor/lr"] < lines[30]["train/actor/lr"] == 1e-3 and lines[0]["train/actor/grad_norm"] > 0
    counts = read_provenance(result.run_dir / "demos")["counts"]
    assert counts["num_played"] == 200 and counts["num_episodes"] == round(200 * counts["success_once"]) > 150
    assert read_metrics(result.run_dir)[0]["demos/num_episodes"] == counts["num_episodes"]

    start.stop()
    load = [f"actor.checkpoint_load_path={result.checkpoint}", "runner.task_type=embodied", "runner.max_steps=1"]
    learner = start(*load, "actor.global_batch_size=48", config=CONFIG, small=SMALL, runner_class=EmbodiedRunner)
    assert learner.evaluate().headline() == result.last_eval.headline()
    learner.run()


def test_waves_of_demonstrations_and_of_evaluations_have_the_limit_of_a_phase_each(start_sft, monkeypatch):
    limits = []

    def noting(*handles, timeout_s, what, **more):
        limits.append((what, timeout_s))
        return wait_all(*handles, timeout_s=timeout_s, what=what, **more)

    monkeypatch.setattr("rlinf_lite.runners.stopping.wait_all", noting)
    start_sft("runner.max_steps=1", "runner.val_check_interval=1", "env.eval.num_episodes=40").run()
    waves = 13  # 200 episodes in 16 environments
    assert [limit for what, limit in limits if what == "demonstrations"] == [60] * (waves + 2)  # begin and finish
    assert {limit for what, limit in limits if what == "evaluation"} == {3 * 60}, "40 episodes in 16 environments"
    assert {limit for what, limit in limits if what not in ("demonstrations", "evaluation")} == {60}


def test_a_resumed_run_takes_the_same_demonstrations(start, start_sft):
    short = ["data.num_episodes=40", "runner.save_interval=1"]
    half = start_sft("runner.max_steps=1", *short).run()
    files = {path: path.stat().st_mtime_ns for path in (half.run_dir / "demos").rglob("*")}
    start.stop()
    resumed = start_sft("runner.max_steps=2", "runner.resume=auto", *short).run()
    assert resumed.run_dir == half.run_dir and resumed.completed_steps == 2
    assert files == {path: path.stat().st_mtime_ns for path in (half.run_dir / "demos").rglob("*")}
    assert [line["step"] for line in read_metrics(resumed.run_dir)] == [0, 1, 2]


def test_any_dataset_is_imitated_by_the_names_of_its_features(start_sft, tmp_path):
    demos = tmp_path / "theirs"
    assert collect(["--out", str(demos), "--config-name", CONFIG, "--episodes", "60", "--num-envs", "20"]) == 0
    shutil.rmtree(demos / ".frames", ignore_errors=True)
    (demos / "meta" / "rlinf_lite.json").unlink()
    names = {"observation.state": "robot", "action": "moves"}
    [data] = (demos / "data").glob("*/*")
    table = pq.read_table(data)
    pq.write_table(table.rename_columns([names.get(name, name) for name in table.column_names]), data)
    info = json.loads((demos / "meta" / "info.json").read_text())
    info["features"] = {names.get(name, name): feature for name, feature in info["features"].items()}
    (demos / "meta" / "info.json").write_text(json.dumps(info))

    folder = ["data.source=folder", f"data.demos_dir={demos}", "data.keys={state: robot, action: moves}"]
    with pytest.raises(LeRobotError, match=r"no vector 'robt'\. Did you mean robot"):
        check_demonstrations(load_config(CONFIG, [*SMALL, *folder, "data.keys.state=robt"]))
    result = start_sft(*folder, "runner.max_steps=60", "runner.save_interval=60").run()
    lines = [line for line in read_metrics(result.run_dir) if "train/actor/sft_loss" in line]
    assert lines[-1]["train/actor/sft_loss"] < 0.5 * lines[0]["train/actor/sft_loss"]
    counts = read_metrics(result.run_dir)[0]
    assert counts["demos/num_chunks"] == counts["demos/num_env_steps"] == info["total_frames"]

    # a copy of the folder can be resumed from, another dataset cannot
    start_sft.stop()
    more = ["runner.resume=auto", "data.source=folder", "runner.save_interval=2", "runner.max_steps=62"]
    copied = shutil.copytree(demos, tmp_path / "copied")
    names_of = "data.keys={state: robot, action: moves}"
    assert start_sft(*more, names_of, f"data.demos_dir={copied}").run().completed_steps == 62
    start_sft.stop()
    others = tmp_path / "others"
    assert collect(["--out", str(others), "--config-name", CONFIG, "--episodes", "20", "--num-envs", "20"]) == 0
    with pytest.raises(DemonstrationError, match=r"holds other demonstrations.*than the run began with.*those"):
        other_keys = "runner.allow_changes=[data.keys]"
        start_sft(*more[:3], "runner.max_steps=64", f"data.demos_dir={others}", other_keys).run()


def test_a_dataset_in_another_order_trains_the_same_weights_which_keep_its_names(start_sft, tmp_path, capsys):
    demos, short = tmp_path / "demos", ["runner.max_steps=4", "runner.save_interval=4"]
    assert collect(["--out", str(demos), "--config-name", CONFIG, "--episodes", "20", "--num-envs", "20"]) == 0
    folder = ["data.source=folder", f"data.demos_dir={demos}", *short]
    whole = start_sft(*folder, root=tmp_path / "whole").run()
    start_sft.stop()
    assert "another order" not in capsys.readouterr().out
    put_in_order(demos, "observation.state", np.random.default_rng(0).permutation(16), nested=True)
    put_in_order(demos, "action", (2, 0, 1))
    other = start_sft(*folder, root=tmp_path / "other").run()
    expected, got = weights(whole.checkpoint), weights(other.checkpoint)
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    for name in ("config.json", "dimension_names.json"):
        assert (whole.checkpoint / "policy" / name).read_text() == (other.checkpoint / "policy" / name).read_text()
    said = capsys.readouterr().out
    assert "note: the columns of action are close, x, y, and are put in the run's order: x, y, close" in said
    assert "states are normalised by the statistics of" in said and "states and actions" not in said
    assert json.loads((other.checkpoint / "policy/dimension_names.json").read_text())["action"] == ["x", "y", "close"]


def test_an_expert_that_never_succeeds_is_an_error(start_sft):
    runner = start_sft("runner.max_steps=30", "env.task=place", "env.train.max_episode_steps=4", "data.num_episodes=4")
    with pytest.raises(DemonstrationError, match=r"none succeeded.*data\.action_noise"):
        runner.run()


def run_example(*overrides, root):
    paths = [f"runner.logger.log_path={root}"]
    command = [sys.executable, "examples/embodiment/train_sft.py", "--config-name", CONFIG, *SMALL, *paths, *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ))


def test_demonstrations_of_another_task_end_the_program_before_it_starts(tmp_path):
    from rlinf_lite.data.demonstrations import PROVENANCE, provenance, recipe
    from rlinf_lite.envs import EnvSpec

    spec = EnvSpec(3, 16, {}, [-1.0] * 3, [1.0] * 3, 24, True)
    (tmp_path / "meta").mkdir()
    meta = provenance(recipe(load_config(CONFIG, SMALL)), spec, {})
    (tmp_path / "meta" / PROVENANCE).write_text(json.dumps(meta))
    process = run_example("env.task=push", f"data.demos_dir={tmp_path}", root=tmp_path)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 1 and "Traceback" not in output
    assert "DemonstrationError: data.demos_dir" in output and "env.task is 'pick' there and 'push' here" in output


def test_in_rounds_of_dagger_the_student_plays_and_the_expert_labels(start_sft):
    rounds = ["data.dagger={rounds: 2, interval: 20, episodes: 12}", "data.num_episodes=32", "env.train.num_envs=8"]
    result = start_sft(*rounds, "runner.max_steps=41", "runner.save_interval=41").run()
    cfg = load_config(f"embodiment/{CONFIG}", [*SMALL, *rounds])
    for number, first_episode in ((1, 32), (2, 44)):
        directory = result.run_dir / f"round_{number}"
        table = pq.read_table(next((directory / "demos" / "data").rglob("*.parquet")))
        student, env = load_policy(directory / "student").eval(), make_env(cfg.env, "train", 1)
        assert len(set(table["episode_index"].to_pylist())) == 12
        for episode in range(3):
            frames = table.filter(pc.equal(table["episode_index"], episode))
            states, labels = (np.stack(frames[key].to_pylist()) for key in ("observation.state", "action"))
            obs = env.reset([balanced_seed(cfg.data.seed, first_episode + episode, 1)])
            chunk, t = cfg.model.num_action_chunks, 0
            while t < len(states):
                np.testing.assert_allclose(states[t], obs["state"][0], atol=1e-4)  # acted with other rows there
                expected = np.clip(env.expert_actions(chunk)[0], env.action_low, env.action_high)
                keys = noise_keys(cfg.data.seed, np.array([first_episode + episode]), t // chunk)
                with torch.inference_mode():
                    acted = student.predict_action_batch({**obs, NOISE_KEY: keys}, "sampled").actions.numpy()
                played = env.chunk_step(acted)
                executed = int(played.executed.sum())
                np.testing.assert_allclose(labels[t : t + executed], expected[:executed], atol=1e-3)
                assert np.abs(acted[0, :executed] - expected[:executed]).max() > 0.01
                obs, t = played.obs, t + executed
            assert played.episodes and t == len(states)
    first, second = (load_file(result.run_dir / f"round_{n}" / "student" / "model.safetensors") for n in (1, 2))
    assert any(not torch.equal(first[name], x) for name, x in second.items())
    counted = [line["demos/num_env_steps"] for line in read_metrics(result.run_dir) if "demos/num_env_steps" in line]
    assert len(counted) == 3 and result.completed_steps == 41
