"""MetaWorld's card: options, tasks and sets of tasks, suites, checks of a config, and probes for doctor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rlinf_lite.cards import EnvCard, Observed, PositiveInt, Probe, Problem, Section, Suite, Task
from rlinf_lite.config.rules.cards import uneven_episodes
from rlinf_lite.envs.metaworld.tasks import DIFFICULTIES, MAX_STEPS, OWN_STATE_DIM, SENTENCES, STATE_DIM, tasks_of
from rlinf_lite.registry import UnknownEnvError, install_command, is_installed

if TYPE_CHECKING:
    from rlinf_lite.config import Config

CAMERA = "corner2"


class MetaWorldOptions(Section):
    obs_mode: Literal["state", "rgb", "rgb+state"] = "state"
    """Observations of the policy. rgb: pictures and the hand's own state; state: everything, as numbers."""
    reward_mode: Literal["sparse", "dense"] = "dense"
    """sparse: 1 at the first success of an episode; dense: the task's own shaped reward, 0 to 1 per step."""
    camera_size: tuple[PositiveInt, PositiveInt] = (128, 128)
    """Height and width of pictures."""
    render: Literal["fast", "exact"] = "fast"
    """exact: the library's pictures; fast: without shadows, reflections and multisampling, 12 times faster."""


def _task(num_tasks: int = 1) -> Task:
    one_hot = num_tasks if num_tasks > 1 else 0
    return Task(MAX_STEPS, STATE_DIM + one_hot, 4, OWN_STATE_DIM, {CAMERA: (128, 128)})


def _suite(task: str, num_episodes: int, max_steps: int = MAX_STEPS) -> dict[str, Any]:
    return {
        "env.id": "metaworld",
        "env.task": task,
        "env.eval.num_episodes": num_episodes,
        "env.eval.max_episode_steps": max_steps,
        "env.eval.ignore_terminations": False,
        "env.eval.seed": 10_000,
        "env.eval.mode": "greedy",
    }


class MetaWorld(EnvCard):
    """MetaWorld v3: one of 50 tasks, MT10, MT50, a difficulty (easy, medium, hard, very_hard) or a list of tasks."""

    Options = MetaWorldOptions
    simulator = "rlinf_lite.envs.metaworld.simulator:MetaWorldSimulator"
    package, extra = "metaworld", "metaworld"
    tasks = {"reach-v3": _task(), "push-v3": _task(), "MT10": _task(10), "MT50": _task(50)}
    has_other_tasks = True
    task_groups = DIFFICULTIES
    suites = {
        "metaworld-mt10": Suite(
            "10 tasks x 50 episodes of 500 env steps, as the library evaluates", _suite("MT10", 500)
        ),
        "metaworld-mt50": Suite("50 tasks x 10 episodes of 500 env steps, as LeRobot does", _suite("MT50", 500)),
        "metaworld-mt50-100": Suite("50 tasks x 10 episodes of 100 env steps, as RLinf does", _suite("MT50", 500, 100)),
    }
    simulator_bytes = (110 * 2**20, 31 * 2**20)

    def task(self, name: str) -> Task | None:
        try:
            return _task(len(tasks_of(name)))
        except UnknownEnvError:
            return None

    def num_tasks(self, task: str) -> int:
        return len(tasks_of(task))

    def steps_per_s(self, task: str, options: MetaWorldOptions) -> float:
        return 80.0

    def sentences(self, task: str) -> Sequence[str]:
        return [SENTENCES[name] for name in tasks_of(task)]

    def one_hot(self, task: str, options: MetaWorldOptions) -> Sequence[str]:
        found = self.task(task)
        return tasks_of(task) if options.obs_mode != "rgb" and found and found.state_dim > STATE_DIM else ()

    def observed(self, task: str, options: MetaWorldOptions) -> Observed | None:
        found = self.task(task)
        if found is None:
            return None
        cameras = {} if options.obs_mode == "state" else {CAMERA: options.camera_size}
        return Observed(found.action_dim, OWN_STATE_DIM if options.obs_mode == "rgb" else found.state_dim, cameras)

    def lacks_state(self, options: MetaWorldOptions) -> Problem | None:
        return Problem("env.options.obs_mode", "rgb has no objects in its state") if options.obs_mode == "rgb" else None

    def problems(self, config: Config) -> Iterator[Problem]:
        try:
            tasks_of(config.env.task)
        except UnknownEnvError as error:
            yield Problem("env.task", error.text)
        else:
            yield from uneven_episodes(config, self.num_tasks(config.env.task))
        if is_installed("metaworld") and not is_installed("mujoco"):
            text = f"metaworld needs mujoco, which is not installed. {install_command('metaworld')}"
            yield Problem("env.id", text, of_machine=True)

    def probes(self) -> dict[str, Probe]:
        """Checks for `doctor`. A failure of EGL is only a warning: states need no renderer."""
        return {
            **super().probes(),
            "EGL": Probe(
                "rlinf_lite.envs.metaworld.painter:painted",
                "apt-get install libegl1 libgl1-mesa-dri",
                unless="MetaWorld pictures",
            ),
        }
