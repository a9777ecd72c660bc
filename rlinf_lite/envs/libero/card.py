"""LIBERO's card: options, suites and their protocols, checks of a config, and probes for doctor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import model_validator

from rlinf_lite.cards import EnvCard, NonNegativeInt, Observed, PositiveInt, Probe, Problem, Section, Suite, Task
from rlinf_lite.config.rules.cards import evaluates, uneven_episodes
from rlinf_lite.envs.libero.tasks import (
    ALL_SUITES,
    EPISODES_PER_TASK,
    EXPERT_TASKS,
    MAX_STEPS,
    NUM_INITIAL_STATES,
    PRO_SUITES,
    SETTLE_STEPS,
    SUITES,
    max_steps,
    sentence,
    suite_and_name,
    tasks_of,
)
from rlinf_lite.registry import UnknownEnvError, install_command, is_installed, pip_command

if TYPE_CHECKING:
    from rlinf_lite.config import Config

STATE_DIM, ACTION_DIM = 8, 7
_NEEDED = ("robosuite", "bddl", "mujoco", "numba", "easydict", "future", "termcolor", "cv2", "matplotlib", "scipy")
_WHO = {"openvla": "OpenVLA", "lerobot": "LeRobot", "rlinf": "RLinf"}


class LiberoOptions(Section):
    protocol: Literal["openvla", "lerobot", "rlinf"] = "openvla"
    """Publication whose settling steps are used, and whose limit of env steps if env.train or env.eval sets none: 220,
    280 or 240 in libero_spatial."""
    settle_steps: NonNegativeInt | None = None
    """Env steps without movement, gripper open, after every reset and before the policy acts; they do not count towards
    the limit. null: the protocol's, 10, 10 or 15."""
    train_states: Literal["published", "drawn"] = "published"
    """Initial states of training and of demonstrations; evaluations play the published ones. published: the 50 of each
    task; drawn: new ones, which the library's own reset draws from a task's regions, by the seed of the episode."""
    cameras: list[Literal["agentview", "robot0_eye_in_hand"]] = ["agentview", "robot0_eye_in_hand"]
    """Cameras that the policy sees, in addition to the robot's state; []: none."""
    camera_size: tuple[PositiveInt, PositiveInt] = (256, 256)
    """Height and width of pictures."""
    render: Literal["fast", "exact"] = "fast"
    """exact: the library's pictures; fast: without multisampling, shadows and reflections, in a buffer of their
    size."""
    gripper: Literal["raw", "openvla"] = "raw"
    """The seventh number of an action. raw: robosuite's, -1 opens and 1 closes; openvla: as in OpenVLA's datasets, 0
    (below 0.5) closes and 1 opens."""
    assets: str | None = None
    """Folder of meshes and textures. null: what the library's own config.yaml names, the packages that `make libero`
    installs, hf-libero's folder assets, or ~/.cache/libero/assets."""

    @model_validator(mode="before")
    @classmethod
    def _settles_as_its_protocol(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("settle_steps") is None:
            return {**given, "settle_steps": SETTLE_STEPS.get(str(given.get("protocol", "openvla")))}
        return given


def _task(name: str) -> Task:
    limit = max_steps(tasks_of(name), "openvla")
    assert limit is not None
    return Task(limit, STATE_DIM, ACTION_DIM, STATE_DIM, {"agentview": (256, 256), "robot0_eye_in_hand": (256, 256)})


def _suites() -> Iterator[tuple[str, Suite]]:
    for protocol, limits in MAX_STEPS.items():
        for suite, limit in limits.items():
            episodes, tasks = EPISODES_PER_TASK[protocol], len(SUITES[suite])
            about = f"{tasks} tasks x {episodes} published initial states, {limit} env steps, as {_WHO[protocol]} does"
            settings = {
                "env.id": "libero",
                "env.task": suite,
                "env.options.protocol": protocol,
                "env.options.settle_steps": SETTLE_STEPS[protocol],
                "env.eval.num_episodes": tasks * episodes,
                "env.eval.max_episode_steps": limit,
                "env.eval.ignore_terminations": False,
                "env.eval.mode": "greedy",
            }
            name = suite.replace("_", "-") + ("" if protocol == "openvla" else f"-{protocol}")
            yield name, Suite(about, settings)
            for pro in PRO_SUITES:
                if protocol == "openvla" and pro.startswith(suite):
                    about = f"LIBERO-PRO's variants of {suite}, with its limit of env steps"
                    yield pro.replace("_", "-"), Suite(about, settings | {"env.task": pro})


class Libero(EnvCard):
    """LIBERO: a suite (libero_spatial, libero_object, libero_goal, libero_10, libero_90, and of LIBERO-PRO
    libero_spatial_lan, _object, _swap, _task and so on), one of its tasks (of LIBERO-PRO: libero_spatial_swap/<task>),
    or a list."""

    Options = LiberoOptions
    free_options = ("assets",)
    simulator = "rlinf_lite.envs.libero.simulator:LiberoSimulator"
    package, extra = "libero", "libero"
    tasks = {suite: _task(suite) for suite in ALL_SUITES}
    has_other_tasks = True
    task_groups = ALL_SUITES
    suites = dict(_suites())
    initial_states = (
        "published: episode k plays task k % tasks, from its state (k // tasks) % 50; the same ones at every evaluation"
    )
    simulator_bytes = (0, 1400 * 2**20)

    def task(self, name: str) -> Task | None:
        try:
            return _task(name)
        except UnknownEnvError:
            return None

    def max_episode_steps(self, task: str, options: LiberoOptions) -> int | None:
        try:
            return max_steps(tasks_of(task), options.protocol)
        except UnknownEnvError:
            return None

    def num_tasks(self, task: str) -> int:
        """Tasks with their initial states."""
        return len(tasks_of(task)) * NUM_INITIAL_STATES

    def num_scenes(self, task: str) -> int:
        return len(tasks_of(task))

    def steps_per_s(self, task: str, options: LiberoOptions) -> float:
        return 20.0

    def sentences(self, task: str) -> Sequence[str]:
        from rlinf_lite.envs.errors import MissingAssetsError

        try:
            return [sentence(name) for name in tasks_of(task)]
        except MissingAssetsError:
            return ()  # reported by `problems`

    def observed(self, task: str, options: LiberoOptions) -> Observed | None:
        if self.task(task) is None:
            return None
        return Observed(ACTION_DIM, STATE_DIM, dict.fromkeys(options.cameras, options.camera_size))

    def lacks_state(self, options: LiberoOptions) -> Problem | None:
        return Problem("env.id", "libero's state is the robot's own, without the objects")

    def lacks_expert(self, task: str, options: LiberoOptions) -> str | None:
        try:
            not_covered = [name for name in tasks_of(task) if name not in EXPERT_TASKS]
        except UnknownEnvError:
            return None  # reported by `problems`
        if not not_covered:
            return None
        more = f" and {len(not_covered) - 3} more" if len(not_covered) > 3 else ""
        covered = ["libero_spatial", "libero_object", *(name for name in EXPERT_TASKS if name in SUITES["libero_goal"])]
        return f"no scripted expert for {', '.join(not_covered[:3])}{more}: there is one for {', '.join(covered)}"

    def problems(self, config: Config) -> Iterator[Problem]:
        from rlinf_lite.envs.errors import MissingAssetsError
        from rlinf_lite.envs.libero.package import find_assets
        from rlinf_lite.envs.libero.pro import pro_folder

        env = config.env
        try:
            tasks = tasks_of(env.task)
        except UnknownEnvError as error:
            yield Problem("env.task", error.text)
            return
        if len(set(env.options.cameras)) < len(env.options.cameras):
            yield Problem("env.options.cameras", f"{', '.join(env.options.cameras)} names a camera twice")
        yield from uneven_episodes(config, len(tasks))
        episodes, states = env.eval.num_episodes, self.num_tasks(env.task)
        if evaluates(config) and episodes > states and (env.eval.mode == "greedy" or episodes % states):
            text = f"is {episodes}, and {states} initial states are published: some would count more often than others"
            yield Problem("env.eval.num_episodes", f"{text}. Use {states} or less")
        if max_steps(tasks, env.options.protocol) is None:
            for split in ("train", "eval"):
                if getattr(env, split).max_episode_steps is None:
                    text = f"{_WHO[env.options.protocol]} has published no limit for libero_90. Set it (400 elsewhere)"
                    yield Problem(f"env.{split}.max_episode_steps", f"{text}, or env.options.protocol to openvla")
        missing = [module for module in _NEEDED if not is_installed(module)]
        if is_installed("libero") and missing:
            text = f"libero needs {', '.join(missing)}, which is not installed. {install_command('libero')}"
            yield Problem("env.id", text, of_machine=True)
        elif is_installed("libero"):
            try:
                find_assets(env.options.assets)
                if any(suite_and_name(task)[0] in PRO_SUITES for task in tasks):
                    pro_folder()
            except MissingAssetsError as error:
                yield Problem(error.key, error.text, of_machine=True)

    def probes(self) -> dict[str, Probe]:
        """Checks for `doctor`: the import of the library; its assets and a driver for pictures."""
        from rlinf_lite.envs.libero.package import GET_ASSETS

        return {
            self.name: Probe("rlinf_lite.envs.libero.probes:imported", pip_command("libero")),
            "LIBERO episodes": Probe(
                "rlinf_lite.envs.libero.probes:played",
                GET_ASSETS,
                fixes={"EGL": "apt-get install libegl1 libgl1-mesa-dri"},
                unless="episodes of LIBERO",
            ),
        }
