"""Runs with flow policies: resume is exact, and neither placement nor stages change what a run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_lite.models import load_policy
from rlinf_lite.runners import SFTRunner
from tests.runners.conftest import read_metrics

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
APART = [
    "cluster.component_placement={actor: 0-1, rollout: 0-1, env: 0-1}",
    "rollout.pipeline_stage_num=2",
    "actor.micro_batch_size=2",
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "settings",
    [TOGETHER, [*APART[:1], "rollout.pipeline_stage_num=1", "model.options.method=flow_noise"]],
    ids=["whole", "sharded_flow_noise"],
)
def test_two_steps_equal_one_and_resume_and_one(start: Any, tmp_path: Path, settings: list[str]) -> None:
    def run(root: str, steps: int, *more: str) -> dict[str, torch.Tensor]:
        overrides = [f"runner.max_steps={steps}", f"runner.save_interval={steps}", *settings, *more]
        runner = start(*overrides, config="tabletop_ppo_flow", small=PPO, root=tmp_path / root)
        result = runner.run()
        start.stop()
        return load_policy(result.checkpoint / "policy").state_dict()

    expected = run("whole", 2)
    run("half", 1)
    got = run("half", 2, "runner.resume=auto")
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)


@pytest.mark.timeout(600)
def test_placement_and_stages_change_nothing(start: Any, tmp_path: Path) -> None:
    """Which step explores, and how far, is a matter of seed, environment and decision."""
    lines = []
    for root, settings in (("one", TOGETHER), ("other", APART)):
        more = ["runner.max_steps=2", "runner.save_interval=-1", *settings]
        result = start(*more, config="tabletop_ppo_flow", small=PPO, root=tmp_path / root).run()
        lines.append(read_metrics(result.run_dir))
        start.stop()
    names = ("train/actor/policy_loss", "train/critic/value_loss", "train/actor/approx_kl_k3", "rollout/returns_mean")
    for one, other in zip(*lines, strict=True):
        assert [one[name] for name in names] == pytest.approx([other[name] for name in names], abs=1e-4)
        assert max(one["rollout/logprob_drift"], other["rollout/logprob_drift"]) < 1e-5


@pytest.mark.timeout(600)
def test_imitation_does_not_depend_on_the_number_of_actors(start: Any, tmp_path: Path) -> None:
    losses = []
    for root, settings in (("one", TOGETHER), ("other", APART)):
        more = [*settings, "data.demos_dir=" + str(tmp_path / "demos")]
        runner = start(*more, config="tabletop_sft_flow", small=SFT, root=tmp_path / root, runner_class=SFTRunner)
        result = runner.run()
        lines = read_metrics(result.run_dir)
        losses.append([line["train/actor/sft_loss"] for line in lines if "train/actor/sft_loss" in line])
        start.stop()
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("actors", ["0", "0-1"], ids=["whole", "sharded"])
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
