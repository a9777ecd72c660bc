"""What a step would take on other placements, from what it took on one, and whether there is memory for it."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf_lite.config.checks import possible
from rlinf_lite.config.explain import yaml_text
from rlinf_lite.config.names import fused_roles
from rlinf_lite.config.plan import PLACEMENT, Plan, ReasoningPlan, plan_of, slots
from rlinf_lite.config.proposals import is_auto
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.schema import Config
from rlinf_lite.scheduler.errors import PlacementError
from rlinf_lite.threads import training_threads

CONTEXT_BYTES = 2**30
"""GPU memory that a process of torch takes besides what is counted."""
_LISTED = 8  # placements in a message, at the most


@dataclass(frozen=True)
class Costs:
    """A step as it was measured somewhere."""

    work: Mapping[str, float]
    """Seconds by role, added up over all processors that worked at once: GPUs, or cores. Of a language model `actor`
    also has what critic and reference do."""
    rest_s: float
    """What no placement changes: advantages, and the driver."""
    sync_s: float = 0.0
    """Weights to rollout workers, which those in the actor's process have already."""


def measured(lines: Sequence[Mapping[str, float]], plan: Plan | ReasoningPlan) -> Costs:
    """The costs behind lines of `metrics.jsonl`, steps that were trained on the placement of `plan`: those of the
    fastest, as what else a machine does only slows steps down."""
    line = min(lines, key=lambda one: one["time/step"])
    step, training, phase = (line.get(f"time/{name}", 0.0) for name in ("step", "training", "generate_rollouts"))
    window = phase if plan.config.runner.mode == "sync" else step  # beside updates they play all the time
    seconds = {role: (1 - line.get(f"perf/{role}_idle_frac", 0.0)) * window for role in _generating(plan)}
    seconds["actor"] = training
    rest = max(step - training - phase, 0.0)
    sync = min(line.get("time/sync_weights", 0.0), rest)
    if isinstance(plan, ReasoningPlan) and plan.config.runner.mode == "sync":
        seconds["actor"] += max(phase - seconds["rollout"], 0.0)
    return Costs({role: took * _processors(plan, role) for role, took in seconds.items()}, rest - sync, sync)


def step_s(costs: Costs, plan: Plan | ReasoningPlan) -> float:
    """Predicted seconds of a step: work is shared out evenly, roles that share processors take turns, and what waits
    for nobody overlaps. Per decision environments and policy wait for each other, unless there are several stages."""
    alone = {role: work / _processors(plan, role) for role, work in costs.work.items()}
    generating = {role: alone[role] for role in _generating(plan)}
    rollouts = sum(generating.values())
    if plan.config.rollout.pipeline_stage_num > 1:
        rollouts = max(*generating.values(), _busiest(generating, plan))
    rest = costs.rest_s + (0.0 if {"actor", "rollout"} <= set(fused_roles(plan.config)) else costs.sync_s)
    if plan.config.runner.mode == "sync":
        return rollouts + alone["actor"] + rest
    return max(rollouts, alone["actor"] + rest, _busiest(alone, plan))


def best_first(prices: Sequence[float], plans: Sequence[Plan | ReasoningPlan]) -> list[int]:
    """Indices of plans of these `step_s`, by price. Those within a twentieth of the cheapest are as good by all that a
    price knows: of them first what has fewer stages, then fewer processes, which send fewer messages."""
    nearly = 1.05 * min(prices)

    def key(i: int) -> tuple[float, int, int, float]:
        stages = plans[i].config.rollout.pipeline_stage_num
        return max(prices[i], nearly), stages, len(_processes(plans[i])), prices[i]

    return sorted(range(len(plans)), key=key)


def fits(plan: Plan | ReasoningPlan, room: int | None) -> bool:
    """Whether it takes at most `room` bytes, as far as known."""
    return room is None or needed_bytes(plan) <= room


def needed_bytes(plan: Plan | ReasoningPlan) -> int:
    """What the fullest slot takes, or on a CPU cluster the fullest node."""
    from rlinf_lite.preview.memory import estimate  # imports torch

    found = estimate(plan)
    if slots(plan.config.cluster)[0] == "cpu":
        return found.node_host_bytes
    contexts = Counter(slot for process_slots in _processes(plan) for slot in process_slots)
    sizes = (counted + contexts[slot] * CONTEXT_BYTES for slot, counted in found.slot_bytes.items())
    return max(sizes, default=0)


def described(config: Config | ReasoningConfig) -> str:
    """A placement in a line, as a config has it."""
    stages, fuse = config.rollout.pipeline_stage_num, ",".join(fused_roles(config))
    parts = [placement_text(config), f"{stages} stage{'s' * (stages > 1)}"]
    return ", ".join([*parts, f"{fuse} in one process"] if fuse else parts)


def placement_text(config: Config | ReasoningConfig) -> str:
    """A line for each role, which a command line takes, too."""
    lines = config.cluster.model_dump(mode="json")["component_placement"]
    return yaml_text({name: line for names, line in lines.items() for name in names.split(",")})


def check_room(config: Config | ReasoningConfig) -> None:
    """Raise PlacementError where a run is to choose its placement and there is memory for none: with what each would
    take, what there is, and what to change. For before anything is started."""
    if not is_auto(config.cluster):
        return
    room, needed = room_for(slots(config.cluster)[0]), dict[str, int]()
    if room is None:
        return
    for placed in possible(config):
        needed[described(placed)] = taken = needed_bytes(plan_of(placed))
        if taken <= room:
            return
    raise no_room(needed, room, config)


def no_room(needed: Mapping[str, int], room: int, config: Config | ReasoningConfig) -> PlacementError:
    """That none of the placements fits, which take so many bytes."""
    is_cpu = slots(config.cluster)[0] == "cpu"
    there = "this machine has {} of memory free" if is_cpu else "the smallest GPU here has {}"
    of_batch = "data.num_prompts, rollout.max_batch_size or actor.max_tokens_per_micro_batch"
    if isinstance(config, Config):
        of_batch = "env.train.num_envs, rollout.num_chunks or actor.micro_batch_size"
    advice = f"Lower {of_batch}, take a smaller model, or "
    advice += "end what else has the memory" if is_cpu else "have memory given back (actor.offload, rollout.offload)"
    lines = [f"{byte_text(count)}  {name}" for name, count in sorted(needed.items(), key=lambda one: one[1])]
    more = [f"and {len(lines) - _LISTED} that take more"] * (len(lines) > _LISTED)
    where = "the fullest node" if is_cpu else "the fullest slot"
    text = f"is auto, and {there.format(byte_text(room))}, less than any placement takes. On {where}:"
    return PlacementError("\n    ".join([text, *lines[:_LISTED], *more]) + f"\n  {advice}", PLACEMENT)


def byte_text(count: int) -> str:
    """`1.5 GiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


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


def _busiest(alone: Mapping[str, float], plan: Plan | ReasoningPlan) -> float:
    """Seconds of the slot, or on a CPU cluster of the node, that has most to do, of these roles."""
    load: dict[int, float] = {}
    if slots(plan.config.cluster)[0] == "cpu":
        for role, seconds in alone.items():
            for node, cores in _cores(plan, role).items():
                load[node] = load.get(node, 0.0) + seconds * cores / _cores_of_node()
    else:
        for role, seconds in alone.items():
            for slot in _slots_of(plan, role):
                load[slot] = load.get(slot, 0.0) + seconds
    return max(load.values())


def _processors(plan: Plan | ReasoningPlan, role: str) -> int:
    """GPUs, or cores, on which a role computes at once."""
    if slots(plan.config.cluster)[0] != "cpu":
        return len(_slots_of(plan, role))
    return sum(_cores(plan, role).values())


def _cores(plan: Plan | ReasoningPlan, role: str) -> dict[int, int]:
    """On which a role computes at once, by node; all nodes have as many as this one."""
    config: Any = plan.config
    per_node = slots(config.cluster)[1]
    nodes = Counter(process.slots[0] // per_node for process in plan.placements[role])

    def threads(processes: int) -> int:
        if role == "actor":
            return training_threads(config.actor.num_threads, processes)
        return int(getattr(config, role).num_threads)

    return {node: min(processes * threads(processes), _cores_of_node()) for node, processes in nodes.items()}


def _slots_of(plan: Plan | ReasoningPlan, role: str) -> set[int]:
    return {process.slots[0] for process in plan.placements[role]}


def _processes(plan: Plan | ReasoningPlan) -> list[tuple[int, ...]]:
    """The slots of every process; roles that share processes have them once."""
    fused = fused_roles(plan.config)
    found = [role for role in plan.placements if role not in fused[1:]]
    return [process.slots for role in found for process in plan.placements[role]]


def _cores_of_node() -> int:
    return len(os.sched_getaffinity(0))
