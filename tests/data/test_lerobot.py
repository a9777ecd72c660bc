"""LeRobot datasets: what is written comes back, as the format has it; what does not fit is refused, its file named."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from rlinf_lite.cards import Observed
from rlinf_lite.config import load_config
from rlinf_lite.data.demonstrations import (
    PROVENANCE,
    DemonstrationError,
    Demonstrations,
    open_dataset,
    strange_tasks,
)
from rlinf_lite.data.lerobot import layout, statistics, video, writer
from rlinf_lite.data.lerobot.frames import Frames, Keys, decode
from rlinf_lite.data.lerobot.layout import ACTION, STATE, Feature, LeRobotError
from rlinf_lite.data.lerobot.reader import LeRobotDataset
from rlinf_lite.data.lerobot.video import VideoWriter
from tests.data.lerobot_folders import FPS, TOP, WRIST, psnr, smooth, write_dataset, write_h264, write_v21

KEYS = Keys({"top": TOP, "wrist": WRIST}, STATE, ACTION)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("lerobot") / "set"
    return directory, write_dataset(directory)


@pytest.fixture
def copy(written, tmp_path):
    shutil.copytree(written[0], tmp_path / "set")
    return tmp_path / "set"


def read(directory, keys=KEYS):
    return Frames(decode(LeRobotDataset(directory), keys, directory / ".frames"))


def test_numbers_and_lossless_pictures_come_back_as_they_were(written, tmp_path):
    directory, episodes = written
    frames = Frames(decode(LeRobotDataset(directory), KEYS, tmp_path))
    assert frames.episodes.tolist() == [[0, 5], [5, 8], [13, 3]]
    for number, (first, length) in enumerate(frames.episodes):
        obs, rows = frames.read(np.arange(first, first + length)), slice(first, first + length)
        assert np.array_equal(obs["state"], episodes[number][STATE])
        assert np.array_equal(frames.actions[rows], episodes[number][ACTION])
        assert np.array_equal(obs["images"]["wrist"], episodes[number][WRIST])
        assert all(psnr(*pair) > 30 for pair in zip(obs["images"]["top"], episodes[number][TOP], strict=True))
        assert set(obs["instruction"]) == {f"task {number % 2}"}
    shuffled = np.random.default_rng(0).permutation(16)
    assert np.array_equal(frames.read(shuffled)["images"]["top"], frames.images["top"][shuffled])


def test_the_files_are_those_of_the_format(written):
    directory, _ = written
    info = json.loads((directory / "meta" / "info.json").read_text())
    assert (info["codebase_version"], info["fps"], info["splits"]) == ("v3.0", 10, {"train": "0:3"})
    assert [info[f"total_{name}"] for name in ("episodes", "frames", "tasks")] == [3, 16, 2]
    assert info["features"][TOP]["info"]["video.codec"] == "av1" and info["features"][TOP]["shape"] == [64, 96, 3]
    [data] = (directory / "data").glob("*/*.parquet")
    assert data.relative_to(directory).as_posix() == "data/chunk-000/file-000.parquet"
    table = pq.ParquetFile(data)
    assert [table.metadata.row_group(i).num_rows for i in range(3)] == [5, 8, 3]
    kinds = {field.name: str(field.type) for field in table.schema_arrow}
    assert kinds == {
        STATE: "fixed_size_list<element: float>[4]",
        ACTION: "fixed_size_list<element: float>[3]",
        WRIST: "struct<bytes: binary, path: string>",
        "timestamp": "float",
        **dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64"),
    }
    only = pyarrow.dataset.dataset(data).to_table(filter=pyarrow.dataset.field("episode_index") == 1)
    assert only["index"].to_pylist() == list(range(5, 13))
    assert np.allclose(only["timestamp"], np.arange(8) / 10)
    [episodes] = pq.read_table(directory / "meta/episodes/chunk-000/file-000.parquet").slice(1, 1).to_pylist()
    assert (episodes["dataset_from_index"], episodes["dataset_to_index"], episodes["seed"]) == (5, 13, 101)
    assert episodes["tasks"] == ["task 1"] and episodes[f"videos/{TOP}/to_timestamp"] == 0.8
    tasks = pq.read_table(directory / "meta" / "tasks.parquet")
    assert tasks.to_pydict() == {"task_index": [0, 1], "task": ["task 0", "task 1"]}
    assert json.loads(tasks.schema.metadata[b"pandas"])["index_columns"] == ["task"]
    assert not (directory / writer.PARTS).exists()


def test_the_reader_of_datasets_finds_the_same(written, tmp_path, repo):
    """`make readers` installs it, where no program here finds it."""
    readers = repo / "build" / "readers"
    if not (readers / "datasets").is_dir():
        pytest.skip("NO READER OF datasets: what it makes of our tables is NOT tested (make readers)")
    directory, episodes = written
    code = """
import sys, datasets, numpy as np
out, *files = sys.argv[1:]
table = datasets.Dataset.from_parquet(files, cache_dir=out + ".cache")
pictures = [np.asarray(datasets.Image().decode_example(x)) for x in table["observation.images.wrist"]]
np.savez(out, wrist=pictures, **{name: np.array(table[name]) for name in ("action", "observation.state", "index")})
"""
    files = sorted(map(str, directory.glob("data/*/*.parquet")))
    environment = os.environ | {"PYTHONPATH": str(readers), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, str(tmp_path / "out.npz"), *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "out.npz")
    for name, key in ((ACTION, ACTION), (STATE, STATE), ("wrist", WRIST)):
        assert np.array_equal(found[name], np.concatenate([episode[key] for episode in episodes])), name
    assert found["index"].tolist() == list(range(16))


def test_statistics_are_exact_over_the_whole_set(written):
    directory, episodes = written
    stats = json.loads((directory / "meta" / "stats.json").read_text())
    actions = np.concatenate([episode[ACTION] for episode in episodes]).astype(np.float64)
    pictures = np.concatenate([episode[TOP] for episode in episodes]).reshape(-1, 3) / 255
    for found, values in ((stats[ACTION], actions), (stats[TOP], pictures)):
        wanted = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
        wanted |= {f"q{q:02d}": np.quantile(values, q / 100, axis=0) for q in (1, 10, 50, 90, 99)}
        for name, value in wanted.items():
            np.testing.assert_allclose(np.ravel(found[name]), value, rtol=1e-9, atol=1e-12)
    assert np.shape(stats[TOP]["mean"]) == (3, 1, 1) and stats[TOP]["count"] == [16]


def test_statistics_of_many_rows_are_the_same_and_take_no_more_memory(monkeypatch):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(200_000, 3)).astype(np.float32)
    values[:, 1] = np.where(values[:, 1] > 2, 1, -0.0)  # as a gripper
    values[:, 2] *= 1e-30
    at_once = statistics.of_numbers(values)
    monkeypatch.setattr(statistics, "_VALUES_AT_ONCE", 2**14)
    peaks = []
    for num_rows in (50_000, 200_000):
        tracemalloc.start()
        in_blocks = statistics.of_numbers(values[:num_rows])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.05 * peaks[0]
    for name, found in at_once.items():
        if name in ("mean", "std"):
            np.testing.assert_allclose(in_blocks[name], found, rtol=1e-12, atol=1e-42)
        else:
            assert in_blocks[name] == found, name


def test_files_roll_at_their_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "DATA_FILE_MB", 0.002)
    monkeypatch.setattr(writer, "VIDEO_FILE_MB", 0.0)  # after every episode
    monkeypatch.setattr(layout, "CHUNKS_SIZE", 2)
    episodes = write_dataset(tmp_path / "set", lengths=(5, 8, 3, 4), num_parts=2)
    assert len(list((tmp_path / "set" / "data").glob("*/*"))) > 1
    assert len(list((tmp_path / "set" / "videos").glob("*/*/*"))) == 4
    assert (tmp_path / "set" / f"videos/{TOP}/chunk-001/file-001.mp4").is_file()
    frames = read(tmp_path / "set")
    assert np.array_equal(frames.actions, np.concatenate([episode[ACTION] for episode in episodes]))
    assert psnr(frames.images["top"], np.concatenate([episode[TOP] for episode in episodes])) > 30


@pytest.mark.parametrize("chunks_size", [1000, 1])
def test_version_2_1_is_read(tmp_path, chunks_size):
    episodes = write_v21(tmp_path / "set")
    edit_info(tmp_path / "set", lambda info: info.update(chunks_size=chunks_size))
    for file in [*(tmp_path / "set").rglob("episode_000001.*")] if chunks_size == 1 else ():
        moved = Path(str(file).replace("chunk-000", "chunk-001"))
        moved.parent.mkdir(parents=True, exist_ok=True)
        file.rename(moved)
    frames = read(tmp_path / "set", Keys({"eye": TOP}, STATE, ACTION))
    assert frames.episodes.tolist() == [[0, 4], [4, 6]] and frames.tasks == ["task 0", "task 1"]
    assert np.array_equal(frames.state, np.concatenate([episode[STATE] for episode in episodes]))
    assert psnr(frames.images["eye"], np.concatenate([episode[TOP] for episode in episodes])) > 30


@pytest.mark.parametrize("list_of", [pa.list_, pa.large_list])
@pytest.mark.parametrize("rows", [[[1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 3.0]], [[1.0] * 3] * 2, [None, [1.0] * 4]])
def test_rows_of_another_length_name_the_file(tmp_path, rows, list_of):
    """Uneven ones whose sum fits, too short ones, an empty one: states would be those of other frames."""
    write_v21(tmp_path / "set")
    file = tmp_path / "set/data/chunk-000/episode_000001.parquet"
    kept = pq.read_table(file)[STATE].to_pylist()
    states = pa.array([*rows, *kept[2:]], list_of(pa.float32()))
    rewrite(file, lambda table: table.set_column(table.schema.names.index(STATE), STATE, states))
    with pytest.raises(LeRobotError, match=r"episode_000001\.parquet: .*observation\.state"):
        read(tmp_path / "set", Keys({}, STATE, ACTION))


def test_what_lerobot_wrote_is_read(repo, tmp_path):
    """A dataset of LeRobot 0.4.4's own writer: random numbers, and pictures by a formula."""
    directory = repo / "tests" / "data" / "written_by_lerobot"
    frames = Frames(decode(LeRobotDataset(directory), KEYS, tmp_path))
    assert frames.episodes.tolist() == [[0, 5], [5, 8], [13, 3]]
    theirs = json.loads((directory / "meta" / "stats.json").read_text())  # whose quantiles are means of episodes'
    for name, key in (("state", STATE), ("action", ACTION)):
        for statistic in ("min", "max", "mean", "std", "count"):
            np.testing.assert_allclose(frames.statistics[name][statistic], theirs[key][statistic], rtol=1e-5, atol=1e-6)
    rng, (y, x) = np.random.default_rng(0), np.mgrid[:64, :96]
    for number, (first, length) in enumerate(frames.episodes):
        obs = frames.read(np.arange(first, first + length))
        assert set(obs["instruction"]) == {f"task {number % 2}"}
        for t in range(length):
            assert np.array_equal(obs["state"][t], rng.normal(size=4).astype(np.float32))
            assert np.array_equal(frames.actions[first + t], rng.normal(size=3).astype(np.float32))
            waves = [np.sin(x / 9 + (number * 9 + t) / 5), np.cos(y / 11 + t / 7), np.sin((x + y) / 13)]
            picture = (127 + 100 * np.stack(waves, axis=-1)).astype(np.uint8)
            assert np.array_equal(obs["images"]["wrist"][t], picture[:32, :48])
            assert psnr(obs["images"]["top"][t], picture) > 30


@pytest.mark.parametrize("stride", [1, 3, 4])
def test_chunks_end_with_their_episode(written, tmp_path, stride):
    directory, episodes = written
    demos = Demonstrations(decode(LeRobotDataset(directory), KEYS, tmp_path), 4, stride)
    expected = [
        (number, start, min(4, len(episode[ACTION]) - start))
        for number, episode in enumerate(episodes)
        for start in range(0, len(episode[ACTION]), stride)
    ]
    assert len(demos) == len(expected)
    for index in np.random.default_rng(stride).permutation(len(demos)):
        number, start, executed = expected[index]
        obs, actions = demos.read(np.array([index]))
        mask = demos.mask(np.array([index]))
        assert demos.episodes(np.array([index])).tolist() == [number]
        assert mask.tolist() == [[i < executed for i in range(4)]]
        assert np.array_equal(actions[0, :executed].numpy(), episodes[number][ACTION][start : start + executed])
        assert np.array_equal(obs["state"][0], episodes[number][STATE][start])


def rewrite(file, change):
    table = pq.read_table(file)
    pq.write_table(change(table), file)


def edit_info(directory, change):
    file = directory / "meta" / "info.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_damage_names_the_file(copy):
    data = copy / "data/chunk-000/file-000.parquet"
    clip = copy / f"videos/{TOP}/chunk-000/file-000.mp4"
    whole = {file: file.read_bytes() for file in (data, clip, copy / "meta/info.json")}

    def refused(match):
        with pytest.raises(LeRobotError, match=match) as caught:
            read(copy)
        for file, content in whole.items():
            file.write_bytes(content)
        return str(caught.value)

    data.write_bytes(whole[data][:-50])
    assert str(data) in refused("truncated")
    clip.write_bytes(whole[clip][:-700])
    assert str(clip) in refused("truncated")
    clip.unlink()
    assert str(clip) in refused("is missing")
    edit_info(copy, lambda info: info.update(total_frames=17))
    refused("info.json has 3 episodes of 17 frames.*3 of 16")
    edit_info(copy, lambda info: info["features"][ACTION].update(shape=[7]))
    assert str(data) in refused("action has 7 numbers in info.json, and 3 there")
    edit_info(copy, lambda info: info["features"][STATE].update(dtype="float64"))
    refused("observation.state is float64 in info.json, and float there")
    rewrite(data, lambda table: table.rename_columns(["other" if x == STATE else x for x in table.column_names]))
    refused("has no one column 'observation.state', which info.json lists")
    edit_info(copy, lambda info: info["features"][TOP]["info"].update({"video.codec": "h264"}))
    assert str(clip) in refused("codec is av1 there and h264 in info.json")
    edit_info(copy, lambda info: info["features"][TOP].update(shape=[64, 64, 3]))
    refused("size is 64 x 96 there and 64 x 64 in info.json")
    for name, said, got in (("fps", 99, "10"), ("pix_fmt", "yuv444p", "yuv420p"), ("height", 480, "64")):
        edit_info(
            copy, lambda info, name=name, said=said: info["features"][TOP]["info"].update({f"video.{name}": said})
        )
        assert str(clip) in refused(f"the video.{name} is {got} there and {said} in info.json")
    edit_info(copy, lambda info: info.update(total_tasks=9))
    refused("info.json has 9 tasks, and the table of tasks 2")
    edit_info(copy, lambda info: info.update(fps=30))
    refused("rate is 10 pictures/s there and 30 pictures/s in info.json")
    edit_info(copy, lambda info: info.update(codebase_version="v2.0"))
    refused("codebase_version is v2.0, and v3.0 and v2.1 are read")
    edit_info(copy, lambda info: info.pop("features"))
    refused("info.json: features is missing")
    rewrite(data, lambda table: table.set_column(5, "episode_index", pa.array(np.zeros(16, np.int64))))
    refused(r"frame 5 is .*'episode_index': 0.*by meta/episodes .*'episode_index': 1")
    read(copy)


def test_what_is_not_in_the_tables_is_named(copy):
    tasks, episodes = copy / "meta/tasks.parquet", copy / "meta/episodes/chunk-000/file-000.parquet"
    data = copy / "data/chunk-000/file-000.parquet"
    whole = {file: file.read_bytes() for file in (data, tasks, episodes, copy / "meta/info.json")}

    def refused(file, match):
        with pytest.raises(LeRobotError, match=match) as caught:
            read(copy)
        assert str(file) in str(caught.value)
        for one, content in whole.items():
            one.write_bytes(content)

    def set_column(name, values):
        return lambda table: table.set_column(table.schema.names.index(name), name, values)

    info = copy / "meta/info.json"
    for fps in (0, -5, None, "10", True, float("inf"), float("nan")):
        edit_info(copy, lambda content, fps=fps: content.update(fps=fps))
        refused(info, rf"info.json: fps is {fps!r}: Input should be ")
    info.write_bytes(b"\xff\xfe\x00")
    refused(info, "cannot be read")
    for path in ("data/{episode_chunk:03d}.parquet", "data/{chunk_index:03d", "data/{}/x", "data/{video_key}"):
        edit_info(copy, lambda content, path=path: content.update(data_path=path))
        refused(info, r"data_path is '.*', which cannot be filled in .*\. v3.0 knows \{chunk_index\}, \{file_index\}")
    rewrite(tasks, lambda table: table.drop_columns(["task"]))
    refused(tasks, "has no column task, but task_index")
    rewrite(tasks, lambda table: table.drop_columns(["task_index"]))
    refused(tasks, "has no column task_index")
    rewrite(tasks, set_column("task", pa.array([None, "task 1"], pa.string())))
    refused(tasks, "the sentence of task 0 is None, and no text")
    rewrite(tasks, set_column("task_index", pa.array([1, 1])))
    refused(tasks, r"2 tasks have the numbers \[1, 1\]")
    rewrite(episodes, set_column("data/file_index", pa.array([0, None, 0])))
    refused(episodes, "data/file_index is empty in some row")
    rewrite(data, set_column("task_index", pa.array([-1] * 16)))
    refused(copy, "a frame has task -1, and there are 2")
    states = np.zeros(64, np.float32)
    states[25] = np.nan
    rewrite(data, set_column(STATE, pa.FixedSizeListArray.from_arrays(pa.array(states), 4)))
    refused(data, r"observation\.state\[1\] is nan in frame 1 of episode 1")
    assert not list((copy / ".frames").iterdir()), "something unfinished was left"
    png = writer.png(np.zeros((32, 48), np.uint16))
    pictures = pq.read_table(data)[WRIST].to_pylist()
    rewrite(data, set_column(WRIST, pa.array([*pictures[:15], {"bytes": png, "path": ""}], writer._PNG)))
    refused(data, "wrist has mode I;16, as depth maps have")
    rewrite(data, set_column(WRIST, pa.array([*pictures[:15], None], writer._PNG)))
    refused(data, "wrist cannot be decoded: there are no bytes of it")

    # a table with more than LeRobot writes, and one whose index pandas has not named
    rewrite(tasks, lambda table: table.add_column(0, "category", pa.array(["easy", "hard"])))
    assert read(copy).tasks == ["task 0", "task 1"]
    rewrite(tasks, lambda table: table.drop_columns(["category"]).rename_columns(["task_index", "__index_level_0__"]))
    assert read(copy).tasks == ["task 0", "task 1"]


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        ("data_path", 3, "data_path is 3: Input should be a valid string"),
        ("total_episodes", "4", "total_episodes is '4': Input should be a valid integer"),
        ("chunks_size", 0, "chunks_size is 0: Input should be greater than 0"),
        ("chunks_size", "1000", "chunks_size is '1000': Input should be a valid integer"),
        ("features", [], "features is []: Input should be a valid dictionary"),
        ("features/action/shape", [3.0], "features.action.shape.0 is 3.0: Input should be a valid integer"),
        ("features/action/shape", "3", "features.action.shape is '3': Input should be a valid list"),
        ("features/action/shape", [-3], "features.action.shape.0 is -3: Input should be greater than 0"),
        ("features/action/dtype", "object", "features.action.dtype is 'object': a numpy type of numbers"),
        (f"features/{TOP}/shape", [64], f"features.{TOP}.shape is [64]: a picture has height, width and"),
        (f"features/{TOP}/info", [1], f"features.{TOP}.info is [1]: Input should be a valid dictionary"),
    ],
)
def test_values_of_other_types_are_named(copy, where, value, said):
    def change(content):
        *path, last = where.split("/")
        for part in path:
            content = content[part]
        content[last] = value

    edit_info(copy, change)
    with pytest.raises(LeRobotError) as caught:
        read(copy)
    assert str(caught.value).startswith(f"{copy}/meta/info.json: {said}")


@pytest.mark.parametrize(
    ("name", "values", "kind"),
    [
        ("length", [5.0, 8.0, 3.0], "double, and LeRobot's is integer"),
        ("episode_index", ["a", "b", "c"], "string, and LeRobot's is integer"),
        ("data/chunk_index", ["0", "0", "0"], "string, and LeRobot's is integer"),
        (f"videos/{TOP}/from_timestamp", ["0", "1", "2"], "string, and LeRobot's is floating"),
    ],
)
def test_columns_of_other_types_are_named(copy, name, values, kind):
    file = copy / "meta/episodes/chunk-000/file-000.parquet"
    rewrite(file, lambda table: table.set_column(table.schema.names.index(name), name, pa.array(values)))
    with pytest.raises(LeRobotError) as caught:
        LeRobotDataset(copy)
    assert str(caught.value) == f"{file}: {name} is of type {kind}"


def test_frames_are_at_their_times(copy):
    """LeRobot finds a picture by the time of its frame, here it is by number."""
    data = copy / "data/chunk-000/file-000.parquet"
    late = pa.array((np.array([*range(5), *range(8), *range(3)]) / 7).astype(np.float32))
    rewrite(data, lambda table: table.set_column(table.schema.names.index("timestamp"), "timestamp", late))
    with pytest.raises(
        LeRobotError, match=rf"{data}: frame 1 is at 0\.1429 s .* by info\.json \(10 frames/s\) .* 0\.1"
    ):
        read(copy)


def test_a_damaged_video_is_refused_and_its_file_and_time_named(tmp_path):
    """H.264 decoders make up for what they cannot decode, unless told otherwise."""
    file = tmp_path / "a.mp4"
    noise = np.random.default_rng(0).integers(-20, 20, (120, 64, 96, 3))
    write_h264(file, np.clip(smooth(0, 120, 64, 96) + noise, 0, 255).astype(np.uint8))
    whole, times = file.read_bytes(), [i / FPS for i in range(120)]
    assert len(list(video.pictures_at(file, times))) == 120
    begin, end = whole.index(b"mdat") + 3000, whole.index(b"moov") - 200
    for seed in range(10):
        damaged = bytearray(whole)
        for place in np.random.default_rng(seed).integers(begin, end, 30):
            damaged[place] ^= 0xFF
        file.write_bytes(damaged)
        with pytest.raises(LeRobotError, match=rf"{file} (is damaged|has no picture at \d)"):
            list(video.pictures_at(file, times))


def test_pictures_from_the_middle_of_a_video_need_no_key_frame_to_stand_alone(tmp_path):
    file = tmp_path / "a.mp4"
    write_h264(file, smooth(0, 80, 64, 96), {"x264-params": "open-gop=1:keyint=12:bframes=3"})
    whole = list(video.pictures_at(file, [i / FPS for i in range(80)]))
    for first in range(11, 70, 3):
        found = list(video.pictures_at(file, [i / FPS for i in range(first, first + 5)]))
        assert np.array_equal(found, whole[first : first + 5]), first


def test_a_video_of_other_episodes_is_named(copy, tmp_path):
    """A shift by one picture, clips that overlap, and v2.1's files in the wrong place."""
    episodes, begins = copy / "meta/episodes/chunk-000/file-000.parquet", f"videos/{TOP}/from_timestamp"
    clips = pq.read_table(episodes).select([begins, f"videos/{TOP}/to_timestamp"]).to_pylist()
    kept = episodes.read_bytes()
    for change, match in (
        ({0: (0.1, 0.0)}, "an episode of 5 frames has 4 pictures"),
        (
            {0: (0.0, 0.3)},
            "an episode of 5 frames has 8 pictures, from 0.0000 s to 0.8000 s. Is it",
        ),
        ({0: (0.1, 0.1)}, r"an episode begins at 0\.5000 s, within the one before it"),
        ({2: (0.1, 0.1)}, r"ends at 0\.70 s, and the dataset has a frame at 0\.80 s: is it truncated"),
    ):
        for number, (late, later) in change.items():
            for (name, second), more in zip(clips[number].items(), (late, later), strict=True):
                values = [clip[name] for clip in clips]
                values[number] = second + more
                column = pa.array(values)
                rewrite(episodes, lambda t, name=name, x=column: t.set_column(t.schema.names.index(name), name, x))
        with pytest.raises(LeRobotError, match=match):
            read(copy)
        episodes.write_bytes(kept)
    read(copy)

    write_v21(tmp_path / "v2")
    first, second = (tmp_path / f"v2/videos/chunk-000/{TOP}/episode_{i:06d}.mp4" for i in range(2))
    shutil.copy(second, first)
    with pytest.raises(LeRobotError, match=f"{first}: an episode of 4 frames has 6 pictures"):
        read(tmp_path / "v2", Keys({"eye": TOP}, STATE, ACTION))


@pytest.mark.parametrize("line", ["[1]", '{"episode_index": 1}', '{"episode_index": "1", "length": 6}'])
def test_lines_of_version_2_1_that_say_too_little_are_named(tmp_path, line):
    write_v21(tmp_path / "set")
    file = tmp_path / "set/meta/episodes.jsonl"
    file.write_text(file.read_text().splitlines()[0] + "\n" + line + "\n")
    with pytest.raises(LeRobotError, match=rf"{file}: line 2 has no (episode_index|length) that is int"):
        LeRobotDataset(tmp_path / "set")


def test_a_video_that_ends_early_is_named(copy):
    clip = copy / f"videos/{TOP}/chunk-000/file-000.mp4"
    short = VideoWriter(clip, 64, 96, 10)
    short.add(smooth(0, 6, 64, 96))
    short.close()
    with pytest.raises(LeRobotError, match=f"{clip} ends at 0.50 s, and the dataset has a frame at 0.60 s"):
        read(copy)
    assert not list((copy / ".frames").glob("*")), "something unfinished was left"


def test_a_part_of_a_video_is_what_the_whole_has(tmp_path):
    clip = VideoWriter(tmp_path / "clip.mp4", 32, 48, 10)
    clip.add(smooth(0, 40, 32, 48))
    clip.close()
    whole = list(video.pictures_at(clip.file, [i / 10 for i in range(40)]))
    for first in (3, 11, 12, 25, 39):
        part = list(video.pictures_at(clip.file, [i / 10 for i in range(first, 40)]))
        assert np.array_equal(np.stack(part), np.stack(whole[first:]))


def test_folders_that_are_none(tmp_path):
    with pytest.raises(LeRobotError, match="no directory"):
        LeRobotDataset(tmp_path / "nothing")
    (tmp_path / "pictures").mkdir()
    with pytest.raises(LeRobotError, match=r"no meta/info.json \(there is pictures\)"):
        LeRobotDataset(tmp_path)


def test_what_a_run_needs_is_compared_with_what_is_there(written):
    def problems(seen, *overrides):
        chosen = ["data.source=folder", f"data.demos_dir={written[0]}", *overrides]
        cfg = load_config("embodiment/tabletop_sft_mlp", chosen)
        with pytest.raises(DemonstrationError) as caught:
            open_dataset(cfg, written[0], seen)
        return str(caught.value)

    seen = Observed(3, 4, {"top": (64, 96)})
    cfg = load_config("embodiment/tabletop_sft_mlp", ["data.source=folder", f"data.demos_dir={written[0]}"])
    open_dataset(cfg, written[0], seen)
    found = problems(Observed(3, 4, {"tob": (64, 64)}))
    assert "no pictures 'observation.images.tob'" in found and "Did you mean observation.images.top" in found
    found = problems(seen, "data.keys.cameras={topp: observation.images.top}")
    assert "data.keys.cameras.topp: the environment has no such camera. Did you mean top?" in found
    found = problems(Observed(7, 39, {"top": (64, 64)}))
    assert "observation.state has 4 numbers, and the environment's state 39" in found
    assert "action has 3 numbers, and the environment's action 7" in found
    assert "no vector 'actoin'. Did you mean action?" in problems(seen, "data.keys.action=actoin")

    open_dataset(cfg, written[0], None)  # of an environment that only its simulator knows, names are checked
    assert "no vector 'actoin'. Did you mean action?" in problems(None, "data.keys.action=actoin")
    assert "no vector 'stat'" in problems(None, "data.keys.state=stat")
    found = problems(None, "data.keys.cameras={any: observation.images.tob}")
    assert "no pictures 'observation.images.tob' for the environment's camera any. Did you mean" in found


def test_demonstrations_of_other_tasks_are_noted_and_another_one_hot_is_refused(copy):
    """Both have the sizes that the run asks for."""

    def strange(made_from, task, obs_mode="rgb+state", look=lambda cfg: strange_tasks(cfg, LeRobotDataset(copy))):
        file = copy / "meta" / PROVENANCE
        file.write_text(json.dumps({"made_from": made_from})) if made_from else file.unlink(missing_ok=True)
        chosen = [
            "data.source=folder",
            f"data.demos_dir={copy}",
            f"env.task='{task}'",
            f"env.options.obs_mode={obs_mode}",
        ]
        cfg = load_config("metaworld_sft_vla", [*chosen, "env.eval.num_episodes=20"])
        return look(cfg)

    made = {"env.id": "metaworld", "env.task": "drawer-open-v3,reach-v3"}
    assert strange(made, "drawer-open-v3,reach-v3") == []
    for task in ("reach-v3,drawer-open-v3", "door-open-v3,push-v3"):
        with pytest.raises(
            DemonstrationError, match=rf"{copy} has states that end in a one-hot of drawer-open-v3,reach"
        ):
            strange(made, task, look=lambda cfg: open_dataset(cfg, copy, None))
        assert strange(made, task, "rgb") == [f"env.task is drawer-open-v3,reach-v3 there and {task} here"]
    assert strange(made, "reach-v3") == ["env.task is drawer-open-v3,reach-v3 there and reach-v3 here"]
    assert strange({**made, "env.id": "tabletop"}, "reach-v3")[0] == "env.id is tabletop there and metaworld here"

    foreign = strange(None, "reach-v3,push-v3")
    assert foreign[0].startswith("states end in a one-hot of reach-v3, push-v3: the dataset does not say")
    assert foreign[1].startswith(
        "none of its sentences (task 0 | task 1) is one of reach-v3,push-v3 (Push the puck to a"
    )
    told = pa.array(["Reach a goal position", "task 1"])
    rewrite(copy / "meta/tasks.parquet", lambda t: t.set_column(t.schema.names.index("task"), "task", told))
    assert strange(None, "reach-v3,push-v3", "rgb") == []


def test_sentences_are_left_out_where_the_environment_has_none(written, tmp_path):
    frames = Frames(decode(LeRobotDataset(written[0]), Keys({}, STATE, ACTION, instruction=False), tmp_path))
    assert set(frames.read(np.arange(16))["instruction"]) == {""}


def test_decoding_is_done_once_and_anew_when_a_file_changes(copy):
    first = read(copy)
    [directory] = (copy / ".frames").iterdir()
    before = directory.stat().st_mtime_ns
    assert np.array_equal(read(copy).actions, first.actions)
    assert directory.stat().st_mtime_ns == before
    rewrite(copy / "data/chunk-000/file-000.parquet", lambda table: table)
    read(copy)
    assert len(list((copy / ".frames").iterdir())) == 2
    sentences = pa.array(["another sentence", "task 1"])
    rewrite(
        copy / "meta/tasks.parquet", lambda table: table.set_column(table.schema.names.index("task"), "task", sentences)
    )
    assert read(copy).tasks == ["another sentence", "task 1"]


def anonymous_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def test_memory_does_not_grow_with_the_frames(tmp_path):
    num_frames = 100_000  # 1.2 GB of pictures, of which the file system keeps none: a file of holes
    shape = (num_frames, 64, 64, 3)
    np.lib.format.open_memmap(tmp_path / "images_0.npy", "w+", np.uint8, shape)
    for name, dtype, of_one in (("actions", np.float32, (7,)), ("task", np.int32, ())):
        np.save(tmp_path / f"{name}.npy", np.zeros((num_frames, *of_one), dtype))
    np.save(tmp_path / "episodes.npy", np.array([[0, num_frames]]))
    np.save(tmp_path / "successes.npy", np.ones(1, bool))
    said = {"tasks": ["push"], "cameras": {"top": "images_0.npy"}, "has_state": False, "has_rewards": False}
    said |= {"statistics": {}, "notes": []}
    (tmp_path / "contents.json").write_text(json.dumps(said))
    demos = Demonstrations(tmp_path, 8, 1)
    rng = np.random.default_rng(0)
    demos.read(rng.integers(0, num_frames, 64))
    before = anonymous_kib()
    for _ in range(50):
        demos.read(rng.integers(0, num_frames, 64))
    assert anonymous_kib() - before < 8192


def test_an_encoder_that_does_not_come_back_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "TIMEOUT_S", 0.5)
    clip = VideoWriter(tmp_path / "clip.mp4", 64, 64, 10)
    clip._process.send_signal(signal.SIGSTOP)
    with pytest.raises(LeRobotError, match=r"clip\.mp4: the AV1 encoder has (taken in nothing|not finished)"):
        clip.add(np.zeros((100, 64, 64, 3), np.uint8))
        clip.close()
    assert clip._process.returncode is not None


def test_what_cannot_be_written_is_said(tmp_path):
    with pytest.raises(LeRobotError, match=r"even height and width.*63 x 64.*data\.pictures=image"):
        VideoWriter(tmp_path / "clip.mp4", 63, 64, 10)
    with pytest.raises(LeRobotError, match=r"shape \(2, 3\) cannot be written"):
        writer.PartWriter(tmp_path / "part", {"grid": Feature("float32", (2, 3))}, 10)
    write_dataset(tmp_path / "set", lengths=(2,), num_parts=1)
    with pytest.raises(LeRobotError, match="is a dataset already"):
        writer.begin(tmp_path / "set")
    left = writer.begin(tmp_path / "failed") / "rank_000"
    left.mkdir()
    writer.begin(tmp_path / "failed")
    assert not left.exists(), "what a failed collection left is in the way of the next"
