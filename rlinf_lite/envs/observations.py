"""Functions on the rows of observations, dicts {"images": {camera: [B,H,W,3]}, "state": [B,S], "instruction": [B
strings]}."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_KNOWN = ("images", "state", "instruction", "noise_key")
_MAX_SIDE = 8192  # pixels; scaling needs memory in proportion to a side, also for a picture with few bytes


class ObservationError(ValueError):
    """An observation is malformed, or a policy cannot read it."""


def take_rows(obs: Mapping[str, Any], rows: slice | np.ndarray | Sequence[int]) -> Any:
    """The given rows of every entry. For a slice, arrays are views."""
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
    """The rows of all parts, in order. All parts must have the same entries."""
    joined = dict[str, Any]()
    for name, first in parts[0].items():
        values = [part[name] for part in parts]
        if isinstance(first, Mapping):
            joined[name] = concat_rows(values)
        else:
            joined[name] = list(itertools.chain(*values)) if isinstance(first, list) else np.concatenate(values)
    return joined


def num_rows(obs: Mapping[str, Any]) -> int:
    """Number of rows of an observation."""
    value = next(iter(obs.values()))
    return num_rows(value) if isinstance(value, Mapping) else len(value)


def as_batch(obs: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The observation with a batch dimension, and whether it had none. Arrays become contiguous, as torch needs them;
    flipped ones are copied.

    Raises ObservationError for unknown entries, images that are not uint8 [H, W, 3] with sides of 1 to 8192, states
    that are not finite numbers, instructions that are not texts, noise keys that are not uint64, and entries with
    different numbers of rows.
    """
    if not isinstance(obs, Mapping):
        kind = type(obs).__name__
        raise ObservationError(f"the observation is a {kind}. Give a dict of {', '.join(_KNOWN[:3])}, as far as read")
    unknown = [name for name in obs if name not in _KNOWN]
    if unknown or not obs:
        raise ObservationError(
            f"an observation has {', '.join(_KNOWN[:3])}; here is {', '.join(map(repr, unknown)) or 'nothing'}"
        )
    images = obs.get("images", {})
    if not isinstance(images, Mapping):
        raise ObservationError("images is no dict. Give {camera: uint8 [H, W, 3] or [B, H, W, 3]}")
    arrays = {f"images[{camera!r}]": (np.asarray(image, order="C"), 3) for camera, image in images.items()}
    if "state" in obs:
        arrays["state"] = _state(obs["state"]), 1
    for name, (array, num_dims) in arrays.items():
        if array.ndim not in (num_dims, num_dims + 1):
            raise ObservationError(
                f"{name} is {list(array.shape)}; it must have {num_dims} dimensions, or a batch's one more"
            )
        if num_dims == 3 and array.dtype != np.uint8:
            raise ObservationError(f"{name} is {array.dtype}; pictures are uint8, 0 to 255")
        if num_dims == 3 and array.shape[-1] != 3:
            raise ObservationError(f"{name} is {list(array.shape)}; pictures are [H, W, 3], red first")
        if num_dims == 3 and not all(1 <= side <= _MAX_SIDE for side in array.shape[-3:-1]):
            raise ObservationError(f"{name} is {list(array.shape)}; sides of pictures are 1 to {_MAX_SIDE} pixels")
    singles = {name: array.ndim == num_dims for name, (array, num_dims) in arrays.items()}
    if isinstance(obs.get("instruction"), list):
        singles["instruction"] = False
    if len(set(singles.values())) > 1:
        text = ", ".join(f"{name} {'without' if single else 'with'}" for name, single in singles.items())
        raise ObservationError(f"some of the observation has a batch dimension and some has none: {text}")
    is_single = all(singles.values())
    rows = {name: array[None] if singles[name] else array for name, (array, _) in arrays.items()}
    return _assembled(obs, rows), is_single


def _state(given: Any) -> NDArray[np.float32]:
    try:
        found = np.asarray(given.detach() if hasattr(given, "detach") else given)  # a tensor may require gradients
    except (TypeError, ValueError) as error:
        raise ObservationError(f"state is no array of numbers: {error}") from error
    if found.dtype.kind not in "biuf":
        raise ObservationError(f"state is no array of numbers: it is {found.dtype}. Give float32")
    state = np.asarray(found, dtype=np.float32, order="C")
    if not np.isfinite(state).all():
        raise ObservationError("state has numbers that are not finite")
    return state


def _assembled(obs: Mapping[str, Any], rows: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """An observation made of `rows` (arrays by name), with the instruction and noise key of each row."""
    counts = {name: len(array) for name, array in rows.items()}
    batch = dict[str, Any]()
    if obs.get("images"):
        batch["images"] = {camera: rows[f"images[{camera!r}]"] for camera in obs["images"]}
    if "state" in obs:
        batch["state"] = rows["state"]
    if "instruction" in obs:
        given = obs["instruction"]
        if isinstance(given, list):
            counts["instruction"] = len(given)
        texts = given if isinstance(given, list) else [given] * next(iter(counts.values()), 1)
        for row, text in enumerate(texts):
            if not isinstance(text, str):
                where = f" of row {row}" if isinstance(given, list) else ""
                raise ObservationError(f"the instruction{where} is {text!r}. Give a text, or a list of a text per row")
        batch["instruction"] = texts
    if "noise_key" in obs:
        batch["noise_key"] = _noise_keys(obs["noise_key"])
        counts["noise_key"] = len(batch["noise_key"])
    if len(set(counts.values())) > 1:
        has = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise ObservationError(f"rows of the observation differ: {has}")
    return batch


def _noise_keys(given: Any) -> NDArray[np.uint64]:
    keys = np.atleast_1d(np.asarray(given))
    if keys.ndim > 1 or keys.dtype.kind not in "iu" or (keys.dtype.kind == "i" and (keys < 0).any()):
        raise ObservationError(f"noise_key is {given!r}; it is a whole number from 0 to 2**64 - 1, one for each row")
    return keys.astype(np.uint64)
