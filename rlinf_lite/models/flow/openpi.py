"""Reads the settings that openpi writes with the weights: a short config.json, and statistics."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinf_lite.models.flow.config import OPENPI_CAMERAS, FlowConfig, StatisticsError, Tower, Transformer
from rlinf_lite.models.flow.files import UnsupportedFlowError, own_files, read_json

_VARIANTS = {"gemma_2b": FlowConfig.text, "gemma_300m": FlowConfig.expert}
_DELTA_DIMS = 6  # relative dimensions in openpi's LIBERO transform: all but the gripper


def read_openpi(directory: Path, config: Mapping[str, Any], cfg: FlowConfig, asset_id: str | None) -> dict[str, Any]:
    """Fields of a FlowConfig, from config.json and statistics. Raises StatisticsError if statistics are missing."""
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
    content = read_json(files[named]).get("norm_stats", {})
    if not {"state", "actions"} <= content.keys():
        raise StatisticsError(f"{files[named]} has no norm_stats of state and actions, but of {list(content)}")
    statistics = {
        name: {key: numbers for key, numbers in entry.items() if numbers is not None} for name, entry in content.items()
    }
    most = cfg.max_state_dim if cfg.family != "pi05" else sys.maxsize  # longer states are cut
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
        "delta_dims": _DELTA_DIMS if tiny.get("extra_delta_transform") else 0,
    }


def read_variants(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of heads and layers (`heads`, `depths`): from the entry `tiny` of config.json if it has one, else from
    the names of the variants."""
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
