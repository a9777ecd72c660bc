"""Where a run's groups work, found out by the run itself: `cluster.component_placement: auto` (docs/placement.md)."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TypeVar

from rlinf_lite.config.checks import possible
from rlinf_lite.config.explain import yaml_text
from rlinf_lite.config.plan import plan_of, slots
from rlinf_lite.config.proposals import is_auto
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.schema import Config
from rlinf_lite.control import Supervisor
from rlinf_lite.file_modes import write_whole
from rlinf_lite.preview.placements import fits, measured, room_for, step_s
from rlinf_lite.runners.checkpoints import CheckpointStore, step_number
from rlinf_lite.runners.run_paths import RunClaim
from rlinf_lite.runners.stopping import RunResult
from rlinf_lite.scheduler import Cluster, SchedulerError

log = logging.getLogger(__name__)

C = TypeVar("C", bound=Config | ReasoningConfig)
NUM_MEASURED = 2
"""Steps of a placement that count; before them comes one in which everything is touched for the first time."""
NUM_TRIED = 3
"""Placements that are run: the first one, from which the others are priced, and the best of these."""
CHOICE = "placement.json"


@dataclass
class Tried:
    """A placement, and what a step of the run took there; seconds, medians."""

    placement: str
    stages: int
    predicted_s: float | None
    """From the first one's steps; None for that one itself."""
    measured_s: float | None = None
    """None where a step failed."""

    def describe(self) -> str:
        """One line of the table."""
        predicted = "" if self.predicted_s is None else f"{self.predicted_s:.3g} s"
        took = "failed" if self.measured_s is None else f"{self.measured_s:.3g} s"
        return f"  {took:>8}  {predicted:>9}  {self.name()}"

    def name(self) -> str:
        return f"{self.placement}, {self.stages} stage{'s' * (self.stages > 1)}"


def run_placed(
    cfg: C, claim: RunClaim, supervisor: Supervisor | None, run: Callable[[C, int | None], RunResult]
) -> RunResult:
    """Train where the config says, or where steps of this very run are fastest.

    Args:
        run: launches the groups of a config whose placement is given, and returns `runner.run(until)`.

    Where slots are to be chosen, the run begins with all roles together. Its steps there price the other placements
    (`preview.placements`), of which the best that memory allows are tried, three steps each, and the fastest one is
    kept. From one to the next it goes by a checkpoint, so that each step is one of the training, with the numbers that
    it would have had anywhere. What was tried is printed, and written to the run's `placement.json`.
    """
    if not is_auto(cfg.cluster):
        return run(cfg, None)
    candidates, room = possible(cfg), room_for(slots(cfg.cluster)[0])
    first = next((placed for placed in candidates if fits(plan_of(placed), room)), candidates[0])
    store = CheckpointStore(claim.checkpoint_dir, 1)
    wanted = {path.resolve() for path in store.steps()}  # checkpoints that are not the search's
    tried: list[tuple[C, Tried]] = []
    evals = []
    for placed, entry in _to_try(first, candidates, claim, room, tried):
        start = claim.resume_from
        begun = 0 if start is None else step_number(start)
        warming_up = 0 if tried else max(cfg.algorithm.critic_warmup_steps - begun, 0)  # only the critic trains in them
        print(f"placement: trying {entry.name()}", flush=True)
        tried.append((placed, entry))
        try:
            result = run(placed, begun + warming_up + 1 + NUM_MEASURED)
        except SchedulerError as error:
            if len(tried) == 1:
                raise
            log.warning("this placement is out: %s", str(error).splitlines()[0])
            newest = store.newest()
            claim.resume_from = start if newest is None else newest.resolve()
        else:
            evals += result.evals
            if result.interrupted or result.completed_steps >= result.total_steps:
                return replace(result, evals=evals)
            steps = _steps_since(claim.log_dir, begun + warming_up + 1)
            entry.measured_s = median(line["time/step"] for line in steps)
        finally:
            _end_groups(supervisor)
        _drop(start, claim.resume_from, wanted, cfg.runner.save_interval)
    best, entry = min(tried, key=lambda one: one[1].measured_s or float("inf"))
    lines = ["placement: seconds of a step, measured and predicted", *(one.describe() for _, one in tried)]
    kept = shlex.quote(f"cluster.component_placement={entry.placement}")
    print("\n".join([*lines, f"  kept: {kept} rollout.pipeline_stage_num={entry.stages}"]), flush=True)
    write_whole(claim.log_dir / CHOICE, json.dumps([asdict(one) for _, one in tried], indent=1))
    result = run(best, None)
    return replace(result, evals=[*evals, *result.evals])


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


def _to_try(
    first: C, candidates: list[C], claim: RunClaim, room: int | None, tried: list[tuple[C, Tried]]
) -> Iterator[tuple[C, Tried]]:
    """The first placement; then, priced by its steps, those that look best."""
    yield first, _entry(first, None)
    done = 0 if claim.resume_from is None else step_number(claim.resume_from)
    lines = _steps_since(claim.log_dir, done - NUM_MEASURED)
    costs = measured(lines, plan_of(first))
    prices = [step_s(costs, plan_of(placed)) for placed in candidates]

    def nearly(number: int) -> tuple[float, int]:
        return float(f"{prices[number]:.2g}"), candidates[number].rollout.pipeline_stage_num

    # of those that cost nearly the same, first those with fewer stages, which send fewer messages
    order = sorted(range(len(prices)), key=nearly)
    for seconds, placed in ((prices[i], candidates[i]) for i in order):
        if len(tried) < NUM_TRIED and placed != first and fits(plan_of(placed), room):
            yield placed, _entry(placed, seconds)


def _entry(placed: Config | ReasoningConfig, predicted_s: float | None) -> Tried:
    lines = placed.cluster.model_dump(mode="json")["component_placement"]
    by_role = {name: line for names, line in lines.items() for name in names.split(",")}  # for a command line, too
    return Tried(yaml_text(by_role), placed.rollout.pipeline_stage_num, predicted_s)


def _steps_since(run_dir: Path, step: int) -> list[dict[str, float]]:
    """Lines of the log after so many steps."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "time/step" in line and line["step"] > step]
