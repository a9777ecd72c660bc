"""What a directory says of the flow policy in it, ours or published; importable without torch.

Widths come from the shapes of the tensors. Numbers of heads, which shapes do not say, and of layers, of which some may
be missing, come from `config.json`, from the variant that it names, or from the `config.json` of the vision-language
model.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
import sys
from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf_lite.cards import Observed, Problem, ProblemError
from rlinf_lite.config.resources import policy_config, start_dir
from rlinf_lite.models.flow.config import (
    OPENPI_CAMERAS,
    PUBLISHED,
    Family,
    FlowConfig,
    Layout,
    LeRobotRules,
    Norm,
    StatisticsError,
    Tower,
    Transformer,
    fresh_config,
    unseen_cameras,
    with_run_settings,
)

if TYPE_CHECKING:
    from rlinf_lite.config.schema import Config

Shapes = Mapping[str, tuple[int, ...]]
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
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
"""Of modules of ours, the published beginning of their tensors' names; the first that fits."""
TIED = {
    f"{_PI}paligemma.model.language_model.embed_tokens.weight": f"{_PI}paligemma.lm_head.weight",
    f"{_SMOLVLA}vlm.model.text_model.embed_tokens.weight": f"{_SMOLVLA}vlm.lm_head.weight",
}
"""Where `tied_embeddings`, another name of the same tensor: files have one of the two, or both. Where both differ,
nobody reads the second."""
UNREAD = {f"{_PI}gemma_expert.lm_head.weight", *TIED.values()}
"""What no forward pass reads, where it is not the input embedding."""
_VARIANTS = {"gemma_2b": FlowConfig.text, "gemma_300m": FlowConfig.expert}
_LEROBOT_ONLY = {
    "use_relative_actions": False,
    "use_visual_memory": False,
    "use_proprioceptive_memory": False,
    "n_obs_steps": 1,
    "time_sampling_beta_alpha": 1.5,
    "time_sampling_beta_beta": 1.0,
    "time_sampling_scale": 0.999,
    "time_sampling_offset": 0.001,
    "add_image_special_tokens": False,
    "adapt_to_pi_aloha": False,
    "use_delta_joint_actions_aloha": False,
}
"""What LeRobot can be told and is not built here: the values that are."""
_SMOLVLM = ("HuggingFaceTB/SmolVLM2-500M-Video-Instruct", "HuggingFaceTB/SmolVLM2-500M-Instruct")
_SMOLVLM_CONFIG: dict[str, Any] = {  # of what their config.json says
    "scale_factor": 4,
    "vision_config": {"num_attention_heads": 12, "num_hidden_layers": 12},
    "text_config": {"num_attention_heads": 15, "num_hidden_layers": 32},
}
_OPENPI_DELTA_DIMS = 6  # of its LIBERO transform: all but the gripper
_RELATIVE = ("relative_actions_processor", "absolute_actions_processor")
_STEPS = (
    *_RELATIVE, "rename_observations_processor", "to_batch_processor", "smolvla_new_line_processor",
    "pi0_new_line_processor", "pi05_prepare_state_tokenizer_processor_step", "tokenizer_processor", "device_processor",
    "normalizer_processor", "unnormalizer_processor",
)  # fmt: skip
"""LeRobot's, whose work is done here; what another one does is not."""
_NORMS: dict[str, Norm] = {
    "MEAN_STD": "mean_std",
    "QUANTILES": "quantiles",
    "MIN_MAX": "min_max",
    "IDENTITY": "identity",
}


class UnsupportedFlowError(ValueError):
    """A published directory with a part that is not built here, or that says too little of itself."""


def flow_config(config: Config, seen: Observed) -> FlowConfig:
    """That of the checkpoint which a run starts from, or of `model.options.size`, with what the run says of it.

    Raises:
        ProblemError: where the checkpoint cannot serve what the run wants.
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
            text = f"is {model.id}, and {directory} holds {cfg.family}. Set it to that"
            raise ProblemError(Problem("model.id", text))
    problem = unseen_cameras(cfg, seen.cameras)
    if problem:
        raise ProblemError(Problem("model.options.cameras", problem))
    for what, own, shown in (("actions", cfg.action_dim, seen.action_dim), ("state", cfg.state_dim, seen.state_dim)):
        if own not in (shown, 0):
            text = f"its {what} have {own} numbers, and those of {config.env.task} {shown}: it is of another robot"
            hint = f"Where the last of them are padding, set model.options.{what.removesuffix('s')}_dim to {shown}"
            raise ProblemError(Problem("rollout.model_dir", f"{text}. {hint}"))
    return cfg


def read_config(directory: Path, asset_id: str | None = None) -> FlowConfig:
    """The settings of the policy in `directory`; `asset_id` as in the options.

    Raises:
        UnsupportedFlowError: where there is no flow policy, or one with a part that is not built here.
        StatisticsError: where there are no statistics, or those that are named are not there.
    """
    try:
        config = policy_config(directory)
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
    """Whose weights are in a directory, by the names of its tensors; None: of no flow policy. Where they cannot be
    read, what `config` (config.json) says: reading it as that one says what is wrong."""
    try:
        return _family(_shapes(directory))
    except (OSError, ValueError):
        said = config.get("type", "pi0" if "paligemma_variant" in config else None)
        return said if said in NAMES else None


def own_files(directory: Path, *patterns: str) -> list[Path]:
    """Files of a checkpoint, in its folders too, by their names; none of another checkpoint that was saved below it."""
    others = {file.parent for name in (WEIGHTS, INDEX) for file in directory.rglob(name)} - {directory}
    found = {file for pattern in patterns for file in directory.rglob(pattern) if file.is_file()}
    return sorted(file for file in found if others.isdisjoint(file.parents))


def weight_files(directory: Path) -> list[Path]:
    """`model.safetensors`, where it is there, as published loaders do; or all shards that its index names.

    Raises UnsupportedFlowError where a shard is not there, or the index does not name any.
    """
    single, index = directory / WEIGHTS, directory / INDEX
    if single.is_file() or not index.is_file():
        return [single] if single.is_file() else []
    found = [directory / name for name in sorted(set(_read_json(index).get("weight_map", {}).values()))]
    missing = [file.name for file in found if not file.is_file()]
    if missing or not found:
        text = f"{index} names {', '.join(missing) or 'no file'}{', which is not there' * bool(missing)}"
        raise UnsupportedFlowError(f"{text}. Download it again")
    return found


def _family(shapes: Shapes) -> Family | None:
    plain = {name.removeprefix("model.") for name in shapes}
    if any(name.startswith(_SMOLVLA) for name in plain):
        return "smolvla"
    if any(name.startswith(_PI) for name in plain):
        # by more than one tensor of pi0.5's: one that is missing is named, where it is read as what it is
        times = any(name.startswith("time_mlp_") or name.endswith("norm.dense.weight") for name in plain)
        return "pi05" if times else "pi0"
    return None


def _read_json(file: Path, content: bytes | None = None) -> Any:
    """Of a file, or of the part of it that `content` is."""
    try:
        return json.loads(file.read_bytes() if content is None else content)
    except ValueError as error:
        raise UnsupportedFlowError(f"{file} is no JSON: {error}. Download it again") from error


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """What the beginning of a safetensors file says of each tensor, and where their bytes begin."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = 8 + int.from_bytes(stream.read(8), "little")
        header: dict[str, Any] = _read_json(file, stream.read(start - 8)) if 8 < start <= size else {}
    header.pop("__metadata__", None)
    if not header or size < start + max(entry["data_offsets"][1] for entry in header.values()):
        text = f"has {size} bytes, and they are no whole safetensors file: it is cut off, or a git-lfs pointer"
        raise UnsupportedFlowError(f"{file} {text}. Download it again (git lfs pull)")
    return header, start


def _numbers(file: Path, beginnings: tuple[str, ...]) -> dict[str, list[float]]:
    """The floating-point tensors of a safetensors file whose names begin so."""
    (header, start), found = _header(file), {}
    with file.open("rb") as stream:
        for name, entry in header.items():
            letter = {"F16": "e", "BF16": "f", "F32": "f", "F64": "d"}.get(entry["dtype"])
            if letter is not None and name.startswith(beginnings):
                first, last = entry["data_offsets"]
                stream.seek(start + first)
                content = stream.read(last - first)
                if entry["dtype"] == "BF16":  # the upper half of a float32
                    content = b"".join(b"\0\0" + content[n : n + 2] for n in range(0, len(content), 2))
                found[name] = list(struct.unpack(f"<{len(content) // struct.calcsize(letter)}{letter}", content))
    return found


def _shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Of the weights in a directory, from the files' headers alone; empty where there are none."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(directory):
        shapes |= {name: tuple(entry["shape"]) for name, entry in _header(file)[0].items()}
    return shapes


def _published_config(directory: Path, config: Mapping[str, Any], asset_id: str | None) -> FlowConfig:
    shapes = _shapes(directory)
    family = _family(shapes)
    if family is None:
        raise UnsupportedFlowError(f"{directory}: the tensors of {WEIGHTS} are not those of pi0, pi05 or smolvla")
    if config.get("type", family) != family:
        raise UnsupportedFlowError(f"{directory}: config.json says {config['type']}, and the tensors are {family}'s")
    begin = "model." if any(name.startswith((f"model.{_PI}", f"model.{_SMOLVLA}")) for name in shapes) else ""
    layout: Layout = "lerobot" if "type" in config or begin else "openpi"
    shapes = {name.removeprefix("model."): shape for name, shape in shapes.items()}
    cfg = FlowConfig(**{**PUBLISHED[family], "family": family, "layout": layout, "prefix": begin})
    said = _smolvla(directory, config) if family == "smolvla" else _pi(directory, config)
    heads, depths, tied = said.pop("heads"), said.pop("depths"), said.get("tied_embeddings", True)
    cfg = replace(cfg, **{**_sizes(shapes, NAMES[family], heads, depths, tied), **said})
    if "noise_head.logvar_min" in shapes:  # RLinf's: logarithms of variances
        found = [_numbers(file, ("noise_head.logvar_",)).items() for file in weight_files(directory)]
        limits = dict(itertools.chain(*found))
        low, high = (math.exp(0.5 * limits[f"noise_head.logvar_{end}"][0]) for end in ("min", "max"))
        cfg = replace(cfg, noise_range=(low, high))
    if cfg.text.depth != cfg.expert.depth or cfg.text.head_dim != cfg.expert.head_dim:
        raise UnsupportedFlowError(
            f"{directory}: the expert has {cfg.expert.depth} layers with heads of {cfg.expert.head_dim}, and the "
            f"language model {cfg.text.depth} with heads of {cfg.text.head_dim}. They must be alike"
        )
    if layout == "lerobot" and asset_id is not None:
        text = f"LeRobot's statistics have no names, and model.options.asset_id is {asset_id!r}. Set it to null"
        raise StatisticsError(f"{directory}: {text}")
    cfg = replace(
        cfg, **_lerobot(directory, config, cfg) if layout == "lerobot" else _openpi(directory, config, cfg, asset_id)
    )
    if family == "pi05":  # whose state is words of the prompt, and no tensor is as wide
        cfg = replace(cfg, max_state_dim=max(cfg.max_state_dim, cfg.state_dim))
    for what, own, most in (
        ("actions", cfg.action_dim, cfg.max_action_dim),
        ("state", cfg.state_dim, cfg.max_state_dim),
    ):
        if own > most:
            text = f"its {what} have {own} numbers, and the tensors take {most}. They do not belong together"
            raise UnsupportedFlowError(f"{directory}: {text}")
    return cfg


# sizes


def _sizes(
    shapes: Shapes, names: Mapping[str, str], heads: tuple[int, ...], depths: tuple[int | None, ...], tied: bool
) -> dict[str, Any]:
    """What the shapes of the tensors say, given the numbers of heads and layers of the vision tower and both
    transformers. Layers of which there is no number (None) are counted."""
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
    """Of an MLP (RLinf's heads) whose layers are `<prefix><number>...weight`; empty where there is none."""
    names = [name for name in shapes if name.startswith(prefix) and name.endswith(".weight")]
    layers = {int(name[len(prefix) :].partition(".")[0]): shapes[name][0] for name in names}
    return tuple(layers[number] for number in sorted(layers)[:-1])


def _pi(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of heads and layers, by the names of the variants; `tiny` is in checkpoints that no variant names."""
    if tiny := config.get("tiny"):
        vision, text, expert = tiny["vision"], tiny["text"], tiny["expert"]
        return {
            "heads": (vision["num_attention_heads"], text["num_heads"], expert["num_heads"]),
            "depths": (vision.get("num_hidden_layers"), text.get("depth"), expert.get("depth")),
        }
    parts: list[Tower | Transformer] = [FlowConfig.vision]
    for key in ("paligemma_variant", "action_expert_variant"):
        if config.get(key) not in _VARIANTS:
            text = f"config.json names the {key} {config.get(key)!r}. Known: {', '.join(_VARIANTS)}"
            raise UnsupportedFlowError(f"{directory}: {text}")
        parts.append(_VARIANTS[config[key]])
    return {"heads": tuple(part.num_heads for part in parts), "depths": tuple(part.depth for part in parts)}


def _smolvla(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the vision-language model's own config.json says; that of the published one need not be there."""
    named, published = config["vlm_model_name"], PUBLISHED["smolvla"]
    if not config["resize_imgs_with_padding"]:
        raise UnsupportedFlowError(f"{directory}: resize_imgs_with_padding is null; a width and height are needed")
    file = directory / named / "config.json"
    if not file.is_file() and named not in _SMOLVLM:
        raise UnsupportedFlowError(
            f"{directory}: vlm_model_name is {named!r}, whose sizes are not known. Put its config.json into "
            f"{directory / 'vlm'} and set vlm_model_name to ./vlm"
        )
    vlm: Mapping[str, Any] = _read_json(file) if file.is_file() else _SMOLVLM_CONFIG
    vision, text = vlm["vision_config"], vlm["text_config"]
    crosses = config.get("attention_mode", "cross_attn") == "cross_attn"
    # of the language model's layers the first num_vlm_layers are kept, above 0; the expert has as many where not said
    kept, whole, own = config.get("num_vlm_layers"), text.get("num_hidden_layers"), config.get("num_expert_layers") or 0
    depth = None if kept is None else min(kept, whole or kept) if kept > 0 else whole
    return {
        "heads": (vision["num_attention_heads"], text["num_attention_heads"], text["num_attention_heads"]),
        "depths": (vision.get("num_hidden_layers"), depth, own if own > 0 else depth),
        "tied_embeddings": bool(vlm.get("tie_word_embeddings") or text.get("tie_word_embeddings")),
        "cross_every": max(config.get("self_attn_every_n_layers", 2), 0) if crosses else 1,
        "resize_to": tuple(config["resize_imgs_with_padding"]),
        "rms_eps": text.get("rms_norm_eps", published["rms_eps"]),
        "pixel_shuffle": vlm["scale_factor"],
        "vision_eps": vision.get("layer_norm_eps", FlowConfig.vision_eps),
    }


# behaviour and statistics


def _openpi(directory: Path, config: Mapping[str, Any], cfg: FlowConfig, asset_id: str | None) -> dict[str, Any]:
    """What openpi's config.json says, which is little, and its statistics."""
    tiny = config.get("tiny", {})
    files = {
        file.parent.relative_to(directory).as_posix().removeprefix("assets/"): file
        for file in own_files(directory, "norm_stats.json")
    }
    named = asset_id or tiny.get("asset_id") or (next(iter(files)) if len(files) == 1 else None)
    if named not in files:
        wanted = f"no statistics of {named!r}" if named else "no one set of statistics"
        raise StatisticsError(
            f"{directory}: there are {wanted} (assets/<id>/norm_stats.json). It has {', '.join(files) or 'none'}. Set "
            "model.options.asset_id"
        )
    content = _read_json(files[named]).get("norm_stats", {})
    if not {"state", "actions"} <= content.keys():
        raise StatisticsError(f"{files[named]} has no norm_stats of state and actions, but of {list(content)}")
    statistics = {
        name: {key: numbers for key, numbers in entry.items() if numbers is not None} for name, entry in content.items()
    }
    most = cfg.max_state_dim if cfg.family != "pi05" else sys.maxsize  # longer ones are cut
    return {
        "statistics": statistics,
        "asset_id": named,
        "action_dim": tiny.get("action_env_dim") or min(len(statistics["actions"]["mean"]), cfg.max_action_dim),
        "state_dim": tiny.get("state_dim") or min(len(statistics["state"]["mean"]), most),
        "horizon": config["action_horizon"],
        "num_action_chunks": config["action_horizon"],
        "slots": tuple(tiny.get("image_keys", OPENPI_CAMERAS)),
        "max_prompt_length": config.get("max_token_len", cfg.max_prompt_length),
        "state_in_prompt": config.get("discrete_state_input", cfg.state_in_prompt) and cfg.family == "pi05",
        "delta_dims": _OPENPI_DELTA_DIMS if tiny.get("extra_delta_transform") else 0,
    }


def _lerobot(directory: Path, config: Mapping[str, Any], cfg: FlowConfig) -> dict[str, Any]:
    """What LeRobot's config.json and its processors say."""
    for key, usual in _LEROBOT_ONLY.items():
        if config.get(key) not in (None, usual):
            raise UnsupportedFlowError(f"{directory}: {key} is {config[key]!r}; only {usual!r} is supported")
    normalizer, statistics = _lerobot_statistics(directory)
    # what was computed with wins over what was configured; kinds that are not named are left as they are
    kinds = normalizer.get("norm_map") or config["normalization_mapping"]
    norms = {name: _NORMS.get(kinds.get(name, "IDENTITY")) for name in ("STATE", "ACTION")}
    if None in norms.values():
        raise UnsupportedFlowError(f"{directory}: {kinds} has kinds of normalisation other than {', '.join(_NORMS)}")
    if kinds.get("VISUAL", "IDENTITY") != "IDENTITY" or normalizer.get("normalize_observation_keys") is not None:
        text = "pictures are normalised, or the state is not (VISUAL of norm_map, normalize_observation_keys)"
        raise UnsupportedFlowError(f"{directory}: {text}; only the usual is supported, IDENTITY and null")
    if (directory / "policy_postprocessor.json").is_file():
        back, other = _lerobot_statistics(directory, "policy_postprocessor.json")
        same = [
            np.array_equal(np.array(numbers, np.float32), np.array(other["actions"][key], np.float32), equal_nan=True)
            for key, numbers in statistics["actions"].items()
            if key in other["actions"]
        ]
        if not all(same) or _NORMS.get((back.get("norm_map") or kinds).get("ACTION", "IDENTITY")) != norms["ACTION"]:
            text = "policy_postprocessor.json and its file say another thing of actions than policy_preprocessor.json"
            raise StatisticsError(f"{directory}: {text}. Save both with the same statistics and norm_map")
    inputs, horizon = config["input_features"], config["chunk_size"]
    pictures = [name for name, feature in inputs.items() if feature["type"] == "VISUAL"]
    slots = [name.removeprefix("observation.").removeprefix("images.") for name in pictures]
    slots = [name for name in slots if not name.startswith("empty_camera_")]
    if not slots:
        raise UnsupportedFlowError(f"{directory}: input_features of config.json have no camera")
    height_width = config.get("image_resolution", (cfg.resize_to[1], cfg.resize_to[0]))
    return {
        "statistics": statistics,
        "norm_eps": normalizer.get("eps", 1e-8),
        "action_dim": config["output_features"]["action"]["shape"][0],
        "state_dim": inputs["observation.state"]["shape"][0] if "observation.state" in inputs else 0,
        "state_norm": norms["STATE"],
        "action_norm": norms["ACTION"],
        "horizon": horizon,
        "num_action_chunks": min(config.get("n_action_steps", horizon), horizon),
        "slots": tuple(slots),
        "resize_to": (height_width[1], height_width[0]),
        "max_prompt_length": config.get("tokenizer_max_length", cfg.max_prompt_length),
        "num_steps": config.get("num_inference_steps", config.get("num_steps", cfg.num_steps)),
        "min_period": config.get("min_period", cfg.min_period),
        "max_period": config.get("max_period", cfg.max_period),
        "lerobot_preprocessing": _trained_by(directory, config) if cfg.knows_lerobots_rules else None,
        # of pi0.5 no tensor is as wide
        "max_state_dim": config.get("max_state_dim", 32) if cfg.family == "pi05" else cfg.max_state_dim,
    }


def _trained_by(directory: Path, config: Mapping[str, Any]) -> LeRobotRules | None:
    """The rules of the release of LeRobot that trained: relative actions are in what 0.5.1 and later write, and
    `cudnn_deterministic` is in the train_config.json of 0.5.0 and later. None: no file says."""
    file = directory / "train_config.json"
    training = _read_json(file) if file.is_file() else None
    steps = [step.get("registry_name") for step in _read_json(directory / "policy_preprocessor.json")["steps"]]
    if "use_relative_actions" in config or _RELATIVE[0] in steps or "cudnn_deterministic" in (training or {}):
        return "v0.5"
    return None if training is None else "v0.4"


def picture_sizes(config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Height and width of the cameras' pictures, as LeRobot's config.json says them; [] of other layouts."""
    shapes = [one["shape"] for one in config.get("input_features", {}).values() if one["type"] == "VISUAL"]
    return [(height, width) for _, height, width in shapes]


def _lerobot_statistics(
    directory: Path, processor: str = "policy_preprocessor.json"
) -> tuple[dict[str, Any], dict[str, dict[str, list[float]]]]:
    """The settings of the normaliser among a processor's steps, and the numbers of its file.

    Raises:
        StatisticsError: where there are none.
        UnsupportedFlowError: where the processor makes actions relative to the state, or does what is not known here.
    """
    file = directory / processor
    steps = _read_json(file)["steps"] if file.is_file() else []
    for step in steps:
        if step.get("registry_name") in _RELATIVE and step.get("config", {}).get("enabled"):
            text = f"the {step['registry_name']} of {processor} is enabled; only false is supported"
            raise UnsupportedFlowError(f"{directory}: {text}")
    unknown = [name for step in steps if (name := step.get("registry_name", step.get("class"))) not in _STEPS]
    if unknown:
        text = f"{processor} has steps that are not known here: {', '.join(map(str, unknown))}"
        raise UnsupportedFlowError(f"{directory}: {text}. Remove those that change nothing")
    named = [step for step in steps if "normalizer" in step.get("registry_name", "") and "state_file" in step]
    if not named or not (directory / named[0]["state_file"]).is_file():
        raise StatisticsError(
            f"{directory}: there are no statistics: {processor} names "
            f"{named[0]['state_file'] + ', which is not there' if named else 'no file of a normalizer_processor'}"
        )
    found: dict[str, dict[str, list[float]]] = {"state": {}, "actions": {}}
    features = {"observation.state": "state", "action": "actions"}
    for name, numbers in _numbers(directory / named[0]["state_file"], tuple(features)).items():
        feature, _, statistic = name.rpartition(".")
        if feature in features:  # observation.state.velocity is another one
            found[features[feature]][statistic] = numbers
    return named[0].get("config", {}), found
