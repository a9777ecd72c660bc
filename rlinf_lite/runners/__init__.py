"""The loops that drive worker groups. Names are loaded when first used: reading a checkpoint needs neither ray nor
torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_lite.lazy import lazy_names

if TYPE_CHECKING:
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

__getattr__ = lazy_names(
    __name__,
    {
        "async_embodied": ["AsyncEmbodiedRunner"],
        "async_reasoning": ["AsyncReasoningRunner"],
        "checkpoints": ["CheckpointError"],
        "embodied": ["EmbodiedRunner"],
        "placed": ["run_placed"],
        "reasoning": ["ReasoningRunner", "check_rewards"],
        "run_paths": ["RunClaim", "RunInUseError", "claim_run"],
        "sft": ["SFTRunner"],
        "stopping": ["RunResult"],
    },
)
