"""What is tried out before Ray starts, and in a dry run: parts, tasks of gymnasium, directories, the key of wandb."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from rlinf_lite import registry
from rlinf_lite.config import ConfigError, load_config
from rlinf_lite.preview.dry_run import describe, policy_problems, shown

NAME = "gym_pendulum_ppo_mlp"
TASK = """
import gymnasium
from gymnasium.envs.classic_control import PendulumEnv
gymnasium.register("OwnPendulum-v0", PendulumEnv, max_episode_steps=50)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_tasks_of_a_test.py").write_text(TASK)
    return tmp_path


def problem(*overrides: str, name: str = NAME, elsewhere: bool = False) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(name, overrides, elsewhere=elsewhere)
    assert len(caught.value.problems) == 1, caught.value.problems
    return caught.value.problems[0]


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("env.task=Pendulumm-v1", "env.task: there is no environment 'Pendulumm-v1'. Did you mean Pendulum-v1"),
        ("env.task=CartPole-v1", "env.task: CartPole-v1: the action space is Discrete(2); policies here act in a"),
        ("env.task=no_module_here:X-v0", "env.task: 'no_module_here:X-v0': no_module_here cannot be imported"),
        ("env.task=json:X-v0", "env.task: there is no environment 'json:X-v0'"),
        ("env.options={gg: 1}", "env.options: Pendulum-v1 cannot be made with {'gg': 1}: TypeError"),
        ("model.id=json:JSONDecoder", "not a subclass of rlinf_lite.models.Policy. Name one"),
        ("model.id=json:nothing", "model.id: json has no 'nothing'"),
        ("env.id=no_module_here:make_env", "env.id: no_module_here:make_env cannot be imported"),
    ],
)
def test_parts_and_tasks(override: str, said: str, elsewhere: bool) -> None:
    assert said in problem(override, elsewhere=elsewhere)


def test_tasks_of_a_module_are_registered_by_importing_it(module: Path) -> None:
    assert load_config(NAME, ["env.task=own_tasks_of_a_test:OwnPendulum-v0"]).env.task.endswith("OwnPendulum-v0")


def test_a_package_that_a_task_needs_may_be_missing_where_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mujoco", None)
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.mujoco")]:
        monkeypatch.delitem(sys.modules, name)
    assert "env.task: Ant-v5 cannot be made: " in problem("env.task=Ant-v5")
    assert load_config(NAME, ["env.task=Ant-v5"], elsewhere=True).env.task == "Ant-v5"


@pytest.mark.parametrize("key", ["runner.logger.log_path", "actor.checkpoint_save_path"])
def test_directories_can_be_written(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    override = f"{key}={tmp_path}/a/b"
    load_config(NAME, [override])
    assert list(tmp_path.iterdir()) == []  # looked at, not made

    def refuse(path: object, mode: int) -> bool:
        return Path(str(path)) != tmp_path

    with monkeypatch.context() as patch:
        patch.setattr(os, "access", refuse)
        assert problem(override) == (
            f"{key}: {tmp_path}/a/b cannot be written: {tmp_path} does not allow it. Name another directory"
        )
        said = describe(load_config(NAME, [override], elsewhere=True))
        assert "it cannot run on this machine" in said and f"{tmp_path} does not allow it" in said
    full = shutil.disk_usage(tmp_path)._replace(free=2**20)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: full)
        overrides = [f"{other}={tmp_path}/a" for other in ("runner.logger.log_path", "actor.checkpoint_save_path")]
        with pytest.raises(ConfigError, match=f"{key}: 1 MiB are free in {tmp_path}, and a run writes 50 MiB or more"):
            load_config(NAME, overrides)
    (tmp_path / "a").touch()
    assert f"{tmp_path}/a is a file" in problem(override, elsewhere=True)


ENVIRONMENTS = """
import gymnasium
import numpy as np


def raises(num_envs, cfg):
    return np.zeros(3)[7]


def none(num_envs, cfg):
    pass


def no_arguments():
    return gymnasium.make("Pendulum-v1")


def discrete(num_envs, cfg):
    return gymnasium.make("CartPole-v1")


def too_few(num_envs, cfg):
    return gymnasium.make_vec("Pendulum-v1", num_envs=3)


def lacks_a_package(num_envs, cfg):
    import a_package_that_is_not_there


def good(num_envs, cfg):
    return gymnasium.make("Pendulum-v1")

from gymnasium.envs.classic_control import PendulumEnv
class Pendulum(PendulumEnv):
    pass


class Stuck(Pendulum):
    def step(self, action):
        raise RuntimeError("gripper stuck")


class Unseeded(Pendulum):
    def reset(self):
        return super().reset()


def stuck(num_envs, cfg):
    return Stuck()


def unseeded(num_envs, cfg):
    return Unseeded()


def for_evaluations(num_envs, cfg, split):
    assert split == "eval" and num_envs <= 2
    return gymnasium.make("Pendulum-v1")


def score(solution, ground_truth, extra_info):
    return 0.0


def as_verl(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0
"""


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "raises",
            r"cannot be made: IndexError: index 7 is out .*, at .*own_environments\.py:7\. Correct it$",
        ),
        ("none", r"make_env returned builtins\.NoneType; it must return a VecEnv"),
        ("no_arguments", r"is called as make_env\(num_envs, cfg\), and takes \(\): too many positional arguments"),
        ("discrete", r"the action space is Discrete\(2\)"),
        (
            "Pendulum",
            r"Pendulum is an environment; name a function: def make_env\(num_envs, cfg\): return Pendulum\(\)",
        ),
        ("stuck", r"chunk_step: row 0, step 1 of .*: step raised RuntimeError: gripper stuck"),
        ("unseeded", r"reset\(seeds=\[1, 2\]\): row 0, .* unexpected keyword argument 'seed'"),
        ("too_few", r"make_env was asked for \d+ environments and made 3"),
    ],
)
def test_an_environment_of_ones_own_is_made_and_tried_out_once(
    name: str, said: str, elsewhere: bool, module: Path
) -> None:
    (module / "own_environments.py").write_text(ENVIRONMENTS)
    own = [f"env.id=own_environments:{name}", "env.task=own", "env.train.max_episode_steps=200"]
    found = problem(*own, elsewhere=elsewhere)
    assert re.match(rf"env\.id: own_environments:{name}:? {said}", found), found


POLICIES = """
from torch import nn
from rlinf_lite.models import GaussianPolicy


class Good(GaussianPolicy):
    def build(self):
        self.actor = nn.Linear(self.spec.state_dim, self.num_outputs)
        self.critic = nn.Linear(self.spec.state_dim, self.num_values)

    def network(self, inputs):
        return self.actor(inputs["state"]), self.critic(inputs["state"])


class Wrong(Good):
    def network(self, inputs):
        return self.actor(inputs["state"])


class WrongAndLarge(Wrong):
    def build(self):
        super().build()
        self.trunk = nn.Linear(5000, 5000)
"""


@pytest.mark.parametrize("task", ["Pendulum-v1", "MountainCarContinuous-v0"])  # whose sizes are known, and found out
def test_a_small_policy_of_ones_own_is_tried_out_in_a_dry_run(task: str, module: Path) -> None:
    (module / "own_policies.py").write_text(POLICIES)
    own = [f"env.task={task}", "runner.run_name=own"]
    for name, count in {"Good": 0, "WrongAndLarge": 0, "Wrong": 1}.items():
        config = load_config(NAME, [*own, f"model.id=own_policies:{name}"], elsewhere=True)
        found = policy_problems(config, shown(config))
        assert len(found) == count, found
    assert found[0].startswith("model.id: own_policies:Wrong: ") and "network returned" in found[0]


def test_an_evaluation_makes_no_environment_of_training(module: Path) -> None:
    (module / "own_environments.py").write_text(ENVIRONMENTS)
    own = ["env.id=own_environments:for_evaluations", "env.eval.max_episode_steps=200", "env.eval.num_envs=2"]
    load_config(NAME, [*own, "runner.task_type=eval"])
    assert "cannot be made: AssertionError" in problem(*own, "env.train.max_episode_steps=200")


def test_an_environment_may_lack_a_package_where_it_does_not_run(module: Path) -> None:
    (module / "own_environments.py").write_text(ENVIRONMENTS)
    own = ["env.id=own_environments:lacks_a_package", "env.train.max_episode_steps=200"]
    assert "No module named 'a_package_that_is_not_there', at " in problem(*own)
    load_config(NAME, own, elsewhere=True)
    load_config(NAME, ["env.id=own_environments:good", "env.train.max_episode_steps=200"])


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nomodule:none", "nomodule:none cannot be imported: No module named 'nomodule'"),
        ("own_environments:scor", "own_environments has no 'scor'. Did you mean score?"),
        ("own_environments:__doc__", "own_environments:__doc__ is None, no function. Name one"),
        ("own_environments:as_verl", "own_environments:as_verl begins with data_source, and is called as (solution, "),
        ("__main__:score", "__main__:score cannot be imported by another process. Move it to a file"),
        ("score", "'score' is no import path. Write pkg.module:function"),
    ],
)
def test_a_reward_function_is_found(path: str, said: str, module: Path) -> None:
    (module / "own_environments.py").write_text(ENVIRONMENTS)
    assert problem(f"reward.fn={path}", name="math_arithmetic_grpo").startswith(f"reward.fn: {said}")
    load_config("math_arithmetic_grpo", ["reward.fn=own_environments:score"])


def test_a_folder_of_demonstrations_is_a_dataset(tmp_path: Path) -> None:
    words = ["data.source=folder", f"data.demos_dir={tmp_path}"]
    assert f"data.demos_dir: '{tmp_path}' is no LeRobotDataset" in problem(*words, name="tabletop_sft_mlp")
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "info.json").write_text("{}")
    load_config("tabletop_sft_mlp", words)


def test_wandb_has_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(registry, "is_installed", lambda module: True)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    override = "runner.logger.backends=[wandb]"
    assert "wandb has no key on this machine. `wandb login` stores one" in problem(override)
    load_config(NAME, [override], elsewhere=True)

    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password 0123\n")
    (tmp_path / "netrc").chmod(0o600)
    load_config(NAME, [override])
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    problem(override)
    for variable, value in (("WANDB_API_KEY", "0123"), ("WANDB_MODE", "offline")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            load_config(NAME, [override])
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nmode = offline\n")  # as `wandb offline` does
    load_config(NAME, [override])
