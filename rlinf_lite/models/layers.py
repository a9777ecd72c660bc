"""How a model's layers run in training: what the backward pass computes again, and whether they are compiled.

Where no gradients are recorded, as in acting, layers run as they are; a model can do both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rlinf_lite.models.training_options import Recompute, TrainingOptions

_MOST_GRAPHS = 64
"""Of a process: a few for each kind of layer, by shapes and by which tensors need gradients."""
_PRODUCTS = {f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm")}
_LONG = 256
"""Of sums in a product, at least, to be worth its memory: those of adapters' ranks are shorter."""


class Layered(Protocol):
    """A policy or a language model."""

    compiles_layers: bool

    def fsdp_units(self) -> list[nn.Module]: ...


def prepare_layers(model: Layered, options: TrainingOptions) -> None:
    """Have the layers of `model` (its `fsdp_units`) run as `options` say wherever gradients are recorded.

    Compiled layers of one kind share a graph; when the number of rows changes there is another, for all numbers. The
    layers must not have dropout, and their own hooks are not called again when they are recomputed. Transformers' own
    gradient checkpointing works only in training mode, where dropout is on and caches are dropped.
    """
    recompute, model.compiles_layers = options.gradient_checkpointing, options.compile
    if recompute != "none" or options.compile:
        for layer in model.fsdp_units():
            layer.forward = partial(_forward, recompute, options.compile, layer.forward)


def _forward(recompute: Recompute, compiled: bool, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    run = _compiled() if compiled else _run
    return run(recompute, forward, *args, **kwargs)


def _run(recompute: Recompute, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if recompute == "none":
        return forward(*args, **kwargs)
    if recompute == "selective":
        kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, _keep)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Attention and long products take nearly all the time of a forward pass."""
    name = str(operation)
    keeps = "attention" in name or "attn" in name or (name in _PRODUCTS and args[-1].shape[-2] >= _LONG)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _compiled() -> Callable[..., Any]:
    # the checkpoint inside: torch does not compile what a checkpoint calls, and so can choose what to keep
    limits: dict[str, Any] = {"recompile_limit": _MOST_GRAPHS, "isolate_recompiles": True}
    return torch.compile(_run, **limits)
