"""What `meta/info.json` says: features, and which file holds what. Needs neither pyarrow nor PyAV."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

INFO = Path("meta/info.json")
V3, V2 = "v3.0", "v2.1"
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
CHUNKS_SIZE = 1000
"""Files per folder."""
DATA_FILE_MB, VIDEO_FILE_MB = 100, 200
PICTURES = "observation.images."
STATE, ACTION = "observation.state", "action"
COUNTERS = {"timestamp": "float32", "frame_index": "int64", "episode_index": "int64", "index": "int64"}
"""Columns of every dataset, besides `task_index`."""


class LeRobotError(ValueError):
    """A folder that is no LeRobotDataset, or whose files do not hold what its info.json says; it names the file."""


@dataclass(frozen=True)
class Feature:
    """One entry of `features`."""

    dtype: str
    """A numpy type, "string", "image" (PNG files in the table) or "video"."""
    shape: tuple[int, ...]
    names: Any = None
    info: Mapping[str, Any] = field(default_factory=dict)
    """Of a video: codec, pixel format, rate, size."""

    @property
    def is_picture(self) -> bool:
        return self.dtype in ("image", "video")

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of a picture, whichever way round its shape is written."""
        if len(self.shape) == 3 and self.shape[0] in (1, 3) and self.shape[2] not in (1, 3):
            return self.shape[1], self.shape[2]
        return self.shape[0], self.shape[1]

    @property
    def width(self) -> int:
        """How many numbers a frame has of it."""
        return math.prod(self.shape)

    def as_json(self) -> dict[str, Any]:
        content: dict[str, Any] = {"dtype": self.dtype, "shape": list(self.shape), "names": self.names}
        return content | ({"info": dict(self.info)} if self.info else {})


@dataclass(frozen=True)
class Info:
    """`meta/info.json`, as far as it is used."""

    version: str
    fps: int
    features: dict[str, Feature]
    num_episodes: int
    num_frames: int
    data_path: str
    video_path: str | None
    chunks_size: int = CHUNKS_SIZE
    robot_type: str | None = None

    @property
    def pictures(self) -> dict[str, Feature]:
        return {key: feature for key, feature in self.features.items() if feature.is_picture}

    def as_json(self, num_tasks: int) -> dict[str, Any]:
        """Of a dataset that we write."""
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


def is_dataset(directory: Path) -> bool:
    return (directory / INFO).is_file()


def read_info(directory: Path) -> Info:
    """Raises LeRobotError where there is no dataset, or one of another version."""
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
        content = json.loads(file.read_text())
        version = str(content["codebase_version"])
        if version not in (V3, V2):
            raise LeRobotError(
                f"{file}: codebase_version is {version}, and {V3} and {V2} are read. Convert the dataset with "
                "LeRobot's own script for that version"
            )
        info = Info(
            version=version,
            fps=content["fps"],
            features={key: _feature(entry) for key, entry in content["features"].items()},
            num_episodes=content["total_episodes"],
            num_frames=content["total_frames"],
            data_path=content["data_path"],
            video_path=content.get("video_path"),
            chunks_size=content.get("chunks_size", CHUNKS_SIZE),
            robot_type=content.get("robot_type"),
        )
    except LeRobotError:
        raise
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        what = f"has no {error}" if isinstance(error, KeyError) else str(error)
        raise LeRobotError(f"{file} cannot be read: {what}") from error
    if isinstance(info.fps, bool) or not isinstance(info.fps, int | float) or not info.fps > 0:
        raise LeRobotError(f"{file}: fps is {info.fps!r}, and a number above 0 is needed")
    if info.video_path is None and any(feature.dtype == "video" for feature in info.features.values()):
        raise LeRobotError(f"{file}: has video features, and video_path is null")
    return info


def picture_feature(dtype: str, height: int, width: int, fps: int) -> Feature:
    """Of a camera that we write; `dtype` is "image" or "video"."""
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


def vector_feature(name: str, num_dims: int) -> Feature:
    return Feature("float32", (num_dims,), [f"{name}_{i}" for i in range(num_dims)])


def counters() -> dict[str, Feature]:
    """The features that every dataset has."""
    return {name: Feature(dtype, (1,)) for name, dtype in [*COUNTERS.items(), ("task_index", "int64")]}


def numbered(path: str, number: int, **more: str) -> str:
    """The path of file `number`, counted over all folders."""
    return path.format(chunk_index=number // CHUNKS_SIZE, file_index=number % CHUNKS_SIZE, **more)


def _feature(entry: Mapping[str, Any]) -> Feature:
    feature = Feature(entry["dtype"], tuple(entry["shape"]), entry.get("names"), entry.get("info") or {})
    if not feature.is_picture and feature.dtype != "string":
        np.dtype(feature.dtype)  # TypeError where it is none
    return feature
