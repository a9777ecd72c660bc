"""What a step would take on other placements, from what it took on one, and whether there is memory for it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rlinf_lite.config.plan import Plan, ReasoningPlan, slots
from rlinf_lite.threads import training_threads

CONTEXT_BYTES = 2**30
"""GPU memory that a process of torch takes besides what is counted."""


@dataclass(frozen=True)
class Costs:
    """A step as it was measured somewhere."""

    work: Mapping[str, float]
    """Seconds by role, added up over all processors that worked at once: GPUs, or cores. Of a language model `actor`
    also has what critic and reference do."""
    rest_s: float
    """What no placement changes: weights to rollout workers, advantages."""


def measured(lines: Sequence[Mapping[str, float]], plan: Plan | ReasoningPlan) -> Costs:
    """The costs behind lines of `metrics.jsonl`, medians over steps, that were trained on the placement of `plan`."""

    def typical(name: str) -> float:
        return median(line.get(name, 0.0) for line in lines)

    step, training, phase = typical("time/step"), typical("time/training"), typical("time/generate_rollouts")
    window = phase if plan.config.runner.mode == "sync" else step  # beside updates they play all the time
    seconds = {role: (1 - typical(f"perf/{role}_idle_frac")) * window for role in _generating(plan)}
    seconds["actor"] = training
    rest = step - training - phase
    if isinstance(plan, ReasoningPlan) and plan.config.runner.mode == "sync":
        seconds["actor"] += max(phase - seconds["rollout"], 0.0)
    return Costs({role: took * _processors(plan, role) for role, took in seconds.items()}, max(rest, 0.0))


def step_s(costs: Costs, plan: Plan | ReasoningPlan) -> float:
    """Predicted seconds of a step: work is shared out evenly, roles that share processors take turns, and what waits
    for nobody overlaps. Per decision environments and policy wait for each other, unless there are several stages."""
    alone = {role: work / _processors(plan, role) for role, work in costs.work.items()}
    generating = {role: alone[role] for role in _generating(plan)}
    rollouts = sum(generating.values())
    if plan.config.rollout.pipeline_stage_num > 1:
        rollouts = max(*generating.values(), _busiest(costs, generating, plan))
    if plan.config.runner.mode == "sync":
        return rollouts + alone["actor"] + costs.rest_s
    return max(rollouts, alone["actor"] + costs.rest_s, _busiest(costs, alone, plan))


def fits(plan: Plan | ReasoningPlan, room: int | None) -> bool:
    """Whether the fullest slot, or on a CPU cluster the fullest node, takes at most `room` bytes, as far as known."""
    from rlinf_lite.preview.memory import estimate  # imports torch

    if room is None:
        return True
    found, slot_bytes = estimate(plan), 0
    if slots(plan.config.cluster)[0] == "cpu":
        return found.node_host_bytes <= room
    for slot, counted in found.slot_bytes.items():
        processes = sum(slot in process.slots for role in plan.placements.values() for process in role)
        slot_bytes = max(slot_bytes, counted + processes * CONTEXT_BYTES)
    return slot_bytes <= room


def room_for(accelerator: str) -> int | None:
    """Bytes that there are for `fits`: of this machine's smallest GPU, or free in its memory; None: not known."""
    if accelerator == "cpu":
        return free_host_bytes()
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.split()
        return min(map(int, found), default=None) and min(map(int, found)) * 2**20
    return None


def free_host_bytes() -> int:
    """Memory that new processes of this machine, or of its container, may take."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free, group = int(fields["MemAvailable"].split()[0]) * 1024, Path("/sys/fs/cgroup")
    if (group / "memory.max").is_file() and (limit := (group / "memory.max").read_text().strip()) != "max":
        free = min(free, int(limit) - int((group / "memory.current").read_text()))
    return free


def _generating(plan: Plan | ReasoningPlan) -> tuple[str, ...]:
    return ("rollout",) if isinstance(plan, ReasoningPlan) else ("env", "rollout")


def _busiest(costs: Costs, alone: Mapping[str, float], plan: Plan | ReasoningPlan) -> float:
    """Seconds of the processor that has most to do, of these roles: a slot, or on a CPU cluster all cores together."""
    if slots(plan.config.cluster)[0] == "cpu":
        return sum(costs.work[role] for role in alone) / _cores(plan)
    load: dict[int, float] = {}
    for role, seconds in alone.items():
        for slot in _slots_of(plan, role):
            load[slot] = load.get(slot, 0.0) + seconds
    return max(load.values())


def _processors(plan: Plan | ReasoningPlan, role: str) -> int:
    """GPUs, or cores, on which a role computes at once."""
    config: Any = plan.config
    if slots(config.cluster)[0] != "cpu":
        return len(_slots_of(plan, role))
    processes = plan.size(role) or 1
    if role == "actor":
        per_process = training_threads(config.actor.num_threads, -(-processes // config.cluster.num_nodes))
    else:
        per_process = getattr(config, role).num_threads
    return min(processes * per_process, _cores(plan))


def _slots_of(plan: Plan | ReasoningPlan, role: str) -> set[int]:
    return {process.slots[0] for process in plan.placements[role]}


def _cores(plan: Plan | ReasoningPlan) -> int:
    return len(os.sched_getaffinity(0)) * plan.config.cluster.num_nodes
