"""How a model trains over the ranks of a group, chosen by `actor.strategy`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from rlinf_lite.models.text.causal_lm import LanguageModel
from rlinf_lite.registry import STRATEGIES
from rlinf_lite.training import sharding


class Strategy(Protocol):
    """A training backend. Where a group has one rank, none is used; else its process group is up."""

    def prepare(self, model: LanguageModel, world_size: int, device: str, precision: str) -> None:
        """Spread `model` over the ranks, in place; torch's get_model_state_dict must still read it."""
        ...

    def reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        """After the last backward pass of an update: make gradients the mean over all ranks."""
        ...


def register_strategy(name: str) -> Callable[[type], type]:
    """Make a `Strategy` available as `actor.strategy: <name>`."""
    return STRATEGIES.register(name)


def build_strategy(name: str) -> Strategy:
    """The strategy of this name, or the class at `pkg.module:Class`. Raises UnknownStrategyError."""
    strategy: Strategy = STRATEGIES.get(name)()
    return strategy


class FSDP:
    """Parameters, gradients and optimizer states in shards (torch's `fully_shard`), gathered layer by layer."""

    def prepare(self, model: LanguageModel, world_size: int, device: str, precision: str) -> None:
        sharding.shard(model, world_size, device, precision)

    def reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Done in the backward pass."""


class Replicated:
    """The whole model on every rank; gradients are averaged once per update. Quickest for small models."""

    def prepare(self, model: LanguageModel, world_size: int, device: str, precision: str) -> None:
        """All ranks built the same one."""

    def reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        trained = [p for p in parameters if p.requires_grad]
        flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in trained])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        parts = flat.split([p.numel() for p in trained])
        for parameter, part in zip(trained, parts, strict=True):
            parameter.grad = part.view_as(parameter)
