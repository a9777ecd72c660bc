"""Reads the settings of a flow policy from its directory, ours or a published one; importable without torch.

Widths come from the shapes of the tensors. Numbers of heads (not visible in shapes) and of layers (files may lack some)
come from `config.json`, from the variant that it names, or from the `config.json` of the vision-language model.
`openpi.py` and `lerobot.py` read how inputs and outputs are processed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_lite.cards import Observed, Problem, ProblemError
from rlinf_lite.config.resources import policy_config, start_dir
from rlinf_lite.models.flow.config import (
    PUBLISHED,
    Family,
    FlowConfig,
    Layout,
    StatisticsError,
    Tower,
    Transformer,
    fresh_config,
    unseen_cameras,
    with_run_settings,
)
from rlinf_lite.models.flow.files import WEIGHTS, UnsupportedFlowError, read_numbers, read_shapes, weight_files
from rlinf_lite.models.flow.lerobot import read_lerobot, read_vlm
from rlinf_lite.models.flow.openpi import read_openpi, read_variants

if TYPE_CHECKING:
    from rlinf_lite.config.schema import Config

Shapes = Mapping[str, tuple[int, ...]]
_PI, _SMOLVLA = "paligemma_with_expert.", "vlm_with_expert."
_PI_NAMES = {
    "vision.": f"{_PI}paligemma.model.vision_tower.vision_model.",
    "connector.": f"{_PI}paligemma.model.multi_modal_projector.linear.",
    "language.": f"{_PI}paligemma.model.language_model.",
    "expert.": f"{_PI}gemma_expert.model.",
}
_SMOLVLA_NAMES = {
    "vision.": f"{_SMOLVLA}vlm.model.vision_model.",
    "connector.": f"{_SMOLVLA}vlm.model.connector.",
    "language.": f"{_SMOLVLA}vlm.model.text_model.",
    "expert.": f"{_SMOLVLA}lm_expert.",
}
NAMES: dict[Family, dict[str, str]] = {"pi0": _PI_NAMES, "pi05": _PI_NAMES, "smolvla": _SMOLVLA_NAMES}
"""Beginnings of our tensors' names, and of the published names; the first that fits counts."""
TIED = {
    f"{_PI}paligemma.model.language_model.embed_tokens.weight": f"{_PI}paligemma.lm_head.weight",
    f"{_SMOLVLA}vlm.model.text_model.embed_tokens.weight": f"{_SMOLVLA}vlm.lm_head.weight",
}
"""With `tied_embeddings`, the two names of the embedding. Files have one of them, or both; if the two tensors differ,
the second is not read."""
UNREAD = {f"{_PI}gemma_expert.lm_head.weight", *TIED.values()}
"""Tensors that no forward pass reads, unless they are the only copy of the embedding."""


def flow_config(config: Config, seen: Observed) -> FlowConfig:
    """Settings of a run's policy: those of its checkpoint, or of `model.options.size`, changed by the run's options.

    Raises:
        ProblemError: if the checkpoint does not allow what the run asks for.
    """
    model, directory = config.model, start_dir(config)
    if directory is None or not (directory / "config.json").is_file():
        cfg = fresh_config(model.id, model, seen)
    else:
        try:
            cfg = with_run_settings(read_config(directory, model.options.asset_id), model)
        except (UnsupportedFlowError, StatisticsError) as error:
            raise ProblemError(Problem("rollout.model_dir", str(error))) from error
        if cfg.family != model.id:
            text = f"is {model.id}, and {directory} holds {cfg.family}. Set it to {cfg.family}"
            raise ProblemError(Problem("model.id", text))
    problem = unseen_cameras(cfg, seen.cameras)
    if problem:
        raise ProblemError(Problem("model.options.cameras", problem))
    for what, own, shown in (("actions", cfg.action_dim, seen.action_dim), ("state", cfg.state_dim, seen.state_dim)):
        if own not in (shown, 0):
            text = f"its {what} have {own} numbers, and those of {config.env.task} {shown}: it is for another robot"
            hint = f"Where the last of them are padding, set model.options.{what.removesuffix('s')}_dim to {shown}"
            raise ProblemError(Problem("rollout.model_dir", f"{text}. {hint}"))
    return cfg


def read_config(directory: Path, asset_id: str | None = None, config: Mapping[str, Any] | None = None) -> FlowConfig:
    """The settings of the policy in `directory`; `asset_id` as in the options. `config`: the result of `policy_config`,
    if the caller has it already.

    Raises:
        UnsupportedFlowError: if there is no flow policy, or it has an unsupported part.
        StatisticsError: if statistics are missing.
    """
    try:
        config = policy_config(directory) if config is None else config
    except ValueError as error:
        raise UnsupportedFlowError(f"{directory}: config.json, or our additions to it, is no JSON: {error}") from error
    if "rlinf_lite" in config:
        cfg = FlowConfig.from_dict(config["rlinf_lite"]["settings"])
        if asset_id not in (None, cfg.asset_id):
            raise StatisticsError(f"{directory}: there are no statistics of {asset_id!r}, but of {cfg.asset_id!r}")
        return cfg
    try:
        return _published_config(directory, config, asset_id)
    except KeyError as missing:
        text = f"{directory}: neither config.json nor the tensors of {WEIGHTS} have {missing}"
        raise UnsupportedFlowError(text) from missing


def published_family(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The family of the weights in a directory, by the names of the tensors; None: this is no flow policy. If the
    weights cannot be read, the family that `config` (config.json) names; loading it then reports the error.
    """
    try:
        return _family(read_shapes(directory))
    except (OSError, ValueError):
        said = config.get("type", "pi0" if "paligemma_variant" in config else None)
        return said if said in NAMES else None


def _family(shapes: Shapes) -> Family | None:
    plain = {name.removeprefix("model.") for name in shapes}
    if any(name.startswith(_SMOLVLA) for name in plain):
        return "smolvla"
    if any(name.startswith(_PI) for name in plain):
        # any of several names decides, so that a pi0.5 that lacks one of these tensors gets an error that names it
        times = any(name.startswith("time_mlp_") or name.endswith("norm.dense.weight") for name in plain)
        return "pi05" if times else "pi0"
    return None


def _published_config(directory: Path, config: Mapping[str, Any], asset_id: str | None) -> FlowConfig:
    shapes = read_shapes(directory)
    family = _family(shapes)
    if family is None:
        raise UnsupportedFlowError(f"{directory}: the tensors of {WEIGHTS} are not those of pi0, pi05 or smolvla")
    if config.get("type", family) != family:
        raise UnsupportedFlowError(f"{directory}: config.json says {config['type']}, and the tensors are {family}'s")
    begin = "model." if any(name.startswith((f"model.{_PI}", f"model.{_SMOLVLA}")) for name in shapes) else ""
    layout: Layout = "lerobot" if "type" in config or begin else "openpi"
    shapes = {name.removeprefix("model."): shape for name, shape in shapes.items()}
    cfg = FlowConfig(**{**PUBLISHED[family], "family": family, "layout": layout, "prefix": begin})
    said = read_vlm(directory, config) if family == "smolvla" else read_variants(directory, config)
    heads, depths, tied = said.pop("heads"), said.pop("depths"), said.get("tied_embeddings", True)
    cfg = replace(cfg, **{**_sizes(shapes, NAMES[family], heads, depths, tied), **said})
    if "noise_head.logvar_min" in shapes:  # RLinf's noise head: logarithms of variances
        found = [read_numbers(file, ("noise_head.logvar_",)).items() for file in weight_files(directory)]
        limits = dict(itertools.chain(*found))
        low, high = (math.exp(0.5 * limits[f"noise_head.logvar_{end}"][0]) for end in ("min", "max"))
        cfg = replace(cfg, noise_range=(low, high))
    if cfg.text.depth != cfg.expert.depth or cfg.text.head_dim != cfg.expert.head_dim:
        raise UnsupportedFlowError(
            f"{directory}: the expert has {cfg.expert.depth} layers with heads of {cfg.expert.head_dim}, and the "
            f"language model {cfg.text.depth} with heads of {cfg.text.head_dim}. They must be equal"
        )
    if layout == "lerobot" and asset_id is not None:
        text = f"LeRobot's statistics have no names, and model.options.asset_id is {asset_id!r}. Set it to null"
        raise StatisticsError(f"{directory}: {text}")
    if layout == "lerobot":
        cfg = replace(cfg, **read_lerobot(directory, config, cfg))
    else:
        cfg = replace(cfg, **read_openpi(directory, config, cfg, asset_id))
    if family == "pi05":  # its state is part of the prompt, and no tensor has this width
        cfg = replace(cfg, max_state_dim=max(cfg.max_state_dim, cfg.state_dim))
    for what, own, most in (
        ("actions", cfg.action_dim, cfg.max_action_dim),
        ("state", cfg.state_dim, cfg.max_state_dim),
    ):
        if own > most:
            text = f"its {what} have {own} numbers, and the tensors take {most}. They do not belong together"
            raise UnsupportedFlowError(f"{directory}: {text}")
    return cfg


def _sizes(
    shapes: Shapes, names: Mapping[str, str], heads: tuple[int, ...], depths: tuple[int | None, ...], tied: bool
) -> dict[str, Any]:
    """Sizes from the shapes of the tensors. `heads` and `depths`: numbers of heads and layers of the vision tower, the
    language model and the expert; layers are counted if their number is None."""
    vision, language = names["vision."], names["language."]
    width, _, patch, _ = shapes[f"{vision}embeddings.patch_embedding.weight"]
    side = isqrt(shapes[f"{vision}embeddings.position_embedding.weight"][0])
    mlp, depth = shapes[f"{vision}encoder.layers.0.mlp.fc1.weight"][0], depths[0]
    embedding = f"{language}embed_tokens.weight"
    embedding = TIED[embedding] if tied and embedding not in shapes else embedding
    max_action_dim = shapes["action_in_proj.weight"][1]
    found = {
        "vision": Tower(width, depth or _count(f"{vision}encoder.layers.", shapes), mlp, heads[0], side * patch, patch),
        "text": _transformer(language, shapes, heads[1], depths[1]),
        "expert": _transformer(names["expert."], shapes, heads[2], depths[2]),
        "vocab_size": shapes[embedding][0],
        "max_action_dim": max_action_dim,
        "max_state_dim": shapes.get("state_proj.weight", (0, max_action_dim))[1],
        "resize_to": (side * patch, side * patch),
        "value_hidden_sizes": _hidden_sizes(shapes, "value_head.mlp."),
        "noise_hidden_sizes": _hidden_sizes(shapes, "noise_head.mlp_logvar.moduleList."),
    }
    return {name: size for name, size in found.items() if size != ()}


def _transformer(prefix: str, shapes: Shapes, num_heads: int, depth: int | None) -> Transformer:
    depth, first = depth or _count(f"{prefix}layers.", shapes), f"{prefix}layers.0"
    queries, width = shapes[f"{first}.self_attn.q_proj.weight"]
    head_dim = queries // num_heads
    kv_heads = shapes[f"{first}.self_attn.k_proj.weight"][0] // head_dim
    return Transformer(width, depth, shapes[f"{first}.mlp.gate_proj.weight"][0], num_heads, kv_heads, head_dim)


def _count(prefix: str, shapes: Shapes) -> int:
    return len({name[len(prefix) :].partition(".")[0] for name in shapes if name.startswith(prefix)})


def _hidden_sizes(shapes: Shapes, prefix: str) -> tuple[int, ...]:
    """Widths of the hidden layers of an MLP (RLinf's heads) with weights `<prefix><number>...weight`; empty if there is
    no such MLP."""
    names = [name for name in shapes if name.startswith(prefix) and name.endswith(".weight")]
    layers = {int(name[len(prefix) :].partition(".")[0]): shapes[name][0] for name in names}
    return tuple(layers[number] for number in sorted(layers)[:-1])
