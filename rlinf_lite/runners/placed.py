"""`cluster.component_placement: auto`: a run tries each placement for a few steps and keeps the fastest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_lite.config.names import max_staleness
from rlinf_lite.config.proposals import is_auto
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.file_modes import write_whole
from rlinf_lite.preview.checkpointing import chosen
from rlinf_lite.preview.placements import Candidate
from rlinf_lite.report import write_report
from rlinf_lite.runners.checkpoints import CheckpointStore, read_state
from rlinf_lite.runners.run_config import write_run_config
from rlinf_lite.runners.run_paths import RunClaim
from rlinf_lite.runners.stopping import RunResult, StoppedAtOnce
from rlinf_lite.scheduler import Cluster, SchedulerError, WorkerDiedError

if TYPE_CHECKING:
    from rlinf_lite.control import Supervisor

NUM_MEASURED = 2  # measured steps of each placement, after a first step that also pays for first-time costs
CHOICE = "placement.json"
Run = Callable[[Any, int | None], RunResult]


def run_placed(
    cfg: Any, claim: RunClaim, supervisor: Supervisor | None, run: Run, trials: Sequence[Candidate]
) -> RunResult:
    """Train on the slots that the config names; with `auto`, try several placements and keep the fastest.

    Args:
        run: launches the groups of a config whose placement is given, and returns `runner.run(until)`.
        trials: the placements to try, from `check_room` for this config.

    A run goes from one placement to the next through a checkpoint. So each step of a trial is a step of the training,
    with the same results as on any other placement. The trials are written to the run's `placement.json`.
    """
    run = partial(_with_checkpointing, run)
    if not is_auto(cfg.cluster):
        return run(cfg, None)
    done: list[RunResult] = []  # one for each placement that was launched
    try:
        _try_and_keep(cfg, claim, supervisor, run, trials, done)
        result = done[-1]
    except KeyboardInterrupt as error:  # between two runners; a runner handles it itself
        if not done or isinstance(error, StoppedAtOnce):
            raise
        newest = CheckpointStore(claim.checkpoint_dir, 1).newest()
        steps = done[-1].completed_steps if newest is None else read_state(newest)["completed_steps"]
        if supervisor is not None:
            supervisor.interrupted(steps)
        result = replace(done[-1], interrupted=True, completed_steps=steps, checkpoint=newest)
    return replace(result, evals=[summary for one in done for summary in one.evals])


def _with_checkpointing(run: Run, cfg: Any, until: int | None) -> RunResult:
    return run(chosen(cfg), until)


def _try_and_keep(
    cfg: Any,
    claim: RunClaim,
    supervisor: Supervisor | None,
    run: Run,
    trials: Sequence[Candidate],
    done: list[RunResult],
) -> None:
    """Try each placement that fits, and continue training on the fastest; results are appended to `done`."""
    store = CheckpointStore(claim.checkpoint_dir, 1)
    # steps in which a language model's critic trains alone are not compared with others
    warm_up = cfg.algorithm.critic_warmup_steps if isinstance(cfg, ReasoningConfig) else 0
    paused_at: set[Path] = set()  # checkpoints that a run without trials would not have
    interval, has_ended, failure = cfg.runner.save_interval, False, SchedulerError("no placement was tried")
    for one in trials:
        if has_ended or one.outcome == "too large":
            continue
        start, saved = claim.resume_from, store.newest()
        first = max(0 if start is None else read_state(start)["completed_steps"], warm_up) + 1
        print(f"placement: trying {one.overrides}", flush=True)
        try:
            done.append(run(one.placed, first + NUM_MEASURED))
        except SchedulerError as error:
            may_be_memory = isinstance(error, WorkerDiedError) or "memory" in str(error).splitlines()[0].lower()
            if not done and not may_be_memory:
                raise
            one.outcome, failure = "failed", error
            print(f"placement: this one is out: {str(error).splitlines()[0]}", flush=True)
            newest = store.newest()  # a checkpoint of the steps that this placement completed, if any
            claim.resume_from = start if newest is None or newest == saved else newest.resolve()
        else:
            if done[-1].interrupted:
                return
            one.outcome, one.per_s = "tried", _throughput(claim.log_dir, first, cfg)
            has_ended = done[-1].completed_steps >= done[-1].total_steps
        finally:
            _end_groups(supervisor)
        if claim.resume_from is not None and claim.resume_from != start:
            if start is not None and start in paused_at:
                shutil.rmtree(start, ignore_errors=True)
            if interval < 1 or read_state(claim.resume_from)["completed_steps"] % interval:
                paused_at.add(claim.resume_from)
    measured = [one for one in trials if one.per_s is not None]
    if has_ended and len(measured) < 2:
        print("placement: nothing was compared: the run has ended within its first trials", flush=True)
        return
    if not measured:
        raise failure
    best = max(measured, key=lambda one: one.per_s or 0.0)
    best.outcome = "kept"
    print(
        "\n".join(["placement: env steps or tokens a second", *map(str, trials), f"  kept: {best.overrides}"]),
        flush=True,
    )
    rows = [{key: value for key, value in vars(one).items() if key != "placed"} for one in trials]
    write_whole(claim.log_dir / CHOICE, json.dumps(rows, indent=1))
    if not has_ended:
        done.append(run(best.placed, None))
    else:
        write_run_config(best.placed, claim.log_dir, done[-1].completed_steps)  # a resumed run uses this placement
        if done[-1].report is not None:
            write_report(claim.log_dir)  # again, with the trials


def _end_groups(supervisor: Supervisor | None) -> None:
    """End all launched groups, also those of a runner that could not be built."""
    if supervisor is not None:
        with suppress(SchedulerError):  # the master is restarting; it learns of the next groups when they begin
            supervisor.release()
    if (cluster := Cluster.current()) is not None:
        for processes in list(cluster.processes):
            cluster.end(processes)


def _throughput(run_dir: Path, step: int, cfg: Any) -> float | None:
    """The throughput of the fastest step after `step`: env steps or tokens per second. If there are others, steps
    without training are left out, and in asynchronous runs steps after an evaluation, whose rollouts existed
    already."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    found = [line for line in lines if "time/step" in line and line["step"] > step]
    found = [line for line in found if line.get("time/training")] or found
    if max_staleness(cfg) and (interval := cfg.runner.val_check_interval) > 0:
        found = [line for line in found if (line["step"] - 1) % interval] or found
    name = "perf/tokens_per_s" if isinstance(cfg, ReasoningConfig) else "perf/env_steps_per_s"
    return max((line[name] for line in found), default=None)
