"""Runs of RECAP: what rounds record, labels on disk, exact resume, and what is refused."""

import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from rlinf_lite.cli.collect import collect
from rlinf_lite.config import ConfigError, load_config
from rlinf_lite.data.demonstrations import DemonstrationError, check_demonstrations
from rlinf_lite.data.lerobot.layout import read_info
from rlinf_lite.data.lerobot.reader import LeRobotDataset
from rlinf_lite.envs import balanced_seed, make_env
from rlinf_lite.models import NOISE_KEY, load_policy
from rlinf_lite.models.sampling import noise_keys
from rlinf_lite.runners import SFTRunner
from rlinf_lite.scheduler import WorkerError
from tests.runners.conftest import read_metrics, starting

CONFIG = "tabletop_recap_flow"
SMALL = [
    "env.train.num_envs=8",
    "env.eval.num_envs=4",
    "data.num_episodes=16",
    "data.recap={rounds: 2, interval: 2, episodes: 8, value_updates: 4}",
    "runner.max_steps=5",
    "runner.val_check_interval=-1",
    "runner.save_interval=1",
    "runner.keep_checkpoints=6",
    "runner.phase_timeout_s=120",
    "runner.report=false",
    "actor.global_batch_size=8",
    "actor.micro_batch_size=8",
    "actor.optim.lr_scheduler=constant",  # else the learning rate depends on max_steps
    "cluster.num_gpus_per_node=2",
    "cluster.component_placement={actor: '0', rollout: '0', env: '0'}",
    "rollout.pipeline_stage_num=1",
]


@pytest.fixture
def start_recap(start):
    return starting(start, config=CONFIG, small=SMALL, runner_class=SFTRunner)


def weights(run_dir, step=5):
    return load_file(run_dir / "checkpoints" / f"step_{step:06d}" / "policy" / "model.safetensors")


def labels(run_dir, number):
    return pq.read_table(run_dir / f"round_{number}" / "advantages.parquet").to_pydict()


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in ours.items())


@pytest.mark.timeout(600)
def test_rounds_record_what_the_student_does_and_an_interrupted_run_ends_alike(start_recap, tmp_path):
    result = start_recap(root=tmp_path / "whole").run()
    start_recap.stop()
    cfg = load_config(f"embodiment/{CONFIG}", SMALL)
    for number, first_episode in ((1, 16), (2, 24)):
        folder = result.run_dir / f"round_{number}"
        table = pq.read_table(next((folder / "demos" / "data").rglob("*.parquet")))
        student, env = load_policy(folder / "student").eval(), make_env(cfg.env, "train", 1)
        assert student.cfg.guidance == 1, "it acts with the positive condition"
        first = [i for i, episode in enumerate(table["episode_index"].to_pylist()) if episode == 0][:4]
        recorded = np.stack(table["action"].to_pylist())[first]
        obs = env.reset([balanced_seed(cfg.data.seed, first_episode, 1)])
        keys = noise_keys(cfg.data.seed, np.array([first_episode]), 0)
        with torch.inference_mode():
            acted = student.predict_action_batch({**obs, NOISE_KEY: keys}, "sampled").actions.numpy()[0]
        np.testing.assert_allclose(recorded, acted[: len(recorded)], atol=1e-4)
        # labels: a table of the whole pool, and columns that a reader of the dataset finds
        found, dataset = labels(result.run_dir, number), LeRobotDataset(folder / "demos")
        own = np.array(found["dataset"]) == number
        assert set(found["dataset"]) == set(range(number + 1)) and len(own) == len(found["positive"])
        assert table["advantage"].to_pylist() == np.array(found["advantage"], np.float32)[own].tolist()
        assert table["positive"].to_pylist() == np.array(found["positive"])[own].tolist()
        assert dataset.info.features["advantage"].dtype == "float32" and dataset.notes == []
        assert read_info(folder / "demos").features["positive"].dtype == "bool"
        dataset.check(["advantage", "positive"])
        assert len(dataset.episodes) == 8 and dataset.successes() is not None
        assert len(list((folder / "demos" / ".frames").iterdir())) == 1, "frames are decoded once"
    logged = [line for line in read_metrics(result.run_dir) if "recap/value_loss" in line]
    assert len(logged) == 3 and all(0.1 < line["recap/positive_share"] < 0.5 for line in logged)

    # as killed in a later step, in a round after it was played, and between its columns and its table
    for name, step, gone in (("later", 3, []), ("played", 2, ["advantages.parquet"]), ("new", 2, ["demos", "student"])):
        root = shutil.copytree(tmp_path / "whole", tmp_path / name, symlinks=True)
        [run_dir] = [path for path in root.iterdir() if path.is_dir()]
        for later in range(step + 1, 6):
            shutil.rmtree(run_dir / "checkpoints" / f"step_{later:06d}")
        shutil.rmtree(run_dir / "round_2")
        for entry in gone:
            path = run_dir / "round_1" / entry
            path.unlink() if path.is_file() else shutil.rmtree(path)
        if "demos" in gone:
            (run_dir / "round_1" / "advantages.parquet").unlink()
        resumed = start_recap("runner.resume=auto", root=root).run()
        start_recap.stop()
        assert resumed.completed_steps == 5 and resumed.run_dir == run_dir
        assert same(weights(run_dir), weights(result.run_dir)), name
        for number in (0, 1, 2):
            assert str(labels(run_dir, number)) == str(labels(result.run_dir, number)), name


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_actors_learn_from_the_same_labels_as_one(start_recap, tmp_path):
    one = start_recap(root=tmp_path / "one").run()
    start_recap.stop()
    two = start_recap(
        "cluster.component_placement={actor: 0-1, rollout: '0', env: '0'}",
        "actor.micro_batch_size=4",
        root=tmp_path / "two",
    ).run()
    assert str(labels(one.run_dir, 0)) == str(labels(two.run_dir, 0))
    lines = [[x for x in read_metrics(run.run_dir) if "train/actor/sft_loss" in x] for run in (one, two)]
    for ours, theirs in zip(*lines, strict=True):
        assert ours["train/actor/sft_loss"] == pytest.approx(theirs["train/actor/sft_loss"], rel=1e-3)


def test_a_folder_of_episodes_with_failures_is_the_first_pool_and_says_which_they_are(start_recap, tmp_path):
    played = tmp_path / "played"
    more = ["--policy", "assets/tabletop_flow", "--episodes", "12", "--num-envs", "12", "--keep-failures"]
    assert collect(["--out", str(played), "--config-name", "tabletop_sft_flow", *more]) == 0
    folder = ["data.source=folder", f"data.demos_dir={played}", "data.teacher_dir=null"]
    result = start_recap(*folder, "runner.max_steps=1").run()
    found = labels(result.run_dir, 0)
    assert np.isfinite(found["advantage"]).all() and np.mean(found["positive"]) == pytest.approx(0.3, abs=0.05)
    assert "advantage" not in json.loads((played / "meta" / "info.json").read_text())["features"], "it is not ours"

    [episodes] = (played / "meta" / "episodes").rglob("*.parquet")
    pq.write_table(pq.read_table(episodes).drop_columns(["success"]), episodes)
    with pytest.raises(DemonstrationError, match=r"does not say which episodes succeeded.*--keep-failures"):
        check_demonstrations(load_config(f"embodiment/{CONFIG}", [*SMALL, *folder]))


def test_conditions_that_a_cut_prompt_loses_end_the_run_before_its_first_update(start_recap):
    cut = ["model.options.max_prompt_length=8", "model.options.long_prompts=cut"]
    with pytest.raises(WorkerError, match=r"gives the same prompt with RECAP's positive and negative condition"):
        start_recap(*cut).run()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.dagger.rounds=1"], "data.recap.rounds: and data.dagger.rounds are both set"),
        (["model.options.guidance=null"], "model.options.guidance: is null, and RECAP trains prompts with a condition"),
        (["model.options.guidance=-1"], "model.options.guidance"),
        (["data.recap.drop=1.5"], "data.recap.drop"),
        (["data.recap.positive_share=0"], "data.recap.positive_share"),
        (["data.teacher_dir=null"], "data.teacher_mode: is sampled, and data.teacher_dir is null"),
    ],
)
def test_config_errors(overrides, said):
    with pytest.raises(ConfigError) as error:
        load_config(f"embodiment/{CONFIG}", [*SMALL, *overrides])
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("config", "overrides", "said"),
    [
        ("tabletop_sft_vla", [], "model.id: openvla has no prompt with RECAP's condition. Use pi0 or pi05 or smolvla"),
        ("tabletop_ppo_flow", ["model.options.guidance=1", "model.options.max_prompt_length=32"], "RECAP is imitation"),
    ],
)
def test_recap_of_other_runs_is_refused(config, overrides, said):
    with pytest.raises(ConfigError) as error:
        load_config(f"embodiment/{config}", ["data.recap.rounds=1", *overrides])
    assert said in str(error.value)
