"""LoRA by peft: low-rank adapters inside a policy, its own weights frozen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from rlinf_lite.models.vla.card import LoraOptions


def add_adapters(policy: nn.Module, lora: Mapping[str, Any]) -> None:
    """Put adapters as `model.options.lora` has them into `policy`, in place.

    They, the value head and the modules of `also_train` are all that trains then.

    Raises:
        ValueError: where `also_train` or `targets` names what the policy does not have.
    """
    import peft

    trained = ["value_head", *lora["also_train"]]
    unknown = [name for name in trained if not isinstance(getattr(policy, name, None), nn.Module | nn.Parameter)]
    if unknown:
        known = ", ".join(name for name, _ in policy.named_children())
        raise ValueError(f"model.options.lora.also_train: the policy has no {', '.join(unknown)}. It has {known}")
    linears = {name.rpartition(".")[2] for name, module in policy.named_modules() if isinstance(module, nn.Linear)}
    usual = LoraOptions().targets  # of which a policy has those that its architecture has
    unknown = [name for name in lora["targets"] if name not in linears and name not in usual]
    if unknown:
        known = ", ".join(sorted(linears))
        raise ValueError(
            f"model.options.lora.targets: no linear layer is called {', '.join(unknown)}. There are {known}"
        )
    config = peft.LoraConfig(
        r=lora["rank"],
        lora_alpha=lora["alpha"] or lora["rank"],
        target_modules=lora["targets"],
        exclude_modules=rf"({'|'.join(map(re.escape, trained))})\..*",
        init_lora_weights="gaussian",
    )
    peft.inject_adapter_in_model(config, policy)
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_("lora_" in name or name.split(".")[0] in trained)


def merge_adapters(policy: nn.Module) -> None:
    """Add the adapters inside `policy` to the weights that they adapt, and take them out, in place."""
    from peft.tuners.lora import LoraLayer

    for name, layer in list(policy.named_modules()):
        if isinstance(layer, LoraLayer):
            layer.merge()
            policy.set_submodule(name, layer.get_base_layer())
    policy.requires_grad_(True)
