"""Datasets as they are found: folders that LeRobot 0.6.1 wrote (`tools/make_lerobot_zoo.py`) are read as it reads them;
and a table of what is accepted, noted and refused of folders that were written or changed by others."""

import io
import json
import os
import shutil
import tempfile
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rlinf_lite.cards import Observed
from rlinf_lite.config import load_config
from rlinf_lite.data.demonstrations import DemonstrationError, _frames_root, check_writable, open_dataset
from rlinf_lite.data.lerobot import video
from rlinf_lite.data.lerobot.frames import Frames, Keys, decode
from rlinf_lite.data.lerobot.layout import ACTION, STATE, LeRobotError
from rlinf_lite.data.lerobot.reader import LeRobotDataset
from tests.data.lerobot_folders import TOP, psnr, smooth, write_h264, write_v21

ZOO = Path(__file__).with_name("lerobot_zoo")
FRONT, WRIST = "observation.images.front", "observation.images.wrist"
NTSC = Fraction(30_000, 1001)
TIME_BASE = Fraction(1, 90_000)
BARE = {"front": "front", "other": "observation.image"}


def read(directory, cameras=None, subtasks=False):
    cameras = {"front": FRONT, "wrist": WRIST} if cameras is None else cameras
    return Frames(decode(LeRobotDataset(directory), Keys(cameras, STATE, ACTION, subtasks=subtasks), directory / "f"))


def same(frames, folder, cameras=None, sentences="task"):
    """Whether every array is what LeRobot's reader gave for this folder of the zoo, to the bit."""
    cameras = {"front": FRONT, "wrist": WRIST} if cameras is None else cameras
    expected = np.load(ZOO / folder / "expected.npz")
    obs = frames.read(np.arange(len(frames.actions)))
    assert np.array_equal(frames.actions, expected["action"])
    assert np.array_equal(obs["state"], expected["state"])
    assert obs["instruction"] == expected[sentences].tolist()
    assert frames.episodes[:, 1].tolist() == np.bincount(expected["episode"]).tolist()
    for camera, key in cameras.items():
        # AV1 decodes to the same YUV everywhere, and releases of FFmpeg may round one step apart on the way to RGB
        most = 1 if LeRobotDataset(ZOO / folder).info.features[key].dtype == "video" else 0
        assert np.abs(obs["images"][camera].astype(int) - expected[key]).max() <= most, camera
    return True


@pytest.fixture
def copy(tmp_path):
    def of(folder, where="set"):
        return Path(shutil.copytree(ZOO / folder, tmp_path / where))

    return of


@pytest.mark.parametrize(
    ("folder", "cameras"),
    [
        ("images", None),  # an episode of one frame is among them
        ("videos", None),
        ("merged", None),
        ("split_train", None),
        ("split_val", None),
        ("deleted", None),
        ("edited_tasks", None),  # row groups span episodes, sentences have U+2028 and U+0085
        ("subtask_index", None),
        ("bare_cameras", BARE),
        ("language", {"front": FRONT}),
        ("ntsc", {"front": FRONT}),  # 29.97 frames/s
    ],
)
def test_what_lerobot_writes_is_read_as_it_reads_it(copy, folder, cameras):
    frames = read(copy(folder), cameras)
    assert same(frames, folder, cameras) and frames.notes == []


def test_the_zoo_has_no_folder_that_is_not_read():
    params = test_what_lerobot_writes_is_read_as_it_reads_it.pytestmark[0].args[1]
    assert {folder for folder, _ in params} == {entry.name for entry in ZOO.iterdir()}


def test_subtasks_are_those_that_lerobot_finds_at_that_time(copy):
    directory = copy("language")
    assert same(read(directory, {"front": FRONT}, subtasks=True), "language", {"front": FRONT}, "subtask")
    file = directory / "data/chunk-000/file-000.parquet"
    table = pq.read_table(file)
    rows = table["language_persistent"].to_pylist()
    changed = pa.array([*rows[:5], []], table.schema.field("language_persistent").type)
    set_column(file, "language_persistent", changed)
    with pytest.raises(LeRobotError, match=rf"{file}: frame 5 has no subtask .* data\.keys\.instruction=task"):
        read(directory, {"front": FRONT}, subtasks=True)


def test_subtasks_are_asked_for_in_the_config(copy):
    def opened(folder):
        directory = copy(folder, folder)
        chosen = ["data.source=folder", f"data.demos_dir={directory}", "data.keys.instruction=subtask"]
        cfg = load_config("embodiment/tabletop_sft_mlp", chosen)
        seen = Observed(action_dim=3, state_dim=4, cameras={})
        return open_dataset(cfg, directory, seen)

    assert opened("language").notes == []
    with pytest.raises(DemonstrationError, match=r"data\.keys\.instruction: subtask, and there are no annotations"):
        opened("images")


def set_column(file, name, values):
    table = pq.read_table(file)
    pq.write_table(table.set_column(table.schema.names.index(name), name, values), file)


def edit_info(directory, change):
    file = directory / "meta/info.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def listed(name, dtype="float32", shape=(1,)):
    return lambda d: edit_info(
        d, lambda info: info["features"].update({name: {"dtype": dtype, "shape": list(shape), "names": None}})
    )


def data_column(name, make):
    def change(directory):
        file = directory / "data/chunk-000/file-000.parquet"
        set_column(file, name, make(pq.read_table(file)[name]))

    return change


def as_jpeg(column):
    """Grey ones without loss that matters: every block of 8 x 8 has one value."""
    rows = []
    for number in range(len(column)):
        content = io.BytesIO()
        Image.new("RGB", (16, 16), (number * 10,) * 3).save(content, "jpeg", quality=100)
        rows.append({"bytes": content.getvalue(), "path": "a.jpg"})
    return pa.array(rows, column.type)


def one_row_group(directory):
    file = directory / "data/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(file), file)
    assert pq.ParquetFile(file).num_row_groups == 1


def row_groups_of_three(directory):
    file = directory / "data/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(file), file, row_group_size=3)


def large_strings(directory):
    data_column("remark", lambda column: column.cast(pa.large_string()))(directory)
    tasks = directory / "meta/tasks.parquet"
    set_column(tasks, "task", pq.read_table(tasks)["task"].cast(pa.large_string()))


def with_bom(directory):
    file = directory / "meta/info.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())


def all_float64(name):
    return data_column(
        name, lambda column: column.combine_chunks().cast(pa.list_(pa.float64(), 4 if name == STATE else 3))
    )


WHICH_IS_NOT_NEEDED = "cannot be read, and this run does not need to: "

FOLDERS = {
    # what was changed: (the change, what is said: None accepted without a word, "note: ..." or "error: ...")
    "strings are large, as pandas 3 and polars write them": (large_strings, None),
    "info.json begins with a byte order mark": (with_bom, None),
    "one row group holds all episodes": (one_row_group, None),
    "row groups end within episodes": (row_groups_of_three, None),
    "an unused number is float32 in the table, float64 in info.json": (
        data_column("next.reward", lambda column: column.cast(pa.float32())),
        f"note: next.reward {WHICH_IS_NOT_NEEDED}",
    ),
    "an unused bool is int64 in the table": (
        data_column("next.success", lambda column: column.cast(pa.int64())),
        f"note: next.success {WHICH_IS_NOT_NEEDED}",
    ),
    "a listed column is in no file": (listed("effort"), f"note: effort {WHICH_IS_NOT_NEEDED}"),
    "two listed columns are in no file": (
        lambda d: (listed("effort")(d), listed("battery")(d)),
        f"note: battery, effort {WHICH_IS_NOT_NEEDED}",
    ),
    "a listed video is in no table": (
        lambda d: (
            listed("observation.images.top", "video", (64, 96, 3))(d),
            edit_info(d, lambda info: info.update(video_path="videos/{video_key}/{chunk_index}/{file_index}.mp4")),
        ),
        f"note: observation.images.top {WHICH_IS_NOT_NEEDED}",
    ),
    "an unused column is of a type that is not known": (
        listed("remark", "utf9"),
        f"note: remark {WHICH_IS_NOT_NEEDED}",
    ),
    "a language column is text": (listed("remark", "language"), f"note: remark {WHICH_IS_NOT_NEEDED}"),
    "the state is float64 in the table, float32 in info.json": (
        all_float64(STATE),
        "error: observation.state is float32 in info.json, and double there",
    ),
    "actions are of a type that is not known": (
        listed(ACTION, "utf9", (3,)),
        "error: features.action.dtype is 'utf9': a numpy type of numbers is needed",
    ),
    "actions are language": (listed(ACTION, "language", (3,)), "error: action is language in info.json, and"),
    "frames are numbered in float64": (
        data_column("frame_index", lambda column: column.cast(pa.float64())),
        "error: frame_index is int64 in info.json, and double there",
    ),
    "times are text": (
        data_column("timestamp", lambda column: column.cast(pa.string())),
        "error: timestamp is float32 in info.json, and string there",
    ),
    "a picture is of another size": (
        listed(FRONT, "image", (8, 8, 3)),
        "error: a picture of observation.images.front is (16, 16), in info.json (8, 8)",
    ),
}


@pytest.mark.parametrize("what", FOLDERS)
def test_what_is_accepted_noted_and_refused(copy, what):
    change, said = FOLDERS[what]
    directory = copy("images")
    change(directory)
    if said is not None and said.startswith("error: "):
        with pytest.raises(LeRobotError) as caught:
            read(directory)
        assert str(directory) in str(caught.value) and said.removeprefix("error: ") in str(caught.value)
        return
    frames = read(directory)
    assert same(frames, "images")
    if said is None:
        assert frames.notes == []
    else:
        [note] = frames.notes
        assert said.removeprefix("note: ") in note and str(directory) in note and "\n" not in note
    assert read(directory).notes == frames.notes, "of frames that were decoded before, notes are the same"


def test_jpeg_files_in_a_table_are_read(copy):
    directory = copy("images")
    data_column(FRONT, as_jpeg)(directory)
    found = read(directory).images["front"]
    assert [np.unique(picture).tolist() for picture in found] == [[10 * number] for number in range(8)]


@pytest.mark.parametrize("name", ["with spaces (2)", "école/données—左", "task=push/length=3", "a:b/50%d"])
@pytest.mark.parametrize("folder", ["images", "videos"])
def test_folders_of_any_name_are_read(copy, folder, name, monkeypatch):
    directory = copy(folder, name)
    monkeypatch.chdir(directory.parents[name.count("/")])
    assert same(read(Path(name)), folder)  # relative: what comes before a colon could be a protocol


def test_sentences_of_version_2_1_may_hold_line_ends_of_unicode_and_files_a_byte_order_mark(tmp_path):
    write_v21(tmp_path / "set")
    sentences = ["first\u2028second\u0085third", "größer"]
    for name in ("tasks", "episodes", "info"):
        file = tmp_path / "set/meta" / f"{name}.{'json' if name == 'info' else 'jsonl'}"
        text = file.read_text()
        if name == "tasks":
            lines = [{"task_index": i, "task": text} for i, text in enumerate(sentences)]
            text = "\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\r\n"
        file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read(tmp_path / "set", {"top": TOP}).tasks == sentences


def drifting(file, late_s):
    """The same pictures, each so much later; the container counts microseconds."""
    with av.open(str(file)) as source:
        pictures = [frame.to_ndarray(format="rgb24") for frame in source.decode(video=0)]
        rate = source.streams.video[0].average_rate
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264rgb", rate=rate, options={"qp": "0"})
        stream.height, stream.width, stream.pix_fmt = *pictures[0].shape[:2], "rgb24"
        stream.codec_context.time_base = TIME_BASE
        for number, picture in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(picture, "rgb24")
            frame.time_base = TIME_BASE
            frame.pts = round((number / rate + late_s(number)) / TIME_BASE)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return pictures


def with_h264(directory, late_s, **info):
    """The file of `front` as `drifting` makes it; its pictures."""
    [file] = (directory / "videos" / FRONT).rglob("*.mp4")
    pictures = drifting(file, late_s)

    def change(content):
        said = content["features"][FRONT]["info"]
        said.update({"video.codec": "h264", "video.pix_fmt": "gbrp", **info})

    edit_info(directory, change)
    return file, pictures


def test_videos_whose_times_drift_give_the_nearest_pictures_and_one_note(copy):
    """By up to 2 ms to either side, and 11 pictures of 100 ms; the second episode is of one frame."""
    directory = copy("videos")
    file, pictures = with_h264(directory, lambda number: 2e-3 * np.sin(number))
    frames = read(directory, {"front": FRONT})
    assert np.array_equal(frames.images["front"], pictures)
    assert frames.notes == [f"{file}: pictures are up to 2.0 ms from the times of their frames; the nearest are taken"]


def test_the_nearest_of_two_pictures_within_the_tolerance_is_taken(tmp_path):
    """As of 250 pictures/s, 4 ms apart."""
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("libx264rgb", rate=250, options={"qp": "0"})
        stream.height, stream.width, stream.pix_fmt = 16, 16, "rgb24"
        for number in range(6):
            picture = np.full((16, 16, 3), 40 * number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, "rgb24")))
        container.mux(stream.encode())
    for late_s in (-1.5e-3, 0.0, 1.5e-3):
        times = [max(number * 4e-3 + late_s, 0) for number in range(6)]
        found = [picture[0, 0, 0] for picture in video.pictures_at(tmp_path / "a.mp4", times)]
        assert found == [40 * number for number in range(6)], late_s


def test_a_neighbours_picture_is_no_drift(tmp_path):
    """At 500 pictures/s, 2 ms apart, all of them one picture late."""
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("libx264rgb", rate=500, options={"qp": "0"})
        stream.height, stream.width, stream.pix_fmt = 16, 16, "rgb24"
        for number in range(6):
            frame = av.VideoFrame.from_ndarray(np.full((16, 16, 3), 40 * number, np.uint8), "rgb24")
            frame.pts = number + 1
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(LeRobotError, match=r"has no picture at 0\.0000 s"):
        list(video.pictures_at(tmp_path / "a.mp4", [number / 500 for number in range(6)]))


def test_a_subtask_begins_with_the_frame_of_its_time_however_that_is_rounded():
    clock = np.arange(2000, dtype=np.float32) * np.float32(1 / 30)
    kind = pa.list_(pa.struct([("content", pa.string()), ("style", pa.string()), ("timestamp", pa.float64())]))
    of_folder = SimpleNamespace(info=SimpleNamespace(fps=30))
    for frame in (1, 2, 3, 500, 1999):
        rows = [("a", 0.0), ("b", float(clock[frame]))]
        said = [{"content": text, "style": "subtask", "timestamp": t} for text, t in rows]
        numbers = np.array([frame - 1, frame])
        found = LeRobotDataset._subtasks(of_folder, Path("f"), pa.array([said, said], kind), 0, numbers)
        assert found.tolist() == ["a", "b"], frame


def test_videos_that_are_later_than_any_drift_are_refused(copy):
    directory = copy("videos")
    file, _ = with_h264(directory, lambda number: 6e-3 * (number > 3))
    with pytest.raises(LeRobotError, match=rf"{file} has no picture at 0\.4000 s, the next is at 0\.4060 s"):
        read(directory, {"front": FRONT})


@pytest.mark.parametrize(("said", "accepted"), [(29.97, True), (29, True), (30, True), (28, False), (31, False)])
def test_rates_may_be_cut_to_whole_numbers(tmp_path, said, accepted):
    write_v21(tmp_path / "set")
    pictures = [smooth(number * 10, length, 64, 96) for number, length in enumerate((4, 6))]
    for number, episode in enumerate(pictures):
        write_h264(tmp_path / f"set/videos/chunk-000/{TOP}/episode_{number:06d}.mp4", episode, rate=NTSC)
        seconds = pa.array((np.arange(len(episode)) / 29.97).astype(np.float32))
        set_column(tmp_path / f"set/data/chunk-000/episode_{number:06d}.parquet", "timestamp", seconds)
    edit_info(tmp_path / "set", lambda info: info.update(fps=29.97))
    edit_info(tmp_path / "set", lambda info: info["features"][TOP]["info"].update({"video.fps": said}))
    if accepted:
        frames = read(tmp_path / "set", {"top": TOP})
        assert psnr(frames.images["top"], np.concatenate(pictures)) > 30 and frames.notes == []
    else:
        with pytest.raises(LeRobotError, match=rf"the video\.fps is 29\.97 there and {said} in info\.json"):
            read(tmp_path / "set", {"top": TOP})


def test_a_read_only_folder_is_refused_before_anything_starts_and_read_with_a_cache_elsewhere():
    with tempfile.TemporaryDirectory() as name:
        parent = Path(name)
        parent.chmod(0o755)
        directory = Path(shutil.copytree(ZOO / "images", parent / "set"))
        (parent / "cache").mkdir(mode=0o777)
        (parent / "cache").chmod(0o777)
        cfg = load_config("embodiment/tabletop_sft_mlp", ["data.source=folder", f"data.demos_dir={directory}"])
        keys, dataset = Keys({"front": FRONT}, STATE, ACTION), LeRobotDataset(directory)
        directory.chmod(0o555)
        user = os.geteuid()
        try:
            if user == 0:  # who may write anywhere
                os.seteuid(65534)
            text = rf"data\.cache_dir: {directory}/\.frames cannot be written to: .*Name another directory"
            with pytest.raises(LeRobotError, match=text):
                check_writable(dataset, keys, _frames_root(cfg, dataset))
            check_writable(dataset, keys, parent / "cache")
            frames = Frames(decode(LeRobotDataset(directory), keys, parent / "cache"))
            assert same(frames, "images", {"front": FRONT})
        finally:
            os.seteuid(user)
            directory.chmod(0o755)
