"""LIBERO in a run, with replacements for its assets: a tiny OpenVLA-OFT trains, a config evaluates its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlinf_lite.envs import RenderUnavailableError
from tests.envs.libero_assets import write_assets

pytest.importorskip("libero", reason="LIBERO is NOT tested: it is not installed (make libero)")

SMALL = [
    "cluster.runtime=local",
    "cluster.num_gpus_per_node=1",
    "env.task=turn_on_the_stove",
    "env.options.camera_size=[32,32]",
    "env.eval.num_envs=2",
    "env.eval.num_episodes=2",
    "env.eval.max_episode_steps=32",
    "model.options.size=tiny",
    "actor.precision=fp32",
]
TRAINING = [
    "env.train.num_envs=2",
    "rollout.num_chunks=2",
    "model.options.lora.rank=0",
    "actor.global_batch_size=4",
    "actor.micro_batch_size=4",
    "runner.max_steps=1",
    "runner.val_check_interval=1",
    "runner.save_interval=1",
]


def test_a_policy_is_trained_and_measured(
    tmp_path: Path, command_line: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    import mujoco

    from rlinf_lite.envs.painter import Painter

    try:
        Painter(mujoco.MjModel.from_xml_string("<mujoco/>"), (8, 8), "fast", "cameras").close()
    except RenderUnavailableError as error:
        pytest.skip(f"NO EGL: a run in LIBERO is NOT tested on this machine: {error}")
    assets = write_assets(tmp_path / "assets")
    runs = tmp_path / "runs"
    where = [f"env.options.assets={assets}", f"runner.logger.log_path={runs}"]
    assert command_line(["train", "--config-name", "libero_ppo_oft", *SMALL, *TRAINING, *where]) == 0
    (run,) = runs.iterdir()
    content = json.loads((run / "eval" / "step_000001.json").read_text())
    assert content["protocol"]["initial_states"].startswith("published")
    assert content["protocol"]["versions"]["hf-libero"] == "0.1.4" and content["total"]["num_episodes"] == 2
    assert content["total"]["success_once"] == 1.0, "the stand-in stove turns itself on"

    assert command_line(["eval", "--config-name", "libero_eval", "--suite", "libero-goal", *SMALL, *where]) == 2
    assert "rollout.model_dir: is null, so there is no policy to measure" in capsys.readouterr().err
    measured = [f"rollout.model_dir={run}", *SMALL, *where]
    assert command_line(["eval", "--config-name", "libero_eval", "--suite", "libero-goal", *measured]) == 0
    said = json.loads((runs / "eval_libero_eval.json").read_text())["protocol"]
    assert said["suite"] is None and said["env_options"]["protocol"] == "openvla" and said["max_episode_steps"] == 32
    assert said["started_from"].startswith(str(run))
