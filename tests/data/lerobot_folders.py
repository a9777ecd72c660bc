"""LeRobot datasets for tests: small, with known content; and v2.1, as its own writer laid it out."""

import json
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlinf_lite.data.lerobot.layout import ACTION, PICTURES, STATE, picture_feature, vector_feature
from rlinf_lite.data.lerobot.writer import Episode, PartWriter, begin, publish

TOP, WRIST = PICTURES + "top", PICTURES + "wrist"
FPS = 10


def smooth(first, length, height, width):
    """Pictures that move, uint8 [T, H, W, 3]."""
    y, x = np.mgrid[:height, :width]
    waves = [
        np.stack([np.sin(x / 9 + t / 5), np.cos(y / 11 + t / 7), np.sin((x + y) / 13 + t / 9)], axis=-1)
        for t in range(first, first + length)
    ]
    return (127 + 100 * np.stack(waves)).astype(np.uint8)


def content(number, length, state_dim=4, action_dim=3):
    rng = np.random.default_rng(number)
    return {
        STATE: rng.normal(size=(length, state_dim)).astype(np.float32),
        ACTION: rng.uniform(-1, 1, size=(length, action_dim)).astype(np.float32),
        TOP: smooth(number * 10, length, 64, 96),
        WRIST: smooth(number * 20, length, 32, 48),
    }


def write_dataset(directory, lengths=(5, 8, 3), num_parts=2):
    """`top` as video, `wrist` as PNG; episode i is of task i % 2. Returns the content of each episode."""
    features = {
        STATE: vector_feature("state", 4),
        ACTION: vector_feature("action", 3),
        TOP: picture_feature("video", 64, 96, FPS),
        WRIST: picture_feature("image", 32, 48, FPS),
    }
    episodes = [content(number, length) for number, length in enumerate(lengths)]
    parts = begin(directory)
    for rank in range(num_parts):
        part = PartWriter(parts / f"rank_{rank:03d}", features, FPS)
        for number in range(rank, len(lengths), num_parts):
            tasks = [f"task {number % 2}"] * lengths[number]
            part.add(Episode(number, episodes[number], tasks, {"seed": 100 + number}))
        part.finish()
    publish(directory, FPS, "tabletop")
    return episodes


def write_v21(directory: Path, lengths=(4, 6)):
    """As LeRobot 0.3 wrote: one table and one H.264 file per episode."""
    episodes = [content(number, length) for number, length in enumerate(lengths)]
    first, lines = 0, []
    for number, episode in enumerate(episodes):
        length = lengths[number]
        table = pa.table(
            {
                STATE: pa.array(list(episode[STATE]), pa.list_(pa.float32())),
                ACTION: pa.array(list(episode[ACTION]), pa.list_(pa.float32())),
                "timestamp": pa.array(np.arange(length, dtype=np.float32) / FPS),
                "frame_index": pa.array(np.arange(length)),
                "episode_index": pa.array(np.full(length, number)),
                "index": pa.array(np.arange(first, first + length)),
                "task_index": pa.array(np.full(length, number % 2)),
            }
        )
        file = directory / "data" / "chunk-000" / f"episode_{number:06d}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, file)
        video = directory / "videos" / "chunk-000" / TOP / f"episode_{number:06d}.mp4"
        video.parent.mkdir(parents=True, exist_ok=True)
        write_h264(video, episode[TOP])
        lines.append({"episode_index": number, "tasks": [f"task {number % 2}"], "length": length})
        first += length
    counters = {name: {"dtype": "int64", "shape": [1], "names": None} for name in ("frame_index", "episode_index")}
    counters |= {name: {"dtype": "int64", "shape": [1], "names": None} for name in ("index", "task_index")}
    info = {
        "codebase_version": "v2.1",
        "robot_type": "unknown",
        "fps": FPS,
        "total_episodes": len(lengths),
        "total_frames": first,
        "total_tasks": 2,
        "total_videos": len(lengths),
        "total_chunks": 1,
        "chunks_size": 1000,
        "splits": {"train": f"0:{len(lengths)}"},
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
        "features": {
            STATE: {"dtype": "float32", "shape": [4], "names": {"motors": ["a", "b", "c", "d"]}},
            ACTION: {"dtype": "float32", "shape": [3], "names": None},
            TOP: {
                "dtype": "video",
                "shape": [64, 96, 3],
                "names": ["height", "width", "channel"],
                "info": {"video.fps": float(FPS), "video.codec": "h264", "video.pix_fmt": "yuv420p"},
            },
            "timestamp": {"dtype": "float32", "shape": [1], "names": None},
            **counters,
        },
    }
    (directory / "meta").mkdir(parents=True)
    (directory / "meta" / "info.json").write_text(json.dumps(info))
    (directory / "meta" / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tasks = [{"task_index": i, "task": f"task {i}"} for i in range(2)]
    (directory / "meta" / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in tasks))
    return episodes


def write_h264(file, pictures, options=None, rate=FPS):
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=rate, options=options)
        stream.height, stream.width, stream.pix_fmt = *pictures.shape[1:3], "yuv420p"
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, "rgb24")))
        container.mux(stream.encode())


def psnr(found, wanted):
    """Peak signal to noise ratio, dB."""
    return 10 * np.log10(255**2 / np.mean((found.astype(float) - wanted) ** 2))


def edit_info(directory, change):
    """Have `change` edit what info.json says."""
    file = directory / "meta" / "info.json"
    info = json.loads(file.read_text())
    change(info)
    file.write_text(json.dumps(info))


def edit_column(directory, key, change):
    """Replace a column of numbers [N, D] by what `change` makes of it, in the type that it has."""
    for file in (directory / "data").rglob("*.parquet"):
        table = pq.read_table(file)
        old = table[key].combine_chunks()
        values = change(np.stack(old.to_numpy(zero_copy_only=False)))
        new = pa.array(list(values), old.type)
        pq.write_table(table.set_column(table.schema.names.index(key), key, new), file)


def put_in_order(directory, key, order, nested=False):
    """Write the columns of a feature, and their names, in another order; `nested`: as LeRobot names motors."""

    def rename(info):
        feature = info["features"][key]
        names = [feature["names"][column] for column in order]
        feature["names"] = {"motors": names} if nested else names

    edit_info(directory, rename)
    edit_column(directory, key, lambda values: values[:, list(order)])
