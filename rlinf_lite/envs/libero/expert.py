"""A scripted expert for LIBERO's pick-and-place tasks. It reads positions from the simulation, not pictures.

It reads the task's goal, chooses a grasp with free space around the hand, carries the object to the goal and puts it
down there. Objects that fit between the fingers are grasped through their centre, wider ones (bowls) by their rim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_lite.envs.errors import EnvContractError

Array = NDArray[np.float64]

OPEN, CLOSED = -1.0, 1.0
REACH, TURN = 0.05, 0.5  # metres and radians by which an action of 1 moves the hand
_SPAN = 0.07  # width of the widest object that fits between the fingers, metres
_BELOW_TOP, _ABOVE_BOTTOM = 0.034, 0.012  # height of a grasp: as low as the palm permits, as high as the table asks for
_HOLD = 0.015  # a grasp is at least so far below the top
_TIP = 0.013  # the fingers end this far below the point that is controlled
_GAP = 0.03  # distance to what the hand passes over
_BESIDE = 0.08  # the hand and what it carries are less than this far from the hand's path
_CLEAR = 0.012  # enough distance between the hand and other objects
_NUM_ANGLES = 12
_INWARD = (0.0, 0.025)  # from a rim to the middle between the open fingers, metres; the second in narrow places
_ALIGNED, _REACHED, _TURNED = 0.012, 0.006, 0.1  # metres, metres, radians
_LONGEST = 60  # env steps of one movement
_PROGRESS, _PATIENCE = 0.001, 6  # a movement that comes no nearer, metres, ends after so many env steps
_LOST = 0.03  # a carried object is never so much nearer to the hand, or farther from it, than when it was grasped
_CORNERS = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], float)
_FINGERS = np.array([[x, y, -_TIP] for x in (-0.055, -0.047, -0.04, 0.04, 0.047, 0.055) for y in (-0.011, 0.011)])
_PALM = np.array([[x, y, 0.036] for x in np.linspace(-0.105, 0.105, 15) for y in (-0.03, 0, 0.03)])
"""Lowest points [P, 3] of the open fingers and of the palm above them. x: the axis along which fingers open; z: up."""


@dataclass(frozen=True)
class Grasp:
    """A pose of the hand, which points down."""

    position: Array  # [3]
    angle: float
    """Direction in which the fingers open, 0 to pi, from the world's x axis."""
    offset: Array
    """The position's distance from the object's centre [2]: zeros, or towards the rim."""


class Boxes:
    """The bounding boxes, each along its shape's own axes, of the shapes of some bodies that may collide. G boxes."""

    def __init__(self, sim: Any, bodies: Sequence[int]) -> None:
        model, data = sim.model, sim.data
        collides = (model.geom_contype != 0) | (model.geom_conaffinity != 0)
        geoms = np.flatnonzero(np.isin(model.body_rootid[model.geom_bodyid], bodies) & collides)
        turns, sizes = data.geom_xmat[geoms].reshape(-1, 3, 3), model.geom_aabb[geoms, 3:]  # sizes: half of the widths
        self.centres = data.geom_xpos[geoms] + np.einsum("gij,gj->gi", turns, model.geom_aabb[geoms, :3])
        self.corners = self.centres[:, None] + np.einsum("gij,gcj->gci", turns, _CORNERS * sizes[:, None])  # [G, 8, 3]
        self.tops = self.corners[..., 2].max(1, initial=-np.inf)
        sideways = np.moveaxis(turns[:, :2], 1, 2)  # [G, 3, 2], of each of a box's axes
        length = np.linalg.norm(sideways, axis=-1, keepdims=True)
        self._axes = sideways / np.maximum(length, 1e-6)
        reaches = np.einsum("gad,gcd->gac", self._axes, self.corners[..., :2] - self.centres[:, None, :2]).max(
            -1, initial=0
        )
        self._reaches = np.where(length[..., 0] > 0.1, reaches, np.inf)  # [G, 3]; an upright axis separates nothing

    def beside(self, points: Array) -> Array:
        """Horizontal distances [G, P] of points [P, 2 or 3] from the boxes; negative above, inside and below them."""
        apart = points[None, :, :2] - self.centres[:, None, :2]
        separations: Array = (np.abs(np.einsum("gad,gpd->gpa", self._axes, apart)) - self._reaches[:, None]).max(-1)
        return separations

    def free(self, points: Array) -> float:
        """The smallest distance that the points [P, 3] and all above them keep from the boxes; negative inside."""
        return float(np.maximum(self.beside(points), points[:, 2] - self.tops[:, None]).min(initial=np.inf))

    def top(self, points: Array, margin: float) -> float:
        """Height of the highest box within a horizontal `margin` of points; -inf if there is none."""
        return float(self.tops[(self.beside(points) < margin).any(1)].max(initial=-np.inf))


class Expert:
    """The expert of one episode in the library's environment. Raises EnvContractError if the task is not to put one
    object on or in another."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self.thing, self.goal, self._is_in = pick_and_place(env.parsed_problem["goal_state"])
        site = env.object_sites_dict.get(self.goal)
        self._site = None if site is None else env.sim.model.site_name2id(self.goal)
        self._support = self.goal if site is None else env.object_states_dict[self.goal].parent_name
        self.failed: list[Grasp] = []
        self._script = self._play()
        self._action, self._asked_at = np.zeros(7), -1

    def action(self) -> Array:
        """The next action [7] from the present state, in the library's units."""
        if self._env.timestep != self._asked_at:
            self._action, self._asked_at = next(self._script), self._env.timestep
        return self._action

    def grasps(self) -> list[Grasp]:
        """Grasps of the object, the best first: with free space around the hand, both here and at the goal; unlike
        those that have failed; across the object's narrow side; with the hand turned little."""
        corners = self._boxes(self.thing).corners.reshape(-1, 3)
        low, high = corners.min(0), corners.max(0)
        around, around_goal = self._boxes(*self._others()), self._boxes(*self._others() - {self._support})
        to_goal = self._to_goal()
        widths = {angle: np.ptp(corners @ _yaw(angle)[:, 0]) for angle in np.arange(_NUM_ANGLES) * np.pi / _NUM_ANGLES}
        if min(widths.values()) < _SPAN:
            candidates = [(angle, 0.0) for angle, width in widths.items() if width < _SPAN]
        else:
            rims = [(angle, width / 2 - inward) for angle, width in widths.items() for inward in _INWARD]
            candidates = [(angle, way * side) for angle, side in rims for way in (1, -1)]
        scored = []
        for angle, side in candidates:
            turn = _yaw(angle)
            position = (low + high) / 2 + side * turn[:, 0]
            palm, fingers = _PALM @ turn.T, _FINGERS @ turn.T
            under_palm = around.top(palm + position, 0.0) - palm[0, 2]
            position[2] = max(low[2] + _ABOVE_BOTTOM, high[2] - _BELOW_TOP, min(under_palm, high[2] - _HOLD))
            hand = np.concatenate([palm, fingers]) + position
            free = min(around.free(hand), around_goal.free(hand + to_goal), _CLEAR)
            grasp = Grasp(position, angle, side * turn[:2, 0])
            again = sum(_are_alike(grasp, failed) for failed in self.failed)
            off_centre = 10 * (widths[angle] / 2 - abs(side)) if side else 10 * widths[angle]
            score = 100 * free - again - 0.2 * abs(angle - np.pi / 2) - off_centre
            scored.append((score, grasp))
        return [grasp for _, grasp in sorted(scored, key=lambda one: -one[0])]

    def _play(self) -> Iterator[Array]:
        """The actions of attempts, one after the other, until the object is at its goal."""
        while True:
            grasp = self.grasps()[0]

            def to_grasp(grasp: Grasp = grasp) -> Array:
                return grasp.position - self._hand()

            over = self._boxes(*self._env.obj_body_id).top(self._path(grasp.position), _BESIDE)
            yield from self._move(to_grasp, grasp, OPEN, over)
            yield from self._move(to_grasp, grasp, OPEN)
            yield from self._grip(grasp, CLOSED)
            reach = self._distance()

            def is_lost(reach: float = reach) -> bool:
                return abs(self._distance() - reach) > _LOST

            over = self._boxes(*self._others()).top(self._path(self._goal_position()), _BESIDE)
            yield from self._move(self._to_goal, grasp, CLOSED, over, is_lost)
            yield from self._move(self._to_goal, grasp, CLOSED, stop=lambda: is_lost() or self._touches())
            yield from self._grip(grasp, OPEN)
            aside = self._hand() + np.array([0, 0, 0.1])
            while self._is_solved():
                yield self._towards(aside - self._hand(), grasp, OPEN)
            self.failed.append(grasp)

    def _move(
        self,
        way: Callable[[], Array],
        grasp: Grasp,
        gripper: float,
        over: float | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[Array]:
        """Actions that move the hand by the vector `way()` from where it is until that is short. If `over` is given
        (height of what is on the way), the hand rises before it moves sideways, and only the horizontal part counts."""
        nearest, waited = np.inf, 0
        for _ in range(_LONGEST):
            move = way()
            if over is None:
                far = np.abs(move).max()
                nearest, waited = (far, 0) if far < nearest - _PROGRESS else (nearest, waited + 1)
                arrived = far < _REACHED or waited > _PATIENCE
            else:
                arrived = np.hypot(*move[:2]) < _ALIGNED
                tips = self._hand()[2] - _TIP
                up = over + _GAP - (tips if gripper == OPEN else min(tips, self._bottom()))
                move = np.append(move[:2] * (up < _GAP / 2), up)
            if stop() or (arrived and np.abs(self._turn(grasp)).max() < _TURNED):
                return
            yield self._towards(move, grasp, gripper)

    def _grip(self, grasp: Grasp, gripper: float) -> Iterator[Array]:
        """Actions that open or close the gripper in place."""
        place = self._hand()
        for _ in range(_LONGEST):
            if self._env.robots[0].gripper.current_action[-1] * gripper >= 1:
                return
            yield self._towards(place - self._hand(), grasp, gripper)

    def _towards(self, move: Array, grasp: Grasp, gripper: float) -> Array:
        """The action [7] that moves the hand by a vector, and turns it as in a grasp."""
        return np.concatenate([np.clip(move / REACH, -1, 1), np.clip(self._turn(grasp) / TURN, -1, 1), [gripper]])

    def _turn(self, grasp: Grasp) -> Array:
        """The rotation [3] from the hand's orientation to the one in a grasp, as axis-angle."""
        from robosuite.utils.transform_utils import mat2quat, quat2axisangle

        now = self._env.sim.data.site_xmat[self._env.robots[0].eef_site_id].reshape(3, 3)
        turn: Array = quat2axisangle(mat2quat(_yaw(grasp.angle) * [1, -1, -1] @ now.T))
        return turn

    def _hand(self) -> Array:
        return np.array(self._env.sim.data.site_xpos[self._env.robots[0].eef_site_id])

    def _position(self, name: str) -> Array:
        return np.array(self._env.sim.data.xpos[self._env.obj_body_id[name]])

    def _distance(self) -> float:
        return float(np.linalg.norm(self._hand() - self._position(self.thing)))

    def _bottom(self) -> float:
        return float(self._boxes(self.thing).corners[..., 2].min())

    def _path(self, to: Array) -> Array:
        return np.linspace(self._hand(), to, 20)

    def _goal_position(self) -> Array:
        """Position [3] of the object at its goal: in the middle of a region, or standing on the middle of a surface."""
        place = self._position(self.goal) if self._site is None else np.array(self._env.sim.data.site_xpos[self._site])
        if not self._is_in:
            place[2] += self._position(self.thing)[2] - self._bottom()
        return place

    def _to_goal(self) -> Array:
        return self._goal_position() - self._position(self.thing)

    def _others(self) -> set[str]:
        return set(self._env.obj_body_id) - {self.thing}

    def _boxes(self, *names: str) -> Boxes:
        return Boxes(self._env.sim, [self._env.obj_body_id[name] for name in names])

    def _touches(self) -> bool:
        """Whether the object stands on its goal."""
        env = self._env
        return not self._is_in and env.check_contact(env.get_object(self.thing), env.get_object(self._support))

    def _is_solved(self) -> bool:
        from libero.libero.envs.predicates import eval_predicate_fn

        ((predicate, *names),) = self._env.parsed_problem["goal_state"]
        return bool(eval_predicate_fn(predicate, *(self._env.object_states_dict[name] for name in names)))


def pick_and_place(goal: Sequence[Sequence[str]]) -> tuple[str, str, bool]:
    """The object that a goal moves, the object or site where it is to be, and whether it is to be in that, not on it.
    Raises EnvContractError for another kind of goal."""
    if len(goal) == 1 and len(goal[0]) == 3 and goal[0][0] in ("on", "in"):
        predicate, thing, where = goal[0]
        return thing, where, predicate == "in"
    raise EnvContractError(f"the expert puts one object on or in another, and the goal is {goal}", "env.task")


def _yaw(angle: float) -> Array:
    """Rotation [3, 3] around the vertical axis."""
    return np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]])


def _are_alike(one: Grasp, other: Grasp) -> bool:
    turn = abs(one.angle - other.angle)
    return bool(min(turn, np.pi - turn) < np.pi / 5 and np.linalg.norm(one.offset - other.offset) < _SPAN / 2)
