"""PushT as docs/sft.md has it, word for word: an environment by gymnasium's door, and a dataset like the public one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rlinf_lite.data.lerobot.layout import ACTION, STATE, picture_feature, vector_feature
from rlinf_lite.data.lerobot.writer import Episode, PartWriter, begin, publish
from tests.data.lerobot_folders import smooth

pytest.importorskip("gym_pusht", reason="docs/sft.md says how to install gym-pusht; .ci/run does so")
IMAGE = "observation.image"
SMALL = [
    "cluster.runtime=local",
    "runner.max_steps=2",
    "runner.val_check_interval=2",
    "actor.global_batch_size=4",
    "actor.micro_batch_size=4",
    "env.eval.num_episodes=4",
    "env.eval.max_episode_steps=16",
    "env.eval.num_videos=0",
]


def test_the_example_of_the_docs_runs(
    repo: Path, tmp_path: Path, command_line: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    section = (repo / "docs" / "sft.md").read_text().split("### PushT")[1].split("\n## ")[0]
    [config] = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    [defaults] = re.findall(r"`(defaults: \[.*?\])`", section, re.DOTALL)
    (tmp_path / "pusht_sft.yaml").write_text(f"{defaults}\n{config}")

    demos, features = tmp_path / "pusht", {STATE: vector_feature("state", 2), ACTION: vector_feature("action", 2)}
    features[IMAGE] = picture_feature("video", 96, 96, 10)
    part = PartWriter(begin(demos) / "rank_000", features, 10)
    for number in range(2):
        places = np.random.default_rng(number).uniform(0, 512, (12, 2)).astype(np.float32)
        columns = {STATE: places, ACTION: places[::-1].copy(), IMAGE: smooth(number, 12, 96, 96)}
        part.add(Episode(number, columns, ["Push the T-shaped block onto the T-shaped target."] * 12, {}))
    part.finish()
    publish(demos, 10, "2d pointer")

    where = [f"runner.logger.log_path={tmp_path}", f"data.demos_dir={demos}"]
    assert command_line(["train", "--config-name", str(tmp_path / "pusht_sft.yaml"), *SMALL, *where]) == 0
    said = capsys.readouterr().out
    assert "2 episodes, 24 chunks, 24 env steps" in said and "greedy" in said
