"""The loops that drive worker groups."""

from rlinf_lite.runners.async_embodied import AsyncEmbodiedRunner as AsyncEmbodiedRunner
from rlinf_lite.runners.async_reasoning import AsyncReasoningRunner as AsyncReasoningRunner
from rlinf_lite.runners.checkpoints import CheckpointError as CheckpointError
from rlinf_lite.runners.embodied import EmbodiedRunner as EmbodiedRunner
from rlinf_lite.runners.placed import run_placed as run_placed
from rlinf_lite.runners.reasoning import ReasoningRunner as ReasoningRunner
from rlinf_lite.runners.reasoning import check_rewards as check_rewards
from rlinf_lite.runners.run_paths import RunClaim as RunClaim
from rlinf_lite.runners.run_paths import RunInUseError as RunInUseError
from rlinf_lite.runners.run_paths import claim_run as claim_run
from rlinf_lite.runners.sft import SFTRunner as SFTRunner
from rlinf_lite.runners.stopping import RunResult as RunResult
