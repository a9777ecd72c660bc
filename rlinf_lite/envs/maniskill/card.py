"""ManiSkill's card: options, tasks and their instructions, checks of a config, and probes for doctor."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlinf_lite.cards import EnvCard, Observed, PositiveInt, Probe, Problem, Section, Task

if TYPE_CHECKING:
    from rlinf_lite.config import Config

_ACTION_DIMS = {"pd_joint_delta_pos": 8, "pd_ee_delta_pose": 7, "pd_ee_delta_pos": 4}
_ONE = {"base_camera": (128, 128)}
_TWO = {"base_camera": (128, 128), "hand_camera": (128, 128)}
EXPERT_TASKS = ("PickCube-v1",)
EXPERT_CONTROL_MODES = ("pd_ee_delta_pos", "pd_ee_delta_pose")
_INSTRUCTIONS = {
    "PickCube-v1": "pick up the red cube and move it to the green goal",
    "PushCube-v1": "push the blue cube to the red and white target",
    "PullCube-v1": "pull the blue cube to the red and white target",
    "StackCube-v1": "stack the red cube on the green cube",
    "PegInsertionSide-v1": "insert the orange end of the peg into the hole of the box",
    "LiftPegUpright-v1": "lift the peg upright",
    "PokeCube-v1": "poke the cube with the peg",
    "RollBall-v1": "roll the ball to the goal",
    "PlaceSphere-v1": "place the sphere in the bin",
    "PlugCharger-v1": "plug the charger into the receptacle",
    "TurnFaucet-v1": "turn the faucet on",
}


class ManiSkillOptions(Section):
    control_mode: str | None = "pd_joint_delta_pos"
    """Controller of the robot; null: the task's default."""
    obs_mode: Literal["state", "rgb", "rgb+state"] = "state"
    """Observations that the policy sees."""
    reward_mode: Literal["sparse", "dense", "normalized_dense"] = "normalized_dense"
    """Reward that the task computes."""
    sim_backend: Literal["auto", "physx_cpu", "physx_cuda"] = "auto"
    """auto: physx_cuda on an env worker that owns a GPU slot, else physx_cpu."""
    render_backend: Literal["auto", "cpu", "gpu", "none"] = "auto"
    """auto: none for state observations, else gpu, or cpu (software Vulkan) if no GPU renders."""
    camera_size: tuple[PositiveInt, PositiveInt] = (128, 128)
    """Height and width of images."""
    kwargs: dict[str, Any] = {}
    """Further arguments of the task, for gymnasium.make."""


class ManiSkill(EnvCard):
    """ManiSkill 3: CPU simulation (one scene per row) or GPU simulation (one batch), state or images."""

    Options = ManiSkillOptions
    simulator = "rlinf_lite.envs.maniskill.simulator:make_simulator"
    package, extra = "mani_skill", "maniskill"
    # A test compares these numbers with the simulators. Action dimensions are those of pd_joint_delta_pos.
    tasks = {
        "PushCube-v1": Task(50, 35, 8, 25, _ONE),
        "PickCube-v1": Task(50, 42, 8, 29, _ONE),
        "StackCube-v1": Task(50, 48, 8, 25, _TWO),
        "PegInsertionSide-v1": Task(100, 43, 8, 25, _TWO),
    }
    has_other_tasks = True
    simulator_bytes = (440 * 2**20, 2**20)
    free_options = ("render_backend",)
    probe_options = {"obs_mode": "state", "sim_backend": "physx_cpu"}

    def observed(self, task: str, options: ManiSkillOptions) -> Observed | None:
        found, action_dim = self.tasks.get(task), _ACTION_DIMS.get(str(options.control_mode))
        if found is None or action_dim is None or options.kwargs:
            return None
        cameras = {} if options.obs_mode == "state" else dict.fromkeys(found.cameras, options.camera_size)
        return Observed(action_dim, found.own_state_dim if options.obs_mode == "rgb" else found.state_dim, cameras)

    def steps_per_s(self, task: str, options: ManiSkillOptions) -> float:
        rate: float = (options.kwargs.get("sim_config") or {}).get("control_freq", 20.0)
        return rate

    def simulator_memory(self, options: ManiSkillOptions, accelerator: str) -> tuple[int, int] | None:
        """Memory per simulator; not known for simulation on a GPU."""
        on_gpu = options.sim_backend == "physx_cuda" or (options.sim_backend, accelerator) == ("auto", "cuda")
        return None if on_gpu else self.simulator_bytes

    def lacks_state(self, options: ManiSkillOptions) -> Problem | None:
        return Problem("env.options.obs_mode", "rgb has no state") if options.obs_mode == "rgb" else None

    def lacks_expert(self, task: str, options: ManiSkillOptions) -> str | None:
        control, sim = options.control_mode, options.sim_backend
        if task in EXPERT_TASKS and control in EXPERT_CONTROL_MODES and sim != "physx_cuda":
            return None
        return (
            f"no scripted expert for {task} under {control} in {sim}: there is one for {', '.join(EXPERT_TASKS)} under "
            f"{' and '.join(EXPERT_CONTROL_MODES)}, in physx_cpu"
        )

    def problems(self, config: Config) -> Iterator[Problem]:
        from rlinf_lite.config.plan import slots  # avoids an import cycle

        if config.env.options.sim_backend == "physx_cuda" and slots(config.cluster)[0] == "cpu":
            text = "physx_cuda simulates on GPUs, and accelerator=cpu here. Use auto or physx_cpu"
            yield Problem("env.options.sim_backend", text)

    def probes(self) -> dict[str, Probe]:
        """Checks for `doctor`. A failure of Vulkan is only a warning, because states and other environments' images do
        not need it. A failure of PhysX on GPUs is one too, because CPUs can simulate."""
        release = Path("/etc/os-release")
        suite = "-t bookworm-backports " if release.is_file() and "bookworm" in release.read_text() else ""
        return {
            "maniskill": Probe(
                "rlinf_lite.cli.probes:simulator",
                "pip install --force-reinstall 'rlinf_lite[maniskill]'",
                fixes={"shared object": "apt-get install libgl1 libglib2.0-0 libx11-6"},
            ),
            "Vulkan": Probe(
                "rlinf_lite.envs.maniskill.setup:rendered_frame",
                f"apt-get install {suite}libvulkan1 mesa-vulkan-drivers",
                unless="ManiSkill images",
            ),
            "GPU physics": Probe(
                "rlinf_lite.envs.maniskill.setup:gpu_physics",
                'python -c "import sapien.physx; sapien.physx.enable_gpu()"',
                unless="ManiSkill in physx_cuda",
            ),
        }


def instruction_of(task: str) -> str:
    """The instruction of a known task, or else its name in words: "OpenCabinetDrawer-v1" -> "open cabinet drawer"."""
    name = re.sub(r"-v\d+$", "", task)
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)
    return _INSTRUCTIONS.get(task) or " ".join(words).lower()
