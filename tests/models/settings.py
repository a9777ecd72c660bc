"""The `model` section of a run with OpenVLA, from settings and options alike."""

from __future__ import annotations

from typing import Any

from rlinf_lite.config.schema import ModelConfig


def openvla(**given: Any) -> ModelConfig:
    settings = {name: value for name, value in given.items() if name in ModelConfig.model_fields}
    options = {name: value for name, value in given.items() if name not in settings}
    return ModelConfig(id="openvla", options=options, **settings)
