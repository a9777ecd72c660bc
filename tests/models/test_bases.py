"""Two methods make a policy, which acts, scores, imitates and is saved, as the MLP that is written out does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlinf_lite.cards import PolicyCard
from rlinf_lite.config import ConfigError, load_config
from rlinf_lite.config.schema import ModelConfig
from rlinf_lite.envs import EnvSpec
from rlinf_lite.models import (
    GaussianPolicy,
    MLPGaussianPolicy,
    NetworkPolicy,
    TokenPolicy,
    VelocityPolicy,
    check_policy,
)
from rlinf_lite.models.check import random_obs

SPEC = EnvSpec(3, 4, {"top": (16, 16), "side": (8, 12)}, [-1.0, -2.0, 0.0], [1.0, 2.0, 1.0], 24, True)


class Network(NetworkPolicy):
    def build(self) -> None:
        spec = self.spec
        pixels = sum(3 * height * width for height, width in spec.cameras.values())
        self.trunk = nn.Linear(pixels + (spec.state_dim or 0), 8)
        self.actor, self.critic = nn.Linear(8, self.num_outputs), nn.Linear(8, self.num_values)

    def network(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        read = [inputs[name].flatten(1).float() / 255 for name in self.spec.cameras]
        read += [inputs["state"]] if self.spec.state_dim else []
        hidden = self.trunk(torch.cat(read, 1)).tanh()
        return self.actor(hidden), self.critic(hidden)


class OfGaussians(Network, GaussianPolicy): ...


class OfTokens(Network, TokenPolicy):
    outputs_per_action = 16


@pytest.mark.parametrize("kind", [OfGaussians, OfTokens])
@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, cameras={}), replace(SPEC, state_dim=None)])
@pytest.mark.parametrize("settings", [{"num_action_chunks": 1}, {"num_action_chunks": 3, "value_type": "action_level"}])
def test_it_keeps_the_contract(kind: type[NetworkPolicy], spec: EnvSpec, settings: dict[str, Any]) -> None:
    assert check_policy(kind, spec, ModelConfig(temperature=0.7, **settings)) == []


STATE = replace(SPEC, cameras={})


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda outputs, values: (outputs[:, 1:], values), "outputs [5, 5]; they are [B, num_outputs] = [5, 6]"),
        (lambda outputs, values: (outputs.repeat(1, 2), values), "outputs [5, 12]; they are [B, num_outputs] = [5, 6]"),
        (lambda outputs, values: (values, outputs), "outputs [5, 1]; they are [B, num_outputs] = [5, 6]"),
        (lambda outputs, values: (outputs, outputs), "values [5, 6]; they are [B, num_values] = [5, 1]"),
        (lambda outputs, values: (outputs, 0.0), "values a float; they are"),
        (lambda outputs, values: outputs, "a Tensor; it returns two tensors, (outputs, values)"),
        (lambda outputs, values: (outputs, values, values), "3 of them; it returns two tensors"),
    ],
)
def test_what_a_network_returns_is_looked_at(returned: Any, said: str) -> None:
    class Wrong(OfGaussians):
        def network(self, inputs: dict[str, Tensor]) -> Any:
            return returned(*super().network(inputs))

    [problem] = check_policy(Wrong, STATE, ModelConfig(num_action_chunks=2))
    assert f"network returned {said}" in problem


def test_a_network_of_states_is_told_where_there_is_none() -> None:
    class OfStates(OfGaussians):
        def build(self) -> None:
            self.actor = nn.Linear(self.spec.state_dim, 3)

    [problem] = check_policy(OfStates, replace(SPEC, state_dim=None))
    assert "spec.state_dim is None, as the environment has no state (its cameras: top, side)" in problem


class OfVelocities(VelocityPolicy):
    def build(self) -> None:
        self.method, self.num_steps = self.options.method, self.options.num_steps
        self.trunk, self.critic = nn.Linear(4, 8), nn.Linear(8, self.num_values)
        self.field = nn.Linear(8 + self.num_action_chunks * self.action_dim + 1, self.num_outputs)

    def prefix(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        seen = self.trunk(inputs["state"]).tanh()
        return seen, self.critic(seen)

    def velocity(self, prefix: Tensor, x: Tensor, t: Tensor) -> Tensor:
        found: Tensor = self.field(torch.cat([prefix, x.flatten(1), t[:, None]], dim=1))
        return found


def velocities(method: str, num_steps: int, **settings: Any) -> ModelConfig:
    options = {"method": method, "num_steps": num_steps}
    return ModelConfig(id=f"{__name__}:OfVelocities", options=options, **settings)


@pytest.mark.parametrize("method", ["flow_sde", "flow_noise", "flow_cps"])
@pytest.mark.parametrize("settings", [{"num_action_chunks": 1}, {"num_action_chunks": 3, "value_type": "action_level"}])
def test_a_flow_keeps_the_contract(method: str, settings: dict[str, Any]) -> None:
    assert check_policy(OfVelocities, replace(SPEC, cameras={}), velocities(method, 3, **settings)) == []


def test_a_flow_refuses_what_would_do_nothing() -> None:
    spec = replace(SPEC, cameras={})
    with pytest.raises(ValueError, match="flow_cps has no noise in its last step"):
        OfVelocities.from_config(velocities("flow_cps", 1), spec)
    with pytest.raises(ValueError, match=r"model\.temperature: is 0\.7, and a flow has none\. Set it to 1"):
        OfVelocities.from_config(velocities("flow_sde", 2, temperature=0.7), spec)


def test_there_has_to_be_a_value_to_warm_up() -> None:
    own = [f"model.id={__name__}:OfVelocities", "model.options={method: flow_sde, num_steps: 2}"]
    load_config("gym_pendulum_ppo_mlp", own)
    with pytest.raises(ConfigError, match=r"critic_warmup_steps: is 2, and .*:OfVelocities has no value_parameters"):
        load_config("gym_pendulum_ppo_mlp", [*own, "algorithm.critic_warmup_steps=2"])


class WithValueParameters(OfGaussians):
    def value_parameters(self) -> list[nn.Parameter]:
        return list(self.critic.parameters())


class NamesOne(PolicyCard):
    policy = f"{__name__}:WithValueParameters"


class NamesNone(PolicyCard):
    policy = f"{__name__}:OfGaussians"


def warmed_up(name: str) -> None:
    load_config("gym_pendulum_ppo_mlp", [f"model.id={__name__}:{name}", "algorithm.critic_warmup_steps=2"])


@pytest.mark.parametrize("name", ["WithValueParameters", "NamesOne"])
def test_a_class_or_its_card_may_be_warmed_up(name: str) -> None:
    warmed_up(name)


@pytest.mark.parametrize("name", ["OfGaussians", "NamesNone"])
def test_a_class_or_its_card_without_value_parameters_may_not(name: str) -> None:
    with pytest.raises(ConfigError, match=rf":{name} has no value_parameters\(\), which would name what trains then"):
        warmed_up(name)


def test_it_is_the_mlp_where_the_network_is() -> None:
    torch.manual_seed(0)
    spec = replace(SPEC, cameras={})
    mlp = MLPGaussianPolicy(4, spec.action_low, spec.action_high, 2, hidden_sizes=(8,))

    class Same(GaussianPolicy):
        def build(self) -> None:
            self.actor, self.critic = mlp.actor, mlp.critic

        def network(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            return self.actor(inputs["state"]), self.critic(inputs["state"])

    same, obs = Same(spec, {}, 2), random_obs(spec)
    for mode in ("train", "sampled", "greedy"):
        a, b = mlp.predict_action_batch(obs, mode), same.predict_action_batch(obs, mode)
        assert torch.equal(a.actions, b.actions) and torch.equal(a.logprobs, b.logprobs)
        if mode == "train":
            scored, again = mlp(a.forward_inputs), same(b.forward_inputs)
            assert torch.equal(scored.logprobs, again.logprobs) and torch.equal(scored.entropy, again.entropy)
            assert torch.equal(scored.values, again.values)
    batch = {"actions": torch.rand(len(a.actions), 2, 3), "mask": torch.rand(len(a.actions), 2) < 0.7}
    losses = [policy.sft_loss({**policy.sft_inputs(obs), **batch}) for policy in (mlp, same)]
    assert torch.allclose(*losses)


def test_tokens_are_bins_of_the_range() -> None:
    spec = replace(SPEC, cameras={})
    policy = OfTokens(spec, {}, 1)
    logits = torch.full((2, 1, 3, 16), -30.0)
    logits[0, 0, :, 0] = logits[1, 0, :, 15] = 30.0
    policy._passes = lambda inputs: (logits, torch.zeros(2, 1))
    obs = random_obs(spec, rows=2)
    for mode in ("greedy", "sampled"):
        actions = policy.predict_action_batch(obs, mode).actions[:, 0]
        low, high = torch.tensor(spec.action_low), torch.tensor(spec.action_high)
        assert torch.allclose(actions[0], low + (high - low) / 32) and torch.allclose(
            actions[1], high - (high - low) / 32
        )
    ends = {"actions": torch.stack([low, high])[:, None], "mask": torch.ones(2, 1, dtype=torch.bool)}
    assert float(policy.sft_loss(ends)) == pytest.approx(0.0, abs=1e-6)


def test_files_and_another_environment(tmp_path: Path) -> None:
    policy = OfTokens(SPEC, {"width": 3}, 2)
    policy.policy_id = "tests.models.test_bases:OfTokens"
    policy.save_pretrained(tmp_path)
    loaded = OfTokens.from_pretrained(tmp_path)
    assert loaded.options.width == 3 and loaded.spec == SPEC
    obs = random_obs(SPEC)
    assert np.array_equal(policy.act(obs), loaded.act(obs))
    with pytest.raises(ValueError, match="made for state_dim 4, the environment has 5"):
        loaded.check_env_spec(replace(SPEC, state_dim=5))
    with pytest.raises(ValueError, match="made for cameras"):
        loaded.check_env_spec(replace(SPEC, cameras={}))
