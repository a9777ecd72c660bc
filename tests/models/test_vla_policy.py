"""The OpenVLA policy in both decodings: scores agree, rows are independent, the wrong input is named."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlinf_lite.envs import EnvSpec
from rlinf_lite.models import check_policy
from rlinf_lite.models.sampling import noise_keys
from rlinf_lite.models.vla.actions import ActionCodec, StatisticsError
from rlinf_lite.models.vla.config import VLAConfig, preset
from rlinf_lite.models.vla.inputs import PromptTooLongError
from rlinf_lite.models.vla.policy import ObservationError, OpenVLAPolicy
from tests.models.settings import openvla

SPEC = EnvSpec(3, 4, {"front": (64, 64), "wrist": (64, 64)}, [-2.0, 0.0, -1.0], [2.0, 1.0, 1.0], 24, True)
TASKS = ["pick up the red block", "push the green cube to the blue bowl", "lift it"]
both = pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "one_by_one"])


def make_policy(seed=0, **settings):
    torch.manual_seed(seed)
    return OpenVLAPolicy.from_config(openvla(num_action_chunks=2, **settings), SPEC).eval()


def make_obs(num_rows=6, decision=0):
    rng = np.random.default_rng(1)
    return {
        "images": {name: rng.integers(0, 256, (num_rows, 64, 64, 3), dtype=np.uint8) for name in SPEC.cameras},
        "state": rng.normal(size=(num_rows, 4)).astype(np.float32),
        "instruction": [TASKS[i % 3] for i in range(num_rows)],
        "noise_key": noise_keys(3, np.arange(num_rows), decision),
    }


@both
def test_the_contract_of_policies_is_kept(parallel):
    settings = {"parallel_decoding": parallel, "use_proprio": True, "temperature": 1.6, "value_type": "action_level"}
    assert check_policy(OpenVLAPolicy, SPEC, openvla(num_action_chunks=2, **settings)) == []


@both
def test_training_logprobs_equal_rollout_logprobs(parallel):
    policy = make_policy(parallel_decoding=parallel, temperature=1.3)
    with torch.inference_mode():
        acted = policy.predict_action_batch(make_obs())
    scored = policy({name: x.clone() for name, x in acted.forward_inputs.items()})
    assert acted.logprobs.shape == scored.entropy.shape == (6, 2, 3) and acted.values.shape == (6, 1)
    assert (acted.logprobs - scored.logprobs).abs().max() <= 1e-5
    torch.testing.assert_close(acted.values, scored.values)
    torch.testing.assert_close(acted.values, policy.predict_values(make_obs()))
    assert acted.forward_inputs["images"].dtype == torch.uint8
    assert acted.forward_inputs["images"].shape == (6, 2, 64, 64, 3)


@both
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_dropout_of_a_published_config_does_not_train_another_distribution(parallel, checkpointing):
    fresh = make_policy(parallel_decoding=parallel)
    config = replace(fresh.cfg, text={**fresh.cfg.text, "attention_dropout": 0.5})
    policy = OpenVLAPolicy(config, fresh.prompts).prepare(openvla(gradient_checkpointing=checkpointing))
    with torch.no_grad():
        acted = policy.eval().predict_action_batch(make_obs())
    scored = policy.train()(acted.forward_inputs)
    torch.testing.assert_close(scored.logprobs, acted.logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(scored.values, acted.values, atol=1e-5, rtol=0)


def test_a_head_that_caps_its_logits_is_refused():
    fresh = make_policy()
    with pytest.raises(ValueError, match="gemma2 scales or caps"):
        OpenVLAPolicy(replace(fresh.cfg, text={**fresh.cfg.text, "model_type": "gemma2"}), attn_implementation="eager")


@both
def test_sampling_follows_the_distribution_that_is_scored(parallel):
    policy = make_policy(parallel_decoding=parallel)
    obs = make_obs(1)
    many = {
        "images": {name: image.repeat(400, axis=0) for name, image in obs["images"].items()},
        "instruction": obs["instruction"] * 400,
        "noise_key": noise_keys(0, np.arange(400), 0),
    }
    with torch.inference_mode():
        acted = policy.predict_action_batch(many)
        entropy = policy(acted.forward_inputs).entropy
    sampled, expected = -acted.logprobs.mean(), entropy.mean()
    assert abs(sampled - expected) < 0.06, (sampled, expected)


@both
def test_what_a_row_does_depends_on_its_key_and_not_on_its_batch(parallel):
    policy = make_policy(parallel_decoding=parallel)
    obs = make_obs()
    together = policy.predict_action_batch(obs)
    alone = policy.predict_action_batch(
        {
            "images": {name: image[4:5] for name, image in obs["images"].items()},
            "instruction": obs["instruction"][4:5],
            "noise_key": obs["noise_key"][4:5],
        }
    )
    torch.testing.assert_close(alone.actions[0], together.actions[4])
    torch.testing.assert_close(alone.logprobs[0], together.logprobs[4])
    assert not torch.equal(policy.predict_action_batch(make_obs(decision=1)).actions, together.actions)


@both
def test_padding_changes_nothing(parallel):
    short, long = (make_policy(parallel_decoding=parallel, max_prompt_length=n) for n in (14, 30))
    acted = short.predict_action_batch(make_obs())
    inputs = long._inputs(make_obs()) | {"action_bins": acted.forward_inputs["action_bins"]}
    torch.testing.assert_close(long(inputs).logprobs, acted.logprobs, atol=2e-5, rtol=0)


def test_instructions_cameras_and_state_all_matter():
    policy = make_policy(use_proprio=True)
    inputs = policy._inputs(make_obs()) | {"action_bins": torch.zeros(6, 2, 3, dtype=torch.int64)}
    before = policy(inputs).logprobs
    for name in ("images", "input_ids", "proprio"):
        other = policy({**inputs, name: inputs[name].flip(0)}).logprobs
        assert (other - before).abs().max() > 1e-3, name
    swapped = policy({**inputs, "images": inputs["images"].flip(1)}).logprobs
    assert (swapped - before).abs().max() > 1e-3


def test_actions_are_in_the_environments_units():
    actions = make_policy().predict_action_batch(make_obs(64)).actions
    assert actions.dtype == torch.float32
    for dim, (low, high) in enumerate(zip(SPEC.action_low, SPEC.action_high, strict=True)):
        assert actions[..., dim].min() >= low and actions[..., dim].max() <= high
        assert actions[..., dim].max() - actions[..., dim].min() > 0.8 * (high - low)


def test_bins_are_those_of_the_published_tokenizer():
    statistics = {"q01": [-1.0, 0.0], "q99": [1.0, 4.0], "mask": [True, False]}
    codec = ActionCodec(VLAConfig(action_dim=2, norm_stats={"robot": {"action": statistics}}))
    edges = np.linspace(-1, 1, 256)
    centres = (edges[:-1] + edges[1:]) / 2
    actions = np.random.default_rng(0).uniform(-1.1, 1.1, (500, 2)).astype(np.float32)
    token_ids = 32_000 - np.digitize(actions.clip(-1, 1).astype(np.float64), edges)
    bins = codec.encode(torch.from_numpy(actions))
    assert np.array_equal(bins.numpy() + 31_744, token_ids)
    decoded = centres[np.clip(32_000 - token_ids - 1, 0, 254)]
    np.testing.assert_allclose(codec.decode(bins), decoded, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unnorm_key": "brigde"}, "no 'brigde'. It has bridge, fractal"),
        ({}, "unnorm_key: is null, and the checkpoint has statistics of bridge, fractal"),
        ({"unnorm_key": "bridge", "norm_type": "bounds"}, "needs min and max of action, and the statistics have q01"),
        ({"unnorm_key": "bridge", "action_dim": 7}, "describe 2 action dimensions, the policy has 7"),
    ],
)
def test_statistics_that_do_not_serve_are_named(change, message):
    norm_stats = {name: {"action": {"q01": [-1.0, -1.0], "q99": [1.0, 1.0]}} for name in ("bridge", "fractal")}
    with pytest.raises(StatisticsError, match=message):
        ActionCodec(VLAConfig(**{"action_dim": 2, "norm_stats": norm_stats, **change}))


def test_cameras_of_any_size_are_kept_at_the_size_that_is_read():
    obs = make_obs()
    obs["images"]["wrist"] = np.repeat(obs["images"]["wrist"], 2, axis=1)
    kept = make_policy().predict_action_batch(obs).forward_inputs["images"]
    assert kept.dtype == torch.uint8 and kept.shape == (6, 2, 64, 64, 3)


def test_observations_that_do_not_fit_are_named():
    policy, obs = make_policy(), make_obs()
    with pytest.raises(ValueError, match="looks through wrist; the environment has front"):
        policy.check_env_spec(replace(SPEC, cameras={"front": (64, 64)}))
    with pytest.raises(ValueError, match="openvla looks at images"):
        OpenVLAPolicy.from_config(openvla(), replace(SPEC, cameras={}))
    with pytest.raises(ValueError, match="use_proprio: is true, and there is no state"):
        OpenVLAPolicy.from_config(openvla(use_proprio=True), replace(SPEC, state_dim=None))
    with pytest.raises(ObservationError, match="there is no 'wrist'; the environment has front"):
        policy.predict_action_batch({**obs, "images": {"front": obs["images"]["front"]}})
    floats = {name: image / np.float32(255) for name, image in obs["images"].items()}
    with pytest.raises(ObservationError, match="'front' are float32; uint8"):
        policy.predict_action_batch({**obs, "images": floats})
    with pytest.raises(PromptTooLongError, match=r"model\.options\.max_prompt_length"):
        policy.predict_action_batch({**obs, "instruction": ["put " * 20] * 6})


@pytest.mark.parametrize(("parallel", "sigma"), [(True, 0.0), (True, 0.2), (False, 0.0)])
def test_imitation_learns_to_copy(parallel, sigma):
    policy = make_policy(parallel_decoding=parallel, sft_label_sigma=sigma).train()
    actions = torch.rand(6, 2, 3) * torch.tensor([4.0, 1.0, 2.0]) + torch.tensor(SPEC.action_low)
    mask = torch.ones(6, 2, dtype=torch.bool)
    mask[5, 1] = False
    actions[5, 1] = 1e30
    batch = policy._inputs(make_obs()) | {"actions": actions, "mask": mask}
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)
    losses = []
    for _ in range(60):
        loss = policy.sft_loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1.0, losses
    copied = policy.eval().predict_action_batch(make_obs(), "greedy").actions
    error = ((copied - actions) / torch.tensor([2.0, 0.5, 1.0]))[mask].abs()
    assert error.mean() < 0.1


def test_masked_actions_do_not_reach_the_imitation_loss():
    policy = make_policy()
    batch = policy._inputs(make_obs()) | {"actions": torch.zeros(6, 2, 3), "mask": torch.ones(6, 2, dtype=torch.bool)}
    batch["mask"][:, 1] = False
    other = {**batch, "actions": batch["actions"].clone()}
    other["actions"][:, 1] = 1.0
    assert torch.equal(policy.sft_loss(batch), policy.sft_loss(other))


@both
def test_forward_compiles_without_a_graph_break(parallel):
    policy = make_policy(parallel_decoding=parallel).train()
    inputs = policy.predict_action_batch(make_obs()).forward_inputs
    compiled = torch.compile(policy.forward, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(inputs).logprobs, policy(inputs).logprobs)


@both
def test_compiled_layers_change_nothing(parallel, monkeypatch):
    compile_module = torch.nn.Module.compile  # without inductor: its C++ takes half a minute
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compile_module(module, backend="eager"))
    plain, compiled = (make_policy(parallel_decoding=parallel, compile=flag) for flag in (False, True))
    expected = plain.predict_action_batch(make_obs())
    with torch.inference_mode():
        found = compiled.predict_action_batch(make_obs())
    assert torch.equal(found.actions, expected.actions)
    scored = compiled.train()(expected.forward_inputs)
    torch.testing.assert_close(scored.logprobs, expected.logprobs, atol=1e-5, rtol=0)


@both
def test_checkpointing_changes_no_gradient(parallel):
    gradients = []
    for checkpointing in (False, True):
        policy = make_policy(parallel_decoding=parallel, gradient_checkpointing=checkpointing).train()
        policy(policy.predict_action_batch(make_obs()).forward_inputs).logprobs.sum().backward()
        gradients.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


@both
@pytest.mark.parametrize("kernels", ["eager", pytest.param("flex_attention", marks=pytest.mark.slow)])
def test_other_attention_kernels_agree(parallel, kernels):
    acted = make_policy(parallel_decoding=parallel).predict_action_batch(make_obs())
    with torch.no_grad():
        scored = make_policy(parallel_decoding=parallel, attn_implementation=kernels)(acted.forward_inputs)
    torch.testing.assert_close(scored.logprobs, acted.logprobs, atol=2e-5, rtol=0)


def test_configs_are_json():
    cfg = preset("7b")
    assert VLAConfig.from_dict(json.loads(json.dumps(cfg.to_dict()))) == cfg
