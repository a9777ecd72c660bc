"""Measure a saved policy on the fixed, seeded evaluation episodes of its run or of a config, or a language model on its
validation problems.

rlinf-lite eval results/<run>
rlinf-lite eval results/<run> env.eval.num_episodes=400
rlinf-lite eval results/<run> --suite metaworld-mt10
rlinf-lite eval --config-name libero_eval --suite libero-goal rollout.model_dir=...
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_lite.cli.parse import names_and_overrides
from rlinf_lite.config import ConfigError, load_config
from rlinf_lite.config.explain import check_measurable
from rlinf_lite.config.loading import as_override
from rlinf_lite.config.resources import policy_directory
from rlinf_lite.registry import PartError, suite_overrides, suites
from rlinf_lite.script import shown_path

if TYPE_CHECKING:
    from rlinf_lite.metrics import EvalSummary

_WITH_EFFECT = (
    *("env.", "model.", "data.", "reward.", "actor.tokenizer."),
    *("rollout.max_response_length", "rollout.engine"),
)
_WITHOUT_EFFECT = ("env.train.", "env.eval.num_envs", "env.eval.num_videos")


def eval(arguments: Sequence[str], evaluate: Callable[[Any, Path | None], EvalSummary] | None = None) -> int:
    """Evaluate, print the result and write it as JSON. Returns the exit code: 0, 1 after an error, or 2 where the
    config is wrong.

    Args:
        evaluate: function that plays the episodes of a config and writes their films to a file; None:
            `rlinf_lite.evaluate`.
    """
    options, runs, changes = _parsed(arguments)

    from rlinf_lite.runners.checkpoints import CheckpointError, find_checkpoint, verify
    from rlinf_lite.runners.run_config import check_options, read_config

    config, overrides, checkpoint = options.config_name, ["runner.resume=never"], None
    of_suite: list[str] = []
    try:
        if options.checkpoint is not None:
            checkpoint = find_checkpoint(options.checkpoint)
            verify(checkpoint)
            config = str(checkpoint / "training_state" / "config.yaml")
            written = (options.out.parent if options.out else checkpoint.parent.parent).absolute()
            overrides += [as_override("actor.checkpoint_load_path", str(checkpoint)), "actor.checkpoint_save_path=null"]
            overrides.append(as_override("runner.logger.log_path", str(written)))
        if options.suite:
            of_suite = suite_overrides(options.suite, load_config(config, elsewhere=True).env.id)
        cfg = load_config(config, [*overrides, *of_suite, *changes])
        check_measurable(cfg, config)
        if checkpoint is not None and cfg.actor.checkpoint_load_path == str(checkpoint):
            check_options(read_config(Path(config)) or {}, cfg, checkpoint)
    except (CheckpointError, ConfigError, PartError) as error:
        print(error, file=sys.stderr)
        if of_suite:
            print(f"--suite {options.suite} sets {' '.join(of_suite)}", file=sys.stderr)
        if checkpoint is None and runs and (policy_directory(runs[0]) / "config.json").is_file():
            policy = shlex.quote(as_override("actor.checkpoint_load_path", runs[0]))
            print(f"This is a policy without a run: --config-name NAME {policy} measures it", file=sys.stderr)
        return 2

    from rlinf_lite.data.prompt_files import DatasetError
    from rlinf_lite.data.tokenizers import TokenizerError
    from rlinf_lite.rewards import RewardError
    from rlinf_lite.scheduler import PlacementError, SchedulerError

    if evaluate is None:
        from rlinf_lite import launch

        evaluate = launch.evaluate
    known = (CheckpointError, DatasetError, PlacementError, RewardError, SchedulerError, TokenizerError)
    with tempfile.TemporaryDirectory() as scratch:
        films = Path(scratch) / "films.gif"
        try:
            summary = evaluate(cfg, films)
        except known as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)  # a worker's error contains its own traceback
            return 1
        film = films.read_bytes() if films.exists() else b""
    notes = [f"note: {line}" for line in summary.protocol.get("notes", [])]
    print("\n".join([*notes, summary.headline(), *summary.task_lines()]))
    suite = summary.protocol.get("suite")
    if options.suite and suite != options.suite:
        print(f"settings of {options.suite} were changed: this evaluation is {suite or 'not that suite'}")
    name = f"eval_{checkpoint.name if checkpoint else cfg.runner.run_name}"
    if options.suite and suite:
        name += f"_{suite}"
    elif checkpoint and (of_suite or any(map(plays_otherwise, changes))):
        name += "_changed"
    directory = checkpoint.parent.parent if checkpoint else Path(cfg.runner.logger.log_path)
    _write(options.out or free_name(directory / f"{name}.json", summary), summary, film)
    return 0


def _parsed(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
    """The options, the runs that are named without one, and the changes to the config."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measured = parser.add_mutually_exclusive_group()
    measured.add_argument("--checkpoint", type=Path, help="a checkpoint or a run directory; RUN alone is short for it")
    measured.add_argument("--config-name", metavar="NAME", help="a config; the policy is its rollout.model_dir")
    parser.add_argument("--suite", metavar="NAME", help=f"a published evaluation: {', '.join(suites())}")
    out_help = "JSON file to write (default: <run>/eval_<checkpoint>.json, or a new name next to it for other settings)"
    parser.add_argument("--out", type=Path, help=out_help)
    parser.add_argument("words", nargs="*", metavar="RUN key=value", help="a run, and changes to its config")
    options = parser.parse_intermixed_args(arguments)
    runs, changes = names_and_overrides(options.words)
    named = [*runs, *filter(None, [options.checkpoint, options.config_name])]
    if len(named) != 1:
        listed = f": {', '.join(map(str, named))}" if named else ""
        parser.error(f"name one run or one config; {len(named)} were given{listed}")
    options.checkpoint = Path(runs[0]) if runs else options.checkpoint
    return options, runs, changes


def _write(path: Path, summary: EvalSummary, film: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(summary.to_json())
    text = f"written to {shown_path(path)}"
    if film:
        path.with_suffix(".gif").write_bytes(film)
        text += f", its first episodes to {shown_path(path.with_suffix('.gif'))}"
    print(text)


def plays_otherwise(change: str) -> bool:
    """Whether an override changes what is evaluated, so that the result cannot be compared with the run's own."""
    key = change.lstrip("+~").partition("=")[0]
    return key.startswith(_WITH_EFFECT) and not key.startswith(_WITHOUT_EFFECT)


def free_name(path: Path, summary: EvalSummary) -> Path:
    """The first of `path` and its numbered names (`-2`, `-3`, ...) that does not exist, or holds an evaluation with the
    same settings."""
    protocol = json.loads(summary.to_json())["protocol"]
    for number in itertools.count(1):
        found = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        if not found.exists() or json.loads(found.read_text()).get("protocol") == protocol:
            break
        print(f"{found} has other settings or code, and is kept")
    return found
