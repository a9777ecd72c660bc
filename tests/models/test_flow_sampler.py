"""Likelihoods of flows: RLinf's numbers, and a process whose exact velocity is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf_lite.models.flow.config import FlowConfig
from rlinf_lite.models.flow.policy import NoiseHead, ValueHead
from rlinf_lite.models.flow.sampler import Sampler, entropy_of, log_density, step_moments, times
from rlinf_lite.models.sampling import noise_keys

GOLDEN = json.loads((Path(__file__).parents[1] / "fixtures" / "flow_rl_golden.json").read_text())
CHAINS = [chain for chain in GOLDEN["chains"] if "train_same" in chain]
CLOSE = 2e-6


def near(one: Tensor, other: Any, limit: float = CLOSE) -> None:
    other = other if isinstance(other, Tensor) else torch.tensor(other)
    np.testing.assert_allclose(one.detach().numpy(), other.numpy(), rtol=0, atol=limit)


@pytest.mark.parametrize("schedule", GOLDEN["schedules"])
def test_schedules(schedule: dict[str, Any]) -> None:
    at, count = times(schedule["num_steps"], "lerobot"), schedule["num_steps"]
    near(at, schedule["timesteps"])
    x, level = torch.zeros(count, 1, 1), torch.full((count,), schedule["noise_level"])
    near(step_moments("flow_sde", x, x, at[:-1], at[1:], level, at[1])[1].flatten(), schedule["step_std"])


def noise_head(params: dict[str, Any], bounds: list[float]) -> NoiseHead:
    weights = {name.removeprefix("noise_head."): torch.tensor(x) for name, x in params.items() if "noise_head" in name}
    shapes = [x.shape for name, x in weights.items() if name.endswith("weight")]
    cfg = replace(
        FlowConfig(),
        expert=replace(FlowConfig.expert, width=shapes[0][1]),
        noise_hidden_sizes=tuple(shape[0] for shape in shapes[:-1]),
        max_action_dim=shapes[-1][0],
        noise_range=(bounds[0], bounds[1]),
    )
    head = NoiseHead(cfg)
    head.load_state_dict(weights)
    return head


@pytest.mark.parametrize("step", GOLDEN["steps"], ids=lambda step: step["id"])
def test_transitions(step: dict[str, Any]) -> None:
    """Rows are at different steps."""
    x, v, eps, t, delta = (torch.tensor(step[name]) for name in ("x_t", "v_t", "eps", "t", "delta"))
    s, second = t - delta, times(step["num_steps"], "lerobot")[1]
    std = None
    if step["method"] == "flow_noise":
        std = noise_head(step["params"], step["noise_logvar_range"])(torch.tensor(step["suffix_out"]))
    method = "flow_sde" if step["method"] == "flow_ode" else step["method"]  # which is its case a = 0
    level = torch.full_like(t, step["effective_noise_level"])
    mean, std = step_moments(method, x, v, t, s, level, second, std)
    near(mean, step["mean"])
    near(std, step["std"])
    x_next = mean + std * eps
    near(x_next, step["x_next"])
    golden = torch.tensor(step["x_next"])
    if "safe_get_logprob" not in step:
        near(log_density(golden, mean, std), step["logprob"])
    else:  # RLinf's own name for minus a squared distance, which is no likelihood
        near(-(golden - mean).square(), step["logprob"])
    if step["method"] != "flow_ode":
        near(entropy_of(std), step["entropy"])


def closed_form(chain: dict[str, Any], vscale: float, head: NoiseHead | None) -> Any:
    state = torch.tensor(chain["state"])
    dims = chain["action_dim"]

    def velocity(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        v = vscale * x + (0.3 * torch.sin(3 * t) + 0.2 * state[:, 0])[:, None, None]
        e, h = torch.arange(4), torch.arange(x.shape[1])
        out = torch.tanh(0.4 * x[..., e % dims] + 0.1 * e - t[:, None, None] + 0.05 * h[:, None])
        return v, None if head is None else head(out)

    return velocity


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain["id"])
def test_chains(chain: dict[str, Any]) -> None:
    config, joint = chain["config"], chain["config"]["noise_method"] == "flow_noise"
    head = noise_head(chain["params"], config["noise_logvar_range"]) if joint else None
    sampler = Sampler(
        config["num_steps"],
        "lerobot",
        config["noise_method"],
        config.get("noise_level", 0.5),
        config.get("ignore_last", False),
        "mean",
    )
    noises = torch.tensor(chain["noises"]).transpose(0, 1)  # [B, K + 1, H, D]
    step = torch.full((chain["B"],), chain["chosen_step"] or 0)
    drawn = noises if joint else noises[:, [0, chain["chosen_step"] + 1]]
    out, crop = chain["out"], (slice(None), slice(config["action_chunk"]), slice(config["action_env_dim"]))

    acted = sampler.explore(closed_form(chain, chain["vscale"], head), drawn, step)
    near(acted.actions, out["actions"])
    visited = torch.tensor(out["chains"])
    near(acted.visited, visited if joint else visited[:, chain["chosen_step"] : chain["chosen_step"] + 2])
    near(acted.logprobs[crop], out["prev_logprobs"])
    for name in ("train_same", "train_changed"):
        expected = chain[name]
        logprobs, entropy = sampler.score(closed_form(chain, expected["vscale"], head), acted.visited, acted.step)
        near(logprobs[crop], expected["logprobs"])
        near(entropy[crop].mean((1, 2), keepdim=True)[:, 0], expected["entropy"])
        ratio = logprobs[crop] - acted.logprobs[crop]
        near(ratio, expected["log_ratio_token_level"])
        near(ratio.sum(2), expected["log_ratio_action_level"])
        near(ratio.sum((1, 2)), expected["log_ratio_chunk_level"])
        if name == "train_same":
            assert torch.equal(logprobs, acted.logprobs)


@pytest.mark.parametrize("chain", GOLDEN["chains"], ids=lambda chain: chain["id"])
def test_value_head_is_rlinfs(chain: dict[str, Any]) -> None:
    """On the states that RLinf's reads: of the expert, at every step when it acts, at the one that trains (flow_noise:
    at all) when it trains. Ours reads the prefix's."""
    weights = {
        name.removeprefix("value_head."): torch.tensor(x) for name, x in chain["params"].items() if "value" in name
    }
    sizes = tuple(x.shape[0] for name, x in weights.items() if name.endswith("weight"))[:-1]
    head = ValueHead(4, replace(FlowConfig(), value_hidden_sizes=sizes))
    head.load_state_dict(weights)
    e, h, found = torch.arange(4), torch.arange(chain["action_horizon"]), []
    for k, t in enumerate(times(chain["config"]["num_steps"], "lerobot")[:-1]):
        x = torch.tensor(chain["out"]["chains"])[:, k]
        states = torch.tanh(0.4 * x[..., e % chain["action_dim"]] + 0.1 * e - t + 0.05 * h[:, None])
        if chain["config"].get("chunk_critic_input"):
            states = states[:, : chain["config"]["action_chunk"]]
        found.append(head(states.mean(1)))
    mean = torch.stack(found).mean(0)
    near(mean, chain["out"]["prev_values"])
    if "train_same" in chain:
        joint = chain["config"]["noise_method"] == "flow_noise"
        near((mean if joint else found[chain["chosen_step"]])[:, 0], chain["train_same"]["values"])


def test_evaluation_is_the_ode() -> None:
    chain = next(chain for chain in GOLDEN["chains"] if chain["mode"] == "eval")
    sampler = Sampler(chain["config"]["num_steps"], "lerobot", "flow_sde", 0.5, False, "sum")
    actions = sampler.ode(closed_form(chain, chain["vscale"], None), torch.tensor(chain["noises"])[0])
    near(actions, chain["out"]["actions"])


def exact_velocity(x: Tensor, t: Tensor) -> tuple[Tensor, None]:
    """Of data N(0.7, 0.3^2): x_t is N((1 - t) 0.7, (1 - t)^2 0.09 + t^2), and v is the mean of e - a given it."""
    t = t[:, None, None]
    mean, variance = (1 - t) * 0.7, (1 - t) ** 2 * 0.09 + t**2
    return -0.7 + (t - (1 - t) * 0.09) / variance * (x - mean), None


def test_the_sde_keeps_the_spread_of_the_data() -> None:
    sampler, count = Sampler(100, "lerobot", "flow_sde", 0.5, False, "sum"), 20_000
    keys = noise_keys(0, np.arange(1), 0)
    noise = sampler.draw_noise(keys, (2, count))[0, 0].view(2, count, 1)
    assert float(sampler.ode(exact_velocity, noise[:1]).std()) == pytest.approx(0.3, abs=0.01)
    x, at = noise[:1], times(100, "lerobot")
    torch.manual_seed(0)
    for k in range(100):  # all steps stochastic
        t, s = at[k : k + 1], at[k + 1 : k + 2]
        mean, std = step_moments("flow_sde", x, exact_velocity(x, t)[0], t, s, torch.full((1,), 0.5), at[1])
        x = mean + std * torch.randn_like(x)
    assert float(x.std()) == pytest.approx(0.299, abs=0.006)
    assert float(x.mean()) == pytest.approx(0.7, abs=0.01)


def test_without_noise_the_sde_is_the_ode_and_its_gradients_are_numbers() -> None:
    sampler = Sampler(5, "lerobot", "flow_sde", 0.0, False, "sum")
    noise = torch.randn(3, 2, 4, 2, generator=torch.Generator().manual_seed(0))
    chain = sampler.explore(exact_velocity, noise, torch.tensor([0, 2, 4]))
    torch.testing.assert_close(chain.actions, sampler.ode(exact_velocity, noise[:, 0]), rtol=0, atol=1e-6)
    assert not chain.logprobs.any()
    scale = torch.ones((), requires_grad=True)
    logprobs, _ = sampler.score(lambda x, t: (scale * exact_velocity(x, t)[0], None), chain.visited, chain.step)
    logprobs.sum().backward()
    assert scale.grad is not None
    assert float(scale.grad) == 0.0


def test_steps_are_drawn_uniformly_by_each_rows_key() -> None:
    sampler = Sampler(4, "openpi", "flow_sde", 0.5, False, "sum")
    keys = noise_keys(3, np.arange(8000), 0)
    counts = torch.bincount(sampler.draw_steps(keys), minlength=4)
    assert (counts - 2000).abs().max() < 150
    assert torch.equal(sampler.draw_steps(keys)[100:200], sampler.draw_steps(keys[100:200]))
    assert torch.equal(sampler.draw_noise(keys[:9], (3, 2))[4:6], sampler.draw_noise(keys[4:6], (3, 2)))
    assert int(replace(sampler, ignore_last=True).draw_steps(keys).max()) == 2
    assert int(replace(sampler, method="flow_cps").draw_steps(keys).max()) == 2  # whose last step has no noise


def test_clocks() -> None:
    """openpi's is off by rounding, which the shortest period feels."""
    with torch.inference_mode():  # what is kept from acting is of use to training
        one, other = times(10, "openpi"), times(10, "lerobot")
    assert not one.is_inference() and times(10, "openpi") is one
    assert one[0] == other[0] == 1
    assert one[-1] == other[-1] == 0
    assert 0 < float((one - other).abs().max()) < 3e-7
