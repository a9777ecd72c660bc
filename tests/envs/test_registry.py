"""Names, paths and what a make_env may return; the custom environment of the examples, end to end."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlinf_lite.cards import EnvCard
from rlinf_lite.config import EnvConfig
from rlinf_lite.envs import (
    ChunkedEnv,
    EnvContractError,
    EpisodeRecord,
    MissingExtraError,
    UnknownEnvError,
    check_env,
    make_env,
    register_env,
)
from rlinf_lite.envs.trial import problems_of
from rlinf_lite.registry import ENVIRONMENTS, PartImportError
from tests.envs.broken_envs import Good
from tests.envs.toy import ToySimulator

CUSTOM = "examples.embodiment.custom_env:PuckPush"


def custom(**train: Any) -> EnvConfig:
    return EnvConfig.model_validate({"id": CUSTOM, "task": "PuckPush", "train": train})


def test_custom_env_in_one_file(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(repo))
    env = make_env(custom(num_envs=4), "train", 4)
    assert check_env(env) == []
    assert "puck_push" in ENVIRONMENTS.names()
    by_name = make_env(custom().model_copy(update={"id": "puck_push"}), "eval", 4)
    assert isinstance(by_name, ChunkedEnv) and not by_name.auto_reset  # the rules of env.eval
    obs = by_name.reset(seeds=range(4))
    assert obs["instruction"] == ["push the puck to the goal"] * 4
    records: list[EpisodeRecord] = []
    while len(records) < 4:  # a spring and a damper solve it
        _, velocity, to_goal = np.split(obs["state"], 3, axis=1)
        result = by_name.chunk_step((2.0 * to_goal - 1.5 * velocity)[:, None])
        obs = result.obs
        records += result.episodes
    assert all(record.success_at_end and record.length < 100 for record in records)  # terminated there
    assert all(record.success_once and record.success_at_end for record in records)


def test_custom_env_file_runs_its_own_check(repo: Path) -> None:
    path = repo / "examples/embodiment/custom_env.py"
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True, cwd=repo)
    assert done.stdout.strip() == "puck_push keeps the environment protocol"


def test_unknown_names_get_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_task.py").write_text("def make_env(num_envs, cfg): ...\n")
    (tmp_path / "broken_task.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def wrong(env_id: str) -> str:
        with pytest.raises(UnknownEnvError) as caught:
            make_env(EnvConfig(id=env_id), "train", 1)
        return str(pickle.loads(pickle.dumps(caught.value)))

    assert "Did you mean maniskill" in wrong("manyskill")
    assert "is its folder on PYTHONPATH" in wrong("my_tusk:make_env")
    assert "Did you mean make_env" in wrong("my_task:make_evn")
    with pytest.raises(
        PartImportError, match="ModuleNotFoundError: No module named 'a_package_that_is_not_there'"
    ) as of:
        make_env(EnvConfig(id="broken_task:make_env"), "train", 1)
    assert isinstance(of.value.__cause__, ModuleNotFoundError)
    (tmp_path / "heavy_task.py").write_text("import mani_skill_of_another_name\n")
    (tmp_path / "mani_skill_of_another_name.py").write_text("raise ModuleNotFoundError('no', name='sapien')\n")
    with pytest.raises(PartImportError, match=r"pip install 'rlinf_lite\[maniskill\]'"):
        make_env(EnvConfig(id="heavy_task:make_env"), "train", 1)
    (tmp_path / "script_task.py").write_text("import sys; sys.exit()\n")
    with pytest.raises(PartImportError, match="script_task:make_env cannot be imported: SystemExit"):
        make_env(EnvConfig(id="script_task:make_env"), "train", 1)


def test_what_make_env_may_return() -> None:
    def build(own: Any, num_envs: int = 2) -> Any:
        register_env("a_test_env")(own)
        return make_env(EnvConfig.model_validate({"id": "a_test_env", "train": {"max_episode_steps": 5}}), "train", 2)

    def simulator(num_envs: int, cfg: EnvConfig) -> Any:
        return ToySimulator(num_envs)

    def vec_env(num_envs: int, cfg: EnvConfig, split: str) -> Any:
        assert split == "train"
        return ChunkedEnv(ToySimulator(num_envs), max_episode_steps=3)

    def one_env(num_envs: int, cfg: EnvConfig) -> Any:
        return gymnasium.make("Pendulum-v1")

    def vector_env(num_envs: int, cfg: EnvConfig) -> Any:
        return gymnasium.make_vec("Pendulum-v1", num_envs=num_envs)

    for own, limit in ((simulator, 5), (vec_env, 3), (one_env, 5), (vector_env, 5)):
        env = build(own)
        assert env.num_envs == 2 and env.max_episode_steps == limit
        env.reset()
        assert env.chunk_step(np.zeros((2, 6, 1), np.float32)).executed.sum() <= 2 * limit
    with pytest.raises(EnvContractError, match=r"returned builtins\.int; it must return a VecEnv"):
        build(lambda num_envs, cfg: 3)
    with pytest.raises(EnvContractError, match="was asked for 2 environments and made 7"):
        build(lambda num_envs, cfg: ToySimulator(7))


def test_an_environment_shared_by_all_rows_is_found_before_a_start() -> None:
    shared = Good()
    made = list[Good]()

    def separate(num_envs: int, cfg: EnvConfig) -> Good:
        made.append(Good())
        return made[-1]

    cfg = EnvConfig(id="a_trial")
    assert problems_of(EnvCard.of(separate, "a_trial"), cfg, "train", 8) == [] and len(made) == 2
    [problem] = problems_of(EnvCard.of(lambda num_envs, cfg: shared, "a_trial"), cfg, "train", 8)
    assert "make_env returned the same environment for several rows" in problem.text


def test_names_are_taken_once() -> None:
    with pytest.raises(ValueError, match="'maniskill' is registered already"):
        register_env("maniskill")(lambda num_envs, cfg: None)


def test_a_missing_extra_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    absent = "mani_skill"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == absent else find(name, *rest))
    with pytest.raises(MissingExtraError, match=r"pip install 'rlinf_lite\[maniskill\]'") as caught:
        make_env(EnvConfig(), "train", 1)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
