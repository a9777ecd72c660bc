"""Conversion of requests, in openpi's format or with our own observations, to what a policy reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlinf_lite.models.base import PolicyInputs

PREFIX = "observation/"
STATE_KEYS = ("state", "observation/state")
INSTRUCTION_KEYS = ("instruction", "prompt")


class RequestError(ValueError):
    """A request that the policy cannot act on: something is missing or wrong."""


def camera_keys(cameras: Mapping[str, Any]) -> dict[str, list[str]]:
    """Keys, besides those in `images`, under which a request may give each camera's picture.

    `observation/<camera>` for every camera. `observation/wrist_image` for the first with `wrist` or `hand` in its name,
    or else for the second camera; `observation/image` for the first of the others.
    """
    keys, names = {name: [f"{PREFIX}{name}"] for name in cameras}, list(cameras)
    wrist = next((name for name in names if "wrist" in name or "hand" in name), names[1] if len(names) > 1 else None)
    third_person = next((name for name in names if name != wrist), None)
    for name, key in ((third_person, f"{PREFIX}image"), (wrist, f"{PREFIX}wrist_image")):
        if name is not None and key not in names and key not in keys[name]:
            keys[name].append(key)
    return keys


def observation(request: Any, reads: PolicyInputs | None) -> dict[str, Any]:
    """The observation for `Policy.act`. Entries that the policy does not read are left out; if it does not say what it
    reads (None), all known entries are passed on. Pictures [..., 3, H, W] become [..., H, W, 3], as in openpi.

    Raises:
        RequestError: an entry is missing or wrong; the message names it.
    """
    if not isinstance(request, Mapping) or not all(isinstance(key, str) for key in request):
        raise RequestError("a request is a map with texts as keys: observation/image, observation/state, prompt, ...")
    pictures = request.get("images", {})
    if not isinstance(pictures, Mapping):
        raise RequestError("images is not a map. Give {camera: uint8 [H, W, 3]}")
    names = [*(f"images/{name}" for name in pictures), *(key for key in request if key != "images")]
    has = f"the request has {', '.join(names) or 'nothing'}"
    obs = dict[str, Any]()

    if reads is None:
        found = {key.removeprefix(PREFIX): value for key, value in request.items() if key.startswith(PREFIX)}
        images = {name: value for name, value in found.items() if name != "state"} | dict(pictures)
    else:
        images, known = {}, camera_keys(reads.cameras)
        for camera, keys in known.items():
            if camera in pictures:
                images[camera] = pictures[camera]
            elif given := [key for key in keys if key in request]:
                images[camera] = request[given[0]]
            elif reads.needs_all_cameras:
                raise RequestError(
                    f"the policy needs camera {camera!r}: give images/{camera} or {' or '.join(keys)}; {has}"
                )
        if len(images) < len(known):
            meant = {key for camera, keys in known.items() for key in (f"images/{camera}", *keys)}
            shown = {key for key, value in request.items() if isinstance(value, np.ndarray) and value.ndim >= 3}
            stray = sorted({*shown, *(f"images/{name}" for name in pictures)} - meant)
            if stray or not images:
                what = f"no camera is called {', '.join(stray)}; " if images else ""
                raise RequestError(f"{what}the policy's cameras are {', '.join(known)}; {has}")
    if images:
        obs["images"] = {camera: _channels_last(np.asarray(image)) for camera, image in images.items()}

    state = next((request[key] for key in STATE_KEYS if key in request), None)
    if reads is not None and reads.state_dim:
        if state is None:
            raise RequestError(f"the policy reads a state: give {' or '.join(STATE_KEYS)}; {has}")
        if np.shape(state)[-1:] != (reads.state_dim,):
            raise RequestError(f"state has shape {list(np.shape(state))}; the policy reads {reads.state_dim} numbers")
    if state is not None and (reads is None or reads.state_dim):
        obs["state"] = state

    instruction = next((request[key] for key in INSTRUCTION_KEYS if key in request), None)
    if instruction is None and reads is not None and reads.has_instruction:
        raise RequestError(f"the policy reads a text: give {' or '.join(INSTRUCTION_KEYS)}; {has}")
    if instruction is not None and (reads is None or reads.has_instruction):
        obs["instruction"] = instruction.tolist() if isinstance(instruction, np.ndarray) else instruction
    return obs


def _channels_last(image: np.ndarray) -> np.ndarray:
    """The picture with its channels last: [..., 3, H, W] becomes [..., H, W, 3]."""
    is_channel_first = image.ndim in (3, 4) and image.shape[-3] == 3 and image.shape[-1] != 3
    return np.moveaxis(image, -3, -1) if is_channel_first else image
