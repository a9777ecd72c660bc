"""`rlinf-lite train NAME|RUN key=value`: train as a config says, or continue a run.

`runner.task_type` of the config selects imitation, reinforcement learning in a simulator, or a language model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_lite.cli.parse import DETACH, parse_cli

if TYPE_CHECKING:
    from rlinf_lite.runners import RunResult

ABOUT = "Train a policy in a simulator, by reinforcement learning or imitation, or a language model on problems."


def train(arguments: Sequence[str]) -> int:
    """Train. Returns the exit code: 0, 1 after an error, or 130 after Ctrl-C. Exits with 2 if the config is wrong."""
    cfg = parse_cli(arguments, None, ABOUT, None, detaches=True)
    if DETACH in arguments:
        from rlinf_lite.cli.detach import detach

        return detach([word for word in arguments if word != DETACH], Path(cfg.runner.logger.log_path))
    from rlinf_lite.launch import train  # takes seconds to import; mistakes in the config are reported first

    return run_to_its_end(train, cfg)


def run_to_its_end(train: Callable[[Any], RunResult], cfg: Any) -> int:
    """Run `train(cfg)` and return the exit code: 0, 130 after Ctrl-C, or 1 after an error that the user can fix. The
    message of such an error is printed without a traceback."""
    from rlinf_lite.data.lerobot.layout import LeRobotError
    from rlinf_lite.data.prompt_files import DatasetError
    from rlinf_lite.data.tokenizers import TokenizerError
    from rlinf_lite.rewards import RewardError
    from rlinf_lite.runners import CheckpointError
    from rlinf_lite.scheduler import PlacementError, SchedulerError, SharedMemoryFullError

    known = (CheckpointError, DatasetError, LeRobotError, PlacementError, RewardError, SchedulerError, TokenizerError)
    try:
        return 130 if train(cfg).interrupted else 0
    except known as error:
        is_full = isinstance(error.__cause__, SharedMemoryFullError)  # its one line is enough
        shown = error.__cause__ if is_full else error
        print(f"{type(shown).__name__}: {shown}", file=sys.stderr)  # a worker's error contains its own traceback
        return 1
