"""The scripts in examples/, which are the entry points: of commands, and of programs that train."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from typing import TYPE_CHECKING, Any

from rlinf_lite.cli.parse import COMMAND_OF, EXAMPLES
from rlinf_lite.config import Config, ConfigError
from rlinf_lite.config.schema import BaseConfig
from rlinf_lite.shipped import shipped

if TYPE_CHECKING:
    from rlinf_lite.metrics import EvalSummary
    from rlinf_lite.runners import RunResult


def load_example(command: str) -> Any:
    """The module that a command is."""
    script = shipped("examples") / EXAMPLES[command]
    spec = spec_from_file_location(script.stem, script)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(cfg: BaseConfig) -> RunResult:
    """Train as `rlinf-lite train`, `sft` or `math` do, by `runner.task_type`, and print what they print, on a Ray of
    its own where this process has none. Raises what ends the run."""
    if cfg.runner.task_type == "eval":
        text = "is eval, which trains nothing: rlinf_lite.evaluate(cfg). Set it to embodied, with sizes of training"
        raise ConfigError(cfg.runner.run_name or "NAME", [f"runner.task_type: {text}"])
    result: RunResult = load_example(COMMAND_OF[cfg.runner.task_type]).train(cfg)
    return result


def evaluate(cfg: Config) -> EvalSummary:
    """Measure the policy at `actor.checkpoint_load_path`, or `rollout.model_dir`, on the evaluation episodes, as
    `rlinf-lite eval` does. Raises ConfigError where neither is set, and for a language model."""
    summary: EvalSummary = load_example("eval").evaluate(cfg)
    return summary
