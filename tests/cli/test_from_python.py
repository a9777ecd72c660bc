"""What the functions of the package refuse; docs/test_docs.py runs a program that calls them."""

import pytest

import rlinf_lite
from rlinf_lite.config import ConfigError


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
