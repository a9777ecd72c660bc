"""The MetaWorld adapter against MetaWorld itself; and what must not depend on history."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf_lite.config import ConfigError, EnvConfig, load_config
from rlinf_lite.envs import (
    ChunkedEnv,
    RenderUnavailableError,
    UnknownEnvError,
    check_env,
    get_env_spec,
    make_env,
    painter,
)
from rlinf_lite.envs.metaworld.tasks import DIFFICULTIES, MT10, SENTENCES, tasks_of

pytest.importorskip("metaworld")

THREE = "reach-v3,drawer-open-v3,window-close-v3"


def config(task: str = "reach-v3", options: dict[str, Any] | None = None, **train: Any) -> EnvConfig:
    return EnvConfig.model_validate({"id": "metaworld", "task": task, "options": options or {}, "train": train})


def make(num_envs: int, cfg: EnvConfig) -> ChunkedEnv:
    env = make_env(cfg, "train", num_envs)
    assert isinstance(env, ChunkedEnv)
    return env


def bare(task: str, seed: int, render: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """The library's own environment under a seed, the goal in sight, and its first observation."""
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    env = ALL_V3_ENVIRONMENTS[task](**(render or {}))
    env._set_task_called, env._freeze_rand_vec, env.seeded_rand_vec = True, False, True
    env._partially_observable = False
    del env.sawyer_observation_space
    env.seed(seed)
    return env, env.reset()[0]


def actions_of(num_envs: int, num_steps: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).uniform(-1, 1, (num_envs, num_steps, 4)).astype(np.float32)


def play(env: ChunkedEnv, actions: Any, num_steps: int = 5) -> dict[str, Any]:
    chunks = [env.chunk_step(actions[:, i : i + num_steps]) for i in range(0, actions.shape[1], num_steps)]
    return {
        "rewards": np.concatenate([chunk.rewards for chunk in chunks], 1),
        "states": np.stack([chunk.obs["state"] for chunk in chunks], 1),
        "episodes": [record for chunk in chunks for record in chunk.episodes],
    }


def until_success(env: ChunkedEnv, seeds: list[int], num_steps: int = 200) -> list[Any]:
    """Records of the episodes that the expert ends from `seeds`, with the chunk that ended each."""
    env.reset(seeds=seeds)
    ended = []
    for _ in range(num_steps):
        result = env.chunk_step(env.expert_actions(4))
        ended += [(record, result) for record in result.episodes]
        if {record.env_id for record, _ in ended} == set(range(env.num_envs)):
            break
    return ended


@pytest.mark.parametrize("task", ["reach-v3", "door-open-v3", "assembly-v3"])
def test_chunks_equal_the_librarys_own_steps(task: str) -> None:
    env = make(2, config(task))
    actions = actions_of(2, 40)
    env.reset(seeds=[8, 9])
    env.chunk_step(actions[:, ::-1])  # another episode first
    first = env.reset(seeds=[1, 2])["state"]
    played = play(env, actions)
    for row, seed in enumerate([1, 2]):
        reference, obs = bare(task, seed)
        np.testing.assert_array_equal(first[row], obs.astype(np.float32))
        for step in range(40):
            obs, reward, _, _, _ = reference.step(actions[row, step])
            assert played["rewards"][row, step] == np.float32(reward / 10)
            if step % 5 == 4:
                np.testing.assert_array_equal(played["states"][row, step // 5], obs.astype(np.float32))
    assert (first[0, -3:] != first[1, -3:]).any(), "goals are in sight, and drawn"


@pytest.mark.parametrize(
    "task",
    [task if task in THREE.split(",") else pytest.param(task, marks=pytest.mark.slow) for task in sorted(SENTENCES)],
)
def test_a_trajectory_is_a_function_of_seed_and_actions(task: str) -> None:
    env = make(1, config(task))
    actions = actions_of(1, 20)
    first = env.reset(seeds=[3])["state"]
    fresh = play(env, actions)
    other = env.reset(seeds=[50])["state"]
    play(env, actions_of(1, 30, 1))
    np.testing.assert_array_equal(env.reset(seeds=[3])["state"], first)
    later = play(env, actions)
    np.testing.assert_array_equal(fresh["states"], later["states"])
    np.testing.assert_array_equal(fresh["rewards"], later["rewards"])
    assert (first != other).any()


def test_success_ends_an_episode_or_not_by_the_table() -> None:
    env = make(2, config("reach-v3", {"reward_mode": "sparse"}))
    for record, result in until_success(env, [1, 2]):
        assert record.success_once and record.success_at_end and record.return_ == 1 and record.length < 150
        assert result.terminated[record.env_id].any() and not result.truncated.any()
    playing_on = make(1, config("reach-v3", {"reward_mode": "sparse"}, ignore_terminations=True, max_episode_steps=100))
    ((record, result),) = until_success(playing_on, [1])
    assert record.success_once and record.length == 100 and record.return_ == 1, "one success counts once"
    assert result.truncated.any() and not result.terminated.any()
    limited = make(1, config("reach-v3", max_episode_steps=600))
    limited.reset(seeds=[1])
    assert not limited.chunk_step(np.zeros((1, 599, 4), np.float32)).episodes, "no limit but the config's"
    assert limited.chunk_step(np.zeros((1, 1, 4), np.float32)).truncated.all()
    assert make(1, config()).max_episode_steps == 500
    assert make_env(config(), "eval", 1).simulator.reports_success  # evaluations play on, by default


def test_resume_is_exact_across_tasks() -> None:
    cfg = config(THREE, max_episode_steps=20)
    env, actions = make(3, cfg), actions_of(3, 60)
    env.reset(seeds=[3, 4, 5])
    env.chunk_step(actions[:, :30])
    saved = env.state_dict()
    other = make(3, cfg)
    resumed = other.load_state_dict([saved[i] for i in (2, 0, 1)])
    expected, got = play(env, actions[:, 30:]), play(other, actions[[2, 0, 1], 30:])
    assert resumed["state"].shape == (3, 42)
    np.testing.assert_array_equal(expected["rewards"][[2, 0, 1]], got["rewards"])
    np.testing.assert_array_equal(expected["states"][[2, 0, 1]], got["states"])
    assert expected["episodes"] and len(expected["episodes"]) == len(got["episodes"]) == 3


def test_a_seed_decides_which_of_several_tasks_is_played() -> None:
    env = make(3, config(THREE))
    obs = env.reset(seeds=[0, 1, 5])
    names = ["reach-v3", "drawer-open-v3", "window-close-v3"]
    assert obs["instruction"] == [SENTENCES[name] for name in names]
    np.testing.assert_array_equal(obs["state"][:, 39:], np.eye(3))
    assert env.simulator.task_ids == names
    again = env.reset(seeds=[1, 0], env_ids=[0, 1])
    np.testing.assert_array_equal(again["state"], obs["state"][[1, 0, 2]])
    single = make(1, config("drawer-open-v3")).reset(seeds=[1])["state"]
    np.testing.assert_array_equal(single[0], obs["state"][1, :39])


def test_keeps_the_protocol() -> None:
    env = make(2, config(THREE))
    assert check_env(env) == []
    spec = get_env_spec(env, env.reset(seeds=[1, 2]))
    assert (spec.action_dim, spec.state_dim, spec.max_episode_steps, spec.has_instruction) == (4, 42, 500, True)


def test_tasks_sets_and_lists() -> None:
    assert len(SENTENCES) == len(tasks_of("MT50")) == 50 and tasks_of("MT10") == MT10
    assert [len(tasks) for tasks in DIFFICULTIES.values()] == [28, 11, 6, 5]
    assert tasks_of("push-v3, reach-v3") == ("push-v3", "reach-v3")
    for wrong, said in (
        ("reach-v2", "Did you mean reach-v3"),
        ("MT11", "Did you mean MT10"),
        ("reach-v3,MT10", "is a set; name it alone"),
        ("push-v3,push-v3", "push-v3 is named twice"),
    ):
        with pytest.raises(UnknownEnvError, match=said):
            tasks_of(wrong)
    with pytest.raises(ConfigError, match=r"env.task: .reach-v2. is no task\. Did you mean reach-v3"):
        load_config("gym_pendulum_ppo_mlp", ["env.id=metaworld", "env.task=reach-v2"])


def test_what_is_missing_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    import rlinf_lite.envs.metaworld.card as card
    from rlinf_lite import registry

    monkeypatch.setattr(card, "is_installed", lambda module: module != "mujoco")
    with pytest.raises(ConfigError, match=r"metaworld needs mujoco, .* pip install 'rlinf_lite\[metaworld\]'"):
        load_config("metaworld_ppo_mlp")
    monkeypatch.setattr(registry, "is_installed", lambda module: False)
    with pytest.raises(ConfigError, match=r"metaworld is not installed .* pip install 'rlinf_lite\[metaworld\]'"):
        load_config("metaworld_ppo_mlp")


def test_the_librarys_names_are_ours() -> None:
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS, MT10_V3, MT50_V3
    from metaworld.policies import ENV_POLICY_MAP

    assert set(SENTENCES) == set(ALL_V3_ENVIRONMENTS) == set(ENV_POLICY_MAP)
    assert (tasks_of("MT10"), tasks_of("MT50")) == (tuple(MT10_V3), tuple(MT50_V3))  # the order of their one-hots


@pytest.fixture(scope="module")
def egl() -> None:
    from rlinf_lite.envs.metaworld.painter import painted

    try:
        painted("metaworld")
    except RenderUnavailableError as error:
        pytest.skip(f"NO EGL: pictures of MetaWorld are NOT tested on this machine: {error}")


def test_exact_pictures_are_the_librarys_flipped_in_both_axes(egl: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "egl")  # which gymnasium's renderer reads
    env = make(1, config("drawer-open-v3", {"obs_mode": "rgb+state", "render": "exact", "camera_size": [96, 128]}))
    render = {"render_mode": "rgb_array", "camera_name": "corner2", "width": 128, "height": 96}
    reference, _ = bare("drawer-open-v3", 1, render)
    reference.model.cam_pos[2] = (0.75, 0.075, 0.7)
    env.reset(seeds=[1])
    actions = actions_of(1, 3)
    seen = env.chunk_step(actions).obs
    for action in actions[0]:
        reference.step(action)
    np.testing.assert_array_equal(seen["images"]["corner2"][0], np.flip(reference.render(), (0, 1)))
    assert seen["state"].shape == (1, 39)
    reference.close()


def test_fast_pictures_show_the_same_without_shadows(egl: None) -> None:
    pictures = {}
    for render in ("fast", "exact"):
        env = make(2, config(THREE, {"obs_mode": "rgb", "render": render}))
        first = env.reset(seeds=[0, 1])
        pictures[render] = first["images"]["corner2"]
        assert first["state"].shape == (2, 4) and pictures[render].shape == (2, 128, 128, 3)
        env.chunk_step(actions_of(2, 5))
        again = env.reset(seeds=[1, 0])["images"]["corner2"]  # other worlds, the same meshes
        np.testing.assert_array_equal(again[::-1], pictures[render])
        env.close()
    difference = np.abs(pictures["fast"].astype(int) - pictures["exact"])
    assert 0.5 < difference.mean() < 12 and np.median(difference) <= 2
    assert (pictures["fast"][0] != pictures["fast"][1]).any()


def test_pictures_change_nothing_of_what_follows(egl: None) -> None:
    blind, seeing = (make(3, config(THREE, {"obs_mode": mode})) for mode in ("state", "rgb+state"))
    for env in (blind, seeing):
        env.reset(seeds=[0, 1, 2])
    expected, got = (play(env, actions_of(3, 20)) for env in (blind, seeing))
    np.testing.assert_array_equal(expected["states"], got["states"])
    np.testing.assert_array_equal(expected["rewards"], got["rewards"])
    np.testing.assert_array_equal(seeing.expert_actions(5), blind.expert_actions(5))


def test_the_first_picture_has_the_goal_where_the_second_has_it(egl: None) -> None:
    env = make(1, config("reach-v3", {"obs_mode": "rgb"}))
    goals = []
    for seed in (1, 2):
        first = env.reset(seeds=[seed])["images"]["corner2"][0]
        second = env.chunk_step(np.zeros((1, 1, 4), np.float32)).obs["images"]["corner2"][0]
        red = [(image[..., 0] > 180) & (image[..., 1] < 40) for image in (first, second)]
        assert (red[0] & red[1]).sum() > 0.8 * red[1].sum() > 0
        goals.append(red[0])
    assert (goals[0] != goals[1]).any()


@pytest.mark.parametrize(
    "lacking",
    [
        {"MUJOCO_EGL_DEVICE_ID": "77"},
        pytest.param({"__EGL_VENDOR_LIBRARY_FILENAMES": "/nowhere.json"}, marks=pytest.mark.slow),
    ],
)
def test_without_a_driver_pictures_are_refused_and_states_work(repo: Any, lacking: dict[str, str]) -> None:
    import os
    import subprocess
    import sys

    code = """
from rlinf_lite.config import EnvConfig
from rlinf_lite.envs import RenderUnavailableError, make_env
state = {"id": "metaworld", "task": "push-v3"}
assert make_env(EnvConfig.model_validate(state), "train", 1).reset(seeds=[1])["state"].shape == (1, 39)
try:
    make_env(EnvConfig.model_validate(state | {"options": {"obs_mode": "rgb"}}), "train", 1)
except RenderUnavailableError as error:
    assert "libegl1" in str(error) and "obs_mode=state" in str(error), error
else:
    raise AssertionError("drawn")
"""
    environment = os.environ | {"MUJOCO_GL": "egl", **lacking}
    done = subprocess.run([sys.executable, "-c", code], cwd=repo, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr, "what is wrong is buried under a half-built context's complaint"


NVIDIA_SMI = """#!/bin/sh
[ "$1" = -L ] && cat << 'END'
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-4f3a1c9e-0000-1111-2222-333344445555)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-4f9b0000-0000-1111-2222-333344446666)
  MIG 1g.5gb      Device  0: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
  MIG 1g.5gb      Device  1: (UUID: MIG-GPU-4f9b0000-0000-1111-2222-333344446666/7/0)
END
"""
SILENT, REVERSED, OF_ALL = {}, {1: 1, 2: 0}, {1: 0, 2: 1}
"""What a driver says of the places of its devices in CUDA_VISIBLE_DEVICES."""


# each: CUDA_VISIBLE_DEVICES, what the driver says, and the devices in the order in which they are tried
ORDERS = [
    # the driver does not say: numbers, UUIDs and MIG names as nvidia-smi lists them
    ("1", SILENT, [2, 0, 1]),
    ("1,0", SILENT, [2, 0, 1]),
    ("0", SILENT, [1, 0, 2]),
    ("2", SILENT, [0, 1, 2]),
    ("", SILENT, [0, 1, 2]),
    ("-1", SILENT, [0, 1, 2]),
    ("GPU-4f9b0000-0000-1111-2222-333344446666", SILENT, [2, 0, 1]),
    ("GPU-4f3a1c9e-0000-1111-2222-333344445555", SILENT, [1, 0, 2]),
    ("GPU-4f9b,GPU-4f3a", SILENT, [2, 0, 1]),
    ("MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", SILENT, [1, 0, 2]),
    ("MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb", SILENT, [2, 0, 1]),
    ("MIG-GPU-4f9b0000-0000-1111-2222-333344446666/7/0", SILENT, [2, 0, 1]),
    # the driver says, whatever the order that nvidia-smi has, and without it
    ("GPU-unknown", {1: 0}, [1, 0, 2]),
    ("MIG-unknown", {2: 0}, [2, 0, 1]),
    ("0", {2: 0}, [2, 0, 1]),
    ("GPU-a,GPU-b", REVERSED, [2, 0, 1]),
    # an older driver numbers all devices, or gives several of them the same place
    ("1", OF_ALL, [2, 0, 1]),
    ("GPU-4f9b", OF_ALL, [2, 0, 1]),
    ("1", {1: 0, 2: 0}, [2, 0, 1]),
]


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, dict[int, int]], list[int]]:
    """`two_gpus(own, places)`: the order in which a software device and two GPUs, which nvidia-smi lists, are tried."""

    def order(own: str, places: dict[int, int]) -> list[int]:
        write_nvidia_smi(tmp_path)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own)
        monkeypatch.setattr(painter, "_is_nvidia", lambda device: device in (1, 2))
        monkeypatch.setattr(painter, "_cuda_place", places.get)
        return [int(number) for number in painter._own_gpu_first([0, 1, 2])]

    return order


@pytest.mark.parametrize(("own", "places", "order"), ORDERS)
def test_a_worker_tries_its_own_gpu_first(two_gpus: Any, own: str, places: dict[int, int], order: list[int]) -> None:
    assert two_gpus(own, places) == order


@pytest.mark.parametrize("own", ["GPU-4f", "GPU-unknown", "MIG-unknown"])
def test_a_gpu_that_no_one_knows_is_said_and_not_the_first_taken(two_gpus: Any, own: str) -> None:
    said = f"CUDA_VISIBLE_DEVICES names '{own}', and neither EGL nor `nvidia-smi -L` says which of 2 GPUs that is. "
    with pytest.raises(RenderUnavailableError) as refused:
        two_gpus(own, SILENT)
    assert f"{said}Name GPUs by their numbers, or set MUJOCO_EGL_DEVICE_ID" in str(refused.value)


@pytest.mark.parametrize(("set_by_user", "order"), [("", [2, 0, 1]), ("2", [2])])
def test_a_worker_draws_on_the_first_device_that_can(
    repo: Any, egl: None, tmp_path: Path, set_by_user: str, order: list[int]
) -> None:
    """There are a software device and two GPUs, of which only the last to be tried can draw; what the user has set
    comes first."""
    code = f"""
import os
from rlinf_lite.envs import painter
from mujoco.egl import egl_ext
from rlinf_lite.envs.metaworld.painter import painted
(real, *_), display_of, tried = egl_ext.eglQueryDevicesEXT(), egl_ext.eglGetPlatformDisplayEXT, []
def display(platform, device, attributes):
    tried.append(device)
    return display_of(platform, real, attributes) if len(tried) >= {len(order)} else egl_ext.EGL_NO_DISPLAY
egl_ext.eglQueryDevicesEXT, egl_ext.eglGetPlatformDisplayEXT = lambda: [0, 1, 2], display
painter._is_nvidia = lambda device: device in (1, 2)
painter._cuda_place = {SILENT}.get
painted("metaworld")
assert tried == {[*order, order[-1]]}, tried  # what can draw is then used
assert os.environ.get("MUJOCO_EGL_DEVICE_ID", "") == "{set_by_user}"
"""
    write_nvidia_smi(tmp_path)
    environment = os.environ | {"MUJOCO_GL": "egl", "CUDA_VISIBLE_DEVICES": "1"}
    environment |= {"MUJOCO_EGL_DEVICE_ID": set_by_user} if set_by_user else {}
    environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run([sys.executable, "-c", code], cwd=repo, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def write_nvidia_smi(directory: Path) -> None:
    """A program of that name that lists two GPUs."""
    program = directory / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="here is a GPU of NVIDIA's")
def test_mesas_devices_are_no_gpus_of_nvidias(egl: None) -> None:
    from mujoco.egl import egl_ext

    from rlinf_lite.envs.painter import _cuda_place, _is_nvidia

    devices = egl_ext.eglQueryDevicesEXT()
    assert not any(_is_nvidia(device) for device in devices)
    assert [_cuda_place(device) for device in devices] == [None] * len(devices)


@pytest.mark.parametrize("task", ["push-v3", "pick-place-v3", "drawer-open-v3", "button-press-topdown-v3"])
def test_the_scripted_expert_succeeds(task: str) -> None:
    env = make(2, config(task))
    ended = until_success(env, [0, 1])
    assert len(ended) == 2 and all(record.success_once and record.length < 120 for record, _ in ended)


def test_datasets_have_the_rate_of_the_simulation(tmp_path: Path) -> None:
    from rlinf_lite.cli.collect import collect

    env, _ = bare("reach-v3", 0)
    words = ["--env", "metaworld", "--task", "reach-v3", "--episodes", "1", "--num-envs", "1"]
    assert collect(["--out", str(tmp_path / "a"), *words]) == 0
    info = json.loads((tmp_path / "a" / "meta" / "info.json").read_text())
    assert info["fps"] == round(1 / env.dt) == 80
