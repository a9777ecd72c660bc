"""LeRobot datasets per second of a core: writing, decoding once, batches of random chunks from the decoded frames.

    python benchmarks/lerobot_bench.py [--frames 2000] [--size 128] [--repeats 5]

Two datasets of the same frames, pictures as AV1 videos and as PNG. Decoding is all that happens once per dataset:
tables compared with info.json, pictures decoded and written to the files that batches are read from; its opponent
decodes the same video with PyAV and keeps nothing. Seconds are those of this process on all cores, whatever else runs,
except that writing is by the clock: the encoder is a process of its own. A batch is 64 chunks of 8 actions with a
picture and a state each.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import av
import numpy as np
from common import Comparison, Report, interleaved, median, print_table, timed

from rlinf_lite.data.demonstrations import Demonstrations
from rlinf_lite.data.lerobot.frames import Keys, decode
from rlinf_lite.data.lerobot.layout import ACTION, PICTURES, STATE, picture_feature, vector_feature
from rlinf_lite.data.lerobot.reader import LeRobotDataset
from rlinf_lite.data.lerobot.writer import Episode, PartWriter, begin, publish

LENGTH, FPS, BATCH, CHUNK = 100, 10, 64, 8
KEYS = Keys({"top": PICTURES + "top"}, STATE, ACTION)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=2000)
    parser.add_argument("--size", type=int, default=128, help="height and width of pictures")
    parser.add_argument("--batches", type=int, default=50, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    report = Report("lerobot", vars(args))

    with tempfile.TemporaryDirectory() as name:
        root, frames = Path(name), moving_pictures(args.frames, args.size)
        folders = {kind: root / kind for kind in ("video", "image")}
        rates = {kind: args.frames / timed(partial(write, folders[kind], kind, frames)) for kind in folders}
        [clip] = folders["video"].glob("videos/*/*/*.mp4")

        def decoding(kind: str) -> Callable[[], float]:
            def measure() -> float:
                shutil.rmtree(root / "frames", ignore_errors=True)
                return args.frames / cpu_timed(lambda: decode(LeRobotDataset(folders[kind]), KEYS, root / "frames"))

            return measure

        decode(LeRobotDataset(folders["video"]), KEYS, root / "first")  # imports, caches

        found = interleaved(
            {
                "decode video": decoding("video"),
                "bare PyAV": lambda: args.frames / cpu_timed(lambda: bare_decoding(clip)),
                "decode image": decoding("image"),
            },
            args.repeats,
            unit="pictures/s",
        )
        demos = Demonstrations(decode(LeRobotDataset(folders["video"]), KEYS, root / "frames"), CHUNK, 1)
        rng = np.random.default_rng(0)

        def batches() -> float:
            drawn = [rng.integers(0, len(demos), BATCH) for _ in range(args.batches)]
            return args.batches * BATCH / cpu_timed(lambda: [(demos.read(rows), demos.mask(rows)) for rows in drawn])

        found |= interleaved({"batches of 64": batches}, args.repeats, unit="rows/s")

    found |= {f"write {kind}": [rate] for kind, rate in rates.items()}
    report.measurements |= {f"{name}, per second": figures for name, figures in found.items()}
    print_table("per second", ["what", "median"], [[name, f"{median(v):.4g}"] for name, v in found.items()])
    rows, pictures = median(found["batches of 64"]), median(found["decode video"])
    bare = median(found["bare PyAV"])
    size = f"{args.size} px, of one core"
    report.comparisons += [
        Comparison(f"random batches of 64, {size}", rows, "a number", 2000, "rows/s", rows / 2000, 1.0, True),
        Comparison(f"AV1 decoded once, {size}", pictures, "PyAV alone", bare, "pictures/s", pictures / bare, 0.7, True),
    ]
    report.write()


def moving_pictures(num_frames: int, size: int) -> np.ndarray:
    """uint8 [n, S, S, 3]: a still background and a square that moves."""
    y, x = np.mgrid[:size, :size]
    still = np.stack([120 + 60 * np.sin(x / 17), 110 + 60 * np.cos(y / 23), 100 + 50 * np.sin((x + y) / 29)], -1)
    frames = np.repeat(still.astype(np.uint8)[None], num_frames, axis=0)
    side = size // 6
    for i, frame in enumerate(frames):
        left, top = (3 * i) % (size - side), (2 * i) % (size - side)
        frame[top : top + side, left : left + side] = (200, 40, 40)
    return frames


def write(directory: Path, kind: str, frames: np.ndarray) -> None:
    rng, size = np.random.default_rng(0), frames.shape[1]
    features = {
        STATE: vector_feature("state", 8),
        ACTION: vector_feature("action", 7),
        PICTURES + "top": picture_feature(kind, size, size, FPS),
    }
    part = PartWriter(begin(directory) / "rank_000", features, FPS)
    for number, first in enumerate(range(0, len(frames), LENGTH)):
        pictures = frames[first : first + LENGTH]
        columns = {
            STATE: rng.normal(size=(len(pictures), 8)).astype(np.float32),
            ACTION: rng.normal(size=(len(pictures), 7)).astype(np.float32),
            PICTURES + "top": pictures,
        }
        part.add(Episode(number, columns, ["push"] * len(pictures)))
    part.finish()
    publish(directory, FPS, None)


def cpu_timed(function: Callable[[], object]) -> float:
    """Seconds of processor time that a call takes."""
    start = time.process_time()
    function()
    return time.process_time() - start


def bare_decoding(clip: Path) -> None:
    with av.open(str(clip)) as container:
        for frame in container.decode(container.streams.video[0]):
            frame.to_ndarray(format="rgb24")


if __name__ == "__main__":
    main()
