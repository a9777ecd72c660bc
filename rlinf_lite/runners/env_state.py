"""Environment states as files: numbers in JSON, action histories in safetensors; one entry per environment."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from rlinf_lite.config.schema import BaseConfig
from rlinf_lite.runners.run_config import CONFIG, changes_episodes, read_config

log = logging.getLogger(__name__)


def save_env_states(rows: list[dict[str, Any]], directory: Path) -> None:
    """Write `envs.json` and `envs.safetensors` (arrays, under `<env_id>.<key>`)."""
    arrays: dict[str, np.ndarray] = {}
    numbers: list[dict[str, Any]] = []
    for row in rows:
        arrays |= {f"{row['env_id']}.{key}": value for key, value in row.items() if isinstance(value, np.ndarray)}
        numbers.append({key: value for key, value in row.items() if not isinstance(value, np.ndarray)})
    save_file(arrays, directory / "envs.safetensors")
    (directory / "envs.json").write_text(json.dumps(numbers))


def load_env_states(directory: Path, cfg: BaseConfig) -> list[dict[str, Any]]:
    """Read what `save_env_states` wrote; nothing, with a warning, where the config beside it is of other episodes."""
    changes = changes_episodes(read_config(directory / CONFIG) or {}, cfg)
    if changes:
        log.warning("unfinished episodes start anew: %s", "; ".join(map(str, changes)))
        return []
    rows = {row["env_id"]: row for row in json.loads((directory / "envs.json").read_text())}
    for name, array in load_file(directory / "envs.safetensors").items():
        env_id, _, key = name.partition(".")
        rows[int(env_id)][key] = array
    return list(rows.values())
