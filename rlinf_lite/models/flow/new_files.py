"""Writes the files, other than weights, of a policy that started from random weights, as openpi and LeRobot do.

openpi and LeRobot can load such policies of published sizes, but not tiny ones: in openpi's layout, the field `tiny` of
config.json has the sizes; in LeRobot's, `vlm/config.json` has them, but LeRobot would build an expert with an MLP of
another width. The tokenizer is a tokenizer.json, without the SentencePiece model that openpi's own class opens.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import save

from rlinf_lite.models.flow.config import FlowConfig, Norm

_ASSET = "robot"
_MOMENTS = ("mean", "std", "q01", "q99")  # the statistics that openpi knows
_NORMS: dict[Norm, str] = {
    "mean_std": "MEAN_STD",
    "quantiles": "QUANTILES",
    "min_max": "MIN_MAX",
    "identity": "IDENTITY",
}
_SMOLVLM = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"


def published_files(cfg: FlowConfig) -> dict[str, bytes]:
    """Contents of config.json, statistics and LeRobot's processors, by path in the directory."""
    if cfg.layout == "openpi":
        entries = {
            name: {key: entry[key] for key in _MOMENTS if key in entry} for name, entry in cfg.statistics.items()
        }
        statistics = {"norm_stats": entries}
        return {"config.json": _json(_openpi(cfg)), f"assets/{_ASSET}/norm_stats.json": _json(statistics)}
    return {"config.json": _json(_smolvla(cfg)), **_vlm(cfg), **_processors(cfg)}


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _openpi(cfg: FlowConfig) -> dict[str, Any]:
    is_published = (cfg.text, cfg.expert, cfg.vision) == (FlowConfig.text, FlowConfig.expert, FlowConfig.vision)
    found = {
        "action_dim": cfg.max_action_dim,
        "action_horizon": cfg.horizon,
        "paligemma_variant": "gemma_2b" if is_published else "tiny",
        "action_expert_variant": "gemma_300m" if is_published else "tiny",
        "precision": "float32",
        "pi05": cfg.family == "pi05",
        "max_token_len": cfg.max_prompt_length,
        "discrete_state_input": cfg.state_in_prompt,
    }
    if is_published:
        return found
    transformers = {
        name: {"num_heads": part.num_heads, "num_kv_heads": part.num_kv_heads, "head_dim": part.head_dim}
        | {"width": part.width, "depth": part.depth, "mlp_dim": part.mlp_size}
        for name, part in (("text", cfg.text), ("expert", cfg.expert))
    }
    transformers["text"]["vocab_size"] = cfg.vocab_size
    tiny = {
        "vision": _vision(cfg),
        **transformers,
        "image_keys": list(cfg.slots),
        "asset_id": _ASSET,
        "action_env_dim": cfg.action_dim,
        "state_dim": cfg.state_dim,
    }
    return {**found, "tiny": tiny}


def _vision(cfg: FlowConfig) -> dict[str, Any]:
    return {
        "hidden_size": cfg.vision.width,
        "intermediate_size": cfg.vision.mlp_size,
        "num_hidden_layers": cfg.vision.depth,
        "num_attention_heads": cfg.vision.num_heads,
        "image_size": cfg.vision.image_size,
        "patch_size": cfg.vision.patch_size,
    }


def _features(cfg: FlowConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """LeRobot's features of inputs and outputs. Nothing reads the sizes of pictures in them."""
    state = {"observation.state": {"type": "STATE", "shape": [cfg.state_dim]}} if cfg.state_dim else {}
    picture = {"type": "VISUAL", "shape": [3, cfg.resize_to[1], cfg.resize_to[0]]}
    inputs = state | {f"observation.images.{slot}": picture for slot in cfg.slots}
    return inputs, {"action": {"type": "ACTION", "shape": [cfg.action_dim]}}


def _norm_map(cfg: FlowConfig) -> dict[str, str]:
    return {"VISUAL": "IDENTITY", "STATE": _NORMS[cfg.state_norm], "ACTION": _NORMS[cfg.action_norm]}


def _is_smolvlm(cfg: FlowConfig) -> bool:
    return cfg.vocab_size == 49_280 and cfg.text.width == 960


def _smolvla(cfg: FlowConfig) -> dict[str, Any]:
    inputs, outputs = _features(cfg)
    return {
        "type": "smolvla",
        "n_obs_steps": 1,
        "input_features": inputs,
        "output_features": outputs,
        "chunk_size": cfg.horizon,
        "n_action_steps": cfg.num_action_chunks,
        "normalization_mapping": _norm_map(cfg),
        "max_state_dim": cfg.max_state_dim,
        "max_action_dim": cfg.max_action_dim,
        "resize_imgs_with_padding": list(cfg.resize_to),
        "empty_cameras": 0,
        "tokenizer_max_length": cfg.max_prompt_length,
        "num_steps": cfg.num_steps,
        "vlm_model_name": _SMOLVLM if _is_smolvlm(cfg) else "./vlm",
        "load_vlm_weights": False,
        "add_image_special_tokens": False,
        "attention_mode": "cross_attn",
        "pad_language_to": "max_length",
        "num_expert_layers": -1,
        "num_vlm_layers": cfg.text.depth,
        "self_attn_every_n_layers": cfg.cross_every,
        "expert_width_multiplier": cfg.expert.width / cfg.text.width,
        "min_period": cfg.min_period,
        "max_period": cfg.max_period,
    }


def _vlm(cfg: FlowConfig) -> dict[str, bytes]:
    if _is_smolvlm(cfg):
        return {}
    text = {
        "model_type": "llama",
        "hidden_size": cfg.text.width,
        "intermediate_size": cfg.text.mlp_size,
        "num_hidden_layers": cfg.text.depth,
        "num_attention_heads": cfg.text.num_heads,
        "num_key_value_heads": cfg.text.num_kv_heads,
        "head_dim": cfg.text.head_dim,
        "rms_norm_eps": cfg.rms_eps,
        "vocab_size": cfg.vocab_size,
        "tie_word_embeddings": cfg.tied_embeddings,
    }
    vision = {"model_type": "smolvlm_vision", **_vision(cfg), "layer_norm_eps": cfg.vision_eps}
    content = {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "model_type": "smolvlm",
        "scale_factor": cfg.pixel_shuffle,
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": cfg.tied_embeddings,
    }
    return {"vlm/config.json": _json(content)}


def _processors(cfg: FlowConfig) -> dict[str, bytes]:
    inputs, outputs = _features(cfg)
    tensors = {
        f"{feature}.{key}": torch.tensor(numbers, dtype=torch.float32)
        for name, feature in (("state", "observation.state"), ("actions", "action"))
        for key, numbers in cfg.statistics.get(name, {}).items()
        if numbers
    }
    tokenizer = {
        "max_length": cfg.max_prompt_length,
        "task_key": "task",
        "padding_side": "right",
        "padding": "max_length",
        "truncation": True,
        "tokenizer_name": "tokenizer",
    }

    def normalizer(kind: str, features: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return kind, {"eps": cfg.norm_eps, "features": features, "norm_map": _norm_map(cfg)}

    steps: dict[str, list[tuple[str, dict[str, Any]]]] = {
        "policy_preprocessor": [
            ("rename_observations_processor", {"rename_map": {}}),
            ("to_batch_processor", {}),
            ("smolvla_new_line_processor", {}),
            ("tokenizer_processor", tokenizer),
            ("device_processor", {"device": "cpu", "float_dtype": None}),
            normalizer("normalizer_processor", inputs | outputs),
        ],
        "policy_postprocessor": [
            normalizer("unnormalizer_processor", outputs),
            ("device_processor", {"device": "cpu", "float_dtype": None}),
        ],
    }
    files: dict[str, bytes] = {}
    for name, listed in steps.items():
        said: list[dict[str, Any]] = [{"registry_name": kind, "config": config} for kind, config in listed]
        for number, step in enumerate(said):
            if step["registry_name"] == "tokenizer_processor":
                step["artifacts"] = {"tokenizer_name": "tokenizer"}
            if step["registry_name"].endswith("normalizer_processor"):
                step["state_file"] = f"{name}_step_{number}_{step['registry_name']}.safetensors"
                files[step["state_file"]] = save(tensors)
        files[f"{name}.json"] = _json({"name": name, "steps": said})
    return files
