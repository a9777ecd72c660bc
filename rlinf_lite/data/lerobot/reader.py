"""Reading a LeRobotDataset, v3.0 or v2.1: its tables are checked against info.json, then frames are read as streams."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from rlinf_lite.data.lerobot.layout import INFO, SUBTASKS, V2, Feature, LeRobotError, counters, read_info, read_text
from rlinf_lite.data.lerobot.video import TOLERANCE_S, check_video, pictures_at
from rlinf_lite.registry import did_you_mean

_ROWS_AT_ONCE = 256
_COUNTERS = ["index", "episode_index", "frame_index"]
_EIGHT_BITS = {"1", "L", "LA", "P", "PA", "RGB", "RGBA"}


@dataclass(frozen=True)
class Clip:
    """The part of a video file that holds an episode."""

    file: Path
    start_s: float
    end_s: float | None = None
    """None: the clip is the whole file."""


@dataclass(frozen=True)
class EpisodeEntry:
    """An episode's entry in `meta/episodes`."""

    first_frame: int
    length: int
    data_file: Path
    clips: dict[str, Clip]


class LeRobotDataset:
    """A dataset whose tables agree with its info.json. Its frames are not in memory.

    Raises:
        LeRobotError: names the file and the problem; also raised later, while frames are read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.info = read_info(directory)
        self.notes: list[str] = []
        """Notes on files that were read although they deviate from what they state, one line each."""
        self._unreadable: dict[str, str] = {}
        """Features that cannot be read, with the reason: an error if a feature is needed, else a note."""
        self.tasks = self._read_tasks()
        self.episodes = self._read_episodes()
        self._check_tables()

    def feature(self, key: str, config_key: str) -> Feature:
        """The feature `key`. Raises LeRobotError, which names the `config_key` to change."""
        found = self.info.features.get(key)
        if found is None:
            raise LeRobotError(
                f"{config_key}: {self.directory} has no feature {key!r}. {did_you_mean(key, self.info.features)}"
            )
        return found

    def check(self, keys: Sequence[str]) -> None:
        """Raise LeRobotError if the tables do not have these features as info.json lists them. Problems of other
        features, which are not read, become a note."""
        needed = [key for key in (*keys, *_COUNTERS, "timestamp", "task_index") if key in self._unreadable]
        if needed:
            raise LeRobotError(self._unreadable[needed[0]])
        if self._unreadable:
            self.notes = [
                f"{self.directory}: {', '.join(self._unreadable)} cannot be read, and this run does not need to: "
                f"{next(iter(self._unreadable.values()))}"
            ]

    def check_videos(self, keys: Sequence[str]) -> None:
        """Open every video of these features, and compare it with the clips of its episodes."""
        for key in keys:
            if self.info.features[key].dtype == "video":
                for file, episodes in self._by_file(key).items():
                    found = check_video(file, key, self.info.features[key], self.info.fps)
                    _check_clips(file, [(x.clips[key], x.length) for x in episodes], self.info.fps, found)

    def num_failures(self) -> int:
        """The number of episodes whose `success` in meta/episodes is false; only our own datasets have that column."""
        successes = self.successes()
        return 0 if successes is None else int((~successes).sum())

    def successes(self) -> NDArray[np.bool_] | None:
        """`success` of every episode in meta/episodes, bool [E]; None: there is no such column."""
        found: list[bool] = []
        for file in sorted(self.directory.glob("meta/episodes/*/*.parquet")):
            if "success" not in pq.read_schema(file).names:
                return None
            found += [value is not False for value in pq.read_table(file, columns=["success"])["success"].to_pylist()]
        return np.array(found, bool) if len(found) == len(self.episodes) else None

    def rows(self, keys: Sequence[str]) -> Iterator[tuple[int, dict[str, NDArray[Any]]]]:
        """The rows of the tables, in order, as (number of the first frame, values by feature): [n, D] for numbers,
        uint8 [n, H, W, 3] for "image", sentences [n] for `language_persistent`."""
        first = 0
        clock = [key for key in ("timestamp",) if key in self.info.features]
        numbers = iter(self._expected_counters())
        for file in dict.fromkeys(episode.data_file for episode in self.episodes):
            try:
                for batch in pq.ParquetFile(file).iter_batches(_ROWS_AT_ONCE, columns=[*keys, *_COUNTERS, *clock]):
                    expected = np.array([next(numbers) for _ in range(len(batch))])
                    found = np.stack([batch[name].to_numpy(zero_copy_only=False) for name in _COUNTERS], axis=1)
                    wrong = np.flatnonzero((found != expected).any(1))
                    if len(wrong):
                        of_row = dict(zip(_COUNTERS, found[wrong[0]].tolist(), strict=True))
                        due = dict(zip(_COUNTERS, expected[wrong[0]].tolist(), strict=True))
                        raise LeRobotError(f"{file}: frame {first + wrong[0]} is {of_row}, by meta/episodes {due}")
                    for key in clock:
                        self._check_clock(file, first, expected[:, 2], self._values(file, key, batch[key])[:, 0])
                    yield (
                        first,
                        {
                            key: self._subtasks(file, batch[key], first, expected[:, 2])
                            if key == SUBTASKS
                            else self._values(file, key, batch[key])
                            for key in keys
                        },
                    )
                    first += len(batch)
            except (OSError, pa.ArrowException) as error:
                raise LeRobotError(f"{file} is damaged: {error}") from error

    def pictures(self, key: str) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """The pictures of a "video" feature, file by file, as (number of the frame, uint8 [H, W, 3])."""
        furthest_s, of_file = 0.0, self.directory
        for file, episodes in self._by_file(key).items():
            frames = [episode.first_frame + i for episode in episodes for i in range(episode.length)]
            times = [
                episode.clips[key].start_s + i / self.info.fps for episode in episodes for i in range(episode.length)
            ]
            distances_s: list[float] = []
            yield from zip(frames, pictures_at(file, times, deviates=distances_s.append), strict=True)
            furthest_s, of_file = max((furthest_s, of_file), (max(distances_s), file))
        if furthest_s > TOLERANCE_S:
            self.notes.append(
                f"{of_file}: pictures are up to {1e3 * furthest_s:.1f} ms from the times of their frames; the nearest "
                "are taken"
            )

    def _by_file(self, key: str) -> dict[Path, list[EpisodeEntry]]:
        """The episodes in each video file of a feature, in the order of the pictures."""
        found: dict[Path, list[EpisodeEntry]] = {}
        for episode in sorted(self.episodes, key=lambda episode: episode.clips[key].start_s):
            found.setdefault(episode.clips[key].file, []).append(episode)
        return dict(sorted(found.items(), key=lambda item: min(episode.first_frame for episode in item[1])))

    def _values(self, file: Path, key: str, column: pa.Array) -> NDArray[Any]:
        feature = self._feature(key)
        if feature.dtype == "image":
            return np.stack([self._png(file, key, feature, x) for x in column.field("bytes").to_pylist()])
        while isinstance(column, pa.ExtensionArray):
            column = column.storage
        num_rows = len(column)
        if column.null_count:
            raise LeRobotError(f"{file}: {column.null_count} of {num_rows} rows of {key} are empty")
        if (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)) and len(feature.shape) == 1:
            lengths = {length for length in pc.list_value_length(column).to_pylist() if length != feature.width}
            if lengths:
                raise LeRobotError(f"{file}: {key} has {feature.width} numbers in info.json, and {min(lengths)} there")
        while pa.types.is_nested(column.type):
            column = column.flatten()
        values: NDArray[Any] = column.to_numpy(zero_copy_only=False)
        if values.size != num_rows * feature.width:
            raise LeRobotError(f"{file}: {num_rows} rows of {key} have {values.size} numbers, not {feature.width} each")
        return values.reshape(-1, feature.width)

    def _subtasks(self, file: Path, column: pa.Array, first: int, frame_index: NDArray[Any]) -> NDArray[Any]:
        """Sentences [n]: for each frame, the last annotation of style "subtask" that has begun at its time."""
        found = list[str]()
        for number, (rows, t) in enumerate(zip(column.to_pylist(), frame_index / self.info.fps, strict=True), first):
            said = [row for row in rows or () if row["style"] == "subtask" and row["content"] is not None]
            by = t + _clock_tolerance_s(t)  # times of annotations are those of frames
            begun = [row for row in said if row["timestamp"] <= by]
            if not begun:
                raise LeRobotError(
                    f"{file}: frame {number} has no subtask in {SUBTASKS}. Set data.keys.instruction=task"
                )
            found.append(max(enumerate(begun), key=lambda x: (x[1]["timestamp"], x[0]))[1]["content"])
        return np.array(found, object)

    def _check_clock(self, file: Path, first: int, frame_index: NDArray[Any], found_s: NDArray[Any]) -> None:
        """Check frame times: LeRobot finds a picture by its time, this reader by its number, and both must agree."""
        due_s = frame_index / self.info.fps
        wrong = np.flatnonzero(~(np.abs(found_s - due_s) <= _clock_tolerance_s(due_s)))
        if len(wrong):
            row = wrong[0]
            raise LeRobotError(
                f"{file}: frame {first + row} is at {found_s[row]:.4f} s of its episode, and by info.json "
                f"({self.info.fps:g} frames/s) frame {frame_index[row]} is at {due_s[row]:.4f} s"
            )

    def _png(self, file: Path, key: str, feature: Feature, content: bytes | None) -> NDArray[np.uint8]:
        try:
            opened = Image.open(io.BytesIO(content or b""))
            picture = np.asarray(opened.convert("RGB"))
        except (UnidentifiedImageError, OSError) as error:
            why = "there are no bytes of it" if not content else "it is damaged, or no picture"
            raise LeRobotError(f"{file}: a picture of {key} cannot be decoded: {why}") from error
        if opened.mode not in _EIGHT_BITS:
            text = f"a picture of {key} has mode {opened.mode}, as depth maps have: colours of 8 bits are read"
            raise LeRobotError(f"{file}: {text}")
        if picture.shape[:2] != feature.size:
            raise LeRobotError(f"{file}: a picture of {key} is {picture.shape[:2]}, in info.json {feature.size}")
        return picture

    def _expected_counters(self) -> Iterator[tuple[int, int, int]]:
        for number, episode in enumerate(self.episodes):
            for i in range(episode.length):
                yield episode.first_frame + i, number, i

    def _check_tables(self) -> None:
        """Check the footers of all data files against info.json and the table of episodes."""
        info, total = self.info, sum(episode.length for episode in self.episodes)
        if len(self.episodes) != info.num_episodes or total != info.num_frames:
            raise LeRobotError(
                f"{self.directory / 'meta'}: info.json has {info.num_episodes} episodes of {info.num_frames} frames, "
                f"the table of episodes {len(self.episodes)} of {total}"
            )
        if info.num_tasks not in (None, len(self.tasks)):
            raise LeRobotError(
                f"{self.directory / 'meta'}: info.json has {info.num_tasks} tasks, and the table of tasks "
                f"{len(self.tasks)}"
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
            for key in info.features.keys() | counters().keys() - {"timestamp"}:
                if self._feature(key).dtype != "video" and key not in self._unreadable:
                    wrong = _wrong_column(key, self._feature(key), schema)
                    if wrong:
                        where = self.directory / INFO if wrong.startswith("features.") else file
                        self._unreadable[key] = f"{where}: {wrong}"
        self._unreadable = {key: self._unreadable[key] for key in sorted(self._unreadable)}

    def _feature(self, key: str) -> Feature:
        return self.info.features.get(key) or counters()[key]

    def _read_tasks(self) -> list[str]:
        if self.info.version == V2:
            file = self.directory / "meta/tasks.jsonl"
            lines = self._json_lines(file, {"task_index": int, "task": str})
            pairs = [(line["task_index"], line["task"]) for line in lines]
        else:
            file = self.directory / "meta/tasks.parquet"
            table = self._table(file, {"task_index": "integer"}, all_columns=True)
            # the index of a pandas frame, named or not
            name = next((name for name in ("task", "__index_level_0__") if name in table.column_names), None)
            if name is None:
                raise LeRobotError(f"{file} has no column task, but {', '.join(table.column_names)}")
            pairs = list(zip(table["task_index"].to_pylist(), table[name].to_pylist(), strict=True))
        if sorted(number for number, _ in pairs if number is not None) != list(range(len(pairs))):
            raise LeRobotError(f"{file}: {len(pairs)} tasks have the numbers {[number for number, _ in pairs][:20]}")
        for number, text in pairs:
            if not isinstance(text, str):
                raise LeRobotError(f"{file}: the sentence of task {number} is {text!r}, and no text")
        return [text for _, text in sorted(pairs)]

    def _read_episodes(self) -> list[EpisodeEntry]:
        if self.info.version == V2:
            lines = self._json_lines(self.directory / "meta/episodes.jsonl", {"episode_index": int, "length": int})
        else:
            lines = self._episode_rows()
        lines.sort(key=lambda line: line["episode_index"])
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
            if key in self._unreadable:
                continue
            path = info.video_path or ""
            at = {name: line[f"videos/{key}/{name}"] for name in ("chunk_index", "file_index")}
            file = self.directory / path.format(video_key=key, **at)
            clips[key] = Clip(file, *(line[f"videos/{key}/{name}_timestamp"] for name in ("from", "to")))
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
        numbers = ["episode_index", "length", "dataset_from_index", "data/chunk_index", "data/file_index"]
        for file in files:
            known = self._names(file)
            for key in self._videos():
                if not any(name.startswith(f"videos/{key}/") for name in known):
                    self._unreadable[key] = f"{file} has no columns videos/{key}/..., and info.json lists {key}"
        videos = [key for key in self._videos() if key not in self._unreadable]
        numbers += [f"videos/{key}/{name}" for key in videos for name in ("chunk_index", "file_index")]
        times = [f"videos/{key}/{name}" for key in videos for name in ("from_timestamp", "to_timestamp")]
        wanted: dict[str, Literal["integer", "floating"]] = {
            **dict.fromkeys(numbers, "integer"),
            **dict.fromkeys(times, "floating"),
        }
        return [row for file in files for row in self._table(file, wanted).to_pylist()]

    def _table(
        self, file: Path, wanted: Mapping[str, Literal["integer", "floating"]], all_columns: bool = False
    ) -> pa.Table:
        """The rows of a table in `meta/`. The `wanted` columns must have numbers of these kinds, and no empty rows.
        With `all_columns` the other columns are included."""
        names = self._names(file)
        missing = [name for name in wanted if name not in names]
        if missing:
            raise LeRobotError(f"{file} has no column {', '.join(missing)}, which info.json's features need")
        try:
            with pq.ParquetFile(file) as opened:  # pq.read_table adds columns for folders named like `task=push`
                table = opened.read(columns=None if all_columns else list(wanted))
            for name, kind in wanted.items():
                found = table.schema.field(name).type
                if not (pa.types.is_integer if kind == "integer" else pa.types.is_floating)(found):
                    raise LeRobotError(f"{file}: {name} is of type {found}, and LeRobot's is {kind}")
            empty = [name for name in wanted if table[name].null_count]
            if empty:
                raise LeRobotError(f"{file}: {', '.join(empty)} is empty in some row")
            return table
        except (OSError, pa.ArrowException) as error:
            raise LeRobotError(f"{file} cannot be read: {error}. Is it truncated, or missing?") from error

    def _names(self, file: Path) -> list[str]:
        try:
            names: list[str] = pq.read_schema(file).names
            return names
        except (OSError, pa.ArrowException) as error:
            raise LeRobotError(f"{file} cannot be read: {error}. Is it truncated, or missing?") from error

    def _json_lines(self, file: Path, wanted: Mapping[str, type]) -> list[dict[str, Any]]:
        """The rows of a v2.1 table in JSON lines; each row must have the `wanted` keys."""
        try:
            lines = [json.loads(line) for line in read_text(file).split("\n") if line.strip()]
        except (OSError, ValueError) as error:
            raise LeRobotError(f"{file} cannot be read: {error}") from error
        for number, line in enumerate(lines, 1):
            for key, kind in wanted.items():
                if not isinstance(line, dict) or type(line.get(key)) is not kind:
                    raise LeRobotError(f"{file}: line {number} has no {key} that is {kind.__name__}: {line!r:.200}")
        return lines


def _clock_tolerance_s(due_s: Any) -> Any:
    """The tolerance for frame times, which are stored as float32."""
    return TOLERANCE_S + 1e-6 * due_s


def _check_clips(file: Path, clips: Sequence[tuple[Clip, int]], fps: float, num_pictures: int) -> None:
    """Raise LeRobotError if episodes (clip, length) overlap, have fewer pictures than frames, or have more than one
    extra picture, which suggests the video of another episode."""
    before = 0
    for clip, length in clips:
        start = clip.start_s * fps
        end = num_pictures if clip.end_s is None else clip.end_s * fps
        if start < before - 0.5:
            raise LeRobotError(f"{file}: an episode begins at {clip.start_s:.4f} s, within the one before it")
        if not length - 0.5 < end - start < length + 1.5:
            raise LeRobotError(
                f"{file}: an episode of {length} frames has {end - start:g} pictures, from {clip.start_s:.4f} s to "
                f"{end / fps:.4f} s. Is it the video of another one, or truncated?"
            )
        before = round(start) + length
    if num_pictures < before:
        raise LeRobotError(
            f"{file} ends at {max(num_pictures - 1, 0) / fps:.2f} s, and the dataset has a frame at "
            f"{num_pictures / fps:.2f} s: is it truncated?"
        )


def _wrong_column(key: str, feature: Feature, schema: pa.Schema) -> str | None:
    """A text on how a table's column differs from info.json; None if it agrees."""
    if schema.get_field_index(key) < 0:
        return f"has no one column {key!r}, which info.json lists. {did_you_mean(key, schema.names)}"
    found = schema.field(key).type
    if feature.dtype == "image":
        right = pa.types.is_struct(found) and found.get_field_index("bytes") >= 0
        return None if right else f"{key} is an image in info.json, and {found} there"
    if feature.dtype == "language":
        row = getattr(found, "value_type", found)
        missing = {"content", "style", *(["timestamp"] if key == SUBTASKS else [])} - set(getattr(row, "names", ()))
        return f"{key} is language in info.json, and {found} there" if missing else None
    if feature.dtype != "string" and not feature.is_numeric:
        return f"features.{key}.dtype is {feature.dtype!r}: a numpy type of numbers is needed, or string, image, video"
    while isinstance(found, pa.BaseExtensionType):
        found = found.storage_type
    length = found.list_size if pa.types.is_fixed_size_list(found) else None
    while pa.types.is_nested(found) and hasattr(found, "value_type"):
        found = found.value_type
    if feature.dtype == "string":
        right = any(is_text(found) for is_text in (pa.types.is_string, pa.types.is_large_string))
    else:
        right = found == pa.from_numpy_dtype(np.dtype(feature.dtype))
    if not right:
        return f"{key} is {feature.dtype} in info.json, and {found} there"
    if length is not None and len(feature.shape) == 1 and length != feature.width:
        return f"{key} has {feature.width} numbers in info.json, and {length} there"
    return None
