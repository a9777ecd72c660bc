"""Measure a saved policy on the fixed, seeded evaluation episodes of its run, or of a config; a language model on the
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
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlinf_lite.cli.examples import load_example
from rlinf_lite.cli.parse import SCRIPTS, names_and_overrides
from rlinf_lite.config import Config, ConfigError, ReasoningConfig, load_config
from rlinf_lite.config.loading import as_override
from rlinf_lite.config.resources import policy_directory, start_dir
from rlinf_lite.config.schema import BaseConfig
from rlinf_lite.registry import PartError, suite_overrides, suites
from rlinf_lite.script import run_script, shown_path

if TYPE_CHECKING:
    from rlinf_lite.metrics import EvalSummary

_WITH_EFFECT = (
    *("env.", "model.", "data.", "reward.", "actor.tokenizer."),
    *("rollout.max_response_length", "rollout.engine"),
)
_WITHOUT_EFFECT = ("env.train.", "env.eval.num_envs", "env.eval.num_videos")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measured = parser.add_mutually_exclusive_group()
    measured.add_argument("--checkpoint", type=Path, help="a checkpoint or a run directory; RUN alone is short for it")
    measured.add_argument("--config-name", metavar="NAME", help="a config; the policy is its rollout.model_dir")
    parser.add_argument("--suite", metavar="NAME", help=f"a published evaluation: {', '.join(suites())}")
    out_help = "where to write the JSON (default: <run>/eval_<checkpoint>.json, and beside it what has other settings)"
    parser.add_argument("--out", type=Path, help=out_help)
    parser.add_argument("words", nargs="*", metavar="RUN key=value", help="a run, and changes to its config")
    arguments = parser.parse_intermixed_args(words)
    runs, changes = names_and_overrides(arguments.words)
    named = [*runs, *filter(None, [arguments.checkpoint, arguments.config_name])]
    if len(named) != 1:
        parser.error(
            f"name one run or one config, here are {len(named)}{': ' * bool(named)}{', '.join(map(str, named))}"
        )
    arguments.checkpoint = Path(runs[0]) if runs else arguments.checkpoint

    from rlinf_lite.runners.checkpoints import CheckpointError, find_checkpoint, verify
    from rlinf_lite.runners.run_config import check_options, read_config

    config, overrides, checkpoint = arguments.config_name, ["runner.resume=never"], None
    of_suite: list[str] = []
    try:
        if arguments.checkpoint is not None:
            checkpoint = find_checkpoint(arguments.checkpoint)
            verify(checkpoint)
            config = str(checkpoint / "training_state" / "config.yaml")
            written = (arguments.out.parent if arguments.out else checkpoint.parent.parent).absolute()
            overrides += [as_override("actor.checkpoint_load_path", str(checkpoint)), "actor.checkpoint_save_path=null"]
            overrides.append(as_override("runner.logger.log_path", str(written)))
        if arguments.suite:
            of_suite = suite_overrides(arguments.suite, load_config(config, elsewhere=True).env.id)
        cfg = load_config(config, [*overrides, *of_suite, *changes])
        check_measurable(cfg, config)
        if checkpoint is not None and cfg.actor.checkpoint_load_path == str(checkpoint):
            check_options(read_config(Path(config)) or {}, cfg, checkpoint)
    except (CheckpointError, ConfigError, PartError) as error:
        print(error, file=sys.stderr)
        if of_suite:
            print(f"--suite {arguments.suite} has set {' '.join(of_suite)}", file=sys.stderr)
        if checkpoint is None and runs and (policy_directory(runs[0]) / "config.json").is_file():
            policy = shlex.quote(as_override("actor.checkpoint_load_path", runs[0]))
            print(f"It is a policy: --config-name NAME {policy} measures it", file=sys.stderr)
        return 2

    from rlinf_lite.data.prompt_files import DatasetError
    from rlinf_lite.data.tokenizers import TokenizerError
    from rlinf_lite.rewards import RewardError
    from rlinf_lite.scheduler import PlacementError, SchedulerError

    known = (CheckpointError, DatasetError, PlacementError, RewardError, SchedulerError, TokenizerError)
    with tempfile.TemporaryDirectory() as scratch:
        films = Path(scratch) / "films.gif"
        try:
            summary = evaluate(cfg, films)
        except known as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)  # a worker's error brings its own traceback
            return 1
        film = films.read_bytes() if films.exists() else b""
    notes = [f"note: {line}" for line in summary.protocol.get("notes", [])]
    print("\n".join([*notes, summary.headline(), *summary.task_lines()]))
    suite = summary.protocol.get("suite")
    if arguments.suite and suite != arguments.suite:
        print(f"settings of {arguments.suite} were changed: this is {suite or 'an evaluation of its own'}")
    name = f"eval_{checkpoint.name if checkpoint else cfg.runner.run_name}"
    if arguments.suite and suite:
        name += f"_{suite}"
    elif checkpoint and (of_suite or any(map(plays_otherwise, changes))):
        name += "_changed"
    directory = checkpoint.parent.parent if checkpoint else Path(cfg.runner.logger.log_path)
    out = arguments.out or free_name(directory / f"{name}.json", summary)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(summary.to_json())
    if film:
        out.with_suffix(".gif").write_bytes(film)
    film_path = shown_path(out.with_suffix(".gif"))
    print(f"written to {shown_path(out)}" + (f", its first episodes to {film_path}" if film else ""))
    return 0


def plays_otherwise(change: str) -> bool:
    """Whether an override makes it another evaluation than the run's own ones."""
    key = change.lstrip("+~").partition("=")[0]
    return key.startswith(_WITH_EFFECT) and not key.startswith(_WITHOUT_EFFECT)


def free_name(path: Path, summary: EvalSummary) -> Path:
    """`path`, or with `-2`, `-3`, ...: the first that is free, or of an evaluation under the very same settings."""
    protocol = json.loads(summary.to_json())["protocol"]
    for number in itertools.count(1):
        found = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        if not found.exists() or json.loads(found.read_text()).get("protocol") == protocol:
            break
        print(f"{found} is of other settings or code, and stays")
    return found


def check_measurable(cfg: BaseConfig, name: str) -> None:
    """Raise ConfigError where there is no policy, or a language model has no problems; `name`: that of the config."""
    if isinstance(cfg, ReasoningConfig) and cfg.data.train_files and not cfg.data.val_files:
        raise ConfigError(name, ["data.val_files: names no problems to measure on. Set it to files that hold some"])
    if start_dir(cfg) is None:
        text = "is null, so there is no policy to measure. Set it to a run, a checkpoint, or a policy's directory"
        raise ConfigError(name, [f"rollout.model_dir: {text}"])


def evaluate(cfg: BaseConfig, films: Path | None = None) -> EvalSummary:
    check_measurable(cfg, cfg.runner.run_name or "NAME")
    if isinstance(cfg, ReasoningConfig):
        summary: EvalSummary = load_example(SCRIPTS["reasoning"]).evaluate(cfg)
        return summary
    assert isinstance(cfg, Config)
    from rlinf_lite.runners import EmbodiedRunner
    from rlinf_lite.scheduler import Cluster, HybridComponentPlacement
    from rlinf_lite.workers import EmbodiedFSDPActor, EnvWorker, MultiStepRolloutWorker

    with Cluster.from_config(cfg.cluster) as cluster:
        placement = HybridComponentPlacement(cfg)
        groups = cluster.launch(
            placement,
            actor=EmbodiedFSDPActor.create_group(cfg),
            rollout=MultiStepRolloutWorker.create_group(cfg),
            env=EnvWorker.create_group(cfg),
        )
        runner = EmbodiedRunner(cfg=cfg, **groups, supervisor=None, claim=None)
        runner.init_workers()
        return runner.evaluate(films)


if __name__ == "__main__":
    sys.exit(run_script(main))
