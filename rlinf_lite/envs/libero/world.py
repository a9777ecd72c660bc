"""One LIBERO environment, in its own process. Steps are the library's; observations are made only when needed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlinf_lite.envs.errors import MissingAssetsError
from rlinf_lite.envs.libero.expert import Expert
from rlinf_lite.envs.libero.package import (
    ASSETS_KEY,
    GET_ASSETS,
    InitialStateError,
    bddl_file,
    import_libero,
    initial_states,
)
from rlinf_lite.envs.libero.stepping import Stepping
from rlinf_lite.envs.painter import Painter

if TYPE_CHECKING:
    from rlinf_lite.envs.libero.card import LiberoOptions

NO_OP = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)
"""Action that lets a scene settle: the arm stays, the gripper opens."""
FIXTURE_SEED = 0
"""Seed of NumPy's global generator before a reset to a published initial state. From it the library draws the places of
fixtures (within 1 cm), which are not part of those. OpenVLA's evaluation sets 0 before a task's first episode."""
_DRAWN = [f"{what}_{of}" for what in ("geom", "site", "cam") for of in ("xpos", "xmat")] + ["light_xpos", "light_xdir"]
"""Fields of MjData from which a picture is drawn: positions that MuJoCo's last step has computed."""
_KEY = "env.options.cameras"
T = TypeVar("T")
_TRIES = 100  # at most this many placements are drawn


class Row:
    """The work of a row's process. It holds the environment of one task at a time and builds another when needed."""

    def __init__(self, options: LiberoOptions, assets: Path) -> None:
        """Raises MissingExtraError, RenderUnavailableError."""
        import_libero(assets)
        self._options = options
        self._world: World | None = None
        self._expert: Expert | None = None
        if options.cameras:
            import mujoco

            Painter(mujoco.MjModel.from_xml_string("<mujoco/>"), options.camera_size, options.render, _KEY).close()

    def reset(self, task: str, state: int, drawn: bool = False) -> None:
        """Begin an episode of `task` in its published initial state number `state`, or in one drawn with that seed."""
        if self._world is None or self._world.task != task:
            if self._world is not None:
                self._world.close()
            self._world = None
            gc.collect()  # a world has reference cycles; two at a time would need twice the memory
            self._world = World(task, self._options)
        self._world.reset(state, drawn)
        self._expert = None

    def step(self, action: NDArray[np.float64]) -> bool:
        """Take one env step with an action [7]; returns whether the task is solved after it."""
        return self._playing().step(action)

    def observe(self) -> tuple[NDArray[np.float32], dict[str, NDArray[np.uint8]]]:
        """State [8], and pictures [H, W, 3] by camera."""
        world = self._playing()
        return world.state(), world.pictures()

    def expert_action(self) -> NDArray[np.float64]:
        """The scripted expert's next action [7]. Raises EnvContractError where the task is no pick and place."""
        if self._expert is None:
            self._expert = Expert(self._playing().env)
        return self._expert.action()

    def simulation_state(self) -> NDArray[np.float64]:
        """State of the simulation [1 + nq + nv]: time, positions, velocities. For tests."""
        state: NDArray[np.float64] = self._playing().env.sim.get_state().flatten()
        return state

    def _playing(self) -> World:
        if self._world is None:
            raise RuntimeError("step or observe before the first reset")
        return self._world


@contextmanager
def _newly_built() -> Iterator[dict[str, NDArray[np.float64]]]:
    """A context that yields arrays of the model built inside, with their values before the library moves fixtures."""
    from robosuite.environments.base import MujocoEnv

    built: dict[str, NDArray[np.float64]] = {}
    initialise = MujocoEnv._initialize_sim

    def initialise_and_note(env: Any, xml_string: str | None = None) -> None:
        initialise(env, xml_string)
        built.update({name: np.array(getattr(env.sim.model, name)) for name in ("body_pos", "body_quat", "site_rgba")})

    MujocoEnv._initialize_sim = initialise_and_note
    try:
        yield built
    finally:
        MujocoEnv._initialize_sim = initialise


def _placed(make: Callable[[], T], seed: int) -> T:
    """Call `make`, which places objects at random, with a seed. If the library refuses a placement, the next one is
    drawn."""
    from robosuite.utils.errors import RandomizationError

    np.random.seed(seed)
    for _ in range(_TRIES - 1):
        with suppress(RandomizationError):  # the library's own wrapper tries again forever, after any error
            return make()
    return make()


class World:
    """The library's environment of one task."""

    def __init__(self, task: str, options: LiberoOptions) -> None:
        """Raises MissingAssetsError, InitialStateError, RenderUnavailableError."""
        import mujoco
        from libero.libero.envs.env_wrapper import ControlEnv
        from robosuite.utils.observables import Observable, sensor

        self.task, self._options = task, options
        self._states = initial_states(task)
        try:
            with _newly_built() as built:
                self._control = _placed(
                    lambda: ControlEnv(
                        bddl_file_name=str(bddl_file(task)),
                        use_camera_obs=False,
                        has_offscreen_renderer=False,
                        ignore_done=True,  # the library's limit is 1000 env steps; ChunkedEnv has its own
                    ),
                    FIXTURE_SEED,
                )
        except (OSError, SyntaxError, ValueError) as error:  # an XML file, a mesh or a texture
            text = (
                f"{task} cannot be built from the assets found here: {error}. {GET_ASSETS} --force-reinstall mends them"
            )
            raise MissingAssetsError(text, ASSETS_KEY) from error
        self.env: Any = self._control.env
        # MuJoCo keeps the source of the model compiled last, 400 MB of meshes and textures: an empty one replaces it
        mujoco.MjModel.from_xml_string("<mujoco/>")
        self._check_states()
        self._keep_model(built)
        model, data = self.env.sim.model._model, self.env.sim.data._data
        self._stepping = Stepping(self.env, model, data)
        self._painter: Painter | None = None
        if options.cameras:
            self._drawn = model
            self._painter = Painter(model, options.camera_size, options.render, _KEY, hidden_groups=[0])
            self._shown, self._shown_rgba = mujoco.MjData(model), model.site_rgba.copy()

            @sensor(modality="picture")
            def moment(_: Any) -> NDArray[np.float64]:
                """Store the visible positions of this moment, for a picture that is drawn later, if at all. The library
                draws pictures when its other sensors are read, in one of 25 substeps."""
                for name in _DRAWN:
                    getattr(self._shown, name)[:] = getattr(data, name)
                self._shown_rgba[:] = model.site_rgba
                return np.zeros(1)

            self.env.add_observable(Observable("moment", moment, sampling_rate=self.env.control_freq))

    def reset(self, state: int, drawn: bool = False) -> None:
        """Begin in the published initial state number `state`, or where the library places objects with that seed."""
        _placed(self.env.reset, state if drawn else FIXTURE_SEED)
        if not drawn:  # the initial state replaces all that was placed, except fixtures
            self._control.set_init_state(self._states[state])
        for _ in range(self._options.settle_steps or 0):
            self.step(np.array(NO_OP))

    def step(self, action: NDArray[np.float64]) -> bool:
        with self._stepping.active():
            return bool(self.env.step(action)[2])

    def state(self) -> NDArray[np.float32]:
        """State of the robot [8]: the hand's position (3), its orientation as axis-angle (3), finger positions (2)."""
        from robosuite.utils.transform_utils import quat2axisangle

        seen = {name: self.env._observables[f"robot0_{name}"].obs for name in ("eef_pos", "eef_quat", "gripper_qpos")}
        turned = quat2axisangle(np.array(seen["eef_quat"]))
        return np.concatenate([seen["eef_pos"], turned, seen["gripper_qpos"]]).astype(np.float32)

    def pictures(self) -> dict[str, NDArray[np.uint8]]:
        """Pictures [H, W, 3] by camera, mirrored: policies are trained with the library's pictures, which are upside
        down, turned by 180 degrees."""
        if self._painter is None:
            return {}
        model = self._drawn
        now = model.site_rgba.copy()
        model.site_rgba[:] = self._shown_rgba  # a burner's glow changes at the end of a step, later than the picture
        images = {camera: self._painter.paint(self._shown, camera) for camera in self._options.cameras}
        model.site_rgba[:] = now
        return {camera: np.ascontiguousarray(image[:, ::-1]) for camera, image in images.items()}

    def close(self) -> None:
        if self._painter is not None:
            self._painter.close()
        self._control.close()

    def _keep_model(self, built: Mapping[str, NDArray[np.float64]]) -> None:
        """Make resets restore the values of the model instead of building it again. `built` holds the arrays of the
        model that resets and steps change, with their values before."""
        env = self.env
        model = env.sim.model
        # Each reset adds the task's initialisers again, and then draws a number for each of them. The first reset has
        # them twice, later ones more often, so that the places of fixtures would depend on earlier resets.
        initialisers = 2 * env.object_property_initializers

        def restore() -> None:
            for name, values in built.items():
                getattr(model, name)[:] = values
            env.object_property_initializers[:] = initialisers
            for robot in env.robots:
                robot.gripper.current_action = np.zeros(robot.gripper.dof)
            env.sim.reset()
            env.sim.forward()
            env.sim.forward()  # as the library's renderer does when it is made: the solver starts from its last result
            env.initialize_time(env.control_freq)

        env._destroy_sim = env._load_model = lambda: None
        env._initialize_sim = restore

    def _check_states(self) -> None:
        """Raise InitialStateError for states of a wrong length, which the library would accept and play wrongly."""
        model = self.env.sim.model
        numbers = 1 + model.nq + model.nv
        if self._states.shape[1] != numbers:
            raise InitialStateError(
                f"the published initial states of {self.task} have {self._states.shape[1]} numbers, its simulation "
                f"1 + {model.nq} + {model.nv} = {numbers}: the assets belong to another version of LIBERO. Name others "
                "with env.options.assets"
            )
