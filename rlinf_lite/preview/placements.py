"""The placements that a run with `cluster.component_placement: auto` tries, and whether they fit in memory."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlinf_lite.config.checks import possible
from rlinf_lite.config.explain import yaml_text
from rlinf_lite.config.names import fused_roles
from rlinf_lite.config.plan import PLACEMENT, Plan, ReasoningPlan, plan_of, slots
from rlinf_lite.config.proposals import is_auto
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.schema import Config
from rlinf_lite.machine import byte_text, free_host_bytes, gpu_bytes
from rlinf_lite.scheduler.errors import PlacementError

if TYPE_CHECKING:
    from rlinf_lite.preview.memory import Estimate

CONTEXT_BYTES = 2**30  # GPU memory of a torch process that the preview does not count


@dataclass
class Candidate:
    """A placement that a run may have."""

    placed: Any  # the config with it
    overrides: str  # words of a command line that give another run this placement
    needed_bytes: int  # on the fullest slot, or on the fullest node of a CPU cluster
    outcome: str  # fits, may fit (free memory is not known), too large; after a trial: tried, kept, failed
    per_s: float | None = None  # env steps or tokens per second, after a trial

    def __str__(self) -> str:
        outcome = f"{self.per_s:.4g} / s" if self.per_s else self.outcome
        return f"{outcome:>10}  {byte_text(self.needed_bytes):>9}  {self.overrides}"


def check_room(config: Config | ReasoningConfig) -> list[Candidate]:
    """The placements among which a run with `auto` chooses; none for other runs. Starts nothing.

    Raises:
        PlacementError: none of them fits into the memory of this machine. The message lists what each needs, and what
            to change.
    """
    if not is_auto(config.cluster):
        return []
    from rlinf_lite.preview.memory import estimate  # loads torch

    found, is_cpu, room = list[Candidate](), slots(config.cluster)[0] == "cpu", room_for(config)
    for plan in map(plan_of, possible(config)):
        needed = needed_bytes(plan, estimate(plan))
        outcome = "may fit" if room is None else "fits" if needed <= room else "too large"
        found.append(Candidate(plan.config, _overrides(plan.config), needed, outcome))
    if room is None or any(one.outcome == "fits" for one in found):
        return found
    where = "this machine's free memory" if is_cpu else "the smallest GPU here"
    batch = "env.train.num_envs, rollout.num_chunks or actor.micro_batch_size"
    if isinstance(config, ReasoningConfig):
        batch = "data.num_prompts, rollout.max_batch_size or actor.max_tokens_per_micro_batch"
    more = "end other programs" if is_cpu else "let roles release memory (actor.offload, rollout.offload)"
    text = f"is auto, and no placement fits into {where}, {byte_text(room)}. Their needs:"
    text = "\n  ".join([text, *map(str, found), f"Lower {batch}, use a smaller model, or {more}"])
    raise PlacementError(text, PLACEMENT)


def room_for(config: Config | ReasoningConfig) -> int | None:
    """Bytes of this machine's smallest GPU (None: not known), or of its free memory for a CPU cluster."""
    return free_host_bytes() if slots(config.cluster)[0] == "cpu" else gpu_bytes()


def needed_bytes(plan: Plan | ReasoningPlan, memory: Estimate) -> int:
    """Bytes that a run needs on its fullest slot, or on the fullest node of a CPU cluster; `memory`: of that plan."""
    fused = fused_roles(plan.config)
    if slots(plan.config.cluster)[0] == "cpu":
        return memory.node_host_bytes
    processes = [one for role, ranks in plan.placements.items() if role not in fused[1:] for one in ranks]
    contexts = Counter(process.slots[0] for process in processes)
    return max((size + contexts[slot] * CONTEXT_BYTES for slot, size in memory.slot_bytes.items()), default=0)


def _overrides(placed: Config | ReasoningConfig) -> str:
    lines = placed.cluster.model_dump(mode="json")["component_placement"]
    lines = {name: line for names, line in lines.items() for name in names.split(",")}  # the form for a command line
    fuse = ",".join(fused_roles(placed))
    settings = [f"cluster.component_placement={yaml_text(lines)}", "cluster.fuse=" + (f"'{fuse}'" if fuse else "null")]
    return shlex.join([*settings, f"rollout.pipeline_stage_num={placed.rollout.pipeline_stage_num}"])
