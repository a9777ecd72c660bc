"""The Gaussian MLP policy: scores agree between acting and training; files round-trip; mistakes are named."""

import math

import numpy as np
import pytest
import torch

from rlinf_lite.models import CheckpointFormatError, MLPGaussianPolicy, UnknownPolicyError, load_policy, policy_class
from rlinf_lite.models.sampling import noise_keys, normal_noise, uniform_noise


def make_policy(**overrides):
    torch.manual_seed(0)
    arguments = {"num_action_chunks": 3, "value_type": "action_level", "temperature": 1.3, "hidden_sizes": (32, 32)}
    return MLPGaussianPolicy(5, [-2.0, 0.0], [2.0, 1.0], **{**arguments, **overrides})


def make_obs(num_rows=7, decision=0):
    state = np.random.default_rng(1).normal(size=(num_rows, 5)).astype(np.float32)
    return {"state": state, "noise_key": noise_keys(3, np.arange(num_rows), decision)}


def test_training_logprobs_equal_rollout_logprobs():
    policy = make_policy()
    acted = policy.predict_action_batch(make_obs())
    scored = policy(acted.forward_inputs)
    assert acted.logprobs.shape == scored.logprobs.shape == scored.entropy.shape == (7, 3, 2)
    assert acted.values.shape == scored.values.shape == (7, 3)
    assert (acted.logprobs - scored.logprobs).abs().max() <= 1e-5
    assert torch.equal(acted.values, policy.predict_values(make_obs()))


def test_logprobs_and_entropy_are_those_of_a_normal_distribution():
    policy = make_policy()
    acted = policy.predict_action_batch(make_obs())
    mean = policy.actor(acted.forward_inputs["state"]).view(-1, 3, 2)
    std = math.exp(-0.5) * 1.3
    expected = torch.distributions.Normal(mean, std)
    torch.testing.assert_close(acted.logprobs, expected.log_prob(acted.forward_inputs["sampled_actions"]))
    torch.testing.assert_close(policy(acted.forward_inputs).entropy, expected.entropy())


def test_actions_are_in_the_environments_units_and_bounds():
    policy = make_policy(log_std_init=2.0)
    actions = policy.predict_action_batch(make_obs(200)).actions
    assert actions.shape == (200, 3, 2)
    for dim, (low, high) in enumerate([(-2.0, 2.0), (0.0, 1.0)]):
        assert actions[..., dim].min() == low and actions[..., dim].max() == high


def test_what_a_row_does_depends_on_its_key_and_not_on_its_batch():
    policy = make_policy()
    obs = make_obs(8)
    together = policy.predict_action_batch(obs)
    alone = policy.predict_action_batch({name: value[5:6] for name, value in obs.items()})
    torch.testing.assert_close(alone.actions[0], together.actions[5])
    other = policy.predict_action_batch(make_obs(8, decision=1))
    assert not torch.allclose(other.actions, together.actions)


def test_greedy_is_the_mean():
    policy = make_policy()
    first, second = (policy.predict_action_batch(make_obs(decision=d), "greedy").actions for d in (0, 1))
    assert torch.equal(first, second)


def test_noise_is_normal_and_uncorrelated():
    noise = normal_noise(noise_keys(0, np.arange(20_000), 4), 3)
    assert noise.shape == (20_000, 3) and noise.dtype == np.float32
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02
    assert np.abs(np.corrcoef(noise.T) - np.eye(3)).max() < 0.03
    decisions = np.concatenate([normal_noise(noise_keys(0, np.array([7]), t), 1)[0] for t in range(5000)])
    assert abs(np.corrcoef(decisions[1:], decisions[:-1])[0, 1]) < 0.05
    uniform = uniform_noise(noise_keys(1, np.arange(1000), 0), 2)
    assert uniform.min() > 0 and uniform.max() < 1


def test_save_and_load_keep_every_bit(tmp_path):
    policy = make_policy()
    policy.save_pretrained(tmp_path)
    loaded = load_policy(tmp_path)
    obs = make_obs()
    assert torch.equal(loaded.predict_action_batch(obs).actions, policy.predict_action_batch(obs).actions)
    assert loaded.config_dict() == policy.config_dict()


def test_foreign_weights_are_refused_with_every_difference(tmp_path):
    make_policy().save_pretrained(tmp_path)
    state = make_policy(hidden_sizes=(16, 16, 16)).state_dict()
    make_policy().save_pretrained(tmp_path, state)
    with pytest.raises(CheckpointFormatError) as error:
        load_policy(tmp_path)
    assert "unexpected actor.6.weight" in str(error.value) and "has shape (16, 5)" in str(error.value)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointFormatError, match=r"has no config\.json"):
        load_policy(tmp_path)


def test_an_unknown_policy_gets_the_nearest_name():
    with pytest.raises(UnknownPolicyError, match="Did you mean mlp_gaussian"):
        policy_class("mlp_gausian")
    with pytest.raises(UnknownPolicyError, match="cannot be imported"):
        policy_class("no_such_module:Policy")
    with pytest.raises(UnknownPolicyError, match="not a subclass"):
        policy_class("json:dumps")
