"""The demonstrations of an imitation run: a LeRobotDataset, collected by the run's expert or made elsewhere.

Chunks of C actions begin at every `data.stride`-th frame of an episode; actions after its end are masked. If the run's
expert made them, `meta/rlinf_lite.json` holds the settings, and another run may use them only if its own settings would
give the same demonstrations. Actors read decoded frames (`lerobot/frames.py`) by index, from mapped files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlinf_lite import __version__
from rlinf_lite.cards import Observed, Section
from rlinf_lite.config import Config
from rlinf_lite.config.plan import observed
from rlinf_lite.config.resources import policy_directory, start_dir
from rlinf_lite.data.lerobot import statistics
from rlinf_lite.data.lerobot.frames import (
    Frames,
    Keys,
    check_writable,
    decode,
    frames_directory,
    joined_order,
    split_by_part,
)
from rlinf_lite.data.lerobot.layout import PICTURES, SUBTASKS, Feature, LeRobotError, is_dataset
from rlinf_lite.data.lerobot.statistics import Statistics
from rlinf_lite.dimensions import counted, flat_names, names_in, numbered_names, order_of, own_names
from rlinf_lite.envs.observations import concat_rows, take_rows
from rlinf_lite.hub import HubError, local_path
from rlinf_lite.registry import did_you_mean, env_card

if TYPE_CHECKING:
    from rlinf_lite.data.lerobot.reader import LeRobotDataset
    from rlinf_lite.envs import EnvSpec

PROVENANCE = "rlinf_lite.json"
"""The file in `meta/` of demonstrations that a run's expert made."""
FRAMES = ".frames"
"""The folder of decoded frames in a dataset's folder, unless `data.cache_dir` names another."""
_PACKAGES = ("numpy", "torch", "gymnasium")
_NOT_MADE_FROM = {"dagger", "recap", "demos_dir", "source", "keys", "stride", "cache_dir", "pictures", "fps"}


class DemonstrationError(LeRobotError):
    """Demonstrations cannot be made, found, or used by this run."""


class Demonstrations:
    """The chunks of `chunk` actions, by index, ordered by episode; only requested rows are read.

    `frames`: the directory that `decode_frames` returned. Raises LeRobotError if it cannot be read.
    """

    def __init__(self, frames: Path, chunk: int, stride: int) -> None:
        self.frames = Frames(frames)
        self._chunk, self._stride = chunk, stride
        self._first, self._length = self.frames.episodes[:, 0], self.frames.episodes[:, 1]
        self._before = np.concatenate([[0], np.cumsum(-(-self._length // stride))])  # chunks of earlier episodes

    def __len__(self) -> int:
        return int(self._before[-1])

    def episodes(self, indices: np.ndarray) -> np.ndarray:
        """The episode numbers of chunks, int64 [n]."""
        found: np.ndarray = np.searchsorted(self._before, indices, side="right") - 1
        return found

    def first_frames(self, indices: np.ndarray) -> np.ndarray:
        """The frames at the beginning of chunks, int64 [n]."""
        return self._rows(indices)[0]

    def mask(self, indices: np.ndarray) -> np.ndarray:
        """The actions of chunks that are inside their episode, bool [n, C]."""
        rows, end = self._rows(indices)
        mask: np.ndarray = rows[:, None] + np.arange(self._chunk) < end[:, None]
        return mask

    def read(self, indices: np.ndarray) -> tuple[dict[str, Any], Tensor]:
        """The observations (see `envs.Obs`) at the beginning of chunks, and their actions float32 [n, C, D]; after an
        episode's end its last action is repeated."""
        rows, end = self._rows(indices)
        following = np.minimum(rows[:, None] + np.arange(self._chunk), end[:, None] - 1)
        return self.frames.read(rows), torch.from_numpy(np.asarray(self.frames.actions[following]))

    def relative_actions(self, dim: int) -> np.ndarray:
        """One dimension of all executed actions of all chunks, minus that of the state at the chunk's beginning;
        float32 [n].

        Raises DemonstrationError if there is no such state.
        """
        state, actions = self.frames.state, self.frames.actions
        if state is None or dim >= state.shape[1]:
            raise DemonstrationError(f"action[{dim}] is relative to state[{dim}], and the demonstrations have none")
        rows, end = self._rows(np.arange(len(self)))
        begun = [(rows[rows + i < end], i) for i in range(self._chunk)]
        return np.concatenate([actions[first + i, dim] - state[first, dim] for first, i in begun])

    def _rows(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first frame of each chunk, and the frame after its episode's last."""
        episodes = self.episodes(indices)
        first = self._first[episodes]
        return first + (indices - self._before[episodes]) * self._stride, first + self._length[episodes]


class DemonstrationPool:
    """The chunks of several datasets, one after the other; what is said of `Demonstrations` holds. `frames`: those of
    the first."""

    def __init__(self, first: Demonstrations) -> None:
        self._parts, self.frames = [first], first.frames

    def add(self, more: Demonstrations) -> None:
        """Add a dataset."""
        self._parts.append(more)

    @property
    def all_frames(self) -> list[Frames]:
        """The frames of each dataset."""
        return [part.frames for part in self._parts]

    def first_frames(self, indices: np.ndarray) -> np.ndarray:
        """The frames at the beginning of chunks, int64 [n], counted over all datasets."""
        return self._counted(indices, Demonstrations.first_frames, [len(frames.actions) for frames in self.all_frames])

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def relative_actions(self, dim: int) -> np.ndarray:
        """Those of the first dataset."""
        return self._parts[0].relative_actions(dim)

    def episodes(self, indices: np.ndarray) -> np.ndarray:
        """The episode numbers of chunks, int64 [n], counted over all datasets."""
        return self._counted(indices, Demonstrations.episodes, [len(frames.episodes) for frames in self.all_frames])

    def mask(self, indices: np.ndarray) -> np.ndarray:
        """The actions of chunks that are inside their episode, bool [n, C]."""
        places = self._of_parts(indices)
        parts = [part.mask(own) for part, (_, own) in zip(self._parts, places, strict=True)]
        return np.concatenate(parts)[joined_order(places)]

    def read(self, indices: np.ndarray) -> tuple[dict[str, Any], Tensor]:
        """As `Demonstrations.read`."""
        places = self._of_parts(indices)
        found = [part.read(own) for part, (_, own) in zip(self._parts, places, strict=True) if len(own)]
        order = joined_order(places)
        obs: dict[str, Any] = take_rows(concat_rows([one for one, _ in found]), order)
        return obs, torch.cat([actions for _, actions in found])[torch.from_numpy(order)]

    def _of_parts(self, indices: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each dataset, which of `indices` are its chunks, and their numbers in it."""
        return split_by_part(indices, [len(part) for part in self._parts])

    def _counted(
        self, indices: np.ndarray, numbers: Callable[[Demonstrations, np.ndarray], np.ndarray], sizes: Sequence[int]
    ) -> np.ndarray:
        """What `numbers` gives for chunks of each dataset, counted over all of them, which have so many (`sizes`)."""
        found, firsts = np.zeros(len(indices), np.int64), np.cumsum([0, *sizes])[:-1]
        for part, first, (rows, own) in zip(self._parts, firsts, self._of_parts(indices), strict=True):
            found[rows] = first + numbers(part, own)
        return found


def batch_indices(num_chunks: int, batch_size: int, seed: int, step: int) -> np.ndarray:
    """The chunks of optimizer step `step`, int64 [batch_size]: the next ones of endless passes, each pass with a
    shuffle of its own."""
    first, parts, missing = step * batch_size, list[np.ndarray](), batch_size
    while missing:
        epoch, offset = divmod(first, num_chunks)
        part = np.random.default_rng([seed, epoch]).permutation(num_chunks)[offset : offset + missing]
        parts.append(part)
        first, missing = first + len(part), missing - len(part)
    return np.concatenate(parts)


def open_dataset(cfg: Config, directory: Path, seen: Observed | EnvSpec | None) -> LeRobotDataset:
    """Open the dataset of this run. It is checked against info.json, against the environment's observations (`seen`;
    None: not known yet), and with `data.source: expert` against the run's own settings. Needs the extra `data`.

    Raises:
        LeRobotError: says what does not fit, and which key to change.
    """
    from rlinf_lite.data.lerobot.reader import LeRobotDataset

    if (directory / "meta.json").is_file() and not is_dataset(directory):
        raise DemonstrationError(
            f"data.demos_dir: {directory} holds shards in the format of versions before LeRobot datasets. Delete it, "
            "and run the same command again: the expert plays the same episodes from the same seed"
        )
    if cfg.data.source == "expert":
        check_provenance(directory, recipe(cfg), None if isinstance(seen, Observed) else seen)
    dataset = LeRobotDataset(directory)
    if not dataset.info.num_frames:
        raise DemonstrationError(f"data.demos_dir: {directory} is a dataset without a frame")
    _check_features(cfg, dataset, seen)
    if cfg.data.source == "folder":
        strange_tasks(cfg, dataset)
        if cfg.data.recap.rounds and dataset.successes() is None:
            raise DemonstrationError(
                f"data.demos_dir: {directory} does not say which episodes succeeded (success in meta/episodes), which "
                "RECAP learns from. Make it with rlinf-lite collect --keep-failures"
            )
    return dataset


def check_demonstrations(cfg: Config, seen: Observed | EnvSpec | None = None) -> LeRobotDataset | None:
    """Check the dataset in `data.demos_dir` before anything is started, and return it; None: it will be collected.
    `seen`: the environment's observations, if its card does not give them. Raises LeRobotError if the dataset cannot be
    used."""
    demos_dir = cfg.data.demos_dir
    if demos_dir is not None and (cfg.data.source == "folder" or Path(demos_dir).is_dir()):
        if cfg.data.source == "expert" and not any(Path(demos_dir).glob("meta*")):
            return None  # to be collected
        seen = observed(cfg) or seen
        try:
            directory = Path(local_path(demos_dir))
        except HubError as error:
            raise LeRobotError(f"data.demos_dir: {error}") from error
        dataset = open_dataset(cfg, directory, seen)
        if seen is not None:
            dataset.check_videos(list(keys_of(cfg, seen).cameras.values()))
            check_writable(dataset, matched_keys(cfg, dataset, seen), _frames_root(cfg, dataset))
        return dataset
    return None


def strange_tasks(cfg: Config, dataset: LeRobotDataset) -> list[str]:
    """The differences between the run's environment and task and those that a folder's demonstrations name, one line
    each.

    Raises:
        DemonstrationError: if states end in a one-hot of other tasks, or of the same tasks in another order.
    """
    card, env, there = env_card(cfg.env.id), cfg.env, dict[str, Any]()
    with suppress(DemonstrationError):  # it was made elsewhere
        there = read_provenance(dataset.directory)["made_from"]
    mine, one_hot = {"env.id": env.id, "env.task": env.task}, card.one_hot(env.task, env.options)
    lines = [
        f"{key} is {there[key]} there and {value} here" for key, value in mine.items() if there.get(key, value) != value
    ]
    if one_hot and cfg.data.keys.state is not None:
        if there.get("env.id") != env.id:
            lines.append(f"states end in a one-hot of {', '.join(one_hot)}: the dataset does not say that its do")
        elif list(card.one_hot(str(there.get("env.task")), env.options)) != list(one_hot):
            raise DemonstrationError(
                f"data.demos_dir: {dataset.directory} has states that end in a one-hot of {there.get('env.task')}, and "
                f"here it is of {env.task}. Set env.task to that, or leave states out (env.options, data.keys.state)"
            )
    sentences = set(card.sentences(env.task))
    if not there and sentences and not sentences & set(dataset.tasks):
        few = " | ".join(dataset.tasks[:3])
        lines.append(f"none of its sentences ({few}) is one of {env.task} ({' | '.join(sorted(sentences)[:3])})")
    return lines


def decode_frames(
    cfg: Config,
    dataset: LeRobotDataset,
    spec: EnvSpec,
    report: Callable[[str, int, int], None] = lambda *_: None,
) -> Path:
    """Decode the features of `dataset` that the environment shows, unless that was done before; see
    `lerobot.frames.decode`. Returns the directory for `Demonstrations`."""
    return decode(dataset, matched_keys(cfg, dataset, spec), _frames_root(cfg, dataset), report)


def add_to_dataset(
    cfg: Config, dataset: LeRobotDataset, frames: Path, spec: EnvSpec, columns: Mapping[str, np.ndarray]
) -> None:
    """Add columns [F] to a dataset that this run made. Its decoded `frames` move to where the changed dataset's are
    looked for; who has opened them goes on reading."""
    from rlinf_lite.data.lerobot.reader import LeRobotDataset
    from rlinf_lite.data.lerobot.writer import add_columns

    keys = matched_keys(cfg, dataset, spec)
    add_columns(dataset.directory, columns)
    os.replace(frames, frames_directory(LeRobotDataset(dataset.directory), keys, _frames_root(cfg, dataset)))


def _frames_root(cfg: Config, dataset: LeRobotDataset) -> Path:
    return dataset.directory / FRAMES if cfg.data.cache_dir is None else Path(cfg.data.cache_dir)


def keys_of(cfg: Config, seen: Observed | EnvSpec) -> Keys:
    """The dataset's features that correspond to the environment's observations."""
    keys = cfg.data.keys
    cameras = {camera: keys.cameras.get(camera, PICTURES + camera) for camera in seen.cameras}
    state, subtasks = keys.state if seen.state_dim else None, keys.instruction == "subtask"
    return Keys(cameras, state, keys.action, seen.has_instruction, subtasks)


def matched_keys(cfg: Config, dataset: LeRobotDataset, seen: Observed | EnvSpec) -> Keys:
    """The keys of `keys_of`, with columns in the environment's order or, if the environment has no names, in the order
    of the policy that the run starts with.

    Raises:
        DemonstrationError: if both sides have names and these differ.
    """
    keys, trained, problems = keys_of(cfg, seen), names_in(start_dir(cfg)), list[str]()
    order, names = dict[str, tuple[int, ...]](), own_names(seen)
    for name, key in (("state", keys.state), ("action", keys.action)):
        if key is None or not cfg.data.keys.match_names:
            names |= {name: trained[name]} if name in trained and name not in names else {}  # nothing to match
            continue
        feature = dataset.info.features[key]
        found, whose = flat_names(feature.names, feature.width), "the environment's"
        wanted = names.get(name) or numbered_names(name, feature.width)
        if name in trained and (name not in names or counted(names[name])):
            wanted, whose = trained[name], f"those of the policy in {start_dir(cfg)}"
        try:
            columns = order_of(wanted, found)
        except ValueError:
            unless = " or, if the policy reads no state, data.keys.state=null" if name == "state" else ""
            problems.append(
                f"data.keys.{name}: the columns of {key} are {', '.join(found or ())}, and {whose} "
                f"{', '.join(wanted)}. "
                "Name the dataset's as these in meta/info.json where they mean the same; write "
                f"data.keys.match_names=false to take them as they come{unless}"
            )
            continue
        if columns is not None:
            order[name] = columns
        if not counted(wanted):
            names[name] = wanted
        elif found is not None and not counted(found) and columns is None:
            names[name] = list(found)
    if problems:
        raise DemonstrationError(f"{dataset.directory}: {'; '.join(problems)}")
    return replace(keys, order=order, names=names)


def stride_of(cfg: Config) -> int:
    """The number of frames from the beginning of a chunk to the beginning of the next one."""
    return cfg.data.stride or (1 if cfg.data.source == "folder" else cfg.model.num_action_chunks)


def beyond_bounds(frames: Frames, spec: EnvSpec) -> list[str]:
    """Action dimensions with values outside the environment's bounds: one line each."""
    found = frames.statistics["action"]
    bounds = zip(found["min"], found["max"], spec.action_low, spec.action_high, strict=True)
    return [
        f"action[{dim}] is in [{low:.4g}, {high:.4g}] there, and the environment takes [{least:g}, {most:g}]"
        for dim, (low, high, least, most) in enumerate(bounds)
        if low < least - 1e-5 * (most - least) or high > most + 1e-5 * (most - least)
    ]


def policy_statistics(demos: Demonstrations, spec: EnvSpec, num_relative: int = 0) -> dict[str, Statistics]:
    """The statistics of `state` and `action` for normalisation, exact over all frames; see `Policy.take_statistics`.

    The first `num_relative` action dimensions are measured in chunks, relative to the state where each chunk begins.
    Constant dimensions get the range of the environment's bounds, or of one unit to either side of a state.
    """
    found = {name: dict(numbers) for name, numbers in demos.frames.statistics.items()}
    action, low, high = found["action"], np.array(spec.action_low), np.array(spec.action_high)
    for dim in range(num_relative):
        relative = statistics.of_numbers(demos.relative_actions(dim)[:, None])
        for name in relative.keys() - {"count"}:
            action[name][dim] = relative[name][0]
        centre, half = (relative["min"][0] + relative["max"][0]) / 2, (high[dim] - low[dim]) / 2
        low[dim], high[dim] = centre - half, centre + half
    usable = {"action": statistics.to_divide_by(action, low, high)}
    if "state" in found:
        centres = (np.array(found["state"]["min"]) + np.array(found["state"]["max"])) / 2
        usable["state"] = statistics.to_divide_by(found["state"], centres - 1, centres + 1)
    return usable


def foreign_dimensions(
    found: Mapping[str, Statistics], usual: Mapping[str, tuple[Sequence[float], Sequence[float]]]
) -> list[str]:
    """The dimensions of `state` and `action` in which demonstrations are far from the `usual` statistics of a policy
    that was trained elsewhere, one line each: outside three times the usual range, or narrower than 1/40 of it."""
    lines = []
    for name in found.keys() & usual.keys():
        numbers, (lows, highs) = found[name], usual[name]
        for dim, (low, high) in enumerate(zip(lows, highs, strict=True)):
            there = [numbers[key][dim] for key in ("min", "q01", "q99", "max")]
            width, rounding = high - low, 1e-6 * max(abs(low), abs(high), 1.0) if np.isfinite(high - low) else 0.0
            beyond = there[1] < low - width - rounding or there[2] > high + width + rounding
            if beyond or there[3] - there[0] < width / 40 < np.inf:
                lines.append(
                    f"{name}[{dim}] is in [{there[1]:.4g}, {there[2]:.4g}] there, and the policy's statistics say "
                    f"[{low:.4g}, {high:.4g}]"
                )
    return sorted(lines)


def recipe(cfg: Config) -> dict[str, Any]:
    """The settings that determine an expert's demonstrations, by config key, with values as JSON returns them."""
    env, data = cfg.env, cfg.data
    made_from: dict[str, Any] = {
        "env.id": env.id,
        "env.task": env.task,
        "env.options": _options(env.id, env.options),
        "env.train.max_episode_steps": env.train.max_episode_steps,
        "env.train.ignore_terminations": env.train.ignore_terminations,
        "model.num_action_chunks": cfg.model.num_action_chunks,
        **{f"data.{name}": value for name, value in data.model_dump(exclude=_NOT_MADE_FROM).items()},
        "data.teacher_dir": data.teacher_dir and _policy_digest(Path(data.teacher_dir)),
    }
    content: dict[str, Any] = json.loads(json.dumps(made_from))
    return content


def provenance(made_from: dict[str, Any], spec: EnvSpec, counts: dict[str, float]) -> dict[str, Any]:
    """The content of `meta/rlinf_lite.json`."""
    module = env_card(made_from["env.id"]).package
    of_env = [] if module is None else metadata.packages_distributions().get(module, [])  # such as hf-libero of libero
    installed = {name: metadata.version(name) for name in (*_PACKAGES, *of_env)}
    return {
        "made_from": made_from,
        "spec": asdict(spec),
        "counts": counts,
        "versions": {"rlinf_lite": __version__, **installed},
    }


def read_provenance(directory: Path) -> dict[str, Any]:
    """Read `meta/rlinf_lite.json`. Raises DemonstrationError if there is none."""
    file = directory / "meta" / PROVENANCE
    try:
        content: dict[str, Any] = json.loads(file.read_text())
        if not isinstance(content["made_from"], dict):
            raise ValueError("made_from is no section of keys")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DemonstrationError(
            f"data.demos_dir: {directory} has no {file.relative_to(directory)} that could be read ({error}), so that "
            "an expert of this project did not make it. Use it all the same with data.source=folder"
        ) from error
    return content


def check_provenance(directory: Path, made_from: dict[str, Any], spec: EnvSpec | None = None) -> dict[str, Any]:
    """Check that this run's expert would make the same demonstrations, and return `meta/rlinf_lite.json`. A teacher is
    compared only if the run names one.

    Raises:
        DemonstrationError: lists the differences.
    """
    meta = read_provenance(directory)
    there, differences = meta["made_from"], []
    for key, value in made_from.items():
        if there.get(key) != value and not (key == "data.teacher_dir" and value is None):
            differences.append(f"{key} is {there.get(key)!r} there and {value!r} here")
    if spec is not None:
        mine = json.loads(json.dumps(asdict(spec)))
        for name, value in mine.items():
            found = meta["spec"].get(name)
            is_unnamed = name.endswith("_names") and None in (value, found)  # one side has no names
            if found != value and not is_unnamed:
                differences.append(f"the environment's {name} is {found} there and {value} here")
    if differences:
        raise DemonstrationError(
            f"data.demos_dir: {directory} holds other demonstrations: {'; '.join(differences)}. Change the config, "
            "name another directory, delete this one, or use them as they are with data.source=folder"
        )
    return meta


def _check_features(cfg: Config, dataset: LeRobotDataset, seen: Observed | EnvSpec | None) -> None:
    """Raise DemonstrationError if features that `data.keys` names are missing, or differ in size from the environment's
    observations `seen`. If `seen` is None (not known), the usual state feature may be missing: the environment may have
    no state."""
    own, problems = cfg.data.keys, list[str]()
    if seen is None:
        usual = type(own).model_fields["state"].default
        keys = Keys(own.cameras, None if own.state == usual else own.state, own.action, False)
    else:
        keys = keys_of(cfg, seen)
    problems += [
        f"data.keys.cameras.{camera}: the environment has no such camera. {did_you_mean(camera, seen.cameras)}"
        for camera in sorted(own.cameras)
        if seen is not None and camera not in seen.cameras
    ]
    for camera, key in keys.cameras.items():
        found = dataset.info.features.get(key)
        if found is None or not found.is_picture:
            known = list(dataset.info.pictures) or ["(it has no pictures)"]
            problems.append(
                f"data.keys.cameras: the dataset has no pictures {key!r} for the environment's camera {camera}. "
                f"{did_you_mean(key, known)} Write data.keys.cameras={{{camera}: <feature>}}"
            )
        elif found.info.get("is_depth_map") or found.info.get("video.is_depth_map"):
            problems.append(f"data.keys.cameras.{camera}: {key} is a depth map in info.json, and colours are read")
    for name, number_key in (("state", keys.state), ("action", keys.action)):
        num_dims = None if seen is None else getattr(seen, f"{name}_dim")
        if number_key is None:
            continue
        feature = dataset.info.features.get(number_key)
        numbers = {key: x for key, x in dataset.info.features.items() if _is_vector(x)}
        if feature is None or not _is_vector(feature):
            problems.append(f"data.keys.{name}: no vector {number_key!r}. {did_you_mean(number_key, numbers)}")
        elif num_dims is not None and feature.width != num_dims:
            unless = ". Write data.keys.state=null if the policy reads none" if name == "state" else ""
            text = f"{number_key} has {feature.width} numbers, and the environment's {name} {num_dims}{unless}"
            problems.append(f"data.keys.{name}: {text}")
    if SUBTASKS in keys.features and SUBTASKS not in dataset.info.features:
        problems.append(f"data.keys.instruction: subtask, and there are no annotations {SUBTASKS}. Write task")
    if problems:
        raise DemonstrationError(f"{dataset.directory}: {'; '.join(problems)}")
    dataset.check(keys.features)
    if seen is not None:
        matched_keys(cfg, dataset, seen)


def _is_vector(feature: Feature) -> bool:
    return feature.is_numeric and len(feature.shape) == 1


def _options(env_id: str, given: Any) -> Any:
    """The options of an environment, without those that have no effect on demonstrations."""
    card = env_card(env_id)
    options = card.options(given)
    return options.model_dump(mode="json", exclude=set(card.free_options)) if isinstance(options, Section) else options


def _policy_digest(directory: Path) -> str:
    files = sorted(policy_directory(directory).glob("*.safetensors"))
    return "sha256:" + hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
