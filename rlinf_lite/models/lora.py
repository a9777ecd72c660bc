"""Low-rank adapters (peft's) in a policy or a language model: options, adding and merging. Importable without torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from rlinf_lite.cards import NonNegativeInt, PositiveInt, Problem, Section

if TYPE_CHECKING:
    from torch import nn


USUAL_TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "gate_proj", "up_proj", "down_proj"),
    *("fc1", "fc2", "fc3", "lm_head"),
)


_OTHERS = (
    "is {}, and the checkpoint has adapters of {}. Say the same, or merge them before ({}.merge_adapters, then "
    "save_pretrained)"
)
ADAPTER, ADAPTER_CONFIG = "adapter", "adapter_config.json"
"""Directory of the adapters in a language model's directory, and peft's config file there."""


class LoraOptions(Section):
    rank: NonNegativeInt = 0
    """Rank of the adapters; 0: train all weights."""
    alpha: PositiveInt | None = None
    """Adapters are scaled by alpha / rank; null: rank."""
    targets: list[str] = list(USUAL_TARGETS)
    """Names of the linear layers that get an adapter."""
    also_train: list[str] = []
    """Modules whose own weights train too, besides those of the heads, for example proprio_projector."""


class LanguageLoraOptions(Section):
    rank: NonNegativeInt = 0
    """Rank of the adapters; 0: train all weights."""
    alpha: PositiveInt | None = None
    """Adapters are scaled by alpha / rank; null: rank."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the linear layers that get an adapter; all-linear: all but the output layer. Experts of a mixture, which
    are one tensor, get none."""


def lacks_adapters(
    own: Mapping[str, Any], wanted: Mapping[str, Any], policy: str, key: str = "model.options.lora"
) -> bool:
    """Whether a policy with the adapters `own` (empty: none) must still get those that a run wants.

    `key` is the run's config key. Raises ValueError if the policy has other adapters than `wanted`.
    """
    if own and wanted["rank"] and own != wanted:
        raise ValueError(f"{key}: {_OTHERS.format(dict(wanted), dict(own), policy)}")
    return bool(wanted["rank"]) and not own


def other_adapters(own: Mapping[str, Any], wanted: Mapping[str, Any], policy: str) -> Iterator[Problem]:
    """The error of `lacks_adapters` as a problem of a config, found before anything is built."""
    if own and wanted["rank"] and own != wanted:
        yield Problem("model.options.lora", _OTHERS.format(dict(wanted), dict(own), policy))


def add_adapters(
    policy: nn.Module,
    lora: Mapping[str, Any],
    trained: Collection[str] = (),
    without: Collection[str] = (),
    key: str = "model.options.lora",
    may_lack: Collection[str] = USUAL_TARGETS,
) -> None:
    """Put adapters into `policy`. Afterwards only they and the modules `trained` train.

    `trained` and `without` get no adapters; `without` stay frozen. `lora` is the config section `key`: `rank`, `alpha`
    and `targets`. Targets in `may_lack` need not exist, as architectures differ.

    Raises ValueError for other targets that do not exist, for a target that shares its weights with another module, and
    for `trained` modules that do not exist or are in `without`.
    """
    import peft
    from peft.tuners.lora import LoraLayer

    from rlinf_lite.models.adapters import AdaptedLinear
    from rlinf_lite.models.tensor_files import tied_names

    parts = [name for name, _ in (*policy.named_modules(), *policy.named_parameters())]
    missing = [name for name in trained if name not in parts]
    if missing:
        known = ", ".join(name for name, _ in policy.named_modules() if re.fullmatch(r"\w+(\.[a-z]\w*)?", name))
        raise ValueError(f"{key}.also_train: the policy has no {', '.join(missing)}. It has {known}")
    frozen = [name for name in trained if any(f"{name}.".startswith(f"{module}.") for module in without)]
    if frozen:
        raise ValueError(f"{key}.also_train: {', '.join(frozen)} would stay frozen (model.options.trainable)")
    linears = {name.rpartition(".")[2] for name, module in policy.named_modules() if is_linear(module)}
    places = [(name, module) for name, module in policy.named_modules(remove_duplicate=False) if is_linear(module)]
    targets, excluded = lora["targets"], [*trained, *without]
    unknown = [x for x in targets if x not in linears and x not in may_lack]
    if unknown:
        known = ", ".join(sorted(linears))
        raise ValueError(f"{key}.targets: no linear layer is called {', '.join(unknown)}. There are {known}")
    config = peft.LoraConfig(
        r=lora["rank"],
        lora_alpha=lora["alpha"] or lora["rank"],
        target_modules=targets,
        exclude_modules=rf"({'|'.join(map(re.escape, excluded))})\..*" if excluded else None,
        init_lora_weights="gaussian",
    )
    holders = [[policy.get_submodule(each.rpartition(".")[0]) for each in pair] for pair in tied_names(policy).items()]
    peft.inject_adapter_in_model(config, policy)
    layers: dict[Any, Any] = {x.get_base_layer(): x for x in policy.modules() if isinstance(x, LoraLayer)}
    for name, module in places:
        if module in layers and any(module in pair and pair[0] is not pair[1] for pair in holders):
            what = "shares its weights with another module; with an adapter they would differ. Leave it out"
            raise ValueError(f"{key}.targets: {name} {what}")
        if module in layers and policy.get_submodule(name) is module:  # peft replaces only its first name
            policy.set_submodule(name, layers[module])
    for layer in layers.values():
        layer.__class__ = AdaptedLinear
    for name, parameter in policy.named_parameters():
        whole = any(f"{name}.".startswith(f"{module}.") for module in trained)
        parameter.requires_grad_("lora_" in name or whole)


def is_linear(module: nn.Module) -> bool:
    """Whether the module can get an adapter: a linear layer, or GPT-2's Conv1D, which is one too."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def merge_adapters(policy: nn.Module) -> None:
    """Merge the adapters into the weights and remove them; then all weights train."""
    from peft.tuners.lora import LoraLayer

    for name, layer in list(policy.named_modules(remove_duplicate=False)):
        if isinstance(layer, LoraLayer):
            if not layer.merged:  # it may have been merged under another name
                layer.merge()
            policy.set_submodule(name, layer.get_base_layer())
    policy.requires_grad_(True)
