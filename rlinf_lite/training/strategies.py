"""How a model lies and trains over the ranks of a group: `actor.strategy`, for every kind of run.

One rank trains the plain module. Process groups are gloo's between CPUs and NCCL's between GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from rlinf_lite.registry import STRATEGIES

if TYPE_CHECKING:
    from rlinf_lite.models import Policy
    from rlinf_lite.models.text.causal_lm import LanguageModel

_ENTRY_POINTS = ("predict_action_batch", "predict_values", "fixed_inputs", "sft_loss")  # besides forward


def init_process_group(
    rank: int, world_size: int, master_addr: str, master_port: int, device: str, timeout_s: float
) -> None:
    """Join the process group of a worker group's ranks."""
    dist.init_process_group(
        "nccl" if device.startswith("cuda") else "gloo",
        init_method=f"tcp://{master_addr}:{master_port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


class Strategy(Protocol):
    """A training backend. Where a group has one rank, none is used; else its process group is up."""

    def prepare(self, model: Policy | LanguageModel, world_size: int, device: str, precision: str) -> None:
        """Spread `model` over the ranks, in place; torch's get_model_state_dict must still read it."""
        ...

    def reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        """After the last backward pass of an update: make gradients the mean over all ranks."""
        ...


def register_strategy(name: str) -> Callable[[type], type]:
    """Make a `Strategy` available as `actor.strategy: <name>`."""
    return STRATEGIES.register(name)


class FSDP:
    """Parameters, gradients and optimizer states in shards (torch's `fully_shard`), gathered unit by unit."""

    def prepare(self, model: Policy | LanguageModel, world_size: int, device: str, precision: str) -> None:
        mesh = init_device_mesh(torch.device(device).type, (world_size,))
        dtype = torch.bfloat16 if precision == "bf16" else None
        mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
        for unit in model.fsdp_units():
            fully_shard(unit, mesh=mesh, mp_policy=mixed)
        # actions and states keep their precision: a bin of an action is narrower than bf16 resolves
        fully_shard(model, mesh=mesh, mp_policy=replace(mixed, cast_forward_inputs=False))
        for name in _ENTRY_POINTS:
            if hasattr(model, name):
                register_fsdp_forward_method(model, name)

    def reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Done in the backward pass."""


class Replicated:
    """The whole model on every rank; gradients are averaged once per update. Quickest for small models."""

    def prepare(self, model: Policy | LanguageModel, world_size: int, device: str, precision: str) -> None:
        """All ranks built the same one."""

    def reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        """One that no rank has a gradient of stays without, and is neither decayed nor counted."""
        has_gradient = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
        gradients = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]
        flat = torch.cat([*gradients, has_gradient])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        *parts, shares = flat.split([*(p.numel() for p in parameters), len(parameters)])
        for parameter, part, share in zip(parameters, parts, shares.tolist(), strict=True):
            parameter.grad = part.view_as(parameter) if share else None
