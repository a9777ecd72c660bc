"""Policies learn: PPO and GRPO raise the reward, on the real path from simulator to update."""

import pytest
import torch
from safetensors.torch import load_file

from tests.runners.conftest import read_metrics

SHORT_REACH = [
    "env.train.num_envs=4",
    "env.eval.num_envs=4",
    "env.eval.num_episodes=4",
    "runner.max_steps=2",
    "runner.val_check_interval=2",
    "runner.save_interval=-1",
    "cluster.num_gpus_per_node=2",
]


@pytest.mark.slow
def test_ppo_swings_the_pendulum_up(start):
    """A random policy returns about -1,280; the best possible is about -150."""
    result = start("runner.max_steps=26", "runner.val_check_interval=26", "runner.save_interval=-1", small=[]).run()
    assert result.first_eval.total.return_mean < -900
    assert result.last_eval.total.return_mean > -400
    curve = [line["env/return"] for line in read_metrics(result.run_dir) if "env/return" in line]
    assert sum(curve[-3:]) / 3 > sum(curve[:3]) / 3 + 300


@pytest.mark.parametrize(
    "config", ["maniskill_pushcube_ppo_mlp", pytest.param("maniskill_pickcube_ppo_mlp", marks=pytest.mark.slow)]
)
def test_real_steps_in_maniskill(start, config):
    result = start("rollout.num_chunks=8", "actor.global_batch_size=16", config=config, small=SHORT_REACH).run()
    lines = read_metrics(result.run_dir)
    assert result.last_eval.total.num_episodes == 4 and result.last_eval.total.success_once is not None
    assert lines[-1]["env/num_steps"] == 2 * 4 * 8
    assert all(line["train/actor/skipped_updates"] == 0 for line in lines if "train/actor/lr" in line)


def test_grpo_steps_in_maniskill(start):
    small = [*SHORT_REACH, "env.train.max_episode_steps=10", "algorithm.group_size=2", "actor.global_batch_size=20"]
    small += ["actor.micro_batch_size=20", "env.eval.max_episode_steps=10", "rollout.pipeline_stage_num=1"]
    result = start(config="maniskill_pushcube_grpo_mlp", small=small).run()
    line = next(line for line in read_metrics(result.run_dir) if "train/actor/lr" in line)
    assert line["env/num_episodes"] == 4 and "train/critic/value_loss" not in line
    assert line["rollout/advantages_mean"] == pytest.approx(0, abs=1e-5)


def test_only_the_value_head_trains_while_the_critic_warms_up(start):
    result = start("runner.max_steps=3", "runner.save_interval=1", "algorithm.critic_warmup_steps=2").run()
    files = [result.run_dir / f"checkpoints/step_00000{k}/policy/model.safetensors" for k in (1, 2, 3)]
    first, second, third = map(load_file, files)
    assert any(not torch.equal(first[name], second[name]) for name in first if name.startswith("critic"))
    assert all(torch.equal(first[name], second[name]) for name in first if not name.startswith("critic"))
    assert any(not torch.equal(second[name], third[name]) for name in first if not name.startswith("critic"))
