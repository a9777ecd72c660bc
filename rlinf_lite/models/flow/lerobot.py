"""Reads the settings that LeRobot writes with the weights: config.json, and the processors before and after the policy;
for SmolVLA also the sizes in the config.json of the vision-language model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_lite.models.flow.config import PUBLISHED, FlowConfig, LeRobotRules, Norm, StatisticsError
from rlinf_lite.models.flow.files import UnsupportedFlowError, read_json, read_numbers

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
"""Settings of LeRobot for which only this value is supported."""
_SMOLVLM = ("HuggingFaceTB/SmolVLM2-500M-Video-Instruct", "HuggingFaceTB/SmolVLM2-500M-Instruct")
_SMOLVLM_CONFIG: dict[str, Any] = {  # a part of their config.json
    "scale_factor": 4,
    "vision_config": {"num_attention_heads": 12, "num_hidden_layers": 12},
    "text_config": {"num_attention_heads": 15, "num_hidden_layers": 32},
}
_RELATIVE = ("relative_actions_processor", "absolute_actions_processor")
_STEPS = (
    *_RELATIVE, "rename_observations_processor", "to_batch_processor", "smolvla_new_line_processor",
    "pi0_new_line_processor", "pi05_prepare_state_tokenizer_processor_step", "tokenizer_processor", "device_processor",
    "normalizer_processor", "unnormalizer_processor",
)  # fmt: skip
"""The supported steps of LeRobot's processors."""
_NORMS: dict[str, Norm] = {
    "MEAN_STD": "mean_std",
    "QUANTILES": "quantiles",
    "MIN_MAX": "min_max",
    "IDENTITY": "identity",
}


def read_lerobot(directory: Path, config: Mapping[str, Any], cfg: FlowConfig) -> dict[str, Any]:
    """Fields of a FlowConfig, from config.json and the processors. Raises UnsupportedFlowError and StatisticsError."""
    for key, usual in _LEROBOT_ONLY.items():
        if config.get(key) not in (None, usual):
            raise UnsupportedFlowError(f"{directory}: {key} is {config[key]!r}; only {usual!r} is supported")
    normalizer, statistics = _statistics(directory)
    # the normaliser's own map, which was used, wins over config.json; kinds that it lacks are not normalised
    kinds = normalizer.get("norm_map") or config["normalization_mapping"]
    norms = {name: _NORMS.get(kinds.get(name, "IDENTITY")) for name in ("STATE", "ACTION")}
    if None in norms.values():
        raise UnsupportedFlowError(f"{directory}: {kinds} has kinds of normalisation other than {', '.join(_NORMS)}")
    if kinds.get("VISUAL", "IDENTITY") != "IDENTITY" or normalizer.get("normalize_observation_keys") is not None:
        text = "pictures are normalised, or the state is not (VISUAL of norm_map, normalize_observation_keys)"
        raise UnsupportedFlowError(f"{directory}: {text}; only the usual is supported, IDENTITY and null")
    if (directory / "policy_postprocessor.json").is_file():
        back, other = _statistics(directory, "policy_postprocessor.json")
        same = [
            np.array_equal(np.array(numbers, np.float32), np.array(other["actions"][key], np.float32), equal_nan=True)
            for key, numbers in statistics["actions"].items()
            if key in other["actions"]
        ]
        if not all(same) or _NORMS.get((back.get("norm_map") or kinds).get("ACTION", "IDENTITY")) != norms["ACTION"]:
            text = "policy_postprocessor.json and its file have other numbers for actions than policy_preprocessor.json"
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
        # no tensor of pi0.5 has this width
        "max_state_dim": config.get("max_state_dim", 32) if cfg.family == "pi05" else cfg.max_state_dim,
    }


def _trained_by(directory: Path, config: Mapping[str, Any]) -> LeRobotRules | None:
    """The release of LeRobot that trained the policy: files of 0.5.1 and later mention relative actions, and the
    train_config.json of 0.5.0 and later has `cudnn_deterministic`. None: not known."""
    file = directory / "train_config.json"
    training = read_json(file) if file.is_file() else None
    steps = [step.get("registry_name") for step in read_json(directory / "policy_preprocessor.json")["steps"]]
    if "use_relative_actions" in config or _RELATIVE[0] in steps or "cudnn_deterministic" in (training or {}):
        return "v0.5"
    return None if training is None else "v0.4"


def picture_sizes(config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Heights and widths of the cameras' pictures in LeRobot's config.json; empty for other layouts."""
    shapes = [one["shape"] for one in config.get("input_features", {}).values() if one["type"] == "VISUAL"]
    return [(height, width) for _, height, width in shapes]


def _statistics(
    directory: Path, processor: str = "policy_preprocessor.json"
) -> tuple[dict[str, Any], dict[str, dict[str, list[float]]]]:
    """The settings of a processor's normaliser, and the statistics in its file.

    Raises:
        StatisticsError: if there are no statistics.
        UnsupportedFlowError: if the processor makes actions relative to the state, or has an unknown step.
    """
    file = directory / processor
    steps = read_json(file)["steps"] if file.is_file() else []
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
    for name, numbers in read_numbers(directory / named[0]["state_file"], tuple(features)).items():
        feature, _, statistic = name.rpartition(".")
        if feature in features:  # others exist, such as observation.state.velocity
            found[features[feature]][statistic] = numbers
    return named[0].get("config", {}), found


def read_vlm(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a FlowConfig, with `heads` and `depths`, from the config.json of the vision-language model; for the
    published models that file is not needed."""
    named, published = config["vlm_model_name"], PUBLISHED["smolvla"]
    if not config["resize_imgs_with_padding"]:
        raise UnsupportedFlowError(f"{directory}: resize_imgs_with_padding is null; a width and height are needed")
    file = directory / named / "config.json"
    if not file.is_file() and named not in _SMOLVLM:
        raise UnsupportedFlowError(
            f"{directory}: vlm_model_name is {named!r}, whose sizes are not known. Put its config.json into "
            f"{directory / 'vlm'} and set vlm_model_name to ./vlm"
        )
    vlm: Mapping[str, Any] = read_json(file) if file.is_file() else _SMOLVLM_CONFIG
    vision, text = vlm["vision_config"], vlm["text_config"]
    crosses = config.get("attention_mode", "cross_attn") == "cross_attn"
    # the language model keeps its first num_vlm_layers layers (all for 0); the expert has as many unless stated
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
