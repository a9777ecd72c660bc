"""A sharded flow policy acts, scores and learns as a whole one: FSDP2 on two gloo ranks, in float32 and in bfloat16."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlinf_lite.config.schema import ModelConfig
from rlinf_lite.envs import EnvSpec
from rlinf_lite.models.check import random_obs
from rlinf_lite.models.flow.policy import FlowPolicy, Pi0Policy, Pi05Policy, SmolVLAPolicy
from rlinf_lite.training.precision import autocast
from rlinf_lite.training.sharding import full_policy_state
from rlinf_lite.training.strategies import FSDP, init_process_group
from tests.ranks import spawn

SPEC = EnvSpec(3, 4, {"front": (64, 64)}, [-1.0] * 3, [1.0] * 3, 24, True)
CASES: list[tuple[type[FlowPolicy], dict[str, Any], str]] = [
    (Pi0Policy, {"trainable": "expert"}, "fp32"),
    (Pi05Policy, {"gradient_checkpointing": True}, "fp32"),
    (SmolVLAPolicy, {"method": "flow_noise", "trainable": "expert"}, "fp32"),
    (Pi0Policy, {"gradient_checkpointing": True}, "bf16"),
    (Pi05Policy, {}, "bf16"),
    (SmolVLAPolicy, {"trainable": "expert"}, "bf16"),
]


def make_policy(cls: type[FlowPolicy], options: dict[str, Any]) -> FlowPolicy:
    torch.manual_seed(0)
    return cls.from_config(ModelConfig(id=cls.policy_id, num_action_chunks=2, options=options), SPEC)


def use(policy: FlowPolicy, precision: str) -> dict[str, Tensor]:
    """Every entry point, and one update. All ranks see the same batch, so means over ranks are those of one."""
    policy.train()
    obs = random_obs(SPEC, rows=4)
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.01)
    with autocast("cpu", precision):
        acted = policy.predict_action_batch(obs)
        values = policy.predict_values(obs)
        output = policy({name: x.clone() for name, x in acted.forward_inputs.items()})
    drift = (output.logprobs - acted.logprobs).abs().max()
    assert float(drift.detach()) <= (1e-5 if precision == "fp32" else 0.3)
    (output.logprobs.mean() + output.values.mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    batch = policy.sft_inputs(obs) | {"actions": torch.zeros(4, 2, 3), "mask": torch.ones(4, 2).bool()}
    with autocast("cpu", precision):
        loss = policy.sft_loss(batch)
    loss.backward()
    gradients = {name: whole(p.grad) for name, p in policy.named_parameters() if p.grad is not None}
    return {"actions": acted.actions, "values": values, "logprobs": output.logprobs, "loss": loss, **gradients}


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def rank_main(rank: int, port: int, expected: list[dict[str, Tensor]]) -> None:
    torch.set_num_threads(1)
    init_process_group(rank, 2, "127.0.0.1", port, "cpu", 60.0)
    for (cls, options, precision), results in zip(CASES, expected, strict=True):
        policy = make_policy(cls, options)
        FSDP().prepare(policy, 2, "cpu", precision)
        assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())
        found = use(policy, precision)
        assert results.keys() <= found.keys()
        exact = {"atol": 2e-5, "rtol": 2e-4} if precision == "fp32" else {"atol": 0.2, "rtol": 0.2}
        for name, tensor in found.items():  # what a loss does not read has no gradient, or where sharded one of 0
            wanted = results.get(name, torch.zeros_like(tensor))
            torch.testing.assert_close(tensor, wanted, **exact, msg=f"{cls.__name__} {options} {precision}: {name}")
        state = full_policy_state(policy)
        assert rank == 1 or state.keys() == make_policy(cls, options).state_dict().keys()
    dist.destroy_process_group()


def test_sharded_equals_whole() -> None:
    expected = [
        {name: x.detach() for name, x in use(make_policy(cls, options), precision).items()}
        for cls, options, precision in CASES
    ]
    spawn(rank_main, 2, expected)
