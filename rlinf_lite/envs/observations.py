"""Rows of observation dictionaries ({"images": {camera: [B,H,W,3]}, "state": [B,S], "instruction": [B strings]})."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def take_rows(obs: Mapping[str, Any], rows: slice | np.ndarray | Sequence[int]) -> Any:
    """The given rows of every entry; arrays of a slice are views."""
    return {name: _take(value, rows) for name, value in obs.items()}


def concat_rows(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows of all parts, in order. Every part has the same entries."""
    return {name: _concat([part[name] for part in parts]) for name in parts[0]}


def num_rows(obs: Mapping[str, Any]) -> int:
    """B of an observation."""
    value = next(iter(obs.values()))
    return num_rows(value) if isinstance(value, Mapping) else len(value)


def _take(value: Any, rows: slice | np.ndarray | Sequence[int]) -> Any:
    if isinstance(value, Mapping):
        return take_rows(value, rows)
    if isinstance(value, list):
        return value[rows] if isinstance(rows, slice) else [value[i] for i in rows]
    return value[rows]


def _concat(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Mapping):
        return concat_rows(values)
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    return np.concatenate(values)
