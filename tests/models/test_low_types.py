"""Parameters in bfloat16: all of a policy that acts (`rollout.dtype`), or the frozen ones of one that trains
(`actor.frozen_dtype`), whole and in shards."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlinf_lite.config.schema import ModelConfig
from rlinf_lite.generation import SamplingParams
from rlinf_lite.generation.engine import TransformersEngine
from rlinf_lite.models import Policy, policy_class
from rlinf_lite.models.check import random_obs
from rlinf_lite.models.text.causal_lm import CausalLM
from rlinf_lite.models.text.presets import preset
from rlinf_lite.runners.step_log import DRIFT_LIMITS
from rlinf_lite.training.precision import autocast, cast_parameters
from rlinf_lite.training.strategies import FSDP, init_process_group
from tests.models.test_flow_sharding import SPEC, whole
from tests.ranks import spawn

ACTING: dict[str, dict[str, Any]] = {
    "mlp_gaussian": {},
    "openvla": {},
    "pi0": {},
    "pi05": {},
    "smolvla": {},
}
EXACT: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in ACTING}
EXACT["openvla, one token by one"] = "openvla", {"parallel_decoding": False}
EXACT |= {f"pi0, {method}": ("pi0", {"method": method}) for method in ("flow_noise", "flow_cps")}
FROZEN: dict[str, dict[str, Any]] = {
    "openvla": {"lora": {"rank": 4}},
    "pi0": {"trainable": "expert"},
    "smolvla": {"trainable": "expert", "method": "flow_noise"},
}


def make_policy(name: str, options: dict[str, Any]) -> Policy:
    torch.manual_seed(0)
    policy: Policy = policy_class(name).from_config(ModelConfig(id=name, num_action_chunks=2, options=options), SPEC)
    return policy


@pytest.mark.parametrize("name", ACTING)
def test_acting_in_bf16_is_close_and_buffers_keep_their_type(name: str) -> None:
    policy = make_policy(name, ACTING[name]).eval()
    obs = random_obs(SPEC, rows=8)
    with torch.no_grad():
        acted = policy.predict_action_batch(obs)
        buffers = {key: buffer.clone() for key, buffer in policy.named_buffers()}
        cast_parameters(policy, torch.bfloat16)
        assert {parameter.dtype for parameter in policy.parameters()} == {torch.bfloat16}
        with autocast("cpu", "bf16"):
            low, again = policy.predict_action_batch(obs), policy(dict(acted.forward_inputs))
    for key, buffer in policy.named_buffers():
        assert buffer.dtype == buffers[key].dtype and torch.equal(buffer, buffers[key]), key
    assert low.actions.isfinite().all() and low.logprobs.isfinite().all()
    assert 0 < float((again.logprobs.float() - acted.logprobs).abs().mean()) < DRIFT_LIMITS["bf16"]
    assert float((low.values.float() - acted.values).abs().max()) < 0.1


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "options"), EXACT.values(), ids=EXACT)
def test_acting_is_as_exact_as_training(name: str, options: dict[str, Any], weights: str) -> None:
    """Both compute in bf16; actions and the states of chains reach training as they were scored."""
    policy, acting = make_policy(name, options).train(), make_policy(name, options).eval()
    if weights == "bf16":
        cast_parameters(acting, torch.bfloat16)
    with torch.no_grad():
        with autocast("cpu", "bf16"):
            acted = acting.predict_action_batch(random_obs(SPEC, rows=64))
            trained = policy(dict(acted.forward_inputs))
        exact = policy(dict(acted.forward_inputs))
    check_as_exact(acted.logprobs, trained.logprobs, exact.logprobs, weights)
    check_as_exact(acted.values, trained.values, exact.values, weights)


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_generating_is_as_exact_as_training(weights: str) -> None:
    torch.manual_seed(0)
    model = CausalLM.from_config(preset("tiny") | {"tie_word_embeddings": False})
    with torch.no_grad():
        model.language_model.get_output_embeddings().weight.mul_(10)  # likelihoods that are not all alike
    acting = copy.deepcopy(model).eval()
    engine = TransformersEngine(acting, max_batch_size=16, max_length=48)
    if weights == "bf16":
        cast_parameters(acting, torch.bfloat16)
    keys = np.arange(32, dtype=np.uint64)
    prompts = [[5 + number, 7, 9] for number in range(len(keys))]
    with autocast("cpu", "bf16"):
        found = engine.generate(prompts, SamplingParams(16), keys[:, None])
    ids = torch.tensor([[*prompt, *done.token_ids] for prompt, done in zip(prompts, found, strict=True)])
    with torch.no_grad():
        with autocast("cpu", "bf16"):
            trained = model(ids, torch.ones_like(ids), 16).logprobs
        exact = model(ids, torch.ones_like(ids), 16).logprobs
    check_as_exact(torch.tensor([done.logprobs for done in found]), trained, exact, weights)


def check_as_exact(acted: Tensor, trained: Tensor, exact: Tensor, weights: str) -> None:
    """Weights that are rounded themselves, where autocast would not, may cost some more."""
    assert {acted.dtype, trained.dtype, exact.dtype} == {torch.float32}
    acting, training = (float((x - exact).abs().mean()) for x in (acted, trained))
    assert 0 < acting < (1.2 if weights == "fp32" else 1.6) * training, (acting, training)
    assert float((acted - trained).abs().mean()) < acting + training


def gradients(policy: Policy) -> dict[str, Tensor]:
    """Of what trains, after a pass over what a whole fp32 policy did."""
    policy.train()
    inputs = make_policy(policy.policy_id, FROZEN[policy.policy_id]).predict_action_batch(random_obs(SPEC, 4))
    with autocast("cpu", "bf16"):
        output = policy(dict(inputs.forward_inputs))
    (output.logprobs.mean() + output.values.mean()).backward()
    return {name: whole(p.grad) for name, p in policy.named_parameters() if p.grad is not None}


def make_low(name: str) -> Policy:
    policy = make_policy(name, FROZEN[name])
    cast_parameters(policy, torch.bfloat16, frozen_only=True)
    return policy


def check_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert expected.keys() <= found.keys()
    for name, tensor in expected.items():
        scale = float(tensor.abs().max())
        assert float((found[name] - tensor).abs().max()) <= 0.05 * scale + 2e-3, name


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_parameters_in_bf16_train_the_others_in_fp32(name: str) -> None:
    policy = make_low(name)
    kept = {key: p.detach().clone() for key, p in policy.named_parameters() if not p.requires_grad}
    assert kept and {p.dtype for p in kept.values()} == {torch.bfloat16}
    trained = [p for p in policy.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}
    check_close(gradients(policy), gradients(make_policy(name, FROZEN[name])))
    before = [p.detach().clone() for p in trained]
    torch.optim.AdamW(trained, lr=1e-2, fused=True).step()
    assert any(not torch.equal(x, y) for x, y in zip(trained, before, strict=True))
    assert all(torch.equal(p, kept[key]) for key, p in policy.named_parameters() if key in kept)


def rank_main(rank: int, port: int, expected: dict[str, dict[str, Tensor]]) -> None:
    torch.set_num_threads(1)
    init_process_group(rank, 2, "127.0.0.1", port, "cpu", 60.0)
    for name, whole_gradients in expected.items():
        policy = make_low(name)
        FSDP().prepare(policy, 2, "cpu", "bf16")
        found = gradients(policy)
        assert {found[key].dtype for key in whole_gradients} == {torch.float32}
        assert all(found[key].isfinite().all() for key in found)
        for key, tensor in whole_gradients.items():
            assert float((found[key] - tensor).norm()) <= 0.3 * float(tensor.norm()) + 2e-3, key
    dist.destroy_process_group()


def test_frozen_parameters_in_bf16_are_sharded_beside_fp32() -> None:
    expected = {name: gradients(make_low(name)) for name in ("openvla", "pi0")}
    spawn(rank_main, 2, expected)
