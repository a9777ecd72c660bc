"""Which architecture an OpenVLA run trains, read without torch."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from rlinf_lite.config.plan import Observed
from rlinf_lite.config.resources import policy_directory
from rlinf_lite.config.schema import Config

if TYPE_CHECKING:
    from rlinf_lite.models.vla.config import VLAConfig


def vla_config(config: Config, seen: Observed) -> VLAConfig:
    """That of the checkpoint which an OpenVLA run starts from, or of `model.size`, with what the run says of it.

    Raises:
        ValueError: where the checkpoint cannot serve what the run wants.
    """
    from rlinf_lite.models.vla.config import preset, with_run_settings  # against the direction, as in plan.py: no torch

    saved, model = saved_vla_config(config), config.model
    if saved is not None:
        return with_run_settings(saved, model)
    fresh = replace(
        preset(model.size),
        action_dim=seen.action_dim,
        num_action_chunks=model.num_action_chunks,
        cameras=tuple(seen.cameras),
        proprio_dim=seen.state_dim if model.use_proprio else 0,
    )
    return with_run_settings(fresh, model)


def saved_vla_config(config: Config) -> VLAConfig | None:
    """What the checkpoint that a run starts from says of its architecture, if there is one. A published one counts as
    OpenVLA's 7B with the language model that it names."""
    from rlinf_lite.models.vla.config import VLAConfig, preset

    path = config.actor.checkpoint_load_path or config.rollout.model_dir
    file = None if path is None else policy_directory(path) / "config.json"
    if file is None or not file.is_file():
        return None
    content = json.loads(file.read_text())
    if "rlinf_lite" in content:
        return VLAConfig.from_dict(content["rlinf_lite"]["settings"])
    published = preset("7b")
    return replace(published, text=published.text | content.get("text_config", {}))
