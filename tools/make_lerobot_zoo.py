"""Write tests/data/lerobot_zoo: small datasets, written by LeRobot itself, and the frames that its reader returns.

LeRobot's requirements conflict with this project's, so the script needs a separate environment:

    python3.12 -m venv /tmp/lerobot && /tmp/lerobot/bin/pip install 'lerobot[dataset]==0.6.1'
    HF_HUB_OFFLINE=1 /tmp/lerobot/bin/python tools/make_lerobot_zoo.py tests/data/lerobot_zoo

Each folder has an `expected.npz` with the items `LeRobotDataset[i]`, pictures as uint8 [N, H, W, 3]. LeRobot's PyAV
backend decodes videos. `subtask` is the result of LeRobot's `active_at` at the time of a frame ("": none). Statistics
are removed first: they are most of a folder's bytes, and this project does not read them.

The files in the repository were made with Python 3.12.1, lerobot 0.6.1, torch 2.11.0, datasets 4.8.5, av 15.1.0.
LeRobot 0.6.1 writes no video of a rate like 29.97, so that `ntsc` has pictures in its table.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from lerobot.annotations.steerable_pipeline.executor import Executor
from lerobot.annotations.steerable_pipeline.reader import iter_episodes
from lerobot.annotations.steerable_pipeline.staging import EpisodeStaging
from lerobot.annotations.steerable_pipeline.writer import LanguageColumnsWriter, speech_atom
from lerobot.datasets import dataset_tools
from lerobot.datasets.language_render import active_at
from lerobot.datasets.lerobot_dataset import LeRobotDataset

SIDES = {"image": 16, "video": 32}  # SVT-AV1 takes no smaller ones
FRONT, WRIST = "observation.images.front", "observation.images.wrist"
SENTENCES = ("Put the cube away.", "Öffne die Schublade — 左", "push it")


def features(pictures: str, cameras: Sequence[str], lengths: Sequence[int]) -> dict[str, Any]:
    side, axes = SIDES[pictures], ["height", "width", "channels"]
    return {
        "observation.state": {"dtype": "float32", "shape": (4,), "names": ["x", "y", "z", "grip"]},
        "action": {"dtype": "float32", "shape": (3,), "names": ["dx", "dy", "grip"]},
        # features that imitation does not use, one of each other type
        "next.reward": {"dtype": "float64", "shape": (1,), "names": None},
        "next.success": {"dtype": "bool", "shape": (1,), "names": None},
        "remark": {"dtype": "string", "shape": (1,), "names": None},
        # LeRobot 0.6.1 cannot combine statistics of tables if an episode has one frame
        **({"tactile": {"dtype": "float32", "shape": (2, 3), "names": None}} if min(lengths) > 1 else {}),
        **{key: {"dtype": pictures, "shape": (side, side, 3), "names": axes} for key in cameras},
    }


def write(
    root: Path, lengths: Sequence[int], pictures: str = "image", cameras: Sequence[str] = (FRONT, WRIST), fps: Any = 10
) -> LeRobotDataset:
    dataset = LeRobotDataset.create(
        f"zoo/{root.name}", fps, features(pictures, cameras, lengths), root=root, use_videos=pictures == "video"
    )
    rng, (y, x) = np.random.default_rng(len(root.name)), np.mgrid[: SIDES[pictures], : SIDES[pictures]]
    for number, length in enumerate(lengths):
        for t in range(length):
            moved = 40 * number + 9 * t
            dataset.add_frame(
                {
                    "observation.state": rng.normal(size=4).astype(np.float32),
                    "action": rng.uniform(-1, 1, 3).astype(np.float32),
                    "next.reward": np.array([t / 2]),
                    "next.success": np.array([t == length - 1]),
                    "remark": f"frame {t}",
                    **({"tactile": np.eye(2, 3, dtype=np.float32) * t} if min(lengths) > 1 else {}),
                    "task": SENTENCES[number % len(SENTENCES)],
                    **{
                        key: np.stack([x // 8 * 60 + moved, y // 8 * 60 + 90 * i, x * 0 + moved], -1).astype(np.uint8)
                        for i, key in enumerate(cameras)
                    },
                }
            )
        dataset.save_episode()
    dataset.finalize()
    return opened(root)


def opened(root: Path) -> LeRobotDataset:
    return LeRobotDataset(f"zoo/{root.name}", root=root, video_backend="pyav", return_uint8=True)


def annotate(root: Path) -> None:
    """Annotate a dataset as LeRobot's pipeline does, with fixed sentences instead of a model's."""
    records = list(iter_episodes(root))
    with tempfile.TemporaryDirectory() as staging:
        for record in records:
            times = record.frame_timestamps
            common = {"role": "assistant", "style": "subtask"}
            rows = [{**common, "content": f"reach {record.episode_index}", "timestamp": times[0]}]
            rows += [{**common, "content": "grasp", "timestamp": t} for t in times[2:3]]
            rows += [{**common, "content": "a plan", "style": "plan", "timestamp": times[0]}]
            EpisodeStaging(Path(staging), record.episode_index).write("plan", rows)
            EpisodeStaging(Path(staging), record.episode_index).write("interjections", [speech_atom(times[0], "Hm.")])
        LanguageColumnsWriter().write_all(records, Path(staging), root)
    Executor._ensure_annotation_metadata_in_info(root)  # nothing public does only this


def leave_out_statistics(root: Path) -> None:
    for file in root.glob("meta/episodes/*/*.parquet"):
        table = pq.read_table(file)
        kept = table.select([name for name in table.column_names if not name.startswith("stats/")])
        pq.write_table(kept.replace_schema_metadata(None), file)
    (root / "meta/stats.json").unlink(missing_ok=True)


def expect(root: Path) -> None:
    dataset = opened(root)
    items = [dataset[i] for i in range(len(dataset))]
    content: dict[str, Any] = {
        "state": np.stack([item["observation.state"].numpy() for item in items]),
        "action": np.stack([item["action"].numpy() for item in items]),
        "task": np.array([item["task"] for item in items]),
        "episode": np.array([int(item["episode_index"]) for item in items]),
        "timestamp": np.array([float(item["timestamp"]) for item in items]),
    }
    for key in dataset.meta.camera_keys:
        pictures = np.stack([item[key].permute(1, 2, 0).numpy() for item in items])
        if pictures.dtype != np.uint8:  # pictures in tables are in [0, 1]
            whole = np.round(pictures * 255)
            assert np.array_equal((whole / 255).astype(np.float32), pictures)
            pictures = whole.astype(np.uint8)
        content[key] = pictures
    if "language_persistent" in dataset.features:
        found = [
            active_at(float(item["timestamp"]), persistent=item["language_persistent"], style="subtask")
            for item in items
        ]
        content["subtask"] = np.array([row["content"] if row else "" for row in found])
    np.savez_compressed(root / "expected.npz", **content)
    size = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
    print(f"{root.name}: {len(items)} frames, {size:,} bytes", flush=True)


def main(root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    write(root / "images", (4, 1, 3))
    bare = ["front", "observation.image"]  # names of cameras without the usual beginning
    write(root / "bare_cameras", (2, 3), cameras=bare)
    videos = write(root / "videos", (4, 1, 6), "video")
    write(root / "language", (5, 1), cameras=[FRONT])
    annotate(root / "language")

    more = write(root / "more", (2, 1), "video")
    dataset_tools.merge_datasets([videos, more], "zoo/merged", root / "merged")
    dataset_tools.delete_episodes(videos, [0], root / "deleted", "zoo/deleted")
    dataset_tools.split_dataset(videos, {"train": [0, 2], "val": [1]}, root / "split")
    for part in ("train", "val"):
        (root / "split" / part).rename(root / f"split_{part}")
    (root / "split").rmdir()
    shutil.rmtree(root / "more")
    shutil.copytree(root / "images", root / "edited_tasks")
    dataset_tools.modify_tasks(opened(root / "edited_tasks"), "do it", {1: "other", 2: "also\u2028new\u0085"})
    subtask = {"dtype": "int64", "shape": (1,), "names": None}  # as LeRobot 0.4 and 0.5 kept subtasks
    numbers = np.arange(8)
    dataset_tools.add_features(
        opened(root / "images"), {"subtask_index": (numbers, subtask)}, root / "subtask_index", "zoo/subtask_index"
    )
    write(root / "ntsc", (3, 2), cameras=[FRONT], fps=29.97)

    for folder in sorted(root.iterdir()):
        leave_out_statistics(folder)
        expect(folder)
    print(json.dumps({folder.name: opened(folder).meta.info.fps for folder in sorted(root.iterdir())}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
