"""A sharded OpenVLA policy acts, scores and learns as a whole one: FSDP2 on two gloo ranks."""

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rlinf_lite.envs import EnvSpec
from rlinf_lite.models.sampling import noise_keys
from rlinf_lite.models.vla.policy import OpenVLAPolicy
from rlinf_lite.training.sharding import full_policy_state
from rlinf_lite.training.strategies import FSDP, init_process_group
from tests.models.settings import openvla
from tests.ranks import spawn

SPEC = EnvSpec(3, 4, {"front": (64, 64)}, [-1.0] * 3, [1.0] * 3, 24, True)


def make_policy(settings):
    torch.manual_seed(0)
    return OpenVLAPolicy.from_config(openvla(num_action_chunks=2, **settings), SPEC)


def make_obs():
    images = np.random.default_rng(0).integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)
    keys = noise_keys(0, np.arange(4), 0)
    return {"images": {"front": images}, "instruction": ["pick up the red block"] * 4, "noise_key": keys}


def use(policy):
    """Every entry point, and one update. All ranks see the same batch, so means over ranks are those of one."""
    policy.train()
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.1)
    acted = policy.predict_action_batch(make_obs())
    values = policy.predict_values(make_obs())
    inputs = {name: x.clone() for name, x in acted.forward_inputs.items()}
    output = policy(inputs)
    (output.logprobs.mean() + output.values.mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    batch = policy.sft_inputs(make_obs()) | {"actions": torch.zeros(4, 2, 3), "mask": torch.ones(4, 2).bool()}
    loss = policy.sft_loss(batch)
    loss.backward()
    gradients = {name: whole(p.grad) for name, p in policy.named_parameters() if p.grad is not None}
    return {"actions": acted.actions, "values": values, "logprobs": output.logprobs, "loss": loss, **gradients}


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


SETTINGS = [
    {"lora": {"rank": 2}},
    {"gradient_checkpointing": True},
    {"parallel_decoding": False},
]


def rank_main(rank, port, expected):
    torch.set_num_threads(1)
    init_process_group(rank, 2, "127.0.0.1", port, "cpu", 60.0)
    for settings, results in zip(SETTINGS, expected, strict=True):
        policy = make_policy(settings)
        FSDP().prepare(policy, 2, "cpu", "fp32")
        assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())
        found = use(policy)
        assert results.keys() <= found.keys()
        for name, tensor in found.items():  # what a loss does not read has no gradient, or where sharded one of 0
            expected_tensor = results.get(name, torch.zeros_like(tensor))
            torch.testing.assert_close(tensor, expected_tensor, atol=2e-5, rtol=2e-4, msg=f"{settings}: {name}")
        state = full_policy_state(policy)
        assert rank == 1 or state.keys() == make_policy(settings).state_dict().keys()
    dist.destroy_process_group()


def test_sharded_equals_whole():
    expected = [{name: x.detach() for name, x in use(make_policy(settings)).items()} for settings in SETTINGS]
    spawn(rank_main, 2, expected)
