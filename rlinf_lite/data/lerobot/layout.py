"""Contents of `meta/info.json`: features, and the layout of files. Needs neither pyarrow nor PyAV."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from rlinf_lite.dimensions import numbered_names

INFO = Path("meta/info.json")
V3, V2 = "v3.0", "v2.1"
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
CHUNKS_SIZE = 1000
"""Number of files per folder."""
DATA_FILE_MB, VIDEO_FILE_MB = 100, 200
PICTURES = "observation.images."
STATE, ACTION = "observation.state", "action"
SUCCESS = "next.success"
"""LeRobot's column that says whether a frame's action led to success."""
SUBTASKS = "language_persistent"
"""LeRobot's column of annotations, each valid from its time on; those of style "subtask" may be instructions."""
COUNTERS = {"timestamp": "float32", "frame_index": "int64", "episode_index": "int64", "index": "int64"}
"""Columns of every dataset, besides `task_index`."""
_PLACES: dict[str, dict[str, Any]] = {
    V3: {"chunk_index": 0, "file_index": 0},
    V2: {"episode_chunk": 0, "episode_index": 0},
}
"""The names that path templates may contain, by version."""


class LeRobotError(ValueError):
    """A folder is no LeRobotDataset, or a file does not agree with its info.json; the message names the file."""


@dataclass(frozen=True)
class Feature:
    """One entry of `features`."""

    dtype: str
    """A numpy type, "string", "image" (encoded pictures in the table), "video" or "language". An unknown type is an
    error only if the feature is read."""
    shape: tuple[int, ...]
    names: Any = None
    info: Mapping[str, Any] = field(default_factory=dict)
    """Properties of a video: codec, pixel format, rate, size."""

    @property
    def is_picture(self) -> bool:
        return self.dtype in ("image", "video")

    @property
    def is_numeric(self) -> bool:
        try:
            return np.dtype(self.dtype).kind in "biuf"
        except (TypeError, ValueError, SyntaxError):
            return False

    @property
    def size(self) -> tuple[int, int]:
        """The height and width of a picture, for shapes with channels first or last."""
        if len(self.shape) == 3 and self.shape[0] in (1, 3) and self.shape[2] not in (1, 3):
            return self.shape[1], self.shape[2]
        return self.shape[0], self.shape[1]

    @property
    def width(self) -> int:
        """The number of values per frame."""
        return math.prod(self.shape)

    def as_json(self) -> dict[str, Any]:
        content: dict[str, Any] = {"dtype": self.dtype, "shape": list(self.shape), "names": self.names}
        return content | ({"info": dict(self.info)} if self.info else {})


@dataclass(frozen=True)
class Info:
    """The used part of `meta/info.json`."""

    version: str
    fps: float
    features: dict[str, Feature]
    num_episodes: int
    num_frames: int
    data_path: str
    video_path: str | None
    chunks_size: int = CHUNKS_SIZE
    robot_type: str | None = None
    num_tasks: int | None = None
    """None: info.json does not give it."""

    @property
    def pictures(self) -> dict[str, Feature]:
        return {key: feature for key, feature in self.features.items() if feature.is_picture}

    def as_json(self, num_tasks: int) -> dict[str, Any]:
        """The content of info.json for a dataset that we write."""
        return {
            "codebase_version": self.version,
            "robot_type": self.robot_type,
            "total_episodes": self.num_episodes,
            "total_frames": self.num_frames,
            "total_tasks": num_tasks,
            "chunks_size": self.chunks_size,
            "data_files_size_in_mb": DATA_FILE_MB,
            "video_files_size_in_mb": VIDEO_FILE_MB,
            "fps": self.fps,
            "splits": {"train": f"0:{self.num_episodes}"},
            "data_path": self.data_path,
            "video_path": self.video_path,
            "features": {key: feature.as_json() for key, feature in self.features.items()},
        }


class _FeatureEntry(BaseModel):
    model_config = ConfigDict(strict=True)

    dtype: str
    shape: list[Annotated[int, Field(gt=0)]]
    names: Any = None
    info: dict[str, Any] | None = None

    @field_validator("shape")
    @classmethod
    def _is_of_a_picture(cls, shape: list[int], others: ValidationInfo) -> list[int]:
        if others.data.get("dtype") in ("image", "video") and len(shape) != 3:
            raise ValueError("a picture has height, width and channels")
        return shape


class _InfoFile(BaseModel):
    """The schema of info.json, to check the types of its values."""

    model_config = ConfigDict(strict=True)

    fps: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    features: dict[str, _FeatureEntry]
    total_episodes: Annotated[int, Field(ge=0)]
    total_frames: Annotated[int, Field(ge=0)]
    total_tasks: int | None = None
    data_path: str
    video_path: str | None = None
    chunks_size: Annotated[int, Field(gt=0)] = CHUNKS_SIZE
    robot_type: str | None = None


def read_text(file: Path) -> str:
    """The text of a JSON file: UTF-8 on every system, without the byte order mark that some editors add."""
    return file.read_text(encoding="utf-8-sig")


def is_dataset(directory: Path) -> bool:
    return (directory / INFO).is_file()


def read_info(directory: Path) -> Info:
    """Read and check info.json. Raises LeRobotError if there is no dataset, or one of another version."""
    file = directory / INFO
    if not directory.is_dir():
        raise LeRobotError(f"no directory {str(directory)!r} (looked for {directory.absolute()})")
    if not file.is_file():
        found = ", ".join(sorted(entry.name for entry in directory.iterdir())[:8]) or "nothing"
        raise LeRobotError(
            f"{directory} is no LeRobotDataset: it has no {INFO} (there is {found}). Name the folder that holds "
            "meta/, data/ and videos/"
        )
    try:
        content = json.loads(read_text(file))
    except (OSError, ValueError) as error:
        raise LeRobotError(f"{file} cannot be read: {error}") from error
    version = content.get("codebase_version") if isinstance(content, dict) else None
    if version not in (V3, V2):
        raise LeRobotError(
            f"{file}: codebase_version is {version}, and {V3} and {V2} are read. Convert the dataset with LeRobot's "
            "own script for that version"
        )
    try:
        read = _InfoFile.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = (
            "is missing"
            if first["type"] == "missing"
            else f"is {first['input']!r:.200}: {first['msg'].removeprefix('Value error, ')}"
        )
        raise LeRobotError(f"{file}: {where} {what}") from error
    if read.video_path is None and any(feature.dtype == "video" for feature in read.features.values()):
        raise LeRobotError(f"{file}: has video features, and video_path is null")
    for name, path in (("data_path", read.data_path), ("video_path", read.video_path or "")):
        try:
            path.format(**_PLACES[version], **({"video_key": ""} if name == "video_path" else {}))
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            known = ", ".join(f"{{{place}}}" for place in _PLACES[version])
            text = f"{name} is {path!r}, which cannot be filled in ({type(error).__name__}: {error})"
            raise LeRobotError(f"{file}: {text}. {version} knows {known}, and videos {{video_key}}") from error
    return Info(
        version=version,
        fps=int(read.fps) if read.fps.is_integer() else read.fps,
        features={key: Feature(x.dtype, tuple(x.shape), x.names, x.info or {}) for key, x in read.features.items()},
        num_episodes=read.total_episodes,
        num_frames=read.total_frames,
        data_path=read.data_path,
        video_path=read.video_path,
        chunks_size=read.chunks_size,
        robot_type=read.robot_type,
        num_tasks=read.total_tasks,
    )


def picture_feature(dtype: str, height: int, width: int, fps: int) -> Feature:
    """The feature of a camera in a dataset that we write; `dtype` is "image" or "video"."""
    info = {}
    if dtype == "video":
        info = {
            "video.height": height,
            "video.width": width,
            "video.codec": "av1",
            "video.pix_fmt": "yuv420p",
            "video.fps": fps,
            "video.channels": 3,
            "is_depth_map": False,
            "has_audio": False,
        }
    return Feature(dtype, (height, width, 3), ["height", "width", "channels"], info)


def vector_feature(name: str, num_dims: int, names: Sequence[str] | None = None) -> Feature:
    return Feature("float32", (num_dims,), numbered_names(name, num_dims) if names is None else list(names))


def counters() -> dict[str, Feature]:
    """The features that every dataset has."""
    return {name: Feature(dtype, (1,)) for name, dtype in [*COUNTERS.items(), ("task_index", "int64")]}


def numbered(path: str, number: int, **more: str) -> str:
    """The path of file `number`, where files are counted over all folders."""
    return path.format(chunk_index=number // CHUNKS_SIZE, file_index=number % CHUNKS_SIZE, **more)
