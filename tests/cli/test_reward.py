"""`rlinf-lite reward`: from logged episodes to a classifier that a run learns by, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlinf_lite.config import ConfigError, load_config
from rlinf_lite.config.schema import StepRewardConfig
from rlinf_lite.data.lerobot import writer
from rlinf_lite.data.lerobot.frames import Frames, Keys, decode
from rlinf_lite.data.lerobot.layout import Feature, LeRobotError
from rlinf_lite.data.lerobot.reader import LeRobotDataset
from rlinf_lite.envs import Obs, StepRewardError
from rlinf_lite.models.success import SuccessClassifier, SuccessReward
from rlinf_lite.training.success import read_logged
from tests.runners.conftest import read_metrics
from tests.runners.test_flow_runs import PPO as SMALL_TABLETOP
from tests.runners.test_flow_runs import TOGETHER

CommandLine = Callable[[list[str]], int]
LOGGED = ["tabletop_ppo_vla", "env.train.ignore_terminations=true", "--policy", "assets/tabletop_vla"]
BY_IT = ["env.train.ignore_terminations=true", "env.train.reward.id=success_classifier"]


def test_from_episodes_to_a_run_that_learns_by_the_classifier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command_line: CommandLine
) -> None:
    data, out = tmp_path / "logged", tmp_path / "success"
    words = ["collect", *LOGGED, "--episodes", "60", "--num-envs", "60", "--noise", "0.3", "--keep-failures"]
    assert command_line([*words, "--out", str(data)]) == 0
    train = ["reward", str(data), "--updates", "6", "--held-out", "0.4", "--seed", "3"]
    for directory in (out, tmp_path / "again"):
        assert command_line([*train, "--out", str(directory)]) == 0
    written = capsys.readouterr().out
    assert "60 episodes of 1,440 frames" in written and "864 train, 288 calibrate, 288 test" in written
    config = json.loads((out / "config.json").read_text())
    assert config["cameras"] == {"top": [64, 64]} and {"lift", "red"} <= set(config["vocabulary"])
    assert f"AUC {config['figures']['auc']:.5f}" in written
    assert config["data"]["num_episodes"] == 60 and config["settings"]["seed"] == 3
    same = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("success", "again")]
    assert same[0] == same[1] and sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in data.iterdir() if path.name.startswith(".")] == []

    small = [*SMALL_TABLETOP, *TOGETHER, "cluster.runtime=local", "env.eval.num_episodes=8", "runner.max_steps=2"]
    by_it = [
        *BY_IT,
        f"env.train.reward.model_dir={out}",
        "env.train.reward.threshold=0.0",
        "env.train.reward.relative=false",
        "env.train.max_episode_steps=8",
    ]
    assert command_line(["train", "tabletop_ppo_vla", *small, *by_it, f"runner.logger.log_path={tmp_path}"]) == 0
    [run] = tmp_path.glob("tabletop_ppo_vla*")
    steps = [line for line in read_metrics(run) if "rollout/rewards" in line]
    assert [line["rollout/rewards"] for line in steps] == [1.0, 1.0]  # a threshold of 0 takes everything for success
    episodes = [line["env/success_once"] for line in steps if "env/success_once" in line]
    assert episodes and max(episodes) < 1, "records keep the true success"


def written_dataset(directory: Path, successes: list[list[bool]], size: int = 8, **left_out: bool) -> Path:
    """Episodes of random pictures whose actions led to success or not; `left_out`: without pictures or success."""
    features = {"action": Feature("float32", (1,))}
    if not left_out.get("pictures"):
        features["observation.images.top"] = Feature("image", (size, size, 3), ["height", "width", "channels"])
    if not left_out.get("success"):
        features["next.success"] = Feature("bool", (1,))
    writer.begin(directory)
    part = writer.PartWriter(directory / writer.PARTS / "rank_000", features, 10)
    draw = np.random.default_rng(len(successes))
    for number, success in enumerate(successes):
        columns = {
            "action": np.zeros((len(success), 1), np.float32),
            "observation.images.top": draw.integers(0, 256, (len(success), size, size, 3)).astype(np.uint8),
            "next.success": np.array(success)[:, None],
        }
        part.add(writer.Episode(number, {key: columns[key] for key in features}, [f"go {number}"] * len(success)))
    part.finish()
    writer.publish(directory, 10, "toy", {})
    return directory


WON, LOST, LAST = [False, True, True, True], [False] * 4, [False, False, False, True]


def test_several_datasets_are_joined(tmp_path: Path) -> None:
    directories = [
        written_dataset(tmp_path / "one", [WON, LAST, LOST]),
        written_dataset(tmp_path / "two", [LOST, WON]),
    ]
    logged = read_logged(directories, tmp_path / "frames", lambda *_: None)
    apart = [read_logged_alone(directory, tmp_path / "frames") for directory in directories]
    rows = np.random.default_rng(0).permutation(20)
    found = logged.read(rows)
    for i, row in enumerate(rows.tolist()):
        frames, first = (apart[0], 0) if row < 12 else (apart[1], 12)
        assert np.array_equal(found["images"]["top"][i], frames.images["top"][row - first])
        assert found["instruction"][i] == f"go {(row - first) // 4}"
    assert logged.num_episodes == 5 and logged.sentences(rows[:0]) == set()
    assert logged.sentences(np.array([0, 15])) == {"go 0"} and logged.sentences(np.array([4, 19])) == {"go 1"}
    assert logged.labels.tolist() == [*[0, 0, 1, 1], *[0] * 4, *[0] * 4, *[0] * 4, *[0, 0, 1, 1]]
    other = written_dataset(tmp_path / "other", [LOST, WON], size=6)
    with pytest.raises(LeRobotError, match=r"other has pictures .* and .*one .*Name datasets of one environment"):
        read_logged([directories[0], other], tmp_path / "frames", lambda *_: None)


def test_a_dataset_that_is_named_twice_and_success_that_is_not_known_are_refused(tmp_path: Path) -> None:
    one = written_dataset(tmp_path / "one", [WON, LOST])
    for again in (one, shutil.copytree(one, tmp_path / "copied")):
        with pytest.raises(LeRobotError, match=r"is named twice, or is a copy of another"):
            read_logged([one, again], tmp_path / "frames", lambda *_: None)
    [file] = (one / "data").rglob("*.parquet")
    table = pq.read_table(file)
    info = json.loads((one / "meta" / "info.json").read_text())
    info["features"]["next.success"]["dtype"] = "float32"
    (one / "meta" / "info.json").write_text(json.dumps(info))
    for odd in (-1.0, math.nan):
        column = pa.array([0.0, 1.0, odd, *[0.0] * 5], pa.float32())
        pq.write_table(table.set_column(table.column_names.index("next.success"), "next.success", column), file)
        with pytest.raises(LeRobotError, match=r"next\.success of frame 2 is (-1\.0|nan), neither true nor false"):
            read_logged([one], tmp_path / "frames", lambda *_: None)


def test_words_that_no_episode_of_training_had_are_an_error(tmp_path: Path) -> None:
    SuccessClassifier({"top": (8, 8)}, ["lift", "the", "block"]).save_pretrained(tmp_path, {})
    reward = SuccessReward(StepRewardConfig(id="success_classifier", model_dir=str(tmp_path)))
    obs = Obs(images={"top": np.zeros((2, 8, 8, 3), np.uint8)}, instruction=["Lift the block."] * 2)
    assert reward(obs).shape == (2,)
    obs["instruction"][1] = "push the block"
    with pytest.raises(StepRewardError, match=r"does not know 'push' of the instruction 'push the block'"):
        reward(obs)


@pytest.mark.parametrize(
    "content", ["[]", '"x"', '{"classifier": "success"}', '{"classifier": "success", "vocabulary": [], "cameras": [1]}']
)
def test_a_folder_that_is_no_classifier_is_said_with_the_config(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"env\.train\.reward\.model_dir: .* is no success classifier"):
        load_config("tabletop_classifier_ppo_vla", [f"env.train.reward.model_dir={tmp_path}"])


def read_logged_alone(directory: Path, root: Path) -> Frames:
    return Frames(decode(LeRobotDataset(directory), Keys({"top": "observation.images.top"}, None, "action"), root))


@pytest.mark.parametrize(
    ("successes", "left_out", "said"),
    [
        ([WON] * 9, {}, "all of 9 episodes succeed, and a classifier has to see failures too. Collect with --keep-"),
        ([LOST] * 9, {}, "none of 9 episodes succeeds. Collect with a better policy or expert"),
        ([LAST, LOST], {}, "so that no frame shows it. Collect with env.train.ignore_terminations=true"),
        ([WON, LOST], {}, "2 episodes are too few to hold out 0.2 of them"),
        ([WON, LOST], {"pictures": True}, "has no pictures observation.images.<camera>, by which success"),
        ([WON, LOST], {"success": True}, "data has no column next.success, which says whether an action led"),
    ],
)
def test_what_nothing_can_be_learned_from_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command_line: CommandLine,
    successes: list[list[bool]],
    left_out: dict[str, bool],
    said: str,
) -> None:
    data = written_dataset(tmp_path / "data", successes, **left_out)
    assert command_line(["reward", str(data), "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert said in error and error.startswith("LeRobotError: ") and error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


def test_wrong_arguments_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command_line: CommandLine
) -> None:
    assert command_line(["reward", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert f"--out {tmp_path} exists. Name a new directory" in capsys.readouterr().err
    assert command_line(["reward", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 1
    assert "LeRobotError: no directory" in capsys.readouterr().err
    for words in (["--held-out", "1"], ["--updates", "0"], ["--seed", "-1"], ["--threshold", "x"]):
        assert command_line(["reward", "data", "--out", "out", *words]) == 2
        assert "; give " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        (
            "tabletop_classifier_ppo_vla",
            ["env.train.ignore_terminations=false"],
            "env.train.ignore_terminations: is false, and episodes that end with success would tell the policy more",
        ),
        (
            "tabletop_ppo_vla",
            ["env.train.reward.model_dir=assets/tabletop_success"],
            "env.train.reward.model_dir: is set, and env.train.reward.id: null takes the environment's own rewards",
        ),
        ("tabletop_ppo_vla", BY_IT, "env.train.reward.model_dir: is null, and success_classifier needs a folder"),
        (
            "tabletop_classifier_ppo_vla",
            ["env.train.reward.model_dir=nowhere"],
            "env.train.reward.model_dir: no success classifier in 'nowhere'",
        ),
        (
            "tabletop_classifier_ppo_vla",
            ["env.train.reward.model_dir=assets/tabletop_vla"],
            "env.train.reward.model_dir: 'assets/tabletop_vla' is no success classifier",
        ),
        (
            "maniskill_pickcube_ppo_vla",
            [*BY_IT, "env.train.reward.model_dir=assets/tabletop_success"],
            "env.train.reward.model_dir: the classifier judges top (64 x 64), and the environment shows ",
        ),
        (
            "tabletop_classifier_ppo_vla",
            ["env.train.reward.id=success"],
            "env.train.reward.id: nothing is registered as 'success'. Did you mean success_classifier?",
        ),
        (
            "tabletop_ppo_vla",
            ["env.train.reward.id=math:pi", "env.train.ignore_terminations=true"],
            "env.train.reward.id: math:pi is 3.14159",
        ),
        ("tabletop_sft_vla", BY_IT, "env.train.reward.id: is success_classifier, and imitation reads no rewards"),
        (
            "metaworld_rlpd_mlp",
            ["env.train.ignore_terminations=true", "env.train.reward.id=tests.envs.test_rewards:clock"],
            "replay.shares: has demonstrations, which are by the environment's own success or rewards",
        ),
    ],
)
def test_what_cannot_be_learned_by_is_said_with_the_config(name: str, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(f"embodiment/{name}", overrides)
    assert said in str(raised.value)
