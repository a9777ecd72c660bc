"""`rlinf-lite train NAME|RUN key=value`: train what a config is about, or go on with a run.

The scripts in examples/ are what trains, each for one kind of run; this is what their command lines have in common.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlinf_lite.cli.examples import train as train_by_kind
from rlinf_lite.cli.parse import parse_cli

if TYPE_CHECKING:
    from rlinf_lite.runners import RunResult

ABOUT = "Train a policy in a simulator, by reinforcement learning or imitation, or a language model on problems."


def train(arguments: Sequence[str]) -> int:
    """Train as the script of the config's kind does."""
    return run_to_its_end(train_by_kind, parse_cli(arguments, None, ABOUT, None))


def run_to_its_end(train: Callable[[Any], RunResult], cfg: Any) -> int:
    """The exit code of a run: 1 where what a user can mend ended it, which is said; 130 after Ctrl-C."""
    # only now what takes time to import: mistakes in the config are reported at once
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
        full = isinstance(error.__cause__, SharedMemoryFullError)  # which says all that there is to know in a line
        said = error.__cause__ if full else error
        print(f"{type(said).__name__}: {said}", file=sys.stderr)  # a worker's error brings its own traceback
        return 1
