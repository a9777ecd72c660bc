"""LoRA by peft: low-rank adapters inside a policy, its own weights frozen."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from rlinf_lite.config.schema import LoraConfig


def add_adapters(policy: nn.Module, cfg: LoraConfig) -> None:
    """Put adapters into `policy`, in place; they, the value head and `cfg.also_train` are all that trains then.

    Raises:
        ValueError: where a name in `cfg` is none of the policy's.
    """
    import peft

    trained = ["value_head", *cfg.also_train]
    unknown = [name for name in trained if not isinstance(getattr(policy, name, None), nn.Module | nn.Parameter)]
    if unknown:
        known = ", ".join(name for name, _ in policy.named_children())
        raise ValueError(f"model.lora.also_train: the policy has no {', '.join(unknown)}. It has {known}")
    config = peft.LoraConfig(
        r=cfg.rank,
        lora_alpha=cfg.alpha or cfg.rank,
        target_modules=cfg.targets,
        exclude_modules=rf"({'|'.join(map(re.escape, trained))})\..*",
        init_lora_weights="gaussian",
    )
    peft.inject_adapter_in_model(config, policy)
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_("lora_" in name or name.split(".")[0] in trained)
