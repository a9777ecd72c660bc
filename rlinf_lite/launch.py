"""Training and evaluation as functions: they start a cluster, launch a config's worker groups on it, and run them.

`rlinf-lite train` and `rlinf-lite eval` call these functions. Each script in examples/ shows the same launch for one
kind of run, on one page.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_lite import runners, workers
from rlinf_lite.config import Config, ConfigError, ReasoningConfig
from rlinf_lite.config.explain import check_measurable
from rlinf_lite.config.names import reads_demonstrations, roles_of
from rlinf_lite.config.schema import BaseConfig
from rlinf_lite.control import supervise
from rlinf_lite.data.problems import Problems, open_problems
from rlinf_lite.metrics import EvalSummary
from rlinf_lite.preview.placements import check_room
from rlinf_lite.runners import RunClaim, RunResult
from rlinf_lite.runners.base import Runner
from rlinf_lite.scheduler import Cluster, HybridComponentPlacement

if TYPE_CHECKING:
    from rlinf_lite.control import Supervisor  # which needs Ray


def train(cfg: Config | ReasoningConfig) -> RunResult:
    """Train what `runner.task_type` says, and print what `rlinf-lite train` prints.

    Joins the Ray that this process is connected to, or starts one. Raises what ends the run; the error of a worker has
    the worker's own exception as its cause.
    """
    _check_type(cfg, "train")
    kind = cfg.runner.task_type
    if kind == "eval":
        text = "is eval, which trains nothing: rlinf_lite.evaluate(cfg). Set it to embodied, with sizes of training"
        raise ConfigError(cfg.runner.run_name or "NAME", [f"runner.task_type: {text}"])
    if isinstance(cfg, Config) and reads_demonstrations(cfg):
        from rlinf_lite.data.demonstrations import check_demonstrations  # needs the extra `data`

        check_demonstrations(cfg)
    trials = check_room(cfg)
    with runners.claim_run(cfg) as claim:
        problems = _problems(cfg)
        with (
            Cluster.from_config(cfg.cluster) as cluster,
            nullcontext() if kind == "sft" else supervise(cfg, cluster) as supervisor,
        ):

            def run(cfg: Config | ReasoningConfig, until: int | None = None) -> RunResult:
                placement = HybridComponentPlacement(cfg)
                print(placement.describe(roles_of(cfg) if isinstance(cfg, ReasoningConfig) else None))
                return _launch(cfg, cluster, placement, problems, supervisor, claim).run(until)

            result = runners.run_placed(cfg, claim, supervisor, run, trials)  # just runs, where no line is auto
        print(result.describe())
    return result


def evaluate(cfg: Config | ReasoningConfig, films: Path | None = None) -> EvalSummary:
    """Measure the policy at `actor.checkpoint_load_path` or `rollout.model_dir` as `rlinf-lite eval` does: on the
    evaluation episodes, or a language model on the validation problems.

    Args:
        films: a file for a GIF of the first episodes, which is written where the environment draws pictures.

    Raises:
        ConfigError: where the config names no policy.
    """
    _check_type(cfg, "evaluate")
    check_measurable(cfg, cfg.runner.run_name or "NAME")
    problems = _problems(cfg)
    with Cluster.from_config(cfg.cluster) as cluster:
        return _launch(cfg, cluster, HybridComponentPlacement(cfg), problems, None, None).evaluate(films)


def _check_type(cfg: Any, function: str) -> None:
    if not isinstance(cfg, BaseConfig):
        raise TypeError(f"{function} got {cfg!r}. Give what load_config returns: {function}(load_config(name))")


def _problems(cfg: Config | ReasoningConfig) -> Problems | None:
    """The checked problems of a language model's run; None of a run in a simulator."""
    if not isinstance(cfg, ReasoningConfig):
        return None
    problems = open_problems(cfg)
    runners.check_rewards(cfg, problems)
    return problems


def _launch(
    cfg: Config | ReasoningConfig,
    cluster: Cluster,
    placement: HybridComponentPlacement,
    problems: Problems | None,
    supervisor: Supervisor | None,
    claim: RunClaim | None,
) -> Runner:
    """Launch the groups and return the runner that drives them, ready to run; without a claim, ready to evaluate."""
    kind: str = "eval" if claim is None else cfg.runner.task_type
    is_async = claim is not None and cfg.runner.mode == "async"
    runner: Runner
    if isinstance(cfg, ReasoningConfig):
        from rlinf_lite.workers.reasoning import launch_roles  # either kind of run does without the other's workers

        assert problems is not None
        roles = launch_roles(cfg, cluster, placement)
        of_text = runners.AsyncReasoningRunner if is_async else runners.ReasoningRunner
        runner = of_text(cfg, problems, **roles, supervisor=supervisor, claim=claim)
    else:
        from_replay = kind == "off_policy"
        groups = cluster.launch(
            placement,
            actor=(workers.OffPolicyActor if from_replay else workers.EmbodiedFSDPActor).create_group(cfg),
            rollout=(workers.ReplayRolloutWorker if from_replay else workers.MultiStepRolloutWorker).create_group(cfg),
            env=workers.EnvWorker.create_group(cfg),
        )
        in_simulators: dict[str, type[runners.SFTRunner] | type[runners.EmbodiedRunner]] = {
            "sft": runners.SFTRunner,
            "eval": runners.EmbodiedRunner,
            "embodied": runners.AsyncEmbodiedRunner if is_async else runners.EmbodiedRunner,
            "off_policy": runners.AsyncOffPolicyRunner if is_async else runners.OffPolicyRunner,
        }
        runner = in_simulators[kind](cfg, **groups, supervisor=supervisor, claim=claim)
    runner.init_workers()
    return runner
