"""The scripts in examples/, which are the entry points: of commands, and of programs that train."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from typing import TYPE_CHECKING, Any

from rlinf_lite.cli.parse import SCRIPTS
from rlinf_lite.config import ConfigError
from rlinf_lite.config.schema import BaseConfig
from rlinf_lite.shipped import shipped

if TYPE_CHECKING:
    from rlinf_lite.metrics import EvalSummary
    from rlinf_lite.runners import RunResult


EVAL = "embodiment/eval_embodied_agent.py"


def load_example(path: str) -> Any:
    """The module at `path` in examples/."""
    script = shipped("examples") / path
    spec = spec_from_file_location(script.stem, script)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _refuse_no_config(cfg: Any, function: str) -> None:
    if not isinstance(cfg, BaseConfig):
        raise TypeError(f"{function} got {cfg!r}. Give what load_config returns: {function}(load_config(name))")


def train(cfg: BaseConfig) -> RunResult:
    """Train as `rlinf-lite train` does, by `runner.task_type`, and print what it prints, on a Ray of its own where this
    process has none. Raises what ends the run."""
    _refuse_no_config(cfg, "train")
    if cfg.runner.task_type == "eval":
        text = "is eval, which trains nothing: rlinf_lite.evaluate(cfg). Set it to embodied, with sizes of training"
        raise ConfigError(cfg.runner.run_name or "NAME", [f"runner.task_type: {text}"])
    result: RunResult = load_example(SCRIPTS[cfg.runner.task_type]).train(cfg)
    return result


def evaluate(cfg: BaseConfig) -> EvalSummary:
    """Measure the policy at `actor.checkpoint_load_path`, or `rollout.model_dir`, on the evaluation episodes, or a
    language model on the validation problems, as `rlinf-lite eval` does. Raises ConfigError where neither is set."""
    _refuse_no_config(cfg, "evaluate")
    summary: EvalSummary = load_example(EVAL).evaluate(cfg)
    return summary
