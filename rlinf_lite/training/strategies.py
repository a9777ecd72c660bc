"""How a model trains over the ranks of a group, chosen by `actor.strategy`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from rlinf_lite.config.names import did_you_mean
from rlinf_lite.models.text.causal_lm import LanguageModel
from rlinf_lite.training import sharding


class UnknownStrategyError(ValueError):
    """`actor.strategy` names nothing."""


class Strategy(Protocol):
    """A training backend. Where a group has one rank, none is used; else its process group is up."""

    def prepare(self, model: LanguageModel, world_size: int, device: str, precision: str) -> None:
        """Spread `model` over the ranks, in place; torch's get_model_state_dict must still read it."""
        ...

    def reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        """After the last backward pass of an update: make gradients the mean over all ranks."""
        ...


_STRATEGIES: dict[str, Callable[[], Strategy]] = {}


def register_strategy(name: str) -> Callable[[type], type]:
    """Make a `Strategy` available as `actor.strategy: <name>`."""

    def register(cls: type) -> type:
        _STRATEGIES[name] = cls
        return cls

    return register


def build_strategy(name: str) -> Strategy:
    """The strategy of this name, or the class at `pkg.module:Class`. Raises UnknownStrategyError."""
    module_name, colon, attribute = name.partition(":")
    if colon:
        cls = getattr(importlib.import_module(module_name), attribute, None)
        if cls is None:
            raise UnknownStrategyError(f"actor.strategy: module {module_name} has no class {attribute!r}")
        strategy: Strategy = cls()
        return strategy
    if name not in _STRATEGIES:
        known = did_you_mean(name, _STRATEGIES)
        raise UnknownStrategyError(f"actor.strategy: nothing is registered as {name!r}. {known}")
    return _STRATEGIES[name]()


def strategy_names() -> list[str]:
    return sorted(_STRATEGIES)


@register_strategy("fsdp")
class FSDP:
    """Parameters, gradients and optimizer states in shards (torch's `fully_shard`), gathered layer by layer."""

    def prepare(self, model: LanguageModel, world_size: int, device: str, precision: str) -> None:
        sharding.shard(model, world_size, device, precision)

    def reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Done in the backward pass."""


@register_strategy("replicated")
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
