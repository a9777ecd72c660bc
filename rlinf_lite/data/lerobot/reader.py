"""Reading a LeRobotDataset, v3.0 or v2.1: its tables are compared with info.json, then frames are streams."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from rlinf_lite.data.lerobot.layout import V2, Feature, LeRobotError, read_info
from rlinf_lite.data.lerobot.video import check_video, pictures_at
from rlinf_lite.registry import did_you_mean

_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Clip:
    """Where in which video an episode is."""

    file: Path
    start_s: float


@dataclass(frozen=True)
class EpisodeEntry:
    """What `meta/episodes` says of one."""

    first_frame: int
    length: int
    data_file: Path
    clips: dict[str, Clip]


class LeRobotDataset:
    """A folder whose tables agree with its info.json; nothing of its frames is in memory.

    Raises:
        LeRobotError: naming the file and what is wrong with it, here and while frames are read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.info = read_info(directory)
        self.tasks = self._read_tasks()
        self.episodes = self._read_episodes()
        self._check_tables()

    def feature(self, key: str, config_key: str) -> Feature:
        """The feature of that name; the error says which `config_key` to change."""
        found = self.info.features.get(key)
        if found is None:
            raise LeRobotError(
                f"{config_key}: {self.directory} has no feature {key!r}. {did_you_mean(key, self.info.features)}"
            )
        return found

    def check_videos(self, keys: Sequence[str]) -> None:
        """Open every video of these features."""
        for key in keys:
            if self.info.features[key].dtype == "video":
                for file in dict.fromkeys(episode.clips[key].file for episode in self.episodes):
                    check_video(file, key, self.info.features[key], self.info.fps)

    def rows(self, keys: Sequence[str]) -> Iterator[tuple[int, dict[str, NDArray[Any]]]]:
        """Number of the first frame, and by feature [n, D] of numbers or uint8 [n, H, W, 3] of "image"s; in order."""
        first = 0
        counters = ["index", "episode_index", "frame_index"]
        numbers = iter(self._expected_counters())
        for file in dict.fromkeys(episode.data_file for episode in self.episodes):
            try:
                for batch in pq.ParquetFile(file).iter_batches(_ROWS_AT_ONCE, columns=[*keys, *counters]):
                    expected = np.array([next(numbers) for _ in range(len(batch))])
                    found = np.stack([batch[name].to_numpy(zero_copy_only=False) for name in counters], axis=1)
                    wrong = np.flatnonzero((found != expected).any(1))
                    if len(wrong):
                        of_row = dict(zip(counters, found[wrong[0]].tolist(), strict=True))
                        due = dict(zip(counters, expected[wrong[0]].tolist(), strict=True))
                        raise LeRobotError(f"{file}: frame {first + wrong[0]} is {of_row}, by meta/episodes {due}")
                    yield first, {key: self._values(file, key, batch[key]) for key in keys}
                    first += len(batch)
            except (OSError, pa.ArrowException) as error:
                raise LeRobotError(f"{file} is damaged: {error}") from error

    def pictures(self, key: str) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Number of the frame, and its picture uint8 [H, W, 3], of a "video" feature; file after file."""
        by_file: dict[Path, list[EpisodeEntry]] = {}
        for episode in self.episodes:
            by_file.setdefault(episode.clips[key].file, []).append(episode)
        for file, episodes in by_file.items():
            episodes.sort(key=lambda episode: episode.clips[key].start_s)
            frames = [episode.first_frame + i for episode in episodes for i in range(episode.length)]
            times = [
                episode.clips[key].start_s + i / self.info.fps for episode in episodes for i in range(episode.length)
            ]
            yield from zip(frames, pictures_at(file, times), strict=True)

    def _values(self, file: Path, key: str, column: pa.Array) -> NDArray[Any]:
        feature = self.info.features[key]
        if feature.dtype == "image":
            return np.stack([self._png(file, key, feature, x) for x in column.field("bytes").to_pylist()])
        while isinstance(column, pa.ExtensionArray):
            column = column.storage
        num_rows = len(column)
        if column.null_count:
            raise LeRobotError(f"{file}: {column.null_count} of {num_rows} rows of {key} are empty")
        if pa.types.is_list(column.type) and len(feature.shape) == 1:
            lengths = {length for length in pc.list_value_length(column).to_pylist() if length != feature.width}
            if lengths:
                raise LeRobotError(f"{file}: {key} has {feature.width} numbers in info.json, and {min(lengths)} there")
        while pa.types.is_nested(column.type):
            column = column.flatten()
        values: NDArray[Any] = column.to_numpy(zero_copy_only=False)
        if values.size != num_rows * feature.width:
            raise LeRobotError(f"{file}: {num_rows} rows of {key} have {values.size} numbers, not {feature.width} each")
        return values.reshape(-1, feature.width)

    def _png(self, file: Path, key: str, feature: Feature, content: bytes | None) -> NDArray[np.uint8]:
        try:
            picture = np.asarray(Image.open(io.BytesIO(content or b"")).convert("RGB"))
        except (UnidentifiedImageError, OSError) as error:
            raise LeRobotError(f"{file}: a picture of {key} cannot be decoded: {error}") from error
        if picture.shape[:2] != feature.size:
            raise LeRobotError(f"{file}: a picture of {key} is {picture.shape[:2]}, in info.json {feature.size}")
        return picture

    def _expected_counters(self) -> Iterator[tuple[int, int, int]]:
        for number, episode in enumerate(self.episodes):
            for i in range(episode.length):
                yield episode.first_frame + i, number, i

    def _check_tables(self) -> None:
        """Footers of all data files against info.json and the table of episodes."""
        info, total = self.info, sum(episode.length for episode in self.episodes)
        if len(self.episodes) != info.num_episodes or total != info.num_frames:
            raise LeRobotError(
                f"{self.directory / 'meta'}: info.json has {info.num_episodes} episodes of {info.num_frames} frames, "
                f"the table of episodes {len(self.episodes)} of {total}"
            )
        due: dict[Path, int] = {}
        for episode in self.episodes:
            due[episode.data_file] = due.get(episode.data_file, 0) + episode.length
        for file, num_rows in due.items():
            try:
                with pq.ParquetFile(file) as table:
                    found, schema = table.metadata.num_rows, table.schema_arrow
            except (OSError, pa.ArrowException) as error:
                raise LeRobotError(f"{file} cannot be read: {error}. Is it truncated, or missing?") from error
            if found != num_rows:
                raise LeRobotError(f"{file} has {found} frames, and its episodes have {num_rows} in meta/episodes")
            for key, feature in info.features.items():
                if feature.dtype != "video":
                    _check_column(file, key, feature, schema)

    def _read_tasks(self) -> list[str]:
        if self.info.version == V2:
            lines = self._json_lines("meta/tasks.jsonl")
            texts = {line["task_index"]: line["task"] for line in lines}
        else:
            table = self._table(self.directory / "meta" / "tasks.parquet")
            name = next((name for name in table.column_names if name != "task_index"), "task")
            texts = dict(zip(table["task_index"].to_pylist(), table[name].to_pylist(), strict=True))
        if sorted(texts) != list(range(len(texts))):
            raise LeRobotError(f"{self.directory / 'meta'}: the numbers of the tasks are {sorted(texts)[:20]}")
        return [texts[i] for i in range(len(texts))]

    def _read_episodes(self) -> list[EpisodeEntry]:
        lines = self._json_lines("meta/episodes.jsonl") if self.info.version == V2 else self._episode_rows()
        lines.sort(key=lambda line: int(line["episode_index"]))
        episodes, first = [], 0
        for number, line in enumerate(lines):
            if line["episode_index"] != number:
                raise LeRobotError(f"{self.directory / 'meta'}: there is no episode {number} among {len(lines)}")
            entry = self._entry_v2(line, first) if self.info.version == V2 else self._entry_v3(line)
            if entry.first_frame != first:
                raise LeRobotError(
                    f"{self.directory / 'meta'}: episode {number} begins at frame {entry.first_frame}, and the "
                    f"{number} before it have {first}"
                )
            episodes.append(entry)
            first += entry.length
        return episodes

    def _entry_v3(self, line: Mapping[str, Any]) -> EpisodeEntry:
        info = self.info
        place = {"chunk_index": line["data/chunk_index"], "file_index": line["data/file_index"]}
        clips = {}
        for key in self._videos():
            path = info.video_path or ""
            at = {name: line[f"videos/{key}/{name}"] for name in ("chunk_index", "file_index")}
            file = self.directory / path.format(video_key=key, **at)
            clips[key] = Clip(file, float(line[f"videos/{key}/from_timestamp"]))
        file = self.directory / info.data_path.format(**place)
        return EpisodeEntry(line["dataset_from_index"], line["length"], file, clips)

    def _entry_v2(self, line: Mapping[str, Any], first: int) -> EpisodeEntry:
        number, info = line["episode_index"], self.info
        place = {"episode_chunk": number // info.chunks_size, "episode_index": number}
        path = info.video_path or ""
        clips = {key: Clip(self.directory / path.format(video_key=key, **place), 0.0) for key in self._videos()}
        return EpisodeEntry(first, line["length"], self.directory / info.data_path.format(**place), clips)

    def _videos(self) -> list[str]:
        return [key for key, feature in self.info.features.items() if feature.dtype == "video"]

    def _episode_rows(self) -> list[dict[str, Any]]:
        files = sorted(self.directory.glob("meta/episodes/*/*.parquet"))
        if not files:
            raise LeRobotError(f"{self.directory / 'meta/episodes'}: there is no table of episodes")
        wanted = ["episode_index", "length", "dataset_from_index", "data/chunk_index", "data/file_index"]
        for key in self._videos():
            wanted += [f"videos/{key}/{name}" for name in ("chunk_index", "file_index", "from_timestamp")]
        return [row for file in files for row in self._table(file, wanted).to_pylist()]

    def _table(self, file: Path, wanted: Sequence[str] | None = None) -> pa.Table:
        try:
            names = pq.read_schema(file).names
            missing = [name for name in wanted or () if name not in names]
            if missing:
                raise LeRobotError(f"{file} has no column {', '.join(missing)}, which info.json's features need")
            return pq.read_table(file, columns=wanted)
        except (OSError, pa.ArrowException) as error:
            raise LeRobotError(f"{file} cannot be read: {error}. Is it truncated, or missing?") from error

    def _json_lines(self, name: str) -> list[dict[str, Any]]:
        file = self.directory / name
        try:
            return [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
        except (OSError, json.JSONDecodeError) as error:
            raise LeRobotError(f"{file} cannot be read: {error}") from error


def _check_column(file: Path, key: str, feature: Feature, schema: pa.Schema) -> None:
    if schema.get_field_index(key) < 0:
        raise LeRobotError(
            f"{file} has no one column {key!r}, which info.json lists. {did_you_mean(key, schema.names)}"
        )
    found = schema.field(key).type
    if feature.dtype == "image":
        if not (pa.types.is_struct(found) and found.get_field_index("bytes") >= 0):
            raise LeRobotError(f"{file}: {key} is an image in info.json, and {found} there")
        return
    while isinstance(found, pa.BaseExtensionType):
        found = found.storage_type
    length = found.list_size if pa.types.is_fixed_size_list(found) else None
    while pa.types.is_nested(found):
        found = found.value_type
    due = pa.string() if feature.dtype == "string" else pa.from_numpy_dtype(np.dtype(feature.dtype))
    if found != due:
        raise LeRobotError(f"{file}: {key} is {feature.dtype} in info.json, and {found} there")
    if length is not None and len(feature.shape) == 1 and length != feature.width:
        raise LeRobotError(f"{file}: {key} has {feature.width} numbers in info.json, and {length} there")
