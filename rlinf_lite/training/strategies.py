"""Ways to train a model on several ranks: `actor.strategy`, for every kind of run.

A single rank trains the plain module. Process groups use gloo on CPUs and NCCL on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from rlinf_lite.registry import STRATEGIES

if TYPE_CHECKING:
    from rlinf_lite.models import Policy
    from rlinf_lite.models.text.causal_lm import LanguageModel

_MESH = ("copy", "shard")
_ENTRY_POINTS = ("predict_action_batch", "predict_values", "fixed_inputs", "sft_loss")  # all besides forward


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
    """A training backend for groups of several ranks, whose process group exists already."""

    def prepare(self, model: Policy | LanguageModel, world_size: int, device: str, precision: str) -> None:
        """Spread `model` over the ranks, in place; torch's get_model_state_dict must still read it."""
        ...

    def reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Make gradients the mean over all ranks; called after the last backward pass of an update."""
        ...


def register_strategy(name: str) -> Callable[[type], type]:
    """Class decorator: makes a `Strategy` available as `actor.strategy: <name>`."""
    return STRATEGIES.register(name)


class FSDP:
    """Parameters, gradients and optimizer states are sharded (torch's `fully_shard`), and gathered unit by unit. With
    `size`, each group of that many consecutive ranks has a sharded copy of all, and gradients are averaged over the
    groups once per update."""

    def __init__(self, size: int | None = None) -> None:
        self.size = size

    def prepare(self, model: Policy | LanguageModel, world_size: int, device: str, precision: str) -> None:
        size = min(self.size or world_size, world_size)
        whole = init_device_mesh(torch.device(device).type, (world_size // size, size), mesh_dim_names=_MESH)
        mesh, self._copies = whole["shard"], whole["copy"].get_group()
        dtype = torch.bfloat16 if precision == "bf16" else None
        mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
        for unit in _closed_units(model):
            fully_shard(unit, mesh=mesh, mp_policy=mixed)
        # actions and states keep their precision: bf16 cannot resolve an action's bins
        fully_shard(model, mesh=mesh, mp_policy=replace(mixed, cast_forward_inputs=False))
        for name in _ENTRY_POINTS:
            if hasattr(model, name):
                register_fsdp_forward_method(model, name)

    def reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Between the copies; the backward passes have reduced them within each."""
        average_gradients(parameters, self._copies)


def _closed_units(model: Policy | LanguageModel) -> list[nn.Module]:
    """The model's FSDP units, each once, without those that share a parameter or inner module with the rest of the
    model: torch would shard it twice, or gather it too late. These are gathered with the model."""

    def is_closed(unit: nn.Module) -> bool:
        inside, parameters = set(unit.modules()), {id(x) for x in unit.parameters()}
        outside = [module for module in model.modules() if module not in inside]
        children = {child for module in outside for child in module.children()} - {unit}
        used = {id(x) for module in outside for x in module.parameters(recurse=False)}
        return not children & inside and not used & parameters

    return [unit for unit in dict.fromkeys(model.fsdp_units()) if is_closed(unit)]


class Replicated:
    """Every rank has the whole model; gradients are averaged once per update. Fastest for small models."""

    def prepare(self, model: Policy | LanguageModel, world_size: int, device: str, precision: str) -> None:
        """Nothing to do: all ranks have built the same model."""

    def reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        average_gradients(parameters)


class TensorParallel:
    """Each layer is split over `size` consecutive ranks (`tensor_parallel.py`), which train the same rows. With a
    multiple of `size` ranks there are several such models, over which gradients are averaged once per update."""

    def __init__(self, size: int) -> None:
        self.size = size

    def prepare(self, model: LanguageModel, world_size: int, device: str, precision: str) -> None:
        """Raises UnsupportedModelError."""
        # here, because it imports transformers, which other strategies do not need
        from rlinf_lite.training.tensor_parallel import split_layers, summed_gradient

        self._summed_gradient = summed_gradient
        shape = (world_size // self.size, self.size)
        self._mesh = init_device_mesh(torch.device(device).type, shape, mesh_dim_names=("dp", "tp"))
        split_layers(model, self._mesh["tp"])

    def reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = self._summed_gradient(parameter, parameter.grad)
        average_gradients(parameters, self._mesh["dp"].get_group())


def average_gradients(parameters: list[nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
    """Average gradients over the ranks of `group` (None: all), in one exchange; for DTensors, their local parts. A
    parameter without a gradient on any rank keeps none, so that weight decay and the norm leave it out."""
    if dist.get_world_size(group) == 1:
        return
    own: list[Any] = [_local(parameter.detach()) for parameter in parameters]
    has_gradient = torch.tensor([float(p.grad is not None) for p in parameters], device=own[0].device)
    gradients = [
        torch.zeros_like(x) if p.grad is None else _local(p.grad) for x, p in zip(own, parameters, strict=True)
    ]
    flat = torch.cat([*(x.flatten() for x in gradients), has_gradient])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    *parts, shares = flat.split([*(x.numel() for x in own), len(parameters)])
    for parameter, x, part, share in zip(parameters, own, parts, shares.tolist(), strict=True):
        parameter.grad = _like(parameter, part.view_as(x)) if share else None


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )
