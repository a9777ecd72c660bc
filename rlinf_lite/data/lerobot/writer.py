"""Writing a dataset: every worker writes a part, and `publish` makes one LeRobotDataset v3.0 of all parts.

A part is a table with one row group per episode, videos that hold one episode after the other, and `part.json`, which
is written last. The published dataset has the episodes in the order of their numbers, independent of the workers; only
the place of an episode in the videos depends on them. `meta/info.json` is written last: a folder that has it is
complete.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from rlinf_lite.data.lerobot import statistics
from rlinf_lite.data.lerobot.layout import (
    DATA_FILE_MB,
    DATA_PATH,
    EPISODES_PATH,
    INFO,
    V3,
    VIDEO_FILE_MB,
    VIDEO_PATH,
    Feature,
    Info,
    LeRobotError,
    counters,
    numbered,
)
from rlinf_lite.data.lerobot.video import VideoWriter

PARTS = ".parts"
"""The folder of parts in the dataset's folder, until it is published."""
_PNG = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@dataclass
class Episode:
    """An episode of T frames to write."""

    number: int
    """The order among all episodes; numbers may have gaps."""
    columns: Mapping[str, NDArray[Any]]
    """Values [T, ...] by feature; pictures uint8 [T, H, W, 3]."""
    tasks: Sequence[str]
    """The sentence of every frame."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the episode in `meta/episodes`, such as its seed."""


class PartWriter:
    """Writes one worker's episodes. `features`: those of its frames, without counters."""

    def __init__(self, directory: Path, features: Mapping[str, Feature], fps: int) -> None:
        directory.mkdir(parents=True)
        self._directory, self._features, self._fps = directory, features, fps
        self._table = pq.ParquetWriter(
            directory / "data.parquet", _schema({**features, "task": Feature("string", (1,))})
        )
        self._videos: dict[str, VideoWriter] = {}
        self._num_files = dict.fromkeys(features, 0)
        self._counts = {key: np.zeros((3, 256), np.int64) for key, x in features.items() if x.is_picture}
        self._episodes: list[dict[str, Any]] = []

    def add(self, episode: Episode) -> None:
        """Add an episode. Raises LeRobotError if a column is missing or does not agree with its feature."""
        length, columns = len(episode.tasks), {}
        entry: dict[str, Any] = {"number": episode.number, "length": length, "facts": dict(episode.facts)}
        entry |= {"clips": {}, "stats": {}}
        for key, feature in self._features.items():
            values = episode.columns.get(key)
            shape = (length, *feature.shape)
            if values is None or values.shape != shape:
                found = "is not there" if values is None else f"has shape {values.shape}"
                raise LeRobotError(f"episode {episode.number}: {key} {found}, and the dataset's is {shape}")
            if feature.is_picture:
                counts = statistics.picture_counts(values)
                self._counts[key] += counts
                entry["stats"][key] = statistics.of_pictures(counts, length)
            if feature.dtype == "video":
                entry["clips"][key] = self._add_clip(key, values)
            elif feature.dtype == "image":
                columns[key] = pa.array([{"bytes": png(x), "path": f"frame_{i:06d}.png"} for i, x in enumerate(values)])
            else:
                columns[key] = _column(feature, values)
        columns["task"] = pa.array(list(episode.tasks), pa.string())
        self._table.write_table(pa.table(columns, schema=self._table.schema), row_group_size=length)
        self._episodes.append(entry)

    def finish(self) -> None:
        """Close the files. Raises LeRobotError if a video could not be finished."""
        for video in self._videos.values():
            video.close()
        self._table.close()
        counts = {key: x.tolist() for key, x in self._counts.items()}
        features = {key: feature.as_json() for key, feature in self._features.items()}
        content = {"features": features, "episodes": self._episodes, "counts": counts}
        (self._directory / "part.json").write_text(json.dumps(content))

    def _add_clip(self, key: str, pictures: NDArray[np.uint8]) -> dict[str, Any]:
        video = self._videos.get(key)
        if video is None or video.num_bytes >= VIDEO_FILE_MB * 2**20:
            if video is not None:
                video.close()
            file = self._directory / key / f"{self._num_files[key]:06d}.mp4"
            height, width = pictures.shape[1:3]
            video = self._videos[key] = VideoWriter(file, height, width, self._fps)
            self._num_files[key] += 1
        first = video.num_frames
        video.add(pictures)
        return {"file": video.file.name, "from_s": first / self._fps, "to_s": video.num_frames / self._fps}


def begin(directory: Path, key: str = "data.demos_dir") -> Path:
    """Create the folder for parts, and delete the parts of an interrupted collection. `key`: the option that names
    `directory`.

    Raises LeRobotError if the folder contains something that a dataset would overwrite, or cannot be written to.
    """
    taken = [name for name in ("meta", "data", "videos") if (directory / name).exists()]
    if taken:
        complete = (
            "is a dataset already" if (directory / INFO).is_file() else "holds something else, or an unfinished dataset"
        )
        raise LeRobotError(f"{directory} {complete} ({', '.join(taken)}). Name another folder, or delete this one")
    parts = directory / PARTS
    shutil.rmtree(parts, ignore_errors=True)
    try:
        parts.mkdir(parents=True)
    except OSError as error:
        raise LeRobotError(f"{key}: {directory} cannot be written to: {error}. Name another folder") from error
    return parts


def publish(directory: Path, fps: int, robot_type: str | None, more_meta: Mapping[str, Any] | None = None) -> Info:
    """Make a dataset of the parts below `directory`, which have at least one episode. `more_meta`: further JSON files
    for `meta/`, by name."""
    parts = sorted(part.parent for part in (directory / PARTS).glob("*/part.json"))
    contents = [json.loads((part / "part.json").read_text()) for part in parts]
    root = directory / PARTS / "published"
    videos = _move_videos(root, parts)
    entries = [
        (part, row, x) for part, found in zip(parts, contents, strict=True) for row, x in enumerate(found["episodes"])
    ]
    entries.sort(key=lambda entry: entry[2]["number"])
    feature_entries = contents[0]["features"]
    features = {
        key: Feature(x["dtype"], tuple(x["shape"]), x["names"], x.get("info", {})) for key, x in feature_entries.items()
    }

    table = _Tables(root, features, fps)
    episodes = [table.add(part, row, entry, videos) for part, row, entry in entries]
    table.close()
    numbers = {key: statistics.of_numbers(np.concatenate(x)) for key, x in table.numbers.items()}
    for key, feature in features.items():
        if feature.is_picture:
            counts = np.sum([content["counts"][key] for content in contents], axis=0)
            numbers[key] = statistics.of_pictures(counts, table.num_frames)

    has_videos = any(feature.dtype == "video" for feature in features.values())
    info = Info(
        version=V3,
        fps=fps,
        features=features | counters(),
        num_episodes=len(episodes),
        num_frames=table.num_frames,
        data_path=DATA_PATH,
        video_path=VIDEO_PATH if has_videos else None,
        robot_type=robot_type,
    )
    _write(root / numbered(EPISODES_PATH, 0), pa.Table.from_pylist(episodes))
    _write(root / "meta" / "tasks.parquet", _tasks_table(table.tasks))
    for name, content in {
        **(more_meta or {}),
        "stats.json": numbers,
        "info.json": info.as_json(len(table.tasks)),
    }.items():
        (root / "meta" / name).write_text(json.dumps(content, indent=1) + "\n")
    for name in ("data", "videos", "meta"):  # meta last
        if (root / name).exists():
            os.replace(root / name, directory / name)
    shutil.rmtree(directory / PARTS)
    return info


def add_columns(directory: Path, columns: Mapping[str, NDArray[Any]]) -> None:
    """Add columns of numbers [F], a value for each frame, to the tables of a published dataset, or replace them. Each
    file is replaced as a whole, `meta/info.json` last."""
    features = {key: Feature(values.dtype.name, (1,)) for key, values in columns.items()}
    before = 0
    for file in sorted(directory.glob("data/*/*.parquet")):
        with pq.ParquetFile(file) as opened:
            table = opened.read()
        table = table.drop_columns([key for key in columns if key in table.column_names])
        for key, values in columns.items():
            table = table.append_column(key, _column(features[key], values[before : before + len(table)]))
        before += len(table)
        partial = file.with_suffix(".partial")
        pq.write_table(table, partial)
        os.replace(partial, file)
    changed = {name: json.loads((directory / "meta" / name).read_text()) for name in ("stats.json", "info.json")}
    changed["stats.json"] |= {key: statistics.of_numbers(values[:, None]) for key, values in columns.items()}
    changed["info.json"]["features"] |= {key: feature.as_json() for key, feature in features.items()}
    for name, content in changed.items():
        partial = directory / "meta" / f"{name}.partial"
        partial.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(partial, directory / "meta" / name)


class _Tables:
    """Writes the files below `data/`, episode by episode."""

    def __init__(self, root: Path, features: Mapping[str, Feature], fps: int) -> None:
        self._root, self._features, self._fps = root, features, fps
        self._schema = _schema({**features, **counters()})
        self._writer: pq.ParquetWriter | None = None
        self._file_number = -1
        self._sources: dict[Path, pq.ParquetFile] = {}
        self.tasks: dict[str, int] = {}
        self.num_frames = self._num_episodes = 0
        self.numbers: dict[str, list[NDArray[Any]]] = {}
        """All values of every numeric feature, by episode."""

    def add(
        self, part: Path, row: int, entry: Mapping[str, Any], videos: Mapping[tuple[str, str], int]
    ) -> dict[str, Any]:
        """Write row group `row` of a part as the next episode. Returns its row of `meta/episodes`."""
        if part not in self._sources:
            self._sources[part] = pq.ParquetFile(part / "data.parquet")
        source = self._sources[part].read_row_group(row)
        length, first = entry["length"], self.num_frames
        sentences = source["task"].to_pylist()
        task_index = [self.tasks.setdefault(task, len(self.tasks)) for task in sentences]
        counted = {
            "timestamp": (np.arange(length) / self._fps).astype(np.float32),
            "frame_index": np.arange(length),
            "episode_index": np.full(length, self._num_episodes),
            "index": np.arange(first, first + length),
            "task_index": np.array(task_index),
        }
        columns = {name: source[name].combine_chunks() for name in source.column_names if name != "task"}
        self._roll()
        assert self._writer is not None
        self._writer.write_table(pa.table(columns | {k: pa.array(x) for k, x in counted.items()}, schema=self._schema))

        found = {key: as_numpy(columns[key], x) for key, x in self._features.items() if not x.is_picture}
        found |= {name: values[:, None] for name, values in counted.items()}
        stats = {key: statistics.of_numbers(values) for key, values in found.items()} | entry["stats"]
        for key, values in found.items():
            self.numbers.setdefault(key, []).append(values)
        place = numbered("{chunk_index}/{file_index}", self._file_number).split("/")
        line: dict[str, Any] = {
            "episode_index": self._num_episodes,
            "tasks": list(dict.fromkeys(sentences)),
            "length": length,
            "data/chunk_index": int(place[0]),
            "data/file_index": int(place[1]),
            "dataset_from_index": first,
            "dataset_to_index": first + length,
        }
        for key, clip in entry["clips"].items():
            number = videos[key, f"{part.name}/{clip['file']}"]
            chunk, file = numbered("{chunk_index}/{file_index}", number).split("/")
            line |= {f"videos/{key}/chunk_index": int(chunk), f"videos/{key}/file_index": int(file)}
            line |= {f"videos/{key}/from_timestamp": clip["from_s"], f"videos/{key}/to_timestamp": clip["to_s"]}
        line |= {f"stats/{key}/{name}": value for key, x in stats.items() for name, value in x.items()}
        line |= {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0, **entry["facts"]}
        self.num_frames, self._num_episodes = first + length, self._num_episodes + 1
        return line

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _roll(self) -> None:
        """Begin the next file if the present one is full."""
        file = self._root / numbered(DATA_PATH, max(self._file_number, 0))
        if self._writer is None or file.stat().st_size >= DATA_FILE_MB * 2**20:
            self.close()
            self._file_number += 1
            file = self._root / numbered(DATA_PATH, self._file_number)
            file.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(file, self._schema)


def _move_videos(root: Path, parts: Sequence[Path]) -> dict[tuple[str, str], int]:
    """Move the videos of all parts to their published places. Returns the number of each video, by (feature, part and
    name)."""
    numbers: dict[tuple[str, str], int] = {}
    next_number: dict[str, int] = {}
    for part in parts:
        for video in sorted(part.glob("*/*.mp4")):
            key = video.parent.name
            number = next_number.get(key, 0)
            target = root / numbered(VIDEO_PATH, number, video_key=key)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(video, target)
            numbers[key, f"{part.name}/{video.name}"] = number
            next_number[key] = number + 1
    return numbers


def png(picture: NDArray[np.uint8]) -> bytes:
    """A picture uint8 [H, W, 3] as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG", compress_level=1)  # 1/3 of the default's time, files 1/10 larger
    return file.getvalue()


def as_numpy(column: pa.Array, feature: Feature) -> NDArray[Any]:
    """The values of a column of numbers, [n, D]."""
    while (
        pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or pa.types.is_fixed_size_list(column.type)
    ):
        column = column.flatten()
    values: NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return values.reshape(-1, feature.width)


def _schema(features: Mapping[str, Feature]) -> pa.Schema:
    return pa.schema([(key, _arrow_type(x)) for key, x in features.items() if x.dtype != "video"])


def _arrow_type(feature: Feature) -> pa.DataType:
    if feature.dtype == "image":
        return _PNG
    if len(feature.shape) != 1:
        raise LeRobotError(f"a feature of shape {feature.shape} cannot be written: vectors, numbers and pictures can")
    value = pa.string() if feature.dtype == "string" else pa.from_numpy_dtype(np.dtype(feature.dtype))
    return value if feature.shape == (1,) else pa.list_(value, feature.shape[0])


def _column(feature: Feature, values: NDArray[Any]) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(values, feature.dtype).ravel())
    return flat if feature.shape == (1,) else pa.FixedSizeListArray.from_arrays(flat, feature.shape[0])


def _tasks_table(tasks: Mapping[str, int]) -> pa.Table:
    """The table of tasks in the form of a pandas frame whose index is the sentence, as LeRobot reads it."""
    kinds = {"task_index": ("int64", "int64"), "task": ("unicode", "object")}
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": of_numpy, "metadata": None}
        for name, (kind, of_numpy) in kinds.items()
    ]
    pandas = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "pandas_version": "2.2.0"}
    table = pa.table({"task_index": pa.array(list(tasks.values()), pa.int64()), "task": list(tasks)})
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})


def _write(file: Path, table: pa.Table) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, file)
