"""Tensor parallelism: several ranks compute each layer together on the same rows, with torch's `parallelize_module` and
transformers' plan for the model's family (`base_model_tp_plan`).

Attention is split by heads and the MLP by its inner width: the rows of weights that read the hidden states, and the
columns of weights that write them. Modules that the plan does not name (embeddings, output layer, norms) are whole on
every rank. Every parameter is a DTensor, so that gradient norms, checkpoints and weight sync see the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from rlinf_lite.models.text.card import SPLIT
from rlinf_lite.models.text.causal_lm import LanguageModel, TokenOutput, UnsupportedModelError
from rlinf_lite.models.text.supported import check_equal, probe_tokens, refusing


class _Whole(ParallelStyle):
    """Keeps parameters whole on every rank. The input (`of_input`) is whole too, or split along a dimension that the
    parameters do not have."""

    def __init__(self, of_input: Placement) -> None:
        super().__init__()
        self._of_input = of_input

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def hold(name: str, part: nn.Module, mesh: DeviceMesh) -> None:
            for key, parameter in part.named_parameters(recurse=False):
                whole = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
                part.register_parameter(key, nn.Parameter(whole, parameter.requires_grad))

        def take(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return DTensor.from_local(inputs[0], mesh, [self._of_input], run_check=False), *inputs[1:]

        def give(module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
            return outputs.to_local()

        return distribute_module(module, device_mesh, hold, take, give)


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "replicated_with_grad_allreduce": lambda: _Whole(Shard(2)),  # norms per head, input [B, L, heads, width]
}


def split_layers(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Split a model, which every rank has whole, over the ranks of a one-dimensional mesh, in place.

    Raises UnsupportedModelError if transformers has no plan for the family, or one with unknown styles, if heads or
    width do not divide by the number of ranks, or if results or gradients of the split model differ from the whole's.
    """
    own, size = model.language_model, mesh.size()
    config = own.config.get_text_config()
    kind, plan = config.model_type, dict(config.base_model_tp_plan or {})
    unknown = sorted(set(plan.values()) - set(_STYLES))
    if not plan or unknown:
        reason = f"its plan has {', '.join(unknown)}" if unknown else "transformers has no plan for it"
        text = f"actor.strategy: tensor_parallel cannot split models of type {kind!r}: {reason}"
        raise UnsupportedModelError(f"{text}. Use fsdp, or a model of the layout of Llama, Qwen2 or Qwen3")
    for name in SPLIT:
        number = getattr(config, name, size)
        if number % size:
            raise UnsupportedModelError(
                f"actor.tensor_model_parallel_size: {size} ranks do not divide {name} = {number} of the model "
                f"({number} / {size} = {number / size:.4g}). Use a divisor"
            )
    with refusing(model):
        expected, wanted = _probe(model)
        places = [(module, name, id(x)) for module in own.modules() for name, x in _parameters(module)]
        parallelize_module(own.base_model, mesh, {name: _STYLES[style]() for name, style in plan.items()})
        for module in own.modules():
            if any(not isinstance(x, DTensor) for _, x in _parameters(module)):
                parallelize_module(module, mesh, _Whole(Replicate()))
        first: dict[int, Any] = {}
        for module, name, key in places:  # tie again the parameters that were tied
            setattr(module, name, first.setdefault(key, getattr(module, name)))
        found, gradients = _probe(model)
    what = "a model that is split over ranks"
    check_equal(model, f"numbers of {what}", found, expected, 1 + expected.abs().max())
    for name, gradient in gradients.items():  # wrong if a whole parameter's partial gradients are not summed
        check_equal(model, f"gradients of {name} in {what}", gradient, wanted[name], 1 + wanted[name].abs().max())


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """A module's own parameters, under each of their names."""
    return module.named_parameters(recurse=False, remove_duplicate=False)


def _probe(model: LanguageModel) -> tuple[Tensor, dict[str, Tensor]]:
    """The model's results for some tokens, the same on all ranks, and the gradients of its parameters with at most one
    dimension, as training computes them."""
    own = model.language_model
    is_flash = "flash" in own.config._attn_implementation  # flash attention has no float32
    ids = probe_tokens(model, 8, seed=0)[None]
    small = {name: x for name, x in own.named_parameters() if x.requires_grad and x.dim() <= 1}
    with torch.set_grad_enabled(bool(small)), torch.autocast(own.device.type, torch.bfloat16, enabled=is_flash):
        found = model(ids, torch.ones_like(ids), 4)
        output: Tensor = found.logprobs if isinstance(found, TokenOutput) else found
        parts = torch.autograd.grad(output.float().sum(), [*small.values()], allow_unused=True) if small else ()
    gradients = {
        name: whole_gradient(parameter, gradient)
        for (name, parameter), gradient in zip(small.items(), parts, strict=True)
        if gradient is not None
    }
    return output.detach().float(), gradients


def summed_gradient(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient in its parameter's layout. For a whole parameter that served a part of the heads on each rank, this
    sums the ranks' partial gradients."""
    placements = getattr(parameter, "placements", None)
    if isinstance(gradient, DTensor) and gradient.placements != placements:
        return gradient.redistribute(placements=placements)
    return gradient


def whole_gradient(parameter: Tensor, gradient: Tensor) -> Tensor:
    summed = summed_gradient(parameter, gradient)
    return (summed.full_tensor() if isinstance(summed, DTensor) else summed).float()
