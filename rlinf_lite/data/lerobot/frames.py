"""Frames by number: a dataset's pictures and numbers are decoded once into files, which are mapped into memory.

Reads are views of the page cache, which the system can free at any time: memory does not grow with the dataset, and
the processes of a node share it. Once the files exist, neither pyarrow nor PyAV is needed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlinf_lite.data.lerobot import statistics
from rlinf_lite.data.lerobot.layout import INFO, SUBTASKS, LeRobotError, read_text
from rlinf_lite.envs.observations import concat_rows, take_rows

if TYPE_CHECKING:
    from rlinf_lite.data.lerobot.reader import LeRobotDataset

FORMAT = 4
"""Version of the format of decoded frames, and of the checks before decoding."""
_CONTENTS = "contents.json"
_REWARD = "next.reward"


@dataclass(frozen=True)
class Keys:
    """The names of the dataset's features, by use."""

    cameras: Mapping[str, str]
    """Feature by camera."""
    state: str | None
    action: str
    instruction: bool = True
    """False: frames get no sentence, because the environment gives no instruction."""
    subtasks: bool = False
    """Whether sentences are LeRobot's subtasks at the frame's time, instead of the frame's task."""
    order: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Columns of `state` and `action` in decoded order, if that differs from the dataset's order."""
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of the columns of `state` and `action` in decoded order; absent if the columns have no names."""

    @property
    def features(self) -> list[str]:
        """The names of all features that are read."""
        found = [self.action, *([self.state] if self.state else []), *self.cameras.values()]
        return found + ([SUBTASKS] if self.instruction and self.subtasks else [])


class Frames:
    """Decoded frames. `images` uint8 [N, H, W, 3] by camera, `state` and `actions` float32 [N, D], `task` int32 [N] (an
    index into `tasks`), `episodes` int64 [E, 2]: first frame and length, `rewards` float32 [N], `successes` bool [E].
    All are mapped; `state` and `rewards` may be None."""

    def __init__(self, directory: Path) -> None:
        try:
            content = json.loads((directory / _CONTENTS).read_text())
            self.tasks: list[str] = content["tasks"]
            self.statistics: dict[str, statistics.Statistics] = content["statistics"]
            """The statistics of `state` and `action`, exact over the whole dataset."""
            self.names: dict[str, list[str]] = content.get("keys", {}).get("names", {})
            """The names of the columns of `state` and `action`, if they have names."""
            self.notes: list[str] = content["notes"]
            """Notes on files that were read although they deviate from what they state, one line each."""
            self.images = {camera: _mapped(directory / file) for camera, file in content["cameras"].items()}
            self.state = _mapped(directory / "state.npy") if content["has_state"] else None
            self.rewards = _mapped(directory / "rewards.npy") if content["has_rewards"] else None
            self.actions, self.task, self.episodes, self.successes = (
                _mapped(directory / f"{name}.npy") for name in ("actions", "task", "episodes", "successes")
            )
        except (OSError, ValueError, KeyError) as error:
            raise LeRobotError(
                f"{directory} cannot be read: {error}. On several nodes it must be a directory that all of them see; "
                "delete it to have it made again"
            ) from error

    def read(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        """The observations (see `envs.Obs`) of these frames."""
        obs: dict[str, Any] = {"instruction": [self.tasks[i] for i in self.task[rows]]}
        if self.images:
            obs["images"] = {camera: np.asarray(images[rows]) for camera, images in self.images.items()}
        if self.state is not None:
            obs["state"] = np.asarray(self.state[rows])
        return obs


def split_by_part(
    numbers: NDArray[np.int64], sizes: Sequence[int]
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """For each of several parts of `sizes` in a row, which of `numbers` are in it, and their numbers in it."""
    found, before = [], 0
    for size in sizes:
        rows = np.flatnonzero((numbers >= before) & (numbers < before + size))
        found.append((rows, numbers[rows] - before))
        before += size
    return found


def joined_order(places: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> NDArray[np.int64]:
    """Where each number that `split_by_part` has split is, once those of all parts are in a row."""
    return np.argsort(np.concatenate([rows for rows, _ in places]), kind="stable")


def read_frames(parts: Sequence[Frames], rows: NDArray[np.int64]) -> dict[str, Any]:
    """The observations (see `envs.Obs`) of frames, which are counted over all `parts`."""
    places = split_by_part(rows, [len(part.actions) for part in parts])
    found = [part.read(own) for part, (_, own) in zip(parts, places, strict=True) if len(own)]
    obs: dict[str, Any] = take_rows(concat_rows(found), joined_order(places))
    return obs


def frames_directory(dataset: LeRobotDataset, keys: Keys, root: Path) -> Path:
    """The folder below `root` for the decoded frames of the dataset in its present state."""
    files = sorted(file for file in (dataset.directory / "meta").rglob("*") if file.is_file())
    files += sorted({episode.data_file for episode in dataset.episodes})
    for key in keys.cameras.values():
        files += sorted({episode.clips[key].file for episode in dataset.episodes if key in episode.clips})
    for file in files:
        if not file.is_file():
            raise LeRobotError(f"{file} is missing, and the dataset's tables name it")
    states = [file.stat() for file in files]
    seen = [(file.name, state.st_size, state.st_mtime_ns) for file, state in zip(files, states, strict=True)]
    described = json.dumps([FORMAT, asdict(keys), read_text(dataset.directory / INFO), seen])
    return root / hashlib.sha256(described.encode()).hexdigest()[:16]


def decode(
    dataset: LeRobotDataset,
    keys: Keys,
    root: Path,
    report: Callable[[str, int, int], None] = lambda *_: None,
    option: str = "data.cache_dir",
) -> Path:
    """Decode every frame, unless that was done before. Returns the directory for `Frames`.

    `report`: called now and then with (what is decoded, number of decoded frames, number of all frames). `option`: the
    name of what the user chose `root` by, for messages.

    Raises:
        LeRobotError: if a file does not agree with info.json, or the disk has too little room.
    """
    directory = frames_directory(dataset, keys, root)
    if (directory / _CONTENTS).is_file():
        return directory
    dataset.check(keys.features)
    dataset.check_videos(list(keys.cameras.values()))
    try:
        partial = root / f".partial_{os.getpid()}"
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed process with the same id
        partial.mkdir(parents=True)
    except OSError as error:
        raise _unwritable(root, error, option) from error
    try:
        _check_room(dataset, keys, partial, option)
        _fill(dataset, keys, partial, report)
        os.replace(partial, directory)
    except BaseException:  # Ctrl-C too: incomplete frames must not stay
        shutil.rmtree(partial, ignore_errors=True)
        if (directory / _CONTENTS).is_file():
            return directory  # another run has finished first
        raise
    return directory


def check_writable(dataset: LeRobotDataset, keys: Keys, root: Path) -> None:
    """Raise LeRobotError if frames are not decoded yet and cannot be written below `root`."""
    there = next(path for path in (root, *root.absolute().parents) if path.exists())
    decoded = (frames_directory(dataset, keys, root) / _CONTENTS).is_file()
    if not decoded and not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        raise _unwritable(root, PermissionError("it is read-only"), "data.cache_dir")


def _unwritable(root: Path, error: OSError, option: str) -> LeRobotError:
    return LeRobotError(f"{option}: {root} cannot be written to: {error}. Name another directory")


def _fill(dataset: LeRobotDataset, keys: Keys, partial: Path, report: Callable[[str, int, int], None]) -> None:
    info, total = dataset.info, dataset.info.num_frames
    widths = {key: info.features[key].width for key in (keys.state, keys.action) if key is not None}
    actions = _new(partial / "actions.npy", np.float32, (total, widths[keys.action]))
    state = None if keys.state is None else _new(partial / "state.npy", np.float32, (total, widths[keys.state]))
    task = _new(partial / "task.npy", np.int32, (total,))
    episodes = np.array([(episode.first_frame, episode.length) for episode in dataset.episodes], np.int64)
    np.save(partial / "episodes.npy", episodes)
    has_rewards = _REWARD in info.features and info.features[_REWARD].width == 1
    rewards = _new(partial / "rewards.npy", np.float32, (total,)) if has_rewards else None

    files = {camera: f"images_{i}.npy" for i, camera in enumerate(keys.cameras)}
    images = {
        camera: _new(partial / files[camera], np.uint8, (total, *info.features[key].size, 3))
        for camera, key in keys.cameras.items()
    }
    in_table = [key for key in keys.cameras.values() if info.features[key].dtype == "image"]
    sentences = {SUBTASKS} & set(keys.features)
    wanted = dict.fromkeys([keys.action, *([keys.state] if keys.state else []), "task_index", *in_table, *sentences])
    wanted |= {_REWARD: None} if has_rewards else {}
    numbers: dict[str, int] = {}  # by subtask
    for first, columns in dataset.rows(list(wanted)):
        rows = slice(first, first + len(columns["task_index"]))
        actions[rows], task[rows] = _ordered(columns[keys.action], keys, "action"), columns["task_index"][:, 0]
        if sentences:
            task[rows] = [numbers.setdefault(text, len(numbers)) for text in columns[SUBTASKS]]
        if rewards is not None:
            rewards[rows] = columns[_REWARD][:, 0]
        if state is not None and keys.state is not None:
            state[rows] = _ordered(columns[keys.state], keys, "state")
        for camera, key in keys.cameras.items():
            if key in columns:
                images[camera][rows] = columns[key]
        report("frames", rows.stop, total)
    tasks = list(numbers) if sentences else dataset.tasks
    for strange in task[(task < 0) | (task >= len(tasks))][:1]:
        raise LeRobotError(f"{dataset.directory}: a frame has task {strange}, and there are {len(tasks)}")
    for camera, key in keys.cameras.items():
        if info.features[key].dtype == "video":
            for done, (frame, picture) in enumerate(dataset.pictures(key), 1):
                images[camera][frame] = picture
                if done % 256 == 0 or done == total:
                    report(f"pictures of {camera}", done, total)
    found = {"action": statistics.of_numbers(actions)} | (
        {} if state is None else {"state": statistics.of_numbers(state)}
    )
    _check_finite(dataset, actions, found["action"], keys.action, keys.order.get("action"))
    if state is not None and keys.state is not None:
        _check_finite(dataset, state, found["state"], keys.state, keys.order.get("state"))
    if rewards is not None and not np.isfinite(rewards).all():
        frame = int(np.flatnonzero(~np.isfinite(rewards))[0])
        raise LeRobotError(f"{dataset.directory}: {_REWARD} is {rewards[frame]} in frame {frame}")
    successes = dataset.successes()
    if successes is None:  # made elsewhere: by the last reward, if there are rewards
        last = episodes.sum(1) - 1
        successes = np.ones(len(episodes), bool) if rewards is None else np.asarray(rewards[last]) > 0
    np.save(partial / "successes.npy", successes)
    tasks = tasks if keys.instruction else [""] * len(tasks)
    content = {
        "tasks": tasks,
        "cameras": files,
        "has_state": state is not None,
        "has_rewards": has_rewards,
        "statistics": found,
        "notes": dataset.notes,
    }
    content |= {"source": str(dataset.directory.absolute()), "keys": asdict(keys)}
    (partial / _CONTENTS).write_text(json.dumps(content, indent=1) + "\n")


def _ordered(values: NDArray[Any], keys: Keys, name: str) -> NDArray[Any]:
    return values[:, list(keys.order[name])] if name in keys.order else values


def _check_finite(
    dataset: LeRobotDataset,
    values: NDArray[Any],
    found: statistics.Statistics,
    key: str,
    order: tuple[int, ...] | None,
) -> None:
    bad = np.flatnonzero(~np.isfinite(found["mean"]))
    if len(bad):
        frame = int(np.flatnonzero(~np.isfinite(values[:, bad[0]]))[0])
        [(number, episode)] = [x for x in enumerate(dataset.episodes) if 0 <= frame - x[1].first_frame < x[1].length]
        column = bad[0] if order is None else order[bad[0]]
        where = f"frame {frame - episode.first_frame} of episode {number}"
        raise LeRobotError(f"{episode.data_file}: {key}[{column}] is {values[frame, bad[0]]} in {where}")


def _check_room(dataset: LeRobotDataset, keys: Keys, partial: Path, option: str) -> None:
    of_frame = sum(int(np.prod(dataset.info.features[key].size)) * 3 for key in keys.cameras.values())
    needed, free = of_frame * dataset.info.num_frames, shutil.disk_usage(partial).free
    if needed > free:
        raise LeRobotError(
            f"{option}: {dataset.info.num_frames:,} decoded frames of {of_frame:,} bytes are "
            f"{needed / 2**30:.1f} GiB, and {partial.parent} has {free / 2**30:.1f} GiB left. Name another directory"
        )


def _new(file: Path, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    array: NDArray[Any] = np.lib.format.open_memmap(file, "w+", dtype, shape)
    return array


def _mapped(file: Path) -> NDArray[Any]:
    array: NDArray[Any] = np.load(file, mmap_mode="r")
    return array
