"""Rows of observation dictionaries ({"images": {camera: [B,H,W,3]}, "state": [B,S], "instruction": [B strings]})."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def take_rows(obs: Mapping[str, Any], rows: slice | np.ndarray | Sequence[int]) -> Any:
    """The given rows of every entry; arrays of a slice are views."""
    taken = dict[str, Any]()
    for name, value in obs.items():
        if isinstance(value, Mapping):
            taken[name] = take_rows(value, rows)
        elif isinstance(value, list) and not isinstance(rows, slice):
            taken[name] = [value[row] for row in rows]
        else:
            taken[name] = value[rows]
    return taken


def concat_rows(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows of all parts, in order. Every part has the same entries."""
    joined = dict[str, Any]()
    for name, first in parts[0].items():
        values = [part[name] for part in parts]
        if isinstance(first, Mapping):
            joined[name] = concat_rows(values)
        else:
            joined[name] = list(itertools.chain(*values)) if isinstance(first, list) else np.concatenate(values)
    return joined


def num_rows(obs: Mapping[str, Any]) -> int:
    """B of an observation."""
    value = next(iter(obs.values()))
    return num_rows(value) if isinstance(value, Mapping) else len(value)
