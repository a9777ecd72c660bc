"""The loops that drive worker groups."""

from rlinf_lite.runners.checkpoints import CheckpointError
from rlinf_lite.runners.embodied import EmbodiedRunner
from rlinf_lite.runners.reasoning import ReasoningRunner, check_rewards
from rlinf_lite.runners.run_paths import RunClaim, RunInUseError, claim_run
from rlinf_lite.runners.run_result import RunResult
from rlinf_lite.runners.sft import SFTRunner, check_demonstrations

__all__ = [
    "CheckpointError",
    "EmbodiedRunner",
    "ReasoningRunner",
    "RunClaim",
    "RunInUseError",
    "RunResult",
    "SFTRunner",
    "check_demonstrations",
    "check_rewards",
    "claim_run",
]
