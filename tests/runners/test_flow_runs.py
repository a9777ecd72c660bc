"""Runs with flow policies: levels of log-probabilities, cached prefixes, statistics of datasets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rlinf_lite.cli.collect import collect
from rlinf_lite.models import load_policy
from rlinf_lite.runners import EmbodiedRunner, SFTRunner
from tests.runners.conftest import WORKERS, read_metrics
from tests.runners.rollouts import Saying

SMALL = [
    "env.train.num_envs=4",
    "env.eval.num_envs=4",
    "runner.val_check_interval=-1",
    "runner.timeline=false",
    "runner.phase_timeout_s=120",
    "actor.global_batch_size=8",
    "actor.optim.lr_scheduler=constant",  # else the learning rate depends on max_steps
    "actor.optim.warmup_steps=0",
    "cluster.num_gpus_per_node=2",
]
PPO = [*SMALL, "rollout.num_chunks=2", "algorithm.update_epochs=1", "algorithm.critic_warmup_steps=0"]
SFT = [*SMALL, "data.num_episodes=20", "runner.max_steps=2", "runner.save_interval=2"]
TOGETHER = ["cluster.component_placement={actor: '0', rollout: '0', env: '0'}", "rollout.pipeline_stage_num=1"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("config", "settings", "said"),
    [
        ("tabletop_ppo_flow", ["algorithm.logprob_type=token_level"], ["noise_level 1.0, where it was 0.5"]),
        (
            "tabletop_ppo_flow",
            ["algorithm.logprob_type=action_level", "model.options.num_steps=3"],
            ["num_steps 3, where it was 4", "noise_level 1.0, where it was 0.5"],
        ),
        (
            "tabletop_grpo_flow",
            ["model.options.method=flow_noise", "algorithm.group_size=2", "rollout.num_chunks=null"],
            ["method flow_noise, where it was flow_sde"],
        ),
    ],
    ids=["token_level", "action_level", "grpo_over_flow_noise"],
)
def test_levels_and_estimators(
    start: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], config: str, settings: list[str], said: list[str]
) -> None:
    """Ratios begin at 1 at each level. Settings that differ from the policy's training give one line, also in the
    files."""
    more = ["runner.max_steps=1", "runner.val_check_interval=1", "env.eval.num_episodes=4", "env.eval.num_videos=0"]
    small = [*PPO, "runner.save_interval=-1", *TOGETHER, *more]
    result = start(*settings, config=config, small=small, root=tmp_path).run()
    [line] = [line for line in read_metrics(result.run_dir) if "train/actor/policy_loss" in line]
    assert line["rollout/logprob_drift"] < 1e-5
    assert np.isfinite(line["train/actor/policy_loss"]) and line["train/actor/grad_norm"] > 0
    notes = [line for line in capfd.readouterr().out.splitlines() if "settings differ from those of the policy" in line]
    assert [line.rpartition(": ")[2].split("; ") for line in notes] == [said]
    assert len(result.last_eval.protocol["notes"]) == 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "actors", ["0", pytest.param("0-1", marks=(pytest.mark.processes, pytest.mark.slow))], ids=["whole", "sharded"]
)
def test_prefixes_that_are_kept_change_no_metric(start: Any, tmp_path: Path, actors: str) -> None:
    found = []
    for keep in ("false", "true"):
        overrides = [f"cluster.component_placement={{actor: {actors}, rollout: '0', env: '0'}}", "runner.max_steps=2"]
        overrides += ["algorithm.update_epochs=2", "actor.micro_batch_size=2", "model.options.trainable=expert"]
        overrides += [f"model.options.keep_prefix={keep}"]
        runner = start(*overrides, config="tabletop_ppo_flow", small=PPO, root=tmp_path / keep)
        runner.run()
        start.stop()
        found.append(read_metrics(runner.run_dir))
    learned = [
        {name: value for name, value in line.items() if name.startswith(("train/", "rollout/"))} for line in found[0]
    ]
    for line, other in zip(learned, found[1], strict=True):
        assert line == pytest.approx({name: other[name] for name in line}, rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_weights_take_a_folders_statistics_and_trained_ones_keep_theirs(
    start: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The statistics are in the actor, in rollout workers and in checkpoints; a resumed run keeps those it began
    with."""
    push, pick = tmp_path / "push", tmp_path / "pick"
    for folder, task, more in ((push, "push", []), (pick, "pick", ["--noise", "0.5"])):
        options = ["--env", "tabletop", "--task", task, "--episodes", "12", "--num-envs", "12", "--seed", "1"]
        assert collect(["--out", str(folder), *options, *more, "env.options.obs_mode=rgb+state"]) == 0
    [table] = (pick / "data").glob("*/*.parquet")  # as if the robot measured in centimetres
    rows, column = pq.read_table(table), "observation.state"
    scaled = np.stack(rows[column].to_numpy()) * np.float32(100)
    states = pa.FixedSizeListArray.from_arrays(pa.array(scaled.ravel()), scaled.shape[1])
    pq.write_table(rows.set_column(rows.schema.names.index(column), column, states), table)
    both = ["model.id=pi05", "model.options.max_prompt_length=128", *TOGETHER]
    both += ["env.task=push", "env.options.obs_mode=rgb+state", "env.eval.num_episodes=4", "env.eval.num_videos=0"]

    def run(root: str, steps: int, folder: Path, *more: str) -> Any:
        own = [*both, "data.source=folder", f"data.demos_dir={folder}", f"runner.max_steps={steps}", *more]
        runner = start(
            *own,
            f"runner.save_interval={steps}",
            f"runner.val_check_interval={steps}",
            config="tabletop_sft_flow",
            small=SMALL,
            runner_class=SFTRunner,
            workers={**WORKERS, "rollout": Saying},
            root=tmp_path / root,
        )
        result = runner.run()
        [acting] = runner.rollout.said().wait()
        assert acting == load_policy(result.checkpoint / "policy").config_dict()
        start.stop()
        return result

    whole = run("whole", 2, push)
    learned: Any = load_policy(whole.checkpoint / "policy")
    said = json.loads((push / "meta" / "stats.json").read_text())
    for name, key in (("state", "observation.state"), ("actions", "action")):
        found = {statistic: np.array(x) for statistic, x in learned.cfg.statistics[name].items()}
        low, high = np.array(said[key]["q01"]), np.array(said[key]["q99"])
        moves = high > low
        assert moves.any() and (name == "actions" or not moves.all()), "nothing is tested"
        assert np.array_equal(found["q01"][moves], low[moves]) and np.array_equal(found["q99"][moves], high[moves])
        assert (found["q99"] > found["q01"]).all() and (found["std"] > 0).all()

    load = [*both, f"actor.checkpoint_load_path={whole.checkpoint}", "runner.task_type=embodied", "runner.max_steps=1"]
    loaded = start(*load, config="tabletop_sft_flow", small=SMALL, runner_class=EmbodiedRunner, root=tmp_path / "rl")
    assert loaded.evaluate().episodes == whole.last_eval.episodes
    acted_by = whole.last_eval.protocol["model_options"]
    assert (acted_by["num_steps"], acted_by["horizon"]) == (4, 4), "what the config leaves to the policy"
    start.stop()

    run("half", 1, push)
    again = load_policy(run("half", 2, push, "runner.resume=auto").checkpoint / "policy")
    assert again.config_dict() == learned.config_dict()
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in learned.state_dict().items())
    other = run("half", 3, pick, "runner.resume=auto", "runner.allow_changes=[data.demos_dir]").checkpoint
    assert load_policy(other / "policy").config_dict() == learned.config_dict()

    capfd.readouterr()
    kept = run("kept", 1, pick, f"actor.checkpoint_load_path={whole.checkpoint}")
    assert load_policy(kept.checkpoint / "policy").config_dict() == learned.config_dict()
    printed = capfd.readouterr().out
    assert "note: state[0] is in [" in printed and "and the policy's statistics say [" in printed
