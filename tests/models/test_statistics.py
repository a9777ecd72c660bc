"""What a policy of random weights does with the statistics of demonstrations, family by family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_lite.config.schema import ModelConfig
from rlinf_lite.data.lerobot.statistics import of_numbers
from rlinf_lite.envs import EnvSpec
from rlinf_lite.models import load_policy, policy_class
from rlinf_lite.models.check import random_obs
from rlinf_lite.registry import policy_card

SPEC = EnvSpec(3, 4, {"top": (64, 64)}, [-1.0, -2.0, 0.0], [1.0, 2.0, 1.0], 24, True)
RNG = np.random.default_rng(0)
STATES = RNG.normal([300.0, 0.0, -5.0, 0.01], [40.0, 1.0, 0.1, 0.001], (500, 4)).astype(np.float32)
ACTIONS = RNG.uniform([-0.1, -3.0, 0.2], [0.3, 0.0, 0.4], (500, 3)).astype(np.float32)
"""The second one leaves the environment's bounds."""
FOUND = {"state": of_numbers(STATES), "action": of_numbers(ACTIONS)}


def built(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    model = ModelConfig(id=name, num_action_chunks=2, options=policy_card(name).options(options))
    return policy_class(name).from_config(model, SPEC).eval().requires_grad_(False)


def observed(states: np.ndarray) -> dict[str, Any]:
    return {**random_obs(SPEC, rows=len(states)), "state": states}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlp_gaussian", {}),
        ("openvla", {"use_proprio": True}),
        ("openvla", {"use_proprio": True, "norm_type": "bounds_q99"}),
        ("pi0", {}),
        ("pi05", {"max_prompt_length": 128}),
        ("smolvla", {}),
    ],
)
def test_a_checkpoint_acts_by_the_statistics_that_were_taken(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    policy, obs = built(name, **options), observed(STATES[:6])
    before = policy.predict_action_batch(obs, "greedy").actions
    policy.take_statistics(FOUND)
    after = policy.predict_action_batch(obs, "greedy").actions
    assert not torch.equal(before, after)
    low, high = np.array(SPEC.action_low), np.array(SPEC.action_high)
    assert (after.numpy() >= low - 1e-6).all() and (after.numpy() <= high + 1e-6).all()
    policy.save_pretrained(tmp_path)
    loaded = load_policy(tmp_path).eval().requires_grad_(False)
    assert loaded.config_dict() == policy.config_dict()
    assert torch.equal(loaded.predict_action_batch(obs, "greedy").actions, after)
    for kind, (least, most) in loaded.usual_ranges().items():
        values = {"state": STATES, "action": ACTIONS}[kind]
        assert (np.array(least) <= np.median(values, axis=0)).all() and (np.median(values, axis=0) <= most).all()


@pytest.mark.parametrize("name", ["pi0", "pi05", "smolvla"])
def test_flow_policies_see_what_openpi_and_lerobot_would(name: str) -> None:
    """openpi (transforms.Normalize): float64, (x - mean) / (std + 1e-6), (x - q01) / (q99 - q01 + 1e-6) * 2 - 1.
    LeRobot (NormalizerProcessorStep), whose layout SmolVLA has: (x - mean) / (std + 1e-8) in float32."""
    policy = built(name, **({"max_prompt_length": 128} if name == "pi05" else {}))
    policy.take_statistics(FOUND)
    for values, normalizer in ((STATES, policy.states), (ACTIONS, policy.actions)):
        x = values.astype(np.float64)
        if name == "pi05":
            low, high = np.quantile(x, 0.01, axis=0), np.quantile(x, 0.99, axis=0)
            wanted = (x - low) / (high - low + 1e-6) * 2.0 - 1.0
            assert 0.9 < np.abs(wanted).max() < 3
        else:
            wanted = (x - x.mean(0)) / (x.std(0) + (1e-8 if name == "smolvla" else 1e-6))
            assert np.allclose(wanted.std(0), 1, atol=2e-3)
        # of float32, whose rounding of 300 is a millionth of a standard deviation of 40
        tolerance = 2e-5 if name == "smolvla" else 1e-12
        np.testing.assert_allclose(normalizer.normalize(values), wanted, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(normalizer.unnormalize(torch.from_numpy(wanted)), values, rtol=1e-5, atol=1e-5)
    inputs = policy.sft_inputs(observed(STATES[:6]))
    np.testing.assert_allclose(inputs["state"][:, :4], policy.states.normalize(STATES[:6]), rtol=1e-6)


def test_bins_span_the_demonstrated_actions_within_the_environments_bounds() -> None:
    policy = built("openvla", use_proprio=True)
    policy.take_statistics(FOUND)
    bins = torch.arange(256)[:, None].expand(-1, 3)
    decoded = policy.codec.decode(bins).numpy()
    low, high = np.maximum(ACTIONS.min(0), SPEC.action_low), np.minimum(ACTIONS.max(0), SPEC.action_high)
    assert np.allclose(decoded.min(0), low, atol=(high - low) / 255) and (decoded.min(0) >= low).all()
    assert np.allclose(decoded.max(0), high, atol=(high - low) / 255) and (decoded.max(0) <= high).all()
    # as OpenVLA-OFT normalises proprioception, from [least, most] to [-1, 1]
    least, most = STATES.min(0), STATES.max(0)
    wanted = np.clip(2 * (STATES - least) / (most - least) - 1, -1, 1)
    np.testing.assert_allclose(policy.proprio.normalize(torch.from_numpy(STATES)), wanted, atol=1e-4)
    beyond = {**FOUND, "action": of_numbers(ACTIONS + np.float32(9))}
    policy = built("openvla")
    policy.take_statistics(beyond)
    decoded = policy.codec.decode(bins).numpy()
    assert (np.abs(decoded.min(0) - SPEC.action_low) < 0.02).all(), "a range without a width"


def test_the_mlp_reads_z_scores_and_acts_within_the_environments_bounds() -> None:
    policy = built("mlp_gaussian")
    assert (
        torch.equal(policy.sft_inputs(observed(STATES))["state"], torch.from_numpy(STATES))
        and not policy.usual_ranges()
    )
    policy.take_statistics(FOUND)
    wanted = (STATES - STATES.astype(np.float64).mean(0)) / STATES.astype(np.float64).std(0)
    np.testing.assert_allclose(policy.sft_inputs(observed(STATES))["state"], wanted, atol=1e-5)
    acted = policy.predict_action_batch(observed(STATES[:6]))
    assert torch.equal(policy(acted.forward_inputs).logprobs, acted.logprobs)
    far = policy.actor[-1]
    torch.nn.init.constant_(far.bias, 100.0)
    largest = policy.predict_action_batch(observed(STATES[:6]), "greedy").actions
    assert torch.allclose(largest, torch.tensor([1.0, 2.0, 1.0]))
    policy.take_statistics({"action": FOUND["action"]})  # a folder without states
    assert policy.config_dict()["state_mean"] == FOUND["state"]["mean"]
