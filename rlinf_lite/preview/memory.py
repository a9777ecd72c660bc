"""Estimate of the memory of all processes of a run, before it starts.

`preview.ranks` estimates one process. This module adds batches and messages, and sums over slots and nodes. Sums are of
resident memory (the kernel's VmHWM): pages that processes share count in each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rlinf_lite.cards import Observed
from rlinf_lite.config.names import builds_training_envs, fused_roles, max_staleness, roles_of
from rlinf_lite.config.plan import Plan, ReasoningPlan, observed, slots
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.resources import policy_directory, start_dir
from rlinf_lite.config.schema import Config
from rlinf_lite.envs.base import EnvSpec
from rlinf_lite.models import build_policy
from rlinf_lite.models.critics import Critics
from rlinf_lite.preview.fake import Counts, count, fake_tensors
from rlinf_lite.preview.ranks import (
    FP32,
    INTERPRETER_BYTES,
    TRANSFORMERS_BYTES,
    RankMemory,
    acting_bytes,
    acting_rank,
    evaluated_at_once,
    language_model,
    language_passes,
    policy_passes,
    reward_model,
    scoring_rank,
    synced_bytes,
    training_rank,
)
from rlinf_lite.registry import env_card

if TYPE_CHECKING:
    from rlinf_lite.models.text.causal_lm import LanguageModel

T = TypeVar("T")


@dataclass
class Estimate:
    """The memory of a run, as far as it can be known before it starts."""

    unknown: list[str] = field(default_factory=list)
    """Sentences on parts that are left out, with the reasons."""
    models: dict[str, Counts] = field(default_factory=dict)
    sample_bytes: int = 0
    """Bytes of one decision, or of one response, in a batch."""
    ranks: dict[str, RankMemory] = field(default_factory=dict)
    """One process of each component; empty if the model could not be counted."""
    processes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Bytes of a process on its slot and in host memory, by its component, or by the roles that share it: `a+b`."""
    slot_bytes: dict[int, int] = field(default_factory=dict)
    """Device memory of all processes on a slot, by slot."""
    node_host_bytes: int = 0
    """Host memory of all processes on the fullest node."""
    node_start_bytes: int = 0
    """Host memory on the fullest node while its processes build models that then move to GPUs."""
    segment_bytes: int = 0
    """Host memory of the weights for rollout workers on GPUs, once per node; part of `node_host_bytes`."""
    shared_bytes: int = 0
    """Largest size in /dev/shm: weights, and a step's batches and observations in transit; part of
    `node_host_bytes`."""

    def attempt(self, sentence: str, function: Callable[[], T]) -> T | None:
        """The result of `function`. If it raises: None, and `sentence` with the error is added to `unknown`."""
        try:
            return function()
        except Exception as error:  # a user's class may raise anything, and the rest of the estimate is still useful
            reason = (str(error).strip().splitlines() or [""])[0]
            self.unknown.append(f"{sentence}: {type(error).__name__}: {reason}")
            return None


def estimate(plan: Plan | ReasoningPlan) -> Estimate:
    """The memory of a config that has passed its checks. A model that cannot be counted is no error: see `unknown`."""
    found = _reasoning(plan) if isinstance(plan, ReasoningPlan) else _embodied(plan)
    accelerator, per_node = slots(plan.config.cluster)
    on_slots: Counter[int] = Counter()
    lent: dict[str, Counter[int]] = {}  # by role, its memory on slots that it has only while it works
    on_nodes: Counter[int] = Counter()
    starts = _starts(plan, found)
    for names, (device, host) in found.processes.items():
        rank = found.ranks.get(names)  # None for roles that share a process, which work in turn anyway
        in_turn = sum(rank.working.values()) if rank is not None and rank.gives_back else 0
        for process in plan.placements[names.partition("+")[0]]:
            slot = process.slots[0]  # a process that owns several uses the first
            on_slots[slot] += device - in_turn
            lent.setdefault(names, Counter())[slot] += in_turn
            on_nodes[slot // per_node] += host
            if accelerator == "cpu":
                on_nodes[slot // per_node] += max(device, 0 if rank is None else rank.start)
    for slot in on_slots:
        on_slots[slot] = max(on_slots[slot] + max(of_role[slot] for of_role in lent.values()), starts[slot])
    found.slot_bytes = dict(sorted(on_slots.items()))
    found.node_start_bytes = _host_at_start(plan, found) if accelerator == "cuda" else 0
    found.node_host_bytes = max(max(on_nodes.values(), default=0) + found.segment_bytes, found.node_start_bytes)
    return found


def _starts(plan: Plan | ReasoningPlan, found: Estimate) -> Counter[int]:
    """Bytes on each slot at the start, while the largest model on it is still whole. Other models have only their
    weights there, because no role works yet."""
    weights: Counter[int] = Counter()
    whole: Counter[int] = Counter()
    for role, rank in found.ranks.items():
        own = rank.held.get("weights", 0)
        for slot in {process.slots[0] for process in plan.placements.get(role, ())}:
            weights[slot] += own
            whole[slot] = max(whole[slot], rank.start - own)
    return weights + whole


def _host_at_start(plan: Plan | ReasoningPlan, found: Estimate) -> int:
    """Host memory of the fullest node while models are built that then move to GPUs.

    Processes build their models at the same time, roles of one process in turn, references and critics after the
    others. Models that transformers reads from fp32 files need less, because processes share the pages of the files.
    """
    _, per_node = slots(plan.config.cluster)
    at_first, later = Counter[int](), Counter[int]()
    for names, (_, host) in found.processes.items():
        roles = names.split("+")
        base = host if names == "env" else max(found.ranks[role].host["interpreter"] for role in roles)
        late = {"reference", "critic"} & {*roles}
        for nodes, own in ((at_first, {*roles} - late), (later, late)):
            models = (found.models.get(_model_of(role, found)) for role in own)
            built = max((counts.num_bytes + counts.buffer_bytes for counts in models if counts is not None), default=0)
            for process in plan.placements[roles[0]]:
                nodes[process.slots[0] // per_node] += base + built
    return max([*at_first.values(), *later.values()], default=0)


def _model_of(role: str, found: Estimate) -> str:
    """The key of a role's model in `found.models`."""
    if role in ("env", "critic") or role in found.models:
        return role
    return "reward model" if role == "reward" else "policy" if "policy" in found.models else "model"


# policies


def spec_of(seen: Observed) -> EnvSpec:
    """The EnvSpec for which a policy is built. Bounds and time limits are invented, because they do not affect
    sizes."""
    bounds = [-1.0] * seen.action_dim, [1.0] * seen.action_dim
    names = (None if x is None else list(x) for x in (seen.state_names, seen.action_names))
    return EnvSpec(seen.action_dim, seen.state_dim or None, seen.cameras, *bounds, 1, seen.has_instruction, *names)


def _embodied(plan: Plan) -> Estimate:
    config, seen, found = plan.config, observed(plan.config), Estimate()
    if seen is None or plan.num_samples is None:
        found.unknown.append(f"known once {config.env.task} and {config.model.id} are built")
        return found
    spec = spec_of(seen)
    name = config.model.id
    with fake_tensors() as meter:
        policy = found.attempt(
            f"parameters of {name} could not be counted without building it",
            lambda: build_policy(config, spec, read_weights=False),
        )
        if policy is None:
            return found
        counts = count(policy, policy.fsdp_units())
        others: dict[str, int] = {}  # of the actor, on its slot
        if config.runner.task_type == "off_policy":
            critics = count(Critics.of(policy, config.off_policy), [])
            others["critics"] = critics.num_bytes + 3 * FP32 * critics.trained  # AdamW's moments and gradients
        if config.teacher.model_dir is not None:
            others["teacher"] = counts.num_bytes + counts.buffer_bytes
        passes = found.attempt(
            f"activations and trajectories of {name} are left out: it could not be run without building it",
            lambda: policy_passes(plan, policy, spec, meter),
        )
    of_simulator = env_card(config.env.id).simulator_memory(config.env.options, slots(config.cluster)[0])
    if of_simulator is None:
        found.unknown.append(f"the simulator's own, {config.env.id}, is left out")
    obs_bytes = FP32 * seen.state_dim + sum(3 * height * width for height, width in seen.cameras.values())
    uses_transformers = any(type(module).__module__.startswith("transformers.") for module in policy.modules())
    found.sample_bytes, kept, acting, activations = passes or (0, 0, 0, 0)
    found.models = {"policy": counts}

    env, ranks = config.env, {name: plan.size(name) or 1 for name in ("env", "rollout", "actor")}
    trained_in = env.train.num_envs if builds_training_envs(config) else 0
    own_envs = -(-(trained_in + evaluated_at_once(plan)) // ranks["env"])
    simulator, each_env = of_simulator or (0, 0)
    hosts = {
        "env": {"simulator": simulator + own_envs * each_env, "observations": 2 * own_envs * obs_bytes},
        "rollout": {},
        "actor": {"weight sync": synced_bytes(config, counts)},
    }
    if config.runner.task_type == "embodied":  # once in parts and once joined; steps played ahead only in parts
        for name, ahead in (("rollout", 0), ("actor", max_staleness(config))):
            hosts[name]["trajectories"] = (2 + ahead) * -(-plan.num_samples // ranks[name]) * found.sample_bytes
    if kept:
        hosts["actor"]["fixed inputs"] = -(-plan.num_samples // ranks["actor"]) * kept
    for name, host in hosts.items():
        judges = name == "env" and trained_in and env.train.reward.id is not None  # with torch, as reward models do
        host["interpreter"] = INTERPRETER_BYTES["reward" if judges else name]
        if uses_transformers and name != "env":
            host["interpreter"] += TRANSFORMERS_BYTES
    fused = fused_roles(config)
    if fused:
        hosts["actor"].pop("weight sync")
    found.ranks = {
        "env": RankMemory({}, {}, hosts["env"]),
        "rollout": acting_rank(plan, counts, {"acting": acting}, hosts["rollout"]),
        "actor": training_rank(plan, "actor", counts, activations, hosts["actor"]),
    }
    found.ranks["actor"].held.update(others)
    _add_processes(found, fused)
    batch = 0 if config.runner.task_type == "eval" else plan.num_samples * found.sample_bytes
    traffic = batch + 2 * (trained_in or evaluated_at_once(plan)) * obs_bytes
    _add_shared(found, traffic, acting_bytes(config, counts), config)
    return found


def _add_processes(found: Estimate, fused: list[str]) -> None:
    """Set `found.processes`. Roles of one process share its interpreter, and work in turn."""
    groups = [[role] for role in found.ranks if role not in fused]
    for group in [fused, *groups] if fused else groups:
        ranks = [found.ranks[role] for role in group]
        device = sum(sum(rank.held.values()) for rank in ranks) + max(sum(rank.working.values()) for rank in ranks)
        own = sum(rank.host_bytes - rank.host["interpreter"] for rank in ranks)
        found.processes["+".join(group)] = (device, max(rank.host["interpreter"] for rank in ranks) + own)


def _add_shared(found: Estimate, traffic: int, weights: int, config: Config | ReasoningConfig) -> None:
    """Add messages in transit and weights that are sent. On a CPU, rollout workers act with the sent weights, which are
    counted as theirs."""
    sent = 0 if {"actor", "rollout"} <= set(fused_roles(config)) else weights
    found.shared_bytes = traffic + sent
    found.segment_bytes = sent if slots(config.cluster)[0] == "cuda" else 0


# language models


def _reasoning(plan: ReasoningPlan) -> Estimate:
    from rlinf_lite.models.text.causal_lm import CausalLM, CausalValueModel  # loads transformers

    config, roles, found = plan.config, roles_of(plan.config), Estimate()
    start = start_dir(config)
    models: dict[str, tuple[type[LanguageModel], str | Path | None]] = {"model": (CausalLM, start)}
    if "critic" in roles:
        models["critic"] = (CausalValueModel, config.critic.model_dir or start)
    if config.teacher.model_dir is not None:
        models["reference"] = (CausalLM, policy_directory(config.teacher.model_dir))
    peaks: Counter[str] = Counter()
    of_teacher: Counter[str] = Counter()
    with fake_tensors() as meter:
        for name, (kind, directory) in models.items():
            model = found.attempt(
                f"parameters of the {name} could not be counted without building it",
                partial(language_model, kind, directory, config, adapts=name == "model"),
            )
            if model is None:
                return found
            found.models[name] = count(model, model.fsdp_units())
            found.attempt(
                f"activations of the {name} are left out: it could not be run without building it",
                partial(language_passes, plan, model, meter, of_teacher if name == "reference" else peaks),
            )
        if config.reward.model is not None:
            found.attempt(
                "the reward model is left out: it could not be built and run",
                partial(reward_model, config, found.models, meter, peaks),
            )
    peaks |= {"scoring": of_teacher["scoring"] or peaks["scoring"]}
    # ids and mask; numbers per token of the response, and its mask
    columns = config.data.max_prompt_length + config.rollout.max_response_length
    found.sample_bytes = 9 * columns + (6 * FP32 + 1) * config.rollout.max_response_length
    found.ranks = {role: _role(plan, role, found, peaks) for role in roles}
    _add_processes(found, fused_roles(config))
    traffic = plan.num_samples * found.sample_bytes
    _add_shared(found, traffic, acting_bytes(config, found.models["model"]), config)
    return found


def _role(plan: ReasoningPlan, role: str, found: Estimate, peaks: Counter[str]) -> RankMemory:
    """The memory of one process of a role in a language run."""
    config, size = plan.config, plan.size(role) or 1
    model = role if role in found.models else "model"
    counts, fused = found.models[model], fused_roles(config)
    kind = "actor" if role in ("critic", "reference") else role
    host = {"interpreter": INTERPRETER_BYTES[kind] + TRANSFORMERS_BYTES}
    host["batch"] = 2 * -(-plan.num_samples // size) * found.sample_bytes  # as sent, and joined
    if role in ("actor", "critic"):
        if role == "actor" and "rollout" not in fused:
            host["weight sync"] = synced_bytes(config, counts)
        return training_rank(plan, role, counts, peaks[model], host)
    if role == "reference":
        return scoring_rank(plan, role, counts, peaks["scoring"], host)
    if role == "rollout":
        return acting_rank(plan, counts, {name: peaks[name] for name in ("keys and values", "generating")}, host)
    if "reward model" not in found.models:
        return RankMemory({}, {}, host)
    counts = found.models["reward model"]
    return RankMemory({"weights": counts.num_bytes + counts.buffer_bytes}, {"scoring": peaks["reward"]}, host)
