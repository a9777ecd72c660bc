"""Training and evaluation as functions of the package, in a process of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

import rlinf_lite
from rlinf_lite.config import ConfigError

CODE = """
import rlinf_lite
small = ["env.train.num_envs=8", "rollout.num_chunks=8", "rollout.pipeline_stage_num=1", "env.eval.num_envs=4"]
small += ["env.eval.num_episodes=4", "env.eval.max_episode_steps=10", "actor.global_batch_size=64"]
small += ["cluster.component_placement={actor: 0, rollout: 0, env: 0}", "runner.report=false"]
cfg = rlinf_lite.load_config("gym_pendulum_ppo_mlp", [*small, "runner.max_steps=2", "runner.save_interval=2"])
result = rlinf_lite.train(cfg)
assert result.completed_steps == 2 and not result.interrupted and result.checkpoint is not None
policy = rlinf_lite.load_policy(result.checkpoint)
assert policy.act({"state": [0.1, 0.2, 0.3]}).shape == (policy.num_action_chunks, 1)
measured = [f"actor.checkpoint_load_path={result.checkpoint}", "runner.val_check_interval=-1"]
summary = rlinf_lite.evaluate(rlinf_lite.load_config("gym_pendulum_ppo_mlp", [*small, *measured]))
assert len(summary.episodes) == 4
"""


@pytest.mark.usefixtures("own_ray")
def test_train_and_evaluate(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "finished after 2 of 2 steps" in done.stdout


def test_a_policy_has_to_be_named() -> None:
    cfg = rlinf_lite.load_config("gym_pendulum_ppo_mlp")
    with pytest.raises(ConfigError, match=r"ppo_mlp: 1 problem\n  - rollout\.model_dir: is null, so there is no"):
        rlinf_lite.evaluate(cfg)


def test_what_is_no_config_is_told_of_load_config() -> None:
    for function in (rlinf_lite.train, rlinf_lite.evaluate):
        with pytest.raises(TypeError, match=rf"{function.__name__} got 'gym_pendulum_ppo_mlp'\. Give what load_config"):
            function("gym_pendulum_ppo_mlp")


def test_make_env_takes_a_config_and_says_what_else() -> None:
    cfg = rlinf_lite.load_config("gym_pendulum_ppo_mlp")
    assert rlinf_lite.make_env(cfg, "eval", 2).num_envs == rlinf_lite.make_env(cfg.env, "eval", 2).num_envs == 2
    with pytest.raises(ValueError, match=r"no split 'test'\. Give 'train' or 'eval'"):
        rlinf_lite.make_env(cfg.env, "test", 2)
    with pytest.raises(ValueError, match=r"num_envs is 0\. Give 1 or more"):
        rlinf_lite.make_env(cfg.env, "eval", 0)
