"""Where a run's groups work, found out by the run itself: `cluster.component_placement: auto` (docs/placement.md)."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from rlinf_lite.config.checks import possible
from rlinf_lite.config.names import fused_roles, max_staleness
from rlinf_lite.config.plan import plan_of, slots
from rlinf_lite.config.proposals import is_auto
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.schema import Config
from rlinf_lite.file_modes import write_whole
from rlinf_lite.metrics import EvalSummary
from rlinf_lite.preview.placements import (
    Costs,
    best_first,
    described,
    fits,
    measured,
    needed_bytes,
    no_room,
    placement_text,
    room_for,
    step_s,
)
from rlinf_lite.report import write_report
from rlinf_lite.runners.checkpoints import CheckpointStore, read_state, step_number
from rlinf_lite.runners.run_config import write_run_config
from rlinf_lite.runners.run_paths import RunClaim
from rlinf_lite.runners.stopping import RunResult, StoppedAtOnce
from rlinf_lite.scheduler import Cluster, SchedulerError, WorkerDiedError

if TYPE_CHECKING:
    from rlinf_lite.control import Supervisor

log = logging.getLogger(__name__)

C = TypeVar("C", bound=Config | ReasoningConfig)
NUM_MEASURED = 2
"""Steps of a placement that count; before them comes one in which everything is touched for the first time."""
NUM_TRIED = 3
"""Placements that are run: the first one, from which the others are priced, and the best of these."""
CHOICE = "placement.json"


@dataclass
class Candidate(Generic[C]):
    """A placement that the run may have, and seconds of a step there."""

    placed: C
    outcome: Literal["kept", "tried", "failed", "not tried", "takes too much memory"] = "not tried"
    predicted_s: float | None = None
    """From the first one's steps; None for that one itself."""
    measured_s: float | None = None
    """The fastest of those that count; None of what did not run."""

    def row(self) -> dict[str, Any]:
        """As it is in `placement.json`."""
        return {
            "placement": placement_text(self.placed),
            "fuse": ",".join(fused_roles(self.placed)) or None,
            "stages": self.placed.rollout.pipeline_stage_num,
            "predicted_s": self.predicted_s,
            "measured_s": self.measured_s,
            "outcome": self.outcome,
        }

    def describe(self) -> str:
        """One line of the table."""
        predicted = "" if self.predicted_s is None else f"{self.predicted_s:.3g} s"
        took = self.outcome if self.measured_s is None else f"{self.measured_s:.3g} s"
        return f"  {took:>8}  {predicted:>9}  {described(self.placed)}"

    def overrides(self) -> str:
        """What gives a run this placement, for a shell."""
        row = self.row()
        fuse = "null" if row["fuse"] is None else f"'{row['fuse']}'"
        settings = [f"cluster.component_placement={row['placement']}", f"cluster.fuse={fuse}"]
        return shlex.join([*settings, f"rollout.pipeline_stage_num={row['stages']}"])


def run_placed(
    cfg: C, claim: RunClaim, supervisor: Supervisor | None, run: Callable[[C, int | None], RunResult]
) -> RunResult:
    """Train where the config says, or where steps of this very run are fastest.

    Args:
        run: launches the groups of a config whose placement is given, and returns `runner.run(until)`.

    Where slots are to be chosen, the run begins with all roles together. Its steps there price the other placements
    (`preview.placements`), of which the best two that memory allows are tried, three steps each, and the fastest one is
    kept. From one to the next it goes by a checkpoint, so that each step is one of the training, with the numbers that
    it would have had anywhere. What was tried is printed, and all that there was is in the run's `placement.json`.
    """
    if not is_auto(cfg.cluster):
        return run(cfg, None)
    paused: list[RunResult] = []
    try:
        return _search(cfg, claim, supervisor, run, paused)
    except KeyboardInterrupt as error:  # from one runner to the next
        if not paused or isinstance(error, StoppedAtOnce):
            raise
    newest = CheckpointStore(claim.checkpoint_dir, 1).newest()
    done = paused[-1].completed_steps if newest is None else int(read_state(newest)["completed_steps"])
    if supervisor is not None:
        supervisor.interrupted(done)
    return replace(paused[-1], interrupted=True, completed_steps=done, checkpoint=newest, evals=_evals(paused))


def _search(
    cfg: C,
    claim: RunClaim,
    supervisor: Supervisor | None,
    run: Callable[[C, int | None], RunResult],
    paused: list[RunResult],
) -> RunResult:
    """As `run_placed`; results of placements that were tried go into `paused`."""
    candidates, room = [Candidate(placed) for placed in possible(cfg)], room_for(slots(cfg.cluster)[0])
    store = CheckpointStore(claim.checkpoint_dir, 1)
    wanted = {path.resolve() for path in (*store.steps(), claim.resume_from) if path is not None}  # not the search's
    tried: list[Candidate[C]] = []
    failure, has_ended = None, False
    while len(tried) < NUM_TRIED and (one := _next(candidates, tried, room)) is not None:
        start = claim.resume_from
        begun = 0 if start is None else int(read_state(start)["completed_steps"])
        newest_before = store.newest()
        print(f"placement: trying {described(one.placed)}", flush=True)
        tried.append(one)
        try:
            result = run(one.placed, begun + 1 + NUM_MEASURED)
        except SchedulerError as error:
            one.outcome, failure = "failed", error
            if all(other.measured_s is None for other in tried):
                if not _may_be_memory(error):
                    raise
                candidates.sort(key=lambda other: needed_bytes(plan_of(other.placed)))
            log.warning("this placement is out: %s", str(error).splitlines()[0])
            newest = store.newest()
            claim.resume_from = start if newest in (None, newest_before) else newest.resolve()
        else:
            one.outcome = "tried"
            paused.append(result)
            if result.interrupted:
                return replace(result, evals=_evals(paused))
            steps = _steps_since(claim.log_dir, begun + 1, cfg)
            if steps and all(other.measured_s is None for other in tried):
                _price(candidates, measured(steps, plan_of(one.placed)), one)
            one.measured_s = min((line["time/step"] for line in steps), default=None)
            if has_ended := result.completed_steps >= result.total_steps:
                break
        finally:
            _end_groups(supervisor)
        _drop(start, claim.resume_from, wanted, cfg.runner.save_interval)
    if not tried:  # the memory was there before other things started
        needed = {described(one.placed): needed_bytes(plan_of(one.placed)) for one in candidates}
        raise no_room(needed, room or 0, cfg)
    if has_ended and sum(one.measured_s is not None for one in tried) < 2:
        of = NUM_TRIED * (1 + NUM_MEASURED)
        print(f"placement: nothing was compared: the run has ended within the {of} steps of the search", flush=True)
        return replace(paused[-1], evals=_evals(paused))
    best = min(tried, key=lambda one: one.measured_s or float("inf"))
    if best.measured_s is None and failure is not None:
        raise failure
    best.outcome = "kept"
    lines = ["placement: seconds of a step, measured and predicted", *(one.describe() for one in tried)]
    print("\n".join([*lines, f"  kept: {best.overrides()}"]), flush=True)
    write_whole(claim.log_dir / CHOICE, json.dumps([one.row() for one in candidates], indent=1))
    if has_ended:
        write_run_config(best.placed, claim.log_dir, paused[-1].completed_steps)  # where it would go on
        if paused[-1].report is not None:
            write_report(claim.log_dir)
        return replace(paused[-1], evals=_evals(paused))
    result = run(best.placed, None)
    return replace(result, evals=_evals([*paused, result]))


def _evals(results: list[RunResult]) -> list[EvalSummary]:
    return [summary for result in results for summary in result.evals]


def _end_groups(supervisor: Supervisor | None) -> None:
    """Whoever was launched, also for a runner that could not be built."""
    cluster = Cluster.current()
    if supervisor is not None:
        with suppress(SchedulerError):  # the master is away; it will hear who works when others begin
            supervisor.release()
    if cluster is not None:
        for processes in list(cluster.processes):
            cluster.end(processes)


def _drop(before: Path | None, now: Path | None, wanted: set[Path], save_interval: int) -> None:
    """Remove the search's last checkpoint but one, unless it would have been written without a search."""
    if before is None or before == now or before in wanted:
        return
    if save_interval < 1 or step_number(before) % save_interval:
        shutil.rmtree(before, ignore_errors=True)


def _next(candidates: list[Candidate[C]], tried: list[Candidate[C]], room: int | None) -> Candidate[C] | None:
    """The first that has not been tried, and that there is memory for. Of those that were priced, one with processes of
    its own and one that shares some, where there are both: what sharing is worth, a price hardly knows."""
    order = candidates
    if tried and tried[-1].predicted_s is not None:
        shares = bool(fused_roles(tried[-1].placed))
        order = sorted(candidates, key=lambda one: bool(fused_roles(one.placed)) == shares)
    for one in order:
        if one.outcome == "not tried":
            if fits(plan_of(one.placed), room):
                return one
            one.outcome = "takes too much memory"
    return None


def _price(candidates: list[Candidate[C]], costs: Costs, first: Candidate[C]) -> None:
    """Predict what a step takes everywhere but where it was measured first; sort the best to the front."""
    plans = [plan_of(one.placed) for one in candidates]
    prices = [step_s(costs, plan) for plan in plans]
    for one, price in zip(candidates, prices, strict=True):
        one.predicted_s = None if one is first else price
    candidates[:] = [candidates[i] for i in best_first(prices, plans)]


def _may_be_memory(error: SchedulerError) -> bool:
    """Whether there may have been too little, which another placement may have enough of."""
    return isinstance(error, WorkerDiedError) or "memory" in str(error).splitlines()[0].lower()


def _steps_since(run_dir: Path, step: int, cfg: Config | ReasoningConfig) -> list[dict[str, float]]:
    """Lines of the log after so many steps; without those that had less to do than others, where there are others: in
    which nothing trained, as all groups were dropped, and which an evaluation was before, as then an asynchronous run
    has the rollouts already. Where a language model's critic trains alone, the actor is added: of the same size, on the
    same processors."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    found = [line for line in lines if "time/step" in line and line["step"] > step]
    found = [line for line in found if line.get("time/training")] or found
    interval = cfg.runner.val_check_interval
    if max_staleness(cfg) and interval > 0:
        found = [line for line in found if (line["step"] - 1) % interval] or found
    for line in found:
        if isinstance(cfg, ReasoningConfig) and line["step"] <= cfg.algorithm.critic_warmup_steps:
            line.setdefault("time/training", 0.0)
            line["time/step"] += line["time/training"]
            line["time/training"] *= 2
    return found
