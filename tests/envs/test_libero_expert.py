"""LIBERO's scripted expert: how it reads goals and chooses grasps, on scenes of a few boxes, and what it solves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlinf_lite.cli import main
from rlinf_lite.config import ConfigError, EnvConfig, load_config
from rlinf_lite.data.lerobot.reader import LeRobotDataset
from rlinf_lite.envs import ChunkedEnv, EnvContractError, MissingAssetsError, balanced_seed, make_env
from rlinf_lite.envs.libero.expert import CLOSED, OPEN, Expert, pick_and_place
from rlinf_lite.envs.libero.simulator import LiberoSimulator
from rlinf_lite.envs.libero.tasks import EXPERT_TASKS, SUITES
from rlinf_lite.registry import env_card

BOX = '<body name="{name}" pos="{pos}" euler="0 0 {yaw}"><freejoint/><geom type="box" size="{size}"/></body>'


def expert_for(**things: tuple[str, str, float]) -> Expert:
    """The expert that puts `thing` on `plate`, in a scene of boxes: position, half sizes, yaw in degrees, by name."""
    mujoco = pytest.importorskip("mujoco", reason="grasps of LIBERO's expert are NOT tested: MuJoCo is not installed")
    things = {"plate": ("0.3 0.3 0.01", "0.07 0.07 0.01", 0)} | things
    bodies = "".join(BOX.format(name=name, pos=pos, size=size, yaw=yaw) for name, (pos, size, yaw) in things.items())
    model = mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{bodies}</worldbody></mujoco>")
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    env = SimpleNamespace(
        sim=SimpleNamespace(model=model, data=data),
        parsed_problem={"goal_state": [["on", "thing", "plate"]]},
        object_sites_dict={},
        obj_body_id={name: model.body(name).id for name in things},
    )
    return Expert(env)


def angle_between(angle: float, degrees: float) -> float:
    """The angle in degrees between two axes."""
    apart = abs(np.degrees(angle) - degrees) % 180
    return float(min(apart, 180 - apart))


def test_a_goal_names_what_is_put_where() -> None:
    assert pick_and_place([["on", "bowl_1", "plate_1"]]) == ("bowl_1", "plate_1", False)
    assert pick_and_place([["in", "milk_1", "basket_1_contain_region"]]) == ("milk_1", "basket_1_contain_region", True)


@pytest.mark.parametrize("goal", [[["open", "drawer"]], [["on", "a", "b"], ["on", "c", "b"]], []])
def test_another_goal_is_refused(goal: list[list[str]]) -> None:
    with pytest.raises(EnvContractError, match="puts one object on or in another, and the goal is"):
        pick_and_place(goal)


@pytest.mark.parametrize("yaw", [0, 90, 30])
def test_the_fingers_close_over_the_narrow_side(yaw: float) -> None:
    grasp = expert_for(thing=("0 0 0.009", "0.04 0.02 0.009", yaw)).grasps()[0]
    assert angle_between(grasp.angle, yaw + 90) < 1
    np.testing.assert_allclose(grasp.position[:2], 0, atol=1e-6)
    assert 0.01 < grasp.position[2] < 0.018, "above the table, and not above the object"


def test_what_is_too_wide_is_grasped_by_its_rim_on_the_free_side() -> None:
    walls = {"left": ("0 0.07 0.05", "0.06 0.01 0.05", 0), "right": ("0.07 0 0.05", "0.01 0.06 0.05", 0)}
    free = expert_for(thing=("0 0 0.03", "0.05 0.05 0.03", 0)).grasps()[0]
    between = expert_for(thing=("0 0 0.03", "0.05 0.05 0.03", 0), **walls).grasps()[0]
    assert np.hypot(*free.offset) > 0.04 and angle_between(free.angle, 90) < 1, "the hand turns only if it must"
    assert between.offset @ [-1, -1] > 0.03, "away from both walls"


def test_a_grasp_that_failed_is_not_the_next_one() -> None:
    expert = expert_for(thing=("0 0 0.03", "0.05 0.05 0.03", 0))
    tried = []
    for _ in range(3):
        tried.append(expert.grasps()[0])
        expert.failed.append(tried[-1])
    gaps = [np.linalg.norm(one.offset - other.offset) for one, other in pairwise(tried)]
    assert min(gaps) > 0.03


def test_tasks_without_an_expert_are_refused_with_those_that_have_one() -> None:
    card = env_card("libero")
    options = card.options({})
    for task in ("libero_spatial", "libero_object", *EXPERT_TASKS, ",".join(EXPERT_TASKS[-2:])):
        assert card.lacks_expert(task, options) is None
    goal = set(SUITES["libero_goal"]) - set(EXPERT_TASKS)
    assert len(goal) == 4
    with pytest.raises(ConfigError) as caught:
        load_config("embodiment/base/run", ["env.id=libero", "env.task=libero_goal", "runner.task_type=sft"])
    [problem] = [text for text in caught.value.problems if text.startswith("data.teacher_dir")]
    assert "for open_the_middle_drawer_of_the_cabinet, " in problem and "and 1 more: there is one for" in problem


@pytest.mark.parametrize(("gripper", "opens", "closes"), [("raw", -1, 1), ("openvla", 1, 0)])
def test_labels_are_in_the_convention_of_the_actions(
    gripper: str, opens: float, closes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {0: np.array([0.5, 0, 0, 0, 0, 0, OPEN]), 1: np.array([0, 0, 0, 0, 0, -1, CLOSED])}
    monkeypatch.setattr(LiberoSimulator, "__init__", lambda self: None)
    monkeypatch.setattr(LiberoSimulator, "_ask", lambda self, method, asked: {row: wanted[row] for row in asked})
    simulator = LiberoSimulator()  # type: ignore[call-arg]
    simulator.num_envs, simulator._options = 2, env_card("libero").options({"gripper": gripper})
    labels = simulator.expert_actions(8)
    assert labels.shape == (2, 1, 7) and labels.dtype == np.float32
    np.testing.assert_array_equal(labels[:, 0, 6], [opens, closes])
    np.testing.assert_array_equal(labels[:, 0, :6], [wanted[0][:6], wanted[1][:6]])


@pytest.mark.slow
@pytest.mark.parametrize("gripper", ["raw", "openvla"])
def test_a_published_task_is_solved_through_the_environment(gripper: str) -> None:
    pytest.importorskip("libero", reason="LIBERO's expert is NOT played: LIBERO is not installed (make libero)")
    from rlinf_lite.envs.libero.package import find_assets

    try:
        find_assets(None)
    except MissingAssetsError as error:
        pytest.skip(f"LIBERO's expert is NOT played: {error}")
    options: Mapping[str, Any] = {"cameras": [], "gripper": gripper}
    task = {"id": "libero", "task": "put_the_bowl_on_the_plate", "options": options}
    env = ChunkedEnv(LiberoSimulator(1, EnvConfig.model_validate(task)))
    try:
        env.reset(seeds=[0])
        for _ in range(env.max_episode_steps):
            wanted = env.expert_actions(8)
            assert wanted.shape == (1, 1, 7)
            np.testing.assert_array_equal(wanted, env.expert_actions(8), "asking again changes nothing")
            episodes = env.chunk_step(wanted).episodes
            if episodes:
                break
        assert [episode.success_once for episode in episodes] == [True] and episodes[0].length < 200
    finally:
        env.close()


@pytest.mark.slow
def test_demonstrations_are_collected_in_two_processes(tmp_path: Path) -> None:
    """From initial states that are not published; pictures are those of the environment, frame by frame."""
    pytest.importorskip("libero", reason="LIBERO's demonstrations are NOT tried: LIBERO is not installed (make libero)")
    out, task = tmp_path / "demos", "put_the_cream_cheese_in_the_bowl"
    words = ["collect", "--out", str(out), "--env", "libero", "--task", task, "--episodes", "2", "--num-envs", "2"]
    options = ["env.options.camera_size=[32,32]", "env.options.train_states=drawn"]
    assert main([*words, "--processes", "2", *options]) == 0
    written = json.loads((out / "meta" / "rlinf_lite.json").read_text())
    assert written["counts"]["success_once"] == 1 and "hf_libero" in written["versions"]
    info = json.loads((out / "meta" / "info.json").read_text())
    assert (info["total_episodes"], info["fps"]) == (2, 20)
    settings = {"camera_size": [32, 32], "train_states": "drawn"}
    cfg = EnvConfig.model_validate({"id": "libero", "task": task, "options": settings})
    env = make_env(cfg, "train", 1)
    obs = env.reset([balanced_seed(0, 1, env_card("libero").num_tasks(task))])
    cameras = {f"observation.images.{camera}": camera for camera in obs["images"]}
    [(_, frames)] = LeRobotDataset(out).rows([*cameras, "observation.state", "action", "episode_index"])
    first = int(np.argmax(frames["episode_index"][:, 0] == 1))
    for frame in range(first, first + 9):
        for key, camera in cameras.items():
            np.testing.assert_array_equal(frames[key][frame], obs["images"][camera][0])
        np.testing.assert_array_equal(frames["observation.state"][frame], obs["state"][0])
        obs = env.chunk_step(frames["action"][frame][None, None]).obs
    env.close()
