"""rlinf_lite: reinforcement learning for vision-language-action policies in simulators.

Names that need torch or Hydra are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_lite.lazy import lazy_names

if TYPE_CHECKING:
    from rlinf_lite.config import load_config as load_config
    from rlinf_lite.envs import make_env as make_env
    from rlinf_lite.launch import evaluate as evaluate
    from rlinf_lite.launch import train as train
    from rlinf_lite.metrics import EvalSummary as EvalSummary
    from rlinf_lite.models import ActionQueue as ActionQueue
    from rlinf_lite.models import load_policy as load_policy
    from rlinf_lite.runners import RunResult as RunResult

__version__ = "0.1.0"

__getattr__ = lazy_names(
    __name__,
    {
        "config": ["load_config"],
        "envs": ["make_env"],
        "launch": ["evaluate", "train"],
        "metrics": ["EvalSummary"],
        "models": ["ActionQueue", "load_policy"],
        "runners": ["RunResult"],
    },
)
