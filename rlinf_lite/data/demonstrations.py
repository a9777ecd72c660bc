"""Demonstrations on disk: safetensors shards and `meta.json`. Env workers write them, actors read them in place.

A shard holds n chunks: `images.<camera>` uint8 [n, H, W, 3] and `state` float32 [n, S] before the chunk, `actions`
float32 [n, C, D] in the environment's units, `mask` bool [n, C] (False after the episode's end), `episode` and
`decision` int64 [n], and `instruction` int64 [n], an index into the shard's `instructions` in `meta.json`. That file is
written last, so that a directory with it is complete; besides shards it says what they were made from and counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import save_file
from safetensors.torch import load_file
from torch import Tensor

from rlinf_lite import __version__
from rlinf_lite.cards import Section
from rlinf_lite.config import Config
from rlinf_lite.config.resources import policy_directory
from rlinf_lite.envs.observations import concat_rows, take_rows
from rlinf_lite.file_modes import follow_umask
from rlinf_lite.registry import env_card, is_installed
from rlinf_lite.renamed_keys import with_new_names

if TYPE_CHECKING:
    from rlinf_lite.envs import EnvSpec

FORMAT = 1
SHARD_BYTES = 256 * 2**20
_PACKAGES = ("numpy", "torch", "gymnasium")


class DemonstrationError(ValueError):
    """Demonstrations that cannot be made, found, or used by this run."""


@dataclass
class Chunks:
    """n chunks of demonstrations; `actions` [n, C, D], `mask` [n, C], `episode` and `decision` [n]."""

    obs: dict[str, Any]
    actions: np.ndarray
    mask: np.ndarray
    episode: np.ndarray
    decision: np.ndarray


class ShardWriter:
    """Writes one worker's chunks into shards of about `SHARD_BYTES`."""

    def __init__(self, directory: Path, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.shards: list[dict[str, Any]] = []
        """File, number of chunks and instructions of every shard written."""
        self._directory, self._rank = directory, rank
        self._parts: list[Chunks] = []
        self._num_bytes = 0

    def add(self, chunks: Chunks) -> None:
        self._parts.append(chunks)
        self._num_bytes += chunks.actions.nbytes + sum(x.nbytes for x in _arrays(chunks.obs).values())
        if self._num_bytes >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what has been added since the last shard."""
        if not self._parts:
            return
        obs = concat_rows([part.obs for part in self._parts])
        names = ("actions", "mask", "episode", "decision")
        arrays = {name: np.concatenate([getattr(part, name) for part in self._parts]) for name in names}
        texts = obs.get("instruction", [""] * len(arrays["mask"]))
        table, arrays["instruction"] = np.unique(texts, return_inverse=True)
        file = f"shard_{self._rank:03d}_{len(self.shards):04d}.safetensors"
        save_file(_arrays(obs) | arrays, self._directory / file)
        follow_umask([self._directory / file])
        self.shards.append({"file": file, "num_chunks": len(texts), "instructions": table.tolist()})
        self._parts, self._num_bytes = [], 0


class Demonstrations:
    """Chunks by index, ordered by episode and decision; only the rows that are asked for are read.

    Raises:
        DemonstrationError: where a shard is missing or unreadable.
    """

    def __init__(self, directory: Path) -> None:
        self.meta = read_meta(directory)
        self._shards = [_load_shard(directory / shard["file"]) for shard in self.meta["shards"]]
        lengths = [len(shard["mask"]) for shard in self._shards]
        self._starts = np.cumsum([0, *lengths])
        self._mask, self._episode, decision = (
            torch.cat([shard[name] for shard in self._shards]).numpy() for name in ("mask", "episode", "decision")
        )
        self._order = np.lexsort((decision, self._episode))  # whichever worker wrote which

    def __len__(self) -> int:
        return len(self._order)

    def mask(self, indices: np.ndarray) -> np.ndarray:
        """Executed actions, bool [n, C]."""
        mask: np.ndarray = self._mask[self._order[indices]]
        return mask

    def episodes(self, indices: np.ndarray) -> np.ndarray:
        """Episode numbers, int64 [n]."""
        episodes: np.ndarray = self._episode[self._order[indices]]
        return episodes

    def read(self, indices: np.ndarray) -> tuple[dict[str, Any], Tensor]:
        """Observations (see `envs.Obs`) and actions float32 [n, C, D] of these chunks."""
        rows = self._order[indices]
        shard_ids = np.searchsorted(self._starts, rows, side="right") - 1
        parts, position = [], []
        for shard_id in np.unique(shard_ids):
            here = np.flatnonzero(shard_ids == shard_id)
            parts.append(self._read_shard(shard_id, rows[here] - self._starts[shard_id]))
            position.append(here)
        back = np.argsort(np.concatenate(position))
        obs, actions = concat_rows([{"obs": obs, "actions": actions} for obs, actions in parts]).values()
        return take_rows(obs, back), torch.from_numpy(actions[back])

    def _read_shard(self, shard_id: int, rows: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
        index, table = torch.from_numpy(rows), self.meta["shards"][shard_id]["instructions"]
        found = {name: x[index].numpy() for name, x in self._shards[shard_id].items() if name != "mask"}
        obs: dict[str, Any] = {"instruction": [table[i] for i in found["instruction"]]}
        images = {name.removeprefix("images."): x for name, x in found.items() if name.startswith("images.")}
        obs |= {"images": images} if images else {}
        obs |= {"state": found["state"]} if "state" in found else {}
        return obs, found["actions"]


def batch_indices(num_chunks: int, batch_size: int, seed: int, step: int) -> np.ndarray:
    """Chunks of optimizer step `step`, int64 [batch_size]: the next ones of endless passes, each shuffled anew."""
    first, parts, missing = step * batch_size, list[np.ndarray](), batch_size
    while missing:
        epoch, offset = divmod(first, num_chunks)
        part = np.random.default_rng([seed, epoch]).permutation(num_chunks)[offset : offset + missing]
        parts.append(part)
        first, missing = first + len(part), missing - len(part)
    return np.concatenate(parts)


def recipe(cfg: Config) -> dict[str, Any]:
    """What demonstrations follow from, by config key; as JSON gives it back."""
    env, data = cfg.env, cfg.data
    made_from: dict[str, Any] = {
        "env.id": env.id,
        "env.task": env.task,
        "env.options": _options(env.id, env.options),
        "env.train.max_episode_steps": env.train.max_episode_steps,
        "env.train.ignore_terminations": env.train.ignore_terminations,
        "model.num_action_chunks": cfg.model.num_action_chunks,
        **{f"data.{name}": value for name, value in data.model_dump(exclude={"demos_dir"}).items()},
        "data.teacher_dir": data.teacher_dir and _policy_digest(Path(data.teacher_dir)),
    }
    content: dict[str, Any] = json.loads(json.dumps(made_from))
    return content


def _options(env_id: str, given: Any) -> Any:
    """Options of an environment, without those that have no effect on what a demonstration holds."""
    card = env_card(env_id)
    options = card.options(given)
    return options.model_dump(mode="json", exclude=set(card.free_options)) if isinstance(options, Section) else options


def _with_new_names(made_from: dict[str, Any]) -> dict[str, Any]:
    """What `recipe` gave, whichever version wrote it."""
    if "env.options" in made_from:
        return made_from
    env_id = made_from["env.id"]
    sections = {name: made_from[f"env.{name}"] for name in ("id", "kwargs", env_id) if made_from.get(f"env.{name}")}
    options = with_new_names({"env": sections})["env"].get("options", {})
    kept = {key: value for key, value in made_from.items() if key not in ("env.kwargs", f"env.{env_id}")}
    return kept | {"env.options": _options(env_id, options)}


def write_meta(
    directory: Path, made_from: dict[str, Any], spec: EnvSpec, shards: list[dict[str, Any]], counts: dict[str, float]
) -> None:
    """Complete the directory."""
    of_env = env_card(made_from["env.id"]).package
    packages = [*_PACKAGES, of_env] if of_env is not None and is_installed(of_env) else _PACKAGES
    installed = {name: metadata.version(name) for name in packages}
    meta = {
        "format": FORMAT,
        "made_from": made_from,
        "spec": asdict(spec),
        "counts": counts,
        "versions": {"rlinf_lite": __version__, **installed},
        "shards": shards,
    }
    partial = directory / ".meta.json.partial"
    partial.write_text(json.dumps(meta, indent=1) + "\n")
    partial.replace(directory / "meta.json")


def read_meta(directory: Path) -> dict[str, Any]:
    """`meta.json` of a complete directory. Raises DemonstrationError where there is none, or of another format."""
    try:
        meta: dict[str, Any] = json.loads((directory / "meta.json").read_text())
    except (OSError, ValueError) as error:
        raise DemonstrationError(
            f"{directory / 'meta.json'} cannot be read: {error}. On several nodes, data.demos_dir must be a directory "
            "that all of them see"
        ) from error
    if meta.get("format") != FORMAT:
        raise DemonstrationError(f"{directory}: demonstrations of format {meta.get('format')}, this version reads 1")
    return meta


def check_meta(directory: Path, made_from: dict[str, Any], spec: EnvSpec | None = None) -> dict[str, Any]:
    """`meta.json` of demonstrations that this run may use. A teacher is compared only where the run names one.

    Raises:
        DemonstrationError: listing what differs.
    """
    meta = read_meta(directory)
    there, differences = _with_new_names(meta["made_from"]), []
    for key, value in made_from.items():
        if there.get(key) != value and not (key == "data.teacher_dir" and value is None):
            differences.append(f"{key} is {there.get(key)!r} there and {value!r} here")
    if spec is not None:
        mine = json.loads(json.dumps(asdict(spec)))
        differences += [
            f"the environment's {name} is {meta['spec'].get(name)} there and {value} here"
            for name, value in mine.items()
            if meta["spec"].get(name) != value
        ]
    if differences:
        raise DemonstrationError(
            f"data.demos_dir: {directory} holds other demonstrations: {'; '.join(differences)}. "
            "Change the config, name another directory, or delete this one"
        )
    return meta


def remove_shards(directory: Path) -> None:
    """Delete what an interrupted collection left."""
    for leftover in directory.glob("shard_*.safetensors"):
        leftover.unlink()


def _arrays(obs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    arrays = {f"images.{camera}": image for camera, image in obs.get("images", {}).items()}
    return arrays | ({"state": obs["state"]} if "state" in obs else {})


def _load_shard(file: Path) -> dict[str, Tensor]:
    """A shard's tensors, which are read from the file when they are indexed."""
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise DemonstrationError(
            f"{file} cannot be read: {error}. Delete the directory to collect its demonstrations anew"
        ) from error


def _policy_digest(directory: Path) -> str:
    files = sorted(policy_directory(directory).glob("*.safetensors"))
    return "sha256:" + hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
