"""Rows of observation dictionaries ({"images": {camera: [B,H,W,3]}, "state": [B,S], "instruction": [B strings]})."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_KNOWN = ("images", "state", "instruction", "noise_key")


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


def as_batch(obs: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The observation with a batch dimension, and whether it had none.

    Raises ValueError for entries that there are none of, images that are no uint8, and rows that do not agree.
    """
    unknown = [name for name in obs if name not in _KNOWN]
    if unknown or not obs:
        raise ValueError(
            f"an observation has {', '.join(_KNOWN[:3])}; here is {', '.join(map(repr, unknown)) or 'nothing'}"
        )
    images = obs.get("images", {})
    if not isinstance(images, Mapping):
        raise ValueError("images is no dict. Give {camera: uint8 [H, W, 3] or [B, H, W, 3]}")
    arrays = {f"images[{camera!r}]": (np.asarray(image), 3) for camera, image in images.items()}
    if "state" in obs:
        arrays["state"] = np.asarray(obs["state"], dtype=np.float32), 1
    for name, (array, num_dims) in arrays.items():
        if array.ndim not in (num_dims, num_dims + 1):
            raise ValueError(
                f"{name} is {list(array.shape)}; it must have {num_dims} dimensions, or a batch's one more"
            )
        if num_dims == 3 and array.dtype != np.uint8:
            raise ValueError(f"{name} is {array.dtype}; pictures are uint8, 0 to 255")
        if num_dims == 1 and not np.isfinite(array).all():
            raise ValueError("state has numbers that are not finite")
    singles = {name: array.ndim == num_dims for name, (array, num_dims) in arrays.items()}
    if isinstance(obs.get("instruction"), list):
        singles["instruction"] = False
    if len(set(singles.values())) > 1:
        text = ", ".join(f"{name} {'without' if single else 'with'}" for name, single in singles.items())
        raise ValueError(f"some of the observation has a batch dimension and some has none: {text}")
    is_single = all(singles.values())
    rows = {name: array[None] if singles[name] else array for name, (array, _) in arrays.items()}
    return _assembled(obs, rows), is_single


def _assembled(obs: Mapping[str, Any], rows: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """`rows` by name, and the instruction of each."""
    counts = {name: len(array) for name, array in rows.items()}
    instruction = obs.get("instruction")
    if isinstance(instruction, list):
        counts["instruction"] = len(instruction)
    if len(set(counts.values())) > 1:
        raise ValueError(f"rows of the observation differ: {', '.join(f'{n} has {c}' for n, c in counts.items())}")
    batch = dict[str, Any]()
    if "images" in obs:
        batch["images"] = {camera: rows[f"images[{camera!r}]"] for camera in obs["images"]}
    if "state" in obs:
        batch["state"] = rows["state"]
    if instruction is not None:
        num = next(iter(counts.values()), 1)
        batch["instruction"] = instruction if isinstance(instruction, list) else [str(instruction)] * num
    if "noise_key" in obs:
        batch["noise_key"] = np.atleast_1d(np.asarray(obs["noise_key"], dtype=np.uint64))
    return batch
