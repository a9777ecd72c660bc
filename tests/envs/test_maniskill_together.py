"""ManiSkill's rows in one pass against row by row, bit for bit; and what may not be done in one pass."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlinf_lite.config import EnvConfig

pytest.importorskip("mani_skill")

from rlinf_lite.envs.maniskill.setup import import_maniskill

import_maniskill()

import torch  # noqa: E402
from mani_skill.agents.controllers.pd_joint_pos import PDJointPosController  # noqa: E402
from mani_skill.envs.tasks.tabletop.push_cube import PushCubeEnv  # noqa: E402
from mani_skill.utils.registration import REGISTERED_ENVS, register_env  # noqa: E402
from mani_skill.utils.structs import Pose  # noqa: E402

from rlinf_lite.envs.errors import RowError  # noqa: E402
from rlinf_lite.envs.maniskill import scenes  # noqa: E402
from rlinf_lite.envs.maniskill.physics import has_hooks, seeds_of_the_cpu  # noqa: E402
from rlinf_lite.envs.maniskill.simulator import make_simulator  # noqa: E402
from rlinf_lite.envs.maniskill.together import Together  # noqa: E402
from rlinf_lite.envs.simulator import StepOutputs  # noqa: E402

NUM_ROWS = 4
PARTS = {"actions", "rewards", "states"}


def simulator(task: str, control_mode: str = "pd_joint_delta_pos", **options: Any) -> Any:
    options = {"control_mode": control_mode, "sim_backend": "physx_cpu", **options}
    return make_simulator(NUM_ROWS, EnvConfig.model_validate({"task": task, "options": options}))


def played(sim: Any, num_steps: int = 40) -> list[np.ndarray]:
    """All that a simulator says while rows move, alone or together, and begin anew at different times."""
    out, everyone, rng = StepOutputs.empty(NUM_ROWS), np.arange(NUM_ROWS), np.random.default_rng(0)
    sim.reset(everyone, [11, 12, 13, 14])
    said = [sim.observe(everyone)["state"]]
    for step in range(num_steps):
        if step % 8 == 0:
            direction = rng.uniform(-1, 1, (NUM_ROWS, len(sim.action_low)))
        actions = np.clip(direction + rng.uniform(-0.3, 0.3, direction.shape), -1, 1).astype(np.float32)
        rows = everyone if step % 5 else np.array([2, 0])
        sim.step(rows, actions, out)
        said += [sim.observe(rows)["state"], out.reward[rows].copy(), out.success[rows].copy()]
        said += [out.terminated[rows].copy()]
        if step % 15 == 14:
            sim.reset(np.array([1, 3]), [step, step + 1])
            said.append(sim.observe(np.array([3, 1]))["state"])
    return said


def assert_same(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("task", "options", "apart"),
    [
        ("PushCube-v1", {}, set()),
        ("StackCube-v1", {}, set()),  # asks what the robot grasps
        ("RollBall-v1", {"reward_mode": "dense"}, set()),  # remembers what was reached
        ("PickCube-v1", {"control_mode": "pd_joint_target_delta_pos"}, set()),  # controllers with a state
        ("LiftPegUpright-v1", {"reward_mode": "sparse"}, set()),
        ("MS-AntRun-v1", {}, set()),  # another robot
        ("PickCube-v1", {"control_mode": "pd_ee_delta_pos"}, {"actions"}),  # inverse kinematics of one scene
        ("TriFingerRotateCubeLevel0-v1", {}, {"rewards"}),  # whose reward sets an attribute
        ("PullCubeTool-v1", {}, {"rewards", "states"}),  # whose info has averages over rows
        ("PegInsertionSide-v1", {}, PARTS),  # whose resets build other pegs
    ],
)
def test_rows_together_say_what_they_say_alone(task: str, options: dict[str, Any], apart: set[str]) -> None:
    together, alone = simulator(task, **options), simulator(task, batch_rows=False, **options)
    assert_same(played(together), played(alone))
    assert set(together.apart) == apart
    assert set(alone.apart) == PARTS


class OddTask(PushCubeEnv):
    """PushCube with a reward or a state that says more about one row than that row's poses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen = 0
        self.best = torch.zeros(1)
        self.lowest = 0.5
        self.visited: list[float] = []
        self.counts = {"steps": torch.zeros(1)}
        self.place = Pose.create_from_pq(torch.zeros(1, 3))
        self.visits = np.zeros(1, np.float32)
        super().__init__(*args, **kwargs)


class SetsAnAttribute(OddTask):
    def evaluate(self) -> dict[str, Any]:
        self.seen += 1
        return super().evaluate() | {"seen": torch.tensor([self.seen])}


class ChangesATensor(OddTask):
    def compute_dense_reward(self, obs: Any, action: Any, info: Any) -> Any:
        reward = super().compute_dense_reward(obs, action, info)
        torch.maximum(self.best, reward, out=self.best)
        return reward + self.best


class AppendsToAList(OddTask):
    def evaluate(self) -> dict[str, Any]:
        self.visited.append(0.5)
        return super().evaluate() | {"visited": torch.tensor([len(self.visited)])}


class ChangesATensorInADict(OddTask):
    def compute_dense_reward(self, obs: Any, action: Any, info: Any) -> Any:
        self.counts["steps"] += 1
        return super().compute_dense_reward(obs, action, info) + self.counts["steps"]


class ChangesAPose(OddTask):
    def compute_dense_reward(self, obs: Any, action: Any, info: Any) -> Any:
        self.place.p = self.place.p + 1
        return super().compute_dense_reward(obs, action, info) + self.place.p[:, 0]


class MovesAnObject(OddTask):
    def evaluate(self) -> dict[str, Any]:
        info = super().evaluate()
        if (self.elapsed_steps == 12).any():  # the state, which comes next, has the new place
            self.goal_region.set_pose(Pose.create(self.goal_region.pose.raw_pose + 0.1))
        return info


class LooksAtTheFirstRow(OddTask):
    def compute_dense_reward(self, obs: Any, action: Any, info: Any) -> Any:
        return super().compute_dense_reward(obs, action, info) + self.obj.pose.p[0, 0]


class AveragesOverRows(OddTask):
    def evaluate(self) -> dict[str, Any]:
        return super().evaluate() | {"height": self.obj.pose.p.mean().expand(self.num_envs)}


class BranchesOnARow(OddTask):
    def compute_dense_reward(self, obs: Any, action: Any, info: Any) -> Any:
        near = bool(self.obj.pose.p[:, 0] > 0)
        return super().compute_dense_reward(obs, action, info) * (2 if near else 1)


class CountsInANumber(OddTask):
    def _initialize_episode(self, env_idx: Any, options: Any) -> None:
        super()._initialize_episode(env_idx, options)
        self.lowest = float(self.obj.pose.p[0, 0])

    def compute_dense_reward(self, obs: Any, action: Any, info: Any) -> Any:
        return super().compute_dense_reward(obs, action, info) + self.lowest


class LimitsActions(OddTask):
    def _step_action(self, action: Any) -> Any:
        return super()._step_action(None if action is None else action / 2)


class Overrides(OddTask):
    goal_radius = 0.1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.goal_radius = 0.3  # of the object, not that of the class


class SetsAnAttributeInSomeRows(OddTask):
    bonus = 0.0

    def _initialize_episode(self, env_idx: Any, options: Any) -> None:
        super()._initialize_episode(env_idx, options)
        if self._episode_seed[0] == 13:
            self.bonus = 1.0

    def compute_dense_reward(self, obs: Any, action: Any, info: Any) -> Any:
        return super().compute_dense_reward(obs, action, info) + self.bonus


class SetsAnAttributeLater(OddTask):
    bonus = 0.0

    def _initialize_episode(self, env_idx: Any, options: Any) -> None:
        super()._initialize_episode(env_idx, options)
        if self._episode_seed[0] == 29:  # the class's has been looked at in many steps by then
            self.bonus = 1.0

    def compute_dense_reward(self, obs: Any, action: Any, info: Any) -> Any:
        return super().compute_dense_reward(obs, action, info) + self.bonus


class CountsBehindItsSteps(OddTask):
    def _after_control_step(self) -> None:
        self.seen += 1

    def compute_dense_reward(self, obs: Any, action: Any, info: Any) -> Any:
        return super().compute_dense_reward(obs, action, info) + self.seen


class HasAMemory(OddTask):
    def _load_agent(self, options: Any) -> None:
        super()._load_agent(options)
        self.agent.memory = {"sum": torch.zeros(1)}

    def compute_dense_reward(self, obs: Any, action: Any, info: Any) -> Any:
        return super().compute_dense_reward(obs, action, info) + self.agent.memory["sum"]


class RemembersInItsSteps(HasAMemory):
    def _after_control_step(self) -> None:
        self.agent.memory["sum"] = self.agent.memory["sum"] + self.obj.pose.p[:, 0]


class RemembersFromAResetOn(HasAMemory):
    def _initialize_episode(self, env_idx: Any, options: Any) -> None:
        super()._initialize_episode(env_idx, options)
        if self._episode_seed[0] < 100:  # not where the environment is made, which resets it too
            self._after_control_step = lambda: RemembersInItsSteps._after_control_step(self)


class RemembersInItsObservations(HasAMemory):
    def _get_obs_extra(self, info: Any) -> Any:
        self.agent.memory["sum"] = self.obj.pose.p[:, 0].clone()  # which a batch may not
        return super()._get_obs_extra(info)


class ChangesASettingInItsSteps(OddTask):
    def _after_control_step(self) -> None:
        if self.elapsed_steps[0] == 15:
            self.sim_config.spacing = float(self.obj.pose.p[0, 0])

    def compute_dense_reward(self, obs: Any, action: Any, info: Any) -> Any:
        return super().compute_dense_reward(obs, action, info) + self.sim_config.spacing


class ChangesASetting(OddTask):
    def compute_dense_reward(self, obs: Any, action: Any, info: Any) -> Any:
        if (self.elapsed_steps % 20 == 13).any():
            self.sim_config.scene_config.bounce_threshold += 1
        return super().compute_dense_reward(obs, action, info) + self.sim_config.scene_config.bounce_threshold


class ReadsItsControllersSteps(OddTask):
    def compute_dense_reward(self, obs: Any, action: Any, info: Any) -> Any:
        reward = super().compute_dense_reward(obs, action, info)
        return reward + self.agent.controller.controllers["arm"]._step


class PushesInItsSteps(OddTask):
    def _before_simulation_step(self) -> None:
        self.obj.set_linear_velocity(self.obj.linear_velocity + torch.tensor([0.01, 0, 0]))


class KeepsWhatItFirstSaw(OddTask):
    def _initialize_episode(self, env_idx: Any, options: Any) -> None:
        super()._initialize_episode(env_idx, options)
        self.__dict__.pop("start", None)

    @cached_property
    def start(self) -> Any:
        return self.obj.pose.p[:, 0]

    def compute_dense_reward(self, obs: Any, action: Any, info: Any) -> Any:
        return super().compute_dense_reward(obs, action, info) + self.start


class ChangesTheAction(OddTask):
    def compute_dense_reward(self, obs: Any, action: Any, info: Any) -> Any:
        action *= 0.5
        return super().compute_dense_reward(obs, action, info) + action[:, 0]


class ChangesAnArray(OddTask):
    def compute_dense_reward(self, obs: Any, action: Any, info: Any) -> Any:
        torch.from_numpy(self.visits).add_(1)  # passes over an array's being read-only
        return super().compute_dense_reward(obs, action, info) + float(self.visits[0])


class DrawsNoise(OddTask):
    def compute_dense_reward(self, obs: Any, action: Any, info: Any) -> Any:
        return super().compute_dense_reward(obs, action, info) + torch.rand(self.num_envs)


class DrawsByNumPy(OddTask):
    def compute_dense_reward(self, obs: Any, action: Any, info: Any) -> Any:
        return super().compute_dense_reward(obs, action, info) + float(np.random.uniform())


class HasASign(OddTask):
    def _initialize_episode(self, env_idx: Any, options: Any) -> None:
        super()._initialize_episode(env_idx, options)
        self.lowest = -0.0 if self._episode_seed[0] == 29 else 0.0  # of a row that begins anew later

    def compute_dense_reward(self, obs: Any, action: Any, info: Any) -> Any:
        return torch.copysign(super().compute_dense_reward(obs, action, info), torch.tensor(self.lowest))


class RemembersInTheRobot(OddTask):
    def _load_agent(self, options: Any) -> None:
        super()._load_agent(options)
        self.agent.memory = {"start": torch.zeros(1, 3)}

    def _initialize_episode(self, env_idx: Any, options: Any) -> None:
        super()._initialize_episode(env_idx, options)
        self.agent.memory["start"] = self.agent.tcp.pose.p + self.obj.pose.p

    def compute_dense_reward(self, obs: Any, action: Any, info: Any) -> Any:
        return super().compute_dense_reward(obs, action, info) + self.agent.memory["start"][:, 1]


class LimitsJointsAtResets(OddTask):
    def _initialize_episode(self, env_idx: Any, options: Any) -> None:
        super()._initialize_episode(env_idx, options)
        if self._episode_seed[0] == 29:
            self.agent.controller.controllers["arm"].action_space_high.fill_(0.02)


class LimitsItsTarget(PDJointPosController):
    def set_action(self, action: Any) -> None:
        super().set_action(action)
        self._target_qpos.clamp_(-2.2, 2.2)  # of what PhysX has been told already


class RemembersLater(PDJointPosController):
    def set_action(self, action: Any) -> None:
        last = self.memory["last"]  # looked at in every call, and changed when the arm has moved far enough
        super().set_action(action + last)
        if (torch.linalg.norm(self.qpos - self.start["qpos"], dim=1) > 0.6).any():
            last.copy_(action / 2)


class CountsActions(PDJointPosController):
    num_actions = 0

    def set_action(self, action: Any) -> None:
        self.num_actions += 1
        super().set_action(action * (0.2 if self.num_actions % 3 else 1))


class SharesOneNumber(PDJointPosController):
    def reset(self) -> None:
        super().reset()
        self.gain = getattr(self, "gain", torch.ones(1, 1)).mul_(0.5)

    def set_action(self, action: Any) -> None:
        super().set_action(action * self.gain)
        self.gain = torch.ones(1, 1).expand(self.scene.num_envs, 1)


class SetsAProperty(PDJointPosController):
    @property
    def share(self) -> float:
        return self._share

    @share.setter
    def share(self, value: float) -> None:
        self._share = value / 2

    def set_action(self, action: Any) -> None:
        self.share = 1.0
        super().set_action(action * self.share)


class DriftsInItsSteps(PDJointPosController):
    def before_simulation_step(self) -> None:
        super().before_simulation_step()
        self.set_drive_targets(self._target_qpos + 0.01 * self._step)


def with_arm(controller: type, **attributes: Any) -> type[OddTask]:
    class WithArm(OddTask):
        def _load_agent(self, options: Any) -> None:
            super()._load_agent(options)
            arm = self.agent.controller.controllers["arm"]
            arm.__class__ = controller
            vars(arm).update(attributes)

    WithArm.__name__ = f"Has{controller.__name__}"
    return WithArm


class HasAControllerThatInterpolates(OddTask):
    def _load_agent(self, options: Any) -> None:
        super()._load_agent(options)
        arm = self.agent.controller.controllers["arm"]
        arm.config, arm._step_size = replace(arm.config, interpolate=True), torch.zeros(1, 7)


class HasAControllerThatRemembers(OddTask):
    def _load_agent(self, options: Any) -> None:
        super()._load_agent(options)
        arm = self.agent.controller.controllers["arm"]
        arm.__class__, arm.memory, arm.start = RemembersLater, {"last": torch.zeros(1, 7)}, {"qpos": torch.zeros(1, 7)}
        arm.start["qpos"] += torch.tensor([0, torch.pi / 8, 0, -torch.pi * 5 / 8, 0, torch.pi * 3 / 4, torch.pi / 4])


@pytest.fixture
def odd(request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"{request.param.__name__}-v1"
    register_env(name, max_episode_steps=50)(request.param)
    yield name
    del REGISTERED_ENVS[name]


@pytest.mark.parametrize(
    ("odd", "apart", "why"),
    [
        (SetsAnAttribute, {"rewards"}, "seen is set"),
        (ChangesATensor, {"rewards"}, "best is changed in place"),
        (AppendsToAList, {"rewards"}, "'append'"),
        (ChangesATensorInADict, {"rewards"}, "does not support item assignment"),
        (ChangesAPose, {"rewards"}, "place is changed in place"),
        (MovesAnObject, {"rewards"}, "set_pose"),
        (LooksAtTheFirstRow, {"rewards"}, "by itself gives something else"),
        (AveragesOverRows, {"rewards"}, "by itself gives something else"),
        (BranchesOnARow, {"rewards"}, "RuntimeError in a batch: Boolean value of Tensor"),
        (CountsInANumber, {"rewards"}, "lowest (float) differs between rows"),
        (LimitsActions, {"actions", "rewards"}, "_step_action"),
        (SetsAnAttributeInSomeRows, {"rewards"}, "bonus is kept by some rows"),
        (SetsAnAttributeLater, {"rewards"}, "bonus is kept by some rows"),
        (PushesInItsSteps, set(), ""),
        (RemembersInItsSteps, set(), ""),
        (RemembersInItsObservations, {"states"}, "does not support item assignment"),
        (ChangesASettingInItsSteps, {"rewards"}, "sim_config['spacing'] is of different types"),
        (ChangesASetting, {"rewards"}, "bounce_threshold is set"),
        (ReadsItsControllersSteps, {"rewards"}, "_step (int) differs between rows"),
        (RemembersFromAResetOn, set(), ""),
        (with_arm(SharesOneNumber), set(), ""),
        (with_arm(SetsAProperty), {"actions"}, "share is set"),
        (with_arm(DriftsInItsSteps), set(), ""),
        (HasAControllerThatInterpolates, set(), ""),
        (KeepsWhatItFirstSaw, {"rewards"}, "start is kept by some rows"),
        (Overrides, set(), ""),
        (ChangesTheAction, {"rewards"}, "the action is changed in place"),
        (ChangesAnArray, {"rewards"}, "visits is changed in place"),
        (DrawsNoise, {"rewards"}, "random numbers are drawn"),
        (DrawsByNumPy, {"rewards"}, "random numbers are drawn"),
        (HasASign, {"rewards"}, "lowest (float) differs between rows"),
        (RemembersInTheRobot, set(), ""),
        (LimitsJointsAtResets, {"actions"}, "action_space_high has no row of its own"),
        (with_arm(LimitsItsTarget), set(), ""),
        (HasAControllerThatRemembers, {"actions"}, "is changed in place"),
    ],
    indirect=["odd"],
)
def test_what_is_not_the_same_in_a_batch_is_done_row_by_row(odd: str, apart: set[str], why: str) -> None:
    together, alone = simulator(odd, batch_rows=True), simulator(odd, batch_rows=False)
    saids = []
    for sim in (together, alone):
        torch.manual_seed(0)
        np.random.seed(0)
        saids.append(played(sim))
    assert_same(*saids)
    assert set(together.apart) == apart
    assert all(why in text for text in together.apart.values())


@pytest.mark.parametrize(
    "odd", [CountsBehindItsSteps, with_arm(CountsActions, num_actions=0), ReadsItsControllersSteps], indirect=True
)
def test_what_all_rows_set_in_a_step_is_seen_in_the_next(odd: str) -> None:
    """Also behind the first calls, in which every row is checked."""
    together, alone = simulator(odd, batch_rows=True), simulator(odd, batch_rows=False)
    out, everyone, action = StepOutputs.empty(NUM_ROWS), np.arange(NUM_ROWS), np.full((NUM_ROWS, 8), 0.5, np.float32)
    rewards = []
    for sim in (together, alone):
        sim.reset(everyone, [1, 2, 3, 4])
        for _ in range(20):
            sim.step(everyone, action, out)
            rewards.append(out.reward.copy())
    assert_same(rewards[:20], rewards[20:])
    assert not together.apart


class LooksLater(OddTask):
    """Looks from row to row from the 30th step of an episode on."""

    def compute_dense_reward(self, obs: Any, action: Any, info: Any) -> Any:
        reward = super().compute_dense_reward(obs, action, info)
        return torch.where(self.elapsed_steps >= 30, reward + self.obj.pose.p.sum(), reward)


@pytest.mark.parametrize("odd", [LooksLater], indirect=True)
def test_a_difference_that_comes_later_is_found_and_said(
    odd: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenes, "_CHECK_EVERY", 5)
    sim, out, everyone = simulator(odd, batch_rows=True), StepOutputs.empty(NUM_ROWS), np.arange(NUM_ROWS)
    sim.reset(everyone, [1, 2, 3, 4])
    for _ in range(29):
        sim.step(everyone, np.zeros((NUM_ROWS, 8), np.float32), out)
    assert not sim.apart
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            sim.step(everyone, np.zeros((NUM_ROWS, 8), np.float32), out)
    assert set(sim.apart) == {"rewards"}
    assert "env.options.batch_rows=false" in caplog.text and "row by row from now on" in caplog.text


@pytest.mark.parametrize("odd", [OddTask], indirect=True)
def test_a_task_of_ones_own_is_computed_row_by_row_unless_asked(odd: str) -> None:
    assert set(simulator(odd).apart) == PARTS
    assert "OddTask is not ManiSkill's own" in simulator(odd).apart["rewards"]
    assert not simulator("PushCube-v1").apart and not simulator(odd, batch_rows=True).apart


def test_targets_that_look_at_another_row_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    set_action = PDJointPosController.set_action
    monkeypatch.setattr(PDJointPosController, "set_action", lambda self, x: set_action(self, x - 0.5 * x[-1:]))
    together, alone = simulator("PushCube-v1"), simulator("PushCube-v1", batch_rows=False)
    assert_same(played(together), played(alone))
    assert together.apart == {"actions": "row 2 by itself has other targets"}


def test_an_error_says_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    sim, everyone = simulator("PushCube-v1"), np.arange(NUM_ROWS)
    sim.reset(everyone, [11, 12, 13, 14])

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("of this row")

    actions = np.zeros((NUM_ROWS, len(sim.action_low)), np.float32)
    of_row = sim.envs[2]
    for owner, name, value in ((of_row.scene, "px", SimpleNamespace(step=fail)), (of_row.agent, "set_action", fail)):
        with monkeypatch.context() as patch, pytest.raises(RowError) as error:
            patch.setattr(owner, name, value)
            sim.step(everyone, actions, StepOutputs.empty(NUM_ROWS))
        assert error.value.row == 2 and isinstance(error.value.__cause__, ZeroDivisionError)


def test_an_action_that_one_row_takes_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    together, alone = simulator("PushCube-v1"), simulator("PushCube-v1", batch_rows=False)
    for sim in (together, alone):
        controller = sim.envs[2].agent.controller.controllers["arm"]
        controller.action_space_high = controller.action_space_high * 2
    assert_same(played(together), played(alone))
    assert set(together.apart) == {"actions"} and "action_space_high" in together.apart["actions"]


@pytest.mark.parametrize(
    ("task", "hooks"), [("PushCube-v1", False), ("MS-AntRun-v1", True), ("MS-HumanoidStand-v1", True)]
)
def test_hooks_of_tasks(task: str, hooks: bool) -> None:
    assert has_hooks(simulator(task).envs[0]) == hooks


@pytest.mark.parametrize(
    "odd",
    [OddTask, CountsBehindItsSteps, PushesInItsSteps, with_arm(DriftsInItsSteps), HasAControllerThatInterpolates],
    indirect=True,
)
def test_hooks_of_ones_own(odd: str) -> None:
    env = simulator(odd, batch_rows=True).envs[0]
    assert has_hooks(env) == (odd != "OddTask-v1")
    for thing, name in ((env, "_after_control_step"), (env.agent, "before_simulation_step"), (env.scene, "step")):
        setattr(thing, name, lambda: None)  # of the object
        assert has_hooks(env)
        delattr(thing, name)


@pytest.mark.parametrize("odd", [RemembersInItsSteps], indirect=True)
def test_parts_are_checked_in_steps_of_their_own(odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one part's check has looked up anew would hide from the next part's that something was out of date."""
    monkeypatch.setattr(Together, "look_again", lambda self: None)  # so that it is
    sim, out, everyone = simulator(odd, batch_rows=True), StepOutputs.empty(NUM_ROWS), np.arange(NUM_ROWS)
    sim.reset(everyone, [1, 2, 3, 4])
    for _ in range(70):
        sim.step(everyone, np.full((NUM_ROWS, 8), 0.1, np.float32), out)
    assert "by itself gives something else" in sim.apart["rewards"]


def test_a_seed_of_the_cpu_gives_the_numbers_that_torchs_own_gives() -> None:
    whole = torch.manual_seed
    torch.manual_seed(5)
    drawn = torch.rand(3)
    with pytest.raises(ZeroDivisionError), seeds_of_the_cpu():
        torch.manual_seed(np.int64(5))
        assert torch.equal(torch.rand(3), drawn)
        raise ZeroDivisionError
    assert torch.manual_seed is whole


def test_two_threads_that_reset_leave_torchs_own_seeding_in_place() -> None:
    whole, inside, may_end = torch.manual_seed, threading.Event(), threading.Event()

    def reset() -> None:
        with seeds_of_the_cpu():
            inside.set()
            assert may_end.wait(10)

    first = threading.Thread(target=reset)
    first.start()
    assert inside.wait(10)
    inside.clear()
    second = threading.Thread(target=reset)
    second.start()
    assert not inside.wait(0.1)  # it waits for the first
    may_end.set()
    for thread in (first, second):
        thread.join(10)
    assert inside.is_set() and torch.manual_seed is whole
