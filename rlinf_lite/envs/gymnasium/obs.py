"""From gymnasium observations to `Obs`: uint8 images by camera, text apart, everything else flattened into a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.spaces.utils import flatdim, flatten

from rlinf_lite.envs.base import Obs
from rlinf_lite.envs.errors import EnvContractError


class ObsReader:
    """Reads observations of one space. Keys of nested Dict spaces are joined by dots; a bare image is camera "rgb"."""

    def __init__(self, space: spaces.Space[Any], task_id: str) -> None:
        self.task_id = task_id
        leaves = _leaves(space)
        self._images = {name: leaf for name, leaf in leaves.items() if _is_image(leaf)}
        self._texts = [name for name, leaf in leaves.items() if isinstance(leaf, spaces.Text)]
        apart = {*self._images, *self._texts}
        self._states = {name: leaf for name, leaf in leaves.items() if name not in apart}
        if not self._images and not self._states:
            raise EnvContractError(
                [f"the observation space {space} holds neither a state nor an image; return at least one of them."],
                task_id,
            )

    def read(self, observations: Sequence[Any], instructions: Sequence[str]) -> Obs:
        """Stacks one observation per row. Raises EnvContractError where one is not what its space promises."""
        flat = [_items(observation) for observation in observations]
        obs: Obs = {}
        if self._images:
            obs["images"] = {
                name or "rgb": np.stack([self._image(name, item) for item in flat]) for name in self._images
            }
        if self._states:
            obs["state"] = np.stack([self._state(item) for item in flat])
        texts = [" ".join(str(item[name]) for name in self._texts) for item in flat]
        obs["instruction"] = [text or given for text, given in zip(texts, instructions, strict=True)]
        return obs

    def read_batch(self, batch: Any, num_envs: int) -> Obs:
        """The same for a batched observation, first dimension rows."""
        items = _items(batch)
        rows = [_nested({name: value[i] for name, value in items.items()}) for i in range(num_envs)]
        return self.read(rows, [""] * num_envs)

    def state_key(self, column: int) -> str:
        """The observation's key that this column of the state comes from; "" where the space has no keys."""
        ends = np.cumsum([flatdim(space) for space in self._states.values()])
        return list(self._states)[int(np.searchsorted(ends, column, side="right"))]

    def _image(self, name: str, item: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
        image, space = self._leaf(name, item), self._images[name]
        if image.dtype != np.uint8 or image.shape != space.shape:
            self._refuse(name, f"{image.dtype} of shape {image.shape}", f"uint8 of shape {space.shape}")
        return image

    def _state(self, item: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
        parts = []
        for name, space in self._states.items():
            value = self._leaf(name, item)
            if space.shape is not None and value.shape != space.shape:
                self._refuse(name, f"shape {value.shape}", f"shape {space.shape}")
            parts.append(np.asarray(flatten(space, item[name]), np.float32).reshape(-1))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _leaf(self, name: str, item: dict[str, Any]) -> np.ndarray[Any, Any]:
        if name not in item:
            self._refuse(name, "nothing", "that key")
        return np.asarray(item[name])

    def _refuse(self, name: str, got: str, promised: str) -> None:
        what = f"observation {name!r}" if name else "the observation"
        raise EnvContractError(
            [f"{what} is {got} where observation_space promises {promised}; make the two agree."], self.task_id
        )


def _leaves(space: spaces.Space[Any], prefix: str = "") -> dict[str, spaces.Space[Any]]:
    if not isinstance(space, spaces.Dict):
        return {prefix: space}
    leaves: dict[str, spaces.Space[Any]] = {}
    for key, inner in space.spaces.items():
        leaves |= _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    return leaves


def _items(observation: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(observation, dict):
        return {prefix: observation}
    items: dict[str, Any] = {}
    for key, inner in observation.items():
        items |= _items(inner, f"{prefix}.{key}" if prefix else str(key))
    return items


def _nested(items: dict[str, Any]) -> Any:
    return items.get("", items)


def _is_image(space: spaces.Space[Any]) -> bool:
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3 and space.shape[2] == 3
