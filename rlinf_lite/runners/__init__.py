"""The loops that drive worker groups."""

from rlinf_lite.runners.checkpoints import CheckpointError
from rlinf_lite.runners.embodied import EmbodiedRunner
from rlinf_lite.runners.reasoning import ReasoningRunner, check_rewards
from rlinf_lite.runners.run_paths import check_resume
from rlinf_lite.runners.run_result import RunResult
from rlinf_lite.runners.sft import SFTRunner, check_demonstrations

__all__ = [
    "CheckpointError",
    "EmbodiedRunner",
    "ReasoningRunner",
    "RunResult",
    "SFTRunner",
    "check_demonstrations",
    "check_resume",
    "check_rewards",
]
