"""The ManiSkill adapter against ManiSkill itself, in a process of its own; and what must not depend on history."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_lite.config import EnvConfig
from rlinf_lite.envs import (
    ChunkedEnv,
    EnvContractError,
    MissingAssetsError,
    RenderUnavailableError,
    UnknownEnvError,
    check_env,
    get_env_spec,
    make_env,
)
from rlinf_lite.envs.maniskill.card import ManiSkillOptions

pytest.importorskip("mani_skill")

TCP_TO_CUBE = slice(36, 39)  # in PickCube's state
SEEDS = [3, 4, 5, 6]


def config(task: str = "PickCube-v1", control_mode: str = "pd_ee_delta_pos", **train: Any) -> EnvConfig:
    maniskill = {"control_mode": control_mode, "sim_backend": "physx_cpu"}
    return EnvConfig.model_validate({"task": task, "options": maniskill, "train": train})


def make(num_envs: int, cfg: EnvConfig) -> ChunkedEnv:
    env = make_env(cfg, "train", num_envs)
    assert isinstance(env, ChunkedEnv)
    return env


def grasping_actions(env: ChunkedEnv, seeds: list[int], seed: int, num_steps: int = 36) -> Any:
    """Actions [B, T, 4] that reach for the cube, grasp, lift and drop it: much contact, as played from `seeds`."""
    rng = np.random.default_rng(seed)
    state = env.reset(seeds=seeds)["state"]
    taken = []
    for step in range(num_steps):
        action = rng.uniform(-0.4, 0.4, (len(seeds), 4)).astype(np.float32)
        action[:, :3] += 20 * state[:, TCP_TO_CUBE]
        action[:, 3] = 1 if step < 15 or step % 12 > 9 else -1
        if 20 < step < 28:
            action[:, 2] = 0.5
        taken.append(np.clip(action, -1, 1))
        state = env.chunk_step(taken[-1][:, None]).obs["state"]
    return np.stack(taken, 1)


def play(env: ChunkedEnv, actions: Any, num_steps: int = 4) -> dict[str, Any]:
    chunks = [env.chunk_step(actions[:, i : i + num_steps]) for i in range(0, actions.shape[1], num_steps)]
    return {
        "rewards": np.concatenate([chunk.rewards for chunk in chunks], 1),
        "states": np.stack([chunk.obs["state"] for chunk in chunks], 1),
        "episodes": [record for chunk in chunks for record in chunk.episodes],
    }


def bare(tmp_path: Path, repo: Path, task: str, settings: dict[str, Any], seeds: list[int], actions: Any) -> Any:
    plan = {"task": task, "settings": settings, "seeds": seeds, "actions": actions.tolist()}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    command = [sys.executable, "-m", "tests.envs.bare_maniskill", str(tmp_path / "plan.json"), str(tmp_path / "o.npz")]
    subprocess.run(command, check=True, cwd=repo, timeout=120)
    return np.load(tmp_path / "o.npz")


def test_chunks_equal_maniskills_own_steps_and_a_fresh_process(tmp_path: Path, repo: Path) -> None:
    settings = {"control_mode": "pd_joint_delta_pos", "reward_mode": "normalized_dense", "sim_backend": "physx_cpu"}
    env = make(2, config("PushCube-v1", "pd_joint_delta_pos", ignore_terminations=True))
    actions = np.random.default_rng(0).uniform(-1, 1, (2, 48, 8)).astype(np.float32)
    actions[:, :, 1] = abs(actions[:, :, 1])  # lean forward, to the cube
    reference = bare(tmp_path, repo, "PushCube-v1", settings, [1, 2], actions)
    env.reset(seeds=[8, 9])
    env.chunk_step(np.ones((2, 20, 8), np.float32))  # another episode first
    np.testing.assert_array_equal(env.reset(seeds=[1, 2])["state"], reference["first"])
    played = play(env, actions)
    np.testing.assert_array_equal(played["rewards"], reference["rewards"])
    np.testing.assert_array_equal(played["states"], reference["states"][:, 3::4])
    result = env.chunk_step(actions[:, :4])
    assert result.executed.sum() == 4 and result.truncated[:, 1].all()  # PushCube's own limit: 50 steps
    assert {record.success_once for record in result.episodes} <= {True, False}
    spec = get_env_spec(env, result.obs)
    assert (spec.action_dim, spec.state_dim, spec.max_episode_steps) == (8, 35, 50)
    assert result.obs["instruction"] == ["push the blue cube to the red and white target"] * 2


@pytest.mark.slow
def test_grasping_is_a_function_of_seed_and_actions(tmp_path: Path, repo: Path) -> None:
    cfg = config(ignore_terminations=True)
    env = make(4, cfg)
    actions = grasping_actions(env, SEEDS, 0)
    env.reset(seeds=SEEDS)
    first = play(env, actions)
    grasping_actions(env, [50, 60, 70, 80], 1)
    env.reset(seeds=SEEDS)
    later = play(env, actions)
    np.testing.assert_array_equal(first["states"], later["states"])
    np.testing.assert_array_equal(first["rewards"], later["rewards"])
    settings = {"control_mode": "pd_ee_delta_pos", "reward_mode": "normalized_dense", "sim_backend": "physx_cpu"}
    reference = bare(tmp_path, repo, "PickCube-v1", settings, SEEDS, actions)
    np.testing.assert_array_equal(later["rewards"], reference["rewards"])
    np.testing.assert_array_equal(later["states"], reference["states"][:, 3::4])
    assert (reference["states"][:, -1] != reference["first"])[:, 29:36].any(1).all()  # the cubes were touched


@pytest.mark.parametrize("auto_reset", [True, False])
def test_resume_is_exact(auto_reset: bool) -> None:
    cfg = config(auto_reset=auto_reset, max_episode_steps=30)
    env = make(3, cfg)
    actions = grasping_actions(env, SEEDS[:3], 0)
    env.reset(seeds=SEEDS[:3])
    env.chunk_step(actions[:, :16])
    env.reset(seeds=[9], env_ids=[1])  # so that rows are at different steps
    pending = env.chunk_step(actions[:, 16:32]).obs  # rows 0 and 2 have ended: reset or frozen
    saved = env.state_dict()
    other = make(3, cfg)
    resumed = other.load_state_dict([saved[i] for i in (2, 0, 1)])
    np.testing.assert_array_equal(resumed["state"], pending["state"][[2, 0, 1]])
    expected, got = env.chunk_step(actions[:, :12]), other.chunk_step(actions[[2, 0, 1], :12])
    np.testing.assert_array_equal(expected.rewards[[2, 0, 1]], got.rewards)
    np.testing.assert_array_equal(expected.obs["state"][[2, 0, 1]], got.obs["state"])
    assert expected.executed.any() and (expected.executed.all() or not auto_reset)


@pytest.mark.parametrize("task", ["StackCube-v1", "PegInsertionSide-v1"])
def test_initial_states_are_functions_of_the_seed(task: str) -> None:
    env = make(2, config(task, "pd_joint_delta_pos"))
    first = env.reset(seeds=[1, 2])["state"]
    env.chunk_step(np.ones((2, 3, env.action_dim), np.float32))
    np.testing.assert_array_equal(env.reset(seeds=[2, 1])["state"][::-1], first)
    assert (first[0] != first[1]).any()


def test_batched_simulator_on_one_row() -> None:
    """The GPU adapter's own code, with ManiSkill's CPU backend under it: one row is all that backend takes."""
    from rlinf_lite.envs.maniskill.scenes import CudaSimulator
    from rlinf_lite.envs.maniskill.setup import Backends

    cfg = config(ignore_terminations=True)
    separate = make(1, cfg)
    batched = ChunkedEnv(CudaSimulator(1, cfg, Backends("physx_cpu", "none")), ignore_terminations=None)
    actions = grasping_actions(separate, [3], 0)
    np.testing.assert_array_equal(separate.reset(seeds=[3])["state"], batched.reset(seeds=[3])["state"])
    assert batched.ignore_terminations and separate.simulator.reports_success  # evaluations play on, by default
    expected, got = play(separate, actions), play(batched, actions)
    np.testing.assert_array_equal(expected["rewards"], got["rewards"])
    np.testing.assert_array_equal(expected["states"], got["states"])
    expected, got = play(separate, actions), play(batched, actions)  # into the next episode, with auto-reset
    np.testing.assert_array_equal(expected["rewards"][:, 14:20], got["rewards"][:, 14:20])
    assert [record.seed for record in expected["episodes"]] == [record.seed for record in got["episodes"]]


def test_keeps_the_protocol() -> None:
    assert check_env(make(2, config("PushCube-v1", "pd_joint_delta_pos"))) == []


def test_an_unknown_task_gets_the_nearest_name() -> None:
    with pytest.raises(UnknownEnvError, match="Did you mean PushCube-v1"):
        make(1, config("PushCub-v1"))


@pytest.mark.slow
def test_images_without_a_device_are_refused_and_states_work(repo: Path) -> None:
    code = """
from rlinf_lite.config import EnvConfig
from rlinf_lite.envs import RenderUnavailableError, make_env
assert make_env(EnvConfig(task="StackCube-v1"), "train", 1).reset(seeds=[1])["state"].shape == (1, 48)
for backend in ("auto", "cpu", "gpu"):
    try:
        settings = {"obs_mode": "rgb", "render_backend": backend}
        make_env(EnvConfig.model_validate({"options": settings}), "train", 1)
    except RenderUnavailableError as error:
        assert "mesa-vulkan-drivers" in str(error) and "obs_mode=state" in str(error), error
    else:
        raise AssertionError(backend)
"""
    environment = os.environ | {"VK_ICD_FILENAMES": "none", "VK_DRIVER_FILES": "none"}
    done = subprocess.run([sys.executable, "-c", code], cwd=repo, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # nothing of ManiSkill's import noise is left


@pytest.mark.parametrize(
    ("options", "card_draws", "found"),
    [
        ({"obs_mode": "state"}, False, ("physx_cuda", "none")),
        ({"obs_mode": "rgb"}, True, ("physx_cuda", "gpu")),
        ({"obs_mode": "rgb"}, False, ("physx_cpu", "cpu")),
        ({"obs_mode": "rgb", "render_backend": "cpu"}, True, ("physx_cpu", "cpu")),
        ({"obs_mode": "rgb", "sim_backend": "physx_cpu"}, True, ("physx_cpu", "gpu")),
        ({"obs_mode": "rgb", "sim_backend": "physx_cuda"}, False, "the GPU has no Vulkan device"),
        ({"obs_mode": "rgb", "sim_backend": "physx_cuda", "render_backend": "cpu"}, True, "render_backend is cpu"),
    ],
)
def test_pictures_of_a_card_that_simulates_are_drawn_there(
    options: dict[str, Any], card_draws: bool, found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlinf_lite.envs.maniskill import setup

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(setup, "material_works", lambda: True)
    monkeypatch.setattr(setup, "_can_render", lambda device: device == "cpu" or card_draws)
    cfg = ManiSkillOptions.model_validate(options)
    if isinstance(found, str):
        with pytest.raises(RenderUnavailableError, match=found):
            setup.plan_backends(cfg)
    else:
        assert setup.plan_backends(cfg) == setup.Backends(*found)


@pytest.fixture
def gpu_physics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where SAPIEN looks for its library, in an empty home; it loads whatever is there."""
    import sapien.physx

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sapien.physx, "enable_gpu", lambda: None)
    return tmp_path / ".sapien" / "physx" / sapien.physx.version() / "libPhysXGpu_64.so"


def fetching(library: Path, then: str) -> str:
    """Code that writes the library as SAPIEN does, in the home it is given, and leaves a word of that."""
    inner = str(library.relative_to(library.parents[3]))
    code = f"import os, pathlib, sys, time; p = pathlib.Path(sys.argv[1], {inner!r}); p.parent.mkdir(parents=True); "
    return code + f"open({str(library.parent / 'times')!r}, 'a').write('x'); p.write_text('a part'); {then}"


def test_physics_for_gpus_is_fetched_once(gpu_physics: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlinf_lite.envs.maniskill import setup

    more = "(p.parent / 'other.so').touch(); time.sleep(0.5); p.write_text('whole')"
    monkeypatch.setattr(setup, "_FETCH", fetching(gpu_physics, more))
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda _: setup.load_gpu_physics(), range(3)))
    assert gpu_physics.read_text() == "whole" and (gpu_physics.parent / "times").read_text() == "x"
    names = {file.name for file in gpu_physics.parent.iterdir()}
    assert names == {gpu_physics.name, "other.so", "times", ".lock"}


def test_physics_for_gpus_that_only_does_not_load_is_kept(gpu_physics: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sapien.physx

    from rlinf_lite.envs.maniskill import setup

    def fails() -> None:
        raise OSError("libcuda.so: cannot open shared object file")

    code = fetching(gpu_physics, "print('Download complete.'); sys.exit('libcuda.so')")
    monkeypatch.setattr(setup, "_FETCH", code)
    monkeypatch.setattr(sapien.physx, "enable_gpu", fails)
    for _ in range(2):
        with pytest.raises(MissingAssetsError, match=r"does not load: libcuda\.so: cannot open"):
            setup.load_gpu_physics()
    assert gpu_physics.exists() and (gpu_physics.parent / "times").read_text() == "x"


@pytest.mark.parametrize(
    ("then", "why"),
    [("raise ConnectionError('no route')", "ConnectionError: no route"), ("time.sleep(60)", "it took longer than")],
)
def test_physics_for_gpus_that_cannot_be_fetched(
    then: str, why: str, gpu_physics: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlinf_lite.envs.maniskill import setup

    monkeypatch.setattr(setup, "_FETCH", fetching(gpu_physics, then))
    with pytest.raises(MissingAssetsError, match=r"^env\.options\.sim_backend: physx_cuda needs ") as raised:
        setup.load_gpu_physics(limit_s=1.0)
    assert why in str(raised.value) and "~/.sapien/physx/" in str(raised.value)
    assert {file.name for file in gpu_physics.parent.iterdir()} == {"times", ".lock"}  # no part of it
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert setup.gpu_physics("maniskill") == "no GPU: ManiSkill simulates on CPUs"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpu_physics.touch()
    assert setup.gpu_physics("maniskill") == "SAPIEN's library for GPUs loads"


def test_physics_for_gpus_without_a_home_or_locks(gpu_physics: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlinf_lite.envs.maniskill import setup

    def unknown(*_: Any) -> Any:
        raise OSError(38, "Function not implemented")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("fcntl.flock", unknown)
    monkeypatch.setattr(setup, "_FETCH", fetching(gpu_physics, "p.write_text('whole')"))
    setup.load_gpu_physics()
    assert gpu_physics.read_text() == "whole"
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(MissingAssetsError, match="That failed: Could not determine home"):
        setup.load_gpu_physics()


def test_sapien_fetches_its_physics_there(tmp_path: Path) -> None:
    """By our code, in a process of its own as we start it, from a web that has it."""
    import sapien.physx

    from rlinf_lite.envs.maniskill import setup

    web = """
import io, types, zipfile, requests
packed = io.BytesIO()
with zipfile.ZipFile(packed, "w") as archive:
    archive.writestr("libPhysXGpu_64.so", "no library")
requests.get = lambda url: types.SimpleNamespace(content=packed.getvalue())
"""
    words = [sys.executable, "-c", web + setup._FETCH, str(tmp_path), "60"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "Download complete" in done.stdout and done.returncode, "of what is no library, nor is there a driver"
    assert (tmp_path / ".sapien" / "physx" / sapien.physx.version() / "libPhysXGpu_64.so").read_text() == "no library"


class OnCard(torch.Tensor):
    """Such as SAPIEN's renderer on a card returns."""

    def cpu(self, *_: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


def test_pictures_that_a_card_has_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    env = make(2, config())
    env.reset(seeds=[1, 2])
    simulator = env.simulator
    drawn = torch.arange(12, dtype=torch.uint8).reshape(1, 2, 2, 3).as_subclass(OnCard)
    monkeypatch.setattr(simulator, "_split_obs", lambda row: (torch.ones(1, 3), {"front": drawn + row}))
    images = simulator.observe(np.array([0, 1]))["images"]["front"]
    assert images.shape == (2, 2, 2, 3) and (images[1] == images[0] + 1).all()


def test_render_backend_none_cannot_make_images() -> None:
    maniskill = {"obs_mode": "rgb", "render_backend": "none"}
    with pytest.raises(RenderUnavailableError, match="set it to auto"):
        make_env(EnvConfig.model_validate({"options": maniskill}), "train", 1)


def test_images() -> None:
    from rlinf_lite.envs.maniskill.setup import import_maniskill, material_works

    import_maniskill()
    if not material_works():
        pytest.skip("NO VULKAN DEVICE: image observations are NOT tested on this machine (docs/environments.md)")
    maniskill = {"obs_mode": "rgb+state", "camera_size": [64, 96], "sim_backend": "physx_cpu"}
    cfg = EnvConfig.model_validate({"task": "PickCube-v1", "options": maniskill})
    env, fresh = make(2, cfg), make(1, cfg)
    first = env.reset(seeds=[1, 2])
    image = first["images"]["base_camera"]
    assert image.shape == (2, 64, 96, 3) and image.dtype == np.uint8 and image.std() > 10
    assert first["state"].shape == (2, 42)
    assert (image[0] != image[1]).any()
    actions = np.random.default_rng(0).uniform(-1, 1, (2, 6, 8)).astype(np.float32)
    env.chunk_step(actions)
    env.reset(seeds=[2, 2])  # into a new physics scene, and still seen
    fresh.reset(seeds=[2])
    moved, expected = env.chunk_step(actions).obs["images"], fresh.chunk_step(actions[:1]).obs["images"]
    np.testing.assert_array_equal(moved["base_camera"][0], expected["base_camera"][0])
    assert (moved["base_camera"][0] != image[1]).any()


@pytest.mark.parametrize("control_mode", ["pd_ee_delta_pose", pytest.param("pd_ee_delta_pos", marks=pytest.mark.slow)])
def test_the_scripted_expert_picks_the_cube(control_mode: str) -> None:
    env = make(4, config(control_mode=control_mode))
    env.reset(seeds=[0, 1, 2, 3])
    records = []
    for _ in range(50):
        actions = env.expert_actions(8)
        assert actions.shape == (4, 1, env.action_dim), "it looks again after each action"
        records += env.chunk_step(actions).episodes
    first = {record.env_id: record for record in reversed(records)}
    assert all(first[row].success_once and first[row].length < 30 for row in range(4))
    env.close()


def test_what_has_no_scripted_expert_says_so() -> None:
    for cfg in (config("PushCube-v1"), config(control_mode="pd_joint_delta_pos")):
        env = make(1, cfg)
        env.reset(seeds=[0])
        with pytest.raises(EnvContractError, match=r"no scripted expert for .*PickCube-v1 under pd_ee_delta_pos"):
            env.expert_actions(1)
        env.close()
