"""Flow policies keep the contract: what explored is scored as it acted, by every family, method and step."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributions import Normal

from rlinf_lite.cards import Observed
from rlinf_lite.config.schema import ModelConfig
from rlinf_lite.envs import EnvSpec
from rlinf_lite.models import check_policy, load_policy
from rlinf_lite.models.base import NOISE_KEY
from rlinf_lite.models.check import random_obs
from rlinf_lite.models.flow.config import fresh_config
from rlinf_lite.models.flow.networks import build_network
from rlinf_lite.models.flow.policy import FlowPolicy, NoiseHead, Pi0Policy, Pi05Policy, SmolVLAPolicy
from rlinf_lite.models.flow.sampler import Sampler, times
from rlinf_lite.models.sampling import noise_keys
from tests.models.flow_checkpoints import NAMES, golden_prefix, largest, observation, padded_state, policy_of

SPEC = EnvSpec(3, 4, {"top": (64, 64)}, [-1.0, -2.0, 0.0], [1.0, 2.0, 1.0], 24, True)
TWO_CAMERAS = replace(SPEC, state_dim=None, cameras={"left": (40, 64), "right": (64, 64)})
CLASSES: list[type[FlowPolicy]] = [Pi0Policy, Pi05Policy, SmolVLAPolicy]
METHODS = ["flow_sde", "flow_noise", "flow_cps"]
NUM_STEPS = 3
TRAINED = {"pi0": 314_713_120, "pi05": 430_098_464, "smolvla": 99_880_992}
"""Parameters of the expert and of what is around it. LeRobot's logs of pi0.5 say 693,422,112: with the unused head."""


def settings(cls: type[FlowPolicy], **given: Any) -> ModelConfig:
    options = {key: value for key, value in given.items() if key not in ModelConfig.model_fields}
    chosen = {key: value for key, value in given.items() if key in ModelConfig.model_fields}
    return ModelConfig(**{"id": cls.policy_id, "num_action_chunks": 2, **chosen}, options=options)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("method", METHODS)
def test_the_contract(cls: type[FlowPolicy], method: str) -> None:
    assert check_policy(cls, SPEC, settings(cls, method=method, horizon=3)) == []


@pytest.mark.parametrize("cls", CLASSES)
def test_the_contract_with_two_cameras_no_state_and_a_value_per_action(cls: type[FlowPolicy]) -> None:
    assert check_policy(cls, TWO_CAMERAS, settings(cls, value_type="action_level", trainable="expert")) == []


def exploring(name: str, method: str, joint: str = "sum") -> FlowPolicy:
    policy = policy_of(name)
    policy.cfg = replace(policy.cfg, method=method, num_steps=NUM_STEPS, joint=joint)
    policy.sampler = Sampler.of(policy.cfg)
    if method == "flow_noise":
        torch.manual_seed(0)
        policy.noise_head = NoiseHead(policy.cfg)
    return policy


def many(name: str, count: int = 8) -> dict[str, Any]:
    """The golden observations, several times over."""
    obs = observation(name)
    return {
        "images": {camera: np.concatenate([image] * count) for camera, image in obs["images"].items()},
        "state": np.concatenate([obs["state"]] * count),
        "instruction": obs["instruction"] * count,
        NOISE_KEY: noise_keys(0, np.arange(2 * count), 0),
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", METHODS)
def test_ratios_are_1_before_the_first_update(name: str, method: str) -> None:
    """Exactly, at every step, on published checkpoints; and the numbers are those of a plain loop."""
    policy, obs = exploring(name, method), many(name)
    with torch.inference_mode():
        acted = policy.predict_action_batch(obs)
        values = policy.predict_values(obs)
    inputs = {key: x.clone() for key, x in acted.forward_inputs.items()}
    steps = inputs["step"]
    drawn = {"flow_sde": NUM_STEPS, "flow_noise": 1, "flow_cps": NUM_STEPS - 1}[method]  # cps ends without noise
    assert set(steps.tolist()) == set(range(drawn))
    scored = policy.train()(inputs)
    assert torch.equal(scored.logprobs, acted.logprobs)
    assert torch.equal(scored.values, acted.values)
    assert torch.equal(values, acted.values)
    assert scored.logprobs.requires_grad

    at, expected = times(NUM_STEPS, policy.cfg.layout), torch.zeros_like(acted.logprobs)
    with torch.no_grad():
        prefix = policy._prefix(inputs)
        for k in range(NUM_STEPS):
            t, s = at[k], at[k + 1]
            here = inputs["visited"][:, k if method == "flow_noise" else 0]
            there = inputs["visited"][:, k + 1 if method == "flow_noise" else 1]
            v, states = policy.network.velocity(prefix, inputs["state"], here, t.expand(len(here)))
            x0, x1, a = here - t * v, here + (1 - t) * v, policy.cfg.noise_level
            if method == "flow_sde":
                sigma = a * torch.sqrt(t / (1 - (at[1] if k == 0 else t)))
                std = sigma * torch.sqrt(t - s)
                mean = (1 - s) * x0 + (s - sigma**2 * (t - s) / (2 * t)) * x1
            elif method == "flow_cps":
                std, mean = s * np.sin(np.pi * a / 2), (1 - s) * x0 + s * np.cos(np.pi * a / 2) * x1
            else:
                assert policy.noise_head is not None
                std, mean = policy.noise_head(states), (1 - s) * x0 + s * x1
                assert float(std.min()) >= 0.08
                assert float(std.max()) <= 0.16
            own = torch.ones_like(steps, dtype=torch.bool) if method == "flow_noise" else steps == k
            if method == "flow_cps" and k == NUM_STEPS - 1:
                continue
            log_density = Normal(mean, std).log_prob(there)[:, : policy.num_action_chunks, : policy.action_dim]
            expected += torch.where(own[:, None, None], log_density, 0.0)
    assert largest(acted.logprobs, expected) < 1e-3  # (x - mean) / std of numbers that were rounded otherwise
    assert float(acted.logprobs.abs().max()) > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_values_do_not_depend_on_the_step_or_on_padding(name: str) -> None:
    policy, obs = exploring(name, "flow_sde"), many(name)
    with torch.no_grad():
        first = policy.predict_action_batch(obs).values
        other = policy.predict_action_batch({**obs, NOISE_KEY: obs[NOISE_KEY] + np.uint64(9)}).values
        assert torch.equal(first, other)
        prefix = policy._prefix(policy._inputs(obs))
        mean = torch.stack([states[mask].mean(0) for states, mask in zip(prefix.states, prefix.mask, strict=True)])
        assert largest(first, policy.value_head(mean)) < 1e-5


def test_the_mean_of_the_joint_makes_log_ratios_smaller() -> None:
    obs, found = many("tiny-pi05"), {}
    for joint in ("sum", "mean"):
        policy = exploring("tiny-pi05", "flow_noise", joint)
        with torch.no_grad():
            acted = policy.predict_action_batch(obs)
            policy.network.action_out_proj.bias += 0.01
            found[joint] = policy(acted.forward_inputs).logprobs - acted.logprobs
    torch.testing.assert_close(found["sum"], (NUM_STEPS + 1) * found["mean"], rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_a_camera_that_is_left_out_is_one_that_is_masked(name: str) -> None:
    policy = policy_of(name)
    inputs = policy._inputs(observation(name))
    with_all = golden_prefix(policy, name)
    if not all(with_all.mask.sum(1) == policy._prefix(inputs).mask.sum(1)):
        inputs = {key: x[:1] for key, x in inputs.items()}  # rows with a camera masked by hand
        with_all = replace(with_all, mask=with_all.mask[:1], states=with_all.states[:1])
        with_all.memory = [(keys[:1], values[:1]) for keys, values in with_all.memory]
    without = policy._prefix(inputs)
    assert without.states.shape[1] < with_all.states.shape[1]
    state, rows = padded_state(policy, name), len(without.states)
    x = torch.randn(rows, policy.cfg.horizon, policy.cfg.max_action_dim, generator=torch.Generator().manual_seed(0))
    t = torch.full((rows,), 0.6)
    one, other = (policy.network.velocity(prefix, state[:rows], x, t)[0] for prefix in (with_all, without))
    assert largest(one, other) < 2e-5


@pytest.mark.parametrize("cls", CLASSES)
def test_the_expert_alone(cls: type[FlowPolicy]) -> None:
    torch.manual_seed(0)
    policy = cls.from_config(settings(cls, trainable="expert"), SPEC)
    acted = policy.predict_action_batch(random_obs(SPEC))
    output = policy.train()(acted.forward_inputs)
    (output.logprobs.sum() + output.values.sum()).backward()
    trained = {name for name, parameter in policy.named_parameters() if parameter.grad is not None}
    assert not any(name.startswith(("network.vision.", "network.language.", "network.connector.")) for name in trained)
    rest = {
        name for name, _ in policy.named_parameters() if not name.startswith(("network.vision.", "network.language."))
    }
    assert trained == {name for name in rest if not name.startswith("network.connector.")}
    assert any("state_proj" in name for name in trained) == (cls is not Pi05Policy)


@pytest.mark.parametrize("cls", CLASSES)
def test_published_files_of_new_policies_follow_their_settings(cls: type[FlowPolicy], tmp_path: Path) -> None:
    torch.manual_seed(0)
    cls.from_config(settings(cls, max_prompt_length=60), SPEC).save_pretrained(tmp_path / "first")
    changed = settings(cls, num_steps=8, horizon=6, num_action_chunks=4, max_prompt_length=70)
    cls.from_pretrained(tmp_path / "first", changed).save_pretrained(tmp_path / "second")
    content = json.loads((tmp_path / "second" / "config.json").read_text())
    expected = {"action_horizon": 6, "max_token_len": 70}
    if cls is SmolVLAPolicy:
        expected = {"num_steps": 8, "chunk_size": 6, "n_action_steps": 4, "tokenizer_max_length": 70}
    assert {name: content[name] for name in expected} == expected
    files = [{path.relative_to(root) for path in root.rglob("*")} for root in (tmp_path / "first", tmp_path / "second")]
    assert files[0] == files[1]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("trainable", ["all", "expert"])
def test_adapters(cls: type[FlowPolicy], trainable: str, tmp_path: Path) -> None:
    """They start as nothing; saved apart from the published layout, loaded, and merged, they act alike."""
    torch.manual_seed(0)
    plain, obs = cls.from_config(settings(cls), SPEC), random_obs(SPEC)
    plain.save_pretrained(tmp_path / "base")
    given = settings(cls, trainable=trainable, lora={"rank": 2, "also_train": ["expert.norm"]})
    policy = cls.from_pretrained(tmp_path / "base", given)
    acted = policy.predict_action_batch(obs)
    assert torch.equal(acted.actions, plain.predict_action_batch(obs).actions)
    output = policy.train()(acted.forward_inputs)
    (output.logprobs.sum() + output.values.sum()).backward()
    trained = {name for name, parameter in policy.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert any("network.language" in name for name in trained) == (trainable == "all")
    layers = ("network.vision", "network.language", "network.expert.layers")
    inside = [name for name in trained if name.startswith(layers)]
    assert inside
    assert all(".lora_" in name for name in inside)
    assert {"value_head.mlp.0.weight", "network.action_out_proj.bias"} < trained

    unknown = settings(cls, trainable=trainable, lora={"rank": 2, "also_train": ["projektor"]})
    with pytest.raises(
        ValueError, match=r"also_train: the policy has no network\.projektor\. It has .*network\.expert"
    ):
        cls.from_pretrained(tmp_path / "base", unknown)
    frozen = settings(cls, trainable="expert", lora={"rank": 2, "also_train": ["language"]})
    with pytest.raises(
        ValueError, match=r"also_train: network\.language would stay frozen \(model\.options\.trainable"
    ):
        cls.from_pretrained(tmp_path / "base", frozen)

    with torch.no_grad():
        for name in inside:
            policy.get_parameter(name).add_(0.1)
    policy.save_pretrained(tmp_path / "out")
    base, out = (load_file(tmp_path / where / "model.safetensors") for where in ("base", "out"))
    assert all(torch.equal(base[name], out[name]) for name in base)
    again = cls.from_pretrained(tmp_path / "out")
    expected = policy.predict_action_batch(obs).actions
    assert largest(expected, acted.actions) > 1e-3
    assert torch.equal(again.predict_action_batch(obs).actions, expected)
    with pytest.raises(ValueError, match="the checkpoint has adapters of"):
        cls.from_pretrained(tmp_path / "out", settings(cls, trainable=trainable, lora={"rank": 3}))
    again.merge_adapters()
    assert largest(again.predict_action_batch(obs).actions, expected) < 1e-4
    again.save_pretrained(tmp_path / "merged")
    assert load_file(tmp_path / "merged" / "model.safetensors").keys() == base.keys()


@pytest.mark.parametrize("cls", CLASSES)
def test_recomputing_layers_changes_no_gradient(cls: type[FlowPolicy]) -> None:
    found = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        policy = cls.from_config(settings(cls, gradient_checkpointing=checkpointing), SPEC).train()
        acted = policy.predict_action_batch(random_obs(SPEC))
        policy(acted.forward_inputs).logprobs.sum().backward()
        found.append([parameter.grad for parameter in policy.parameters() if parameter.grad is not None])
    assert len(found[0]) == len(found[1]) > 50
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("cls", CLASSES)
def test_evaluation_follows_the_ode(cls: type[FlowPolicy]) -> None:
    """sampled: from the row's own noise; greedy: from 0, whatever the key. More steps come nearer to the flow."""
    torch.manual_seed(0)
    policy, obs = cls.from_config(settings(cls), SPEC).eval(), random_obs(SPEC)
    other = {**obs, NOISE_KEY: obs[NOISE_KEY] + np.uint64(1)}
    with torch.no_grad():
        assert not torch.equal(*(policy.predict_action_batch(one, "sampled").actions for one in (obs, other)))
        assert torch.equal(*(policy.predict_action_batch(one, "greedy").actions for one in (obs, other)))
        assert policy.predict_action_batch(obs, "sampled").forward_inputs == {}


def test_imitation_counts_what_was_executed() -> None:
    """The loss is the mean of the velocity's squared error over executed actions; those after an end do not matter."""
    torch.manual_seed(0)
    policy = Pi0Policy.from_config(settings(Pi0Policy, horizon=3), SPEC).train()
    obs = random_obs(SPEC)
    inputs = policy.sft_inputs(obs)
    low, high = torch.tensor(SPEC.action_low), torch.tensor(SPEC.action_high)
    actions = low + (high - low) * torch.rand(len(inputs["state"]), 2, 3)
    mask = torch.tensor([[True, True], [True, False], [True, True], [True, True], [True, False]])
    loss = policy.sft_loss({**inputs, "actions": actions, "mask": mask})

    normalised = (actions - (high + low) / 2) / ((high - low) / 2)
    target = torch.cat([normalised, normalised[:, -1:]], dim=1)
    noise, t = inputs["noise"], inputs["time"][:, None, None]
    v, _ = policy.network.velocity(
        policy._prefix(inputs), inputs["state"], t * noise + (1 - t) * target, inputs["time"]
    )
    error = (v - (noise - target)).square()[:, :2, :3].mean(-1)
    assert float(loss.detach()) == pytest.approx(float(error[mask].mean().detach()), rel=1e-5)
    again = policy.sft_inputs(obs)
    assert all(torch.equal(inputs[key], again[key]) for key in inputs)
    assert 0.001 < float(inputs["time"].min()) < float(inputs["time"].max()) <= 1.0


def test_times_of_imitation_are_of_a_beta_distribution() -> None:
    torch.manual_seed(0)
    policy = Pi0Policy.from_config(settings(Pi0Policy), SPEC)
    spec, found = SPEC, []
    for seed in range(20):
        found.append(policy.sft_inputs(random_obs(spec, seed=seed, rows=64))["time"])
    drawn = (torch.cat(found) - 0.001) / 0.999
    for x in (0.25, 0.5, 0.75):  # P(t < x) = x^1.5
        assert float((drawn < x).float().mean()) == pytest.approx(x**1.5, abs=0.04)


@pytest.mark.parametrize(
    ("family", "published", "unused"),
    [("pi0", 3_501_372_176, 263_323_648), ("pi05", 3_616_757_520, 263_323_648), ("smolvla", 450_046_176, 47_308_800)],
)
def test_published_sizes(family: str, published: int, unused: int) -> None:
    """Without the language-model heads that no forward pass reads: gemma_expert.lm_head, and SmolVLM's."""
    model = ModelConfig(id=family, num_action_chunks=5, options={"size": "published", "horizon": 50})
    cfg = fresh_config(family, model, Observed(7, 8, {"a": (224, 224), "b": (224, 224)}))
    with torch.device("meta"):
        network = build_network(cfg)
    assert sum(parameter.numel() for parameter in network.parameters()) == published - unused
    vision_language = [network.get_submodule(name) for name in ("vision", "connector", "language")]
    frozen = sum(p.numel() for module in vision_language for p in module.parameters())
    assert published - unused - frozen == TRAINED[family]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("method", ["flow_sde", "flow_noise"])
def test_a_prefix_that_is_kept_changes_neither_scores_nor_gradients(cls: type[FlowPolicy], method: str) -> None:
    torch.manual_seed(0)
    policy = cls.from_config(settings(cls, trainable="expert", keep_prefix=True, method=method), SPEC).train()
    inputs = policy.predict_action_batch(random_obs(SPEC)).forward_inputs
    with torch.no_grad():
        kept = policy.fixed_inputs(inputs)
    found = []
    for given in (inputs, {**inputs, **kept}):
        policy.zero_grad()
        output = policy(given)
        (output.logprobs.sum() + output.values.sum() + output.entropy.sum()).backward()
        gradients = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
        found.append((output.logprobs, output.values, output.entropy, gradients))
        policy.network.vision.register_forward_hook(lambda *_: pytest.fail("the prefix was computed again"))
    assert all(torch.equal(one, other) for one, other in zip(found[0][:3], found[1][:3], strict=True))
    torch.testing.assert_close(found[0][3], found[1][3], rtol=0, atol=0)
    assert any("state_proj" in name for name in found[0][3]) == (cls is not Pi05Policy)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("spec", [SPEC, TWO_CAMERAS], ids=["state", "two_cameras"])
def test_what_began_here_is_a_published_checkpoint_without_our_files(
    cls: type[FlowPolicy], spec: EnvSpec, tmp_path: Path
) -> None:
    """Sizes, statistics, cameras and tokenizer come from the files that openpi and LeRobot have."""
    torch.manual_seed(0)
    policy, obs = cls.from_config(settings(cls, horizon=3), spec), random_obs(spec, rows=3)
    numbers = {"mean": [0.3, -0.2, 0.1], "std": [0.5, 0.25, 2.0], "q01": [-1.0, -0.5, 0.0], "q99": [1.0, 0.5, 4.0]}
    wider = {key: [*x, x[0]] for key, x in numbers.items()}
    policy.take_statistics({"action": numbers, **({"state": wider} if spec.state_dim else {})})
    policy.save_pretrained(tmp_path)
    for file in tmp_path.glob("rlinf_lite.*"):
        file.unlink()
    # K is an argument of openpi's sample_actions, and clipping what its environments do
    given = settings(cls, horizon=3, num_steps=policy.cfg.num_steps)
    again = load_policy(tmp_path, given)
    assert type(again) is cls
    expected, found = policy.predict_action_batch(obs, "greedy").actions, again.predict_action_batch(obs, "greedy")
    assert torch.equal(expected, found.actions.clamp(torch.tensor(spec.action_low), torch.tensor(spec.action_high)))
    again.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_bytes() == (tmp_path / "config.json").read_bytes()


def test_the_policy_that_ships_is_a_published_checkpoint_without_our_files(tmp_path: Path) -> None:
    shipped = Path(__file__).parents[2] / "assets" / "tabletop_flow"
    shutil.copytree(shipped, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("rlinf_lite.*"))
    obs = random_obs(replace(SPEC, action_low=[-1.0] * 3, action_high=[1.0] * 3), rows=3)
    found = load_policy(tmp_path, settings(Pi0Policy, num_action_chunks=4, num_steps=4))
    expected = load_policy(shipped).predict_action_batch(obs, "greedy").actions
    assert torch.equal(expected, found.predict_action_batch(obs, "greedy").actions.clamp(-1, 1))


@pytest.mark.parametrize("cls", CLASSES)
def test_a_prefix_that_training_changes_is_not_kept(cls: type[FlowPolicy]) -> None:
    policy = cls.from_config(settings(cls, keep_prefix=True), SPEC)
    assert policy.fixed_inputs(policy.predict_action_batch(random_obs(SPEC)).forward_inputs) == {}
