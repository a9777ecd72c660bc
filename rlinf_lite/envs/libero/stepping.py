"""The library's env steps at half their cost, to the same bits.

An env step is 25 substeps, each with a torque from the robot's controller. In each, the library computes the model's
positions, velocities and forces three times: before the controller, in it, and in MuJoCo's own step. In between, only
the controls change. So positions and velocities are computed once here, and the forces (whose solver starts from its
last result) three times as before. The controller's numbers are computed as robosuite computes them, without looking up
names and limits again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BAD = 1e10  # MuJoCo starts a simulation again whose positions or velocities are larger


class Stepping:
    """Inside `active`, takes the place of the simulation's `forward` and `step` and of the robot's `control`. Unlike
    that, it keeps no recent torques and poses of the robot, which nothing in LIBERO reads."""

    def __init__(self, env: Any, model: Any, data: Any) -> None:
        """`env`: the library's environment, of one arm with a controller of kind OSC_POSE; `model` and `data`: MuJoCo's
        own."""
        import mujoco
        from robosuite.utils import control_utils

        self._mujoco, self._control_utils = mujoco, control_utils
        self._env, self._robot = env, env.robots[0]
        self._mj_model, self._mj_data = model, data
        self._active = self._is_known = False
        env.sim.forward, env.sim.step = self._forward, self._step
        self._arm, self._fingers = (
            [env.sim.model.actuator_name2id(name) for name in part.actuators]
            for part in (self._robot.robot_model, self._robot.gripper)
        )
        self._arm_low, self._arm_high = self._mj_model.actuator_ctrlrange[self._arm].T
        low, high = self._mj_model.actuator_ctrlrange[self._fingers].T
        self._finger_middle, self._finger_reach = 0.5 * (high + low), 0.5 * (high - low)

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context for one `env.step`."""
        self._robot.control, self._active, self._is_known = self._control, True, False
        try:
            yield
        finally:
            self._active = self._is_known = False
            del self._robot.control

    def _forward(self) -> None:
        if self._is_known:
            self._mujoco.mj_forwardSkip(self._mj_model, self._mj_data, self._mujoco.mjtStage.mjSTAGE_VEL, False)
        else:
            self._mujoco.mj_forward(self._mj_model, self._mj_data)
            self._is_known = self._active

    def _step(self, with_udd: bool = True) -> None:
        data = self._mj_data
        if self._is_known and (np.abs(data.qpos) < _BAD).all() and (np.abs(data.qvel) < _BAD).all():
            self._mujoco.mj_step2(self._mj_model, data)
        else:
            self._mujoco.mj_step(self._mj_model, data)
        self._is_known = False

    def _control(self, action: NDArray[np.float64], policy_step: bool = False) -> None:
        """Set the arm's torques and the fingers' positions for the next substep."""
        data, controller = self._mj_data, self._robot.controller
        if policy_step:
            controller.set_goal(action[: controller.control_dim])
        else:
            self._update(controller)
        data.ctrl[self._arm] = np.clip(self._torques(controller), self._arm_low, self._arm_high)
        fingers = self._robot.gripper.format_action(action[controller.control_dim :])
        data.ctrl[self._fingers] = self._finger_middle + self._finger_reach * fingers

    def _update(self, controller: Any) -> None:
        """`Controller.update`: read the arm's pose, velocity, Jacobians and mass matrix."""
        model, data, joints = self._mj_model, self._mj_data, controller.qvel_index
        self._forward()
        site = self._robot.eef_site_id
        jac_pos, jac_ori = np.zeros((3, model.nv)), np.zeros((3, model.nv))
        self._mujoco.mj_jacSite(model, data, jac_pos, jac_ori, site)
        mass = np.zeros((model.nv, model.nv))
        self._mujoco.mj_fullM(model, mass, data.qM)
        controller.ee_pos = np.array(data.site_xpos[site])
        controller.ee_ori_mat = np.array(data.site_xmat[site].reshape(3, 3))
        controller.ee_pos_vel, controller.ee_ori_vel = np.dot(jac_pos, data.qvel), np.dot(jac_ori, data.qvel)
        controller.joint_pos, controller.joint_vel = data.qpos[controller.qpos_index], data.qvel[joints]
        controller.J_pos, controller.J_ori = np.array(jac_pos[:, joints]), np.array(jac_ori[:, joints])
        controller.J_full = np.vstack([controller.J_pos, controller.J_ori])
        controller.mass_matrix = mass[joints, :][:, joints]

    def _torques(self, controller: Any) -> NDArray[np.float64]:
        """`OperationalSpaceController.run_controller`, for a goal that is not interpolated."""
        utils, c = self._control_utils, controller
        pos_error, ori_error = c.goal_pos - c.ee_pos, utils.orientation_error(c.goal_ori, c.ee_ori_mat)
        force = np.multiply(pos_error, c.kp[0:3]) + np.multiply(-c.ee_pos_vel, c.kd[0:3])
        torque = np.multiply(ori_error, c.kp[3:6]) + np.multiply(-c.ee_ori_vel, c.kd[3:6])
        _, lambda_pos, lambda_ori, nullspace = utils.opspace_matrices(c.mass_matrix, c.J_full, c.J_pos, c.J_ori)
        wrench = np.concatenate([np.dot(lambda_pos, force), np.dot(lambda_ori, torque)])
        torques: NDArray[np.float64] = np.dot(c.J_full.T, wrench) + self._mj_data.qfrc_bias[c.qvel_index]
        torques += utils.nullspace_torques(c.mass_matrix, nullspace, c.initial_joint, c.joint_pos, c.joint_vel)
        c.new_update = True
        return torques
