"""Rules for the processes of roles: GPUs, runtime, shared processes, offload, and ranks that form a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlinf_lite import registry
from rlinf_lite.cards import Problem
from rlinf_lite.config.names import SHARING, fused_roles, names_in_fuse, roles_of
from rlinf_lite.config.plan import PLACEMENT, Plan, ReasoningPlan, slots
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.rules import PLAYED, REINFORCED, SIMULATED, near_multiples, quotient, rule
from rlinf_lite.config.schema import BaseConfig, Config

_TP = "actor.tensor_model_parallel_size"


@rule(PLACEMENT, "cluster.accelerator")
def _one_gpu_per_process(config: BaseConfig, plan: Any) -> Iterator[Problem]:
    if slots(config.cluster)[0] != "cuda":
        return
    for name, processes in plan.placements.items():
        slots_of = next((process.slots for process in processes if len(process.slots) > 1), None)
        num_gpus = len({process.slots for process in processes})
        if slots_of is not None:
            one_each = f"{min(processes[0].slots)}-{max(processes[-1].slots)}"
            yield Problem(
                f"{PLACEMENT}.{name}",
                f"gives a process the GPUs {slots_of[0]}..{slots_of[-1]}, and it would compute on the first. Write "
                f"'{one_each}': a process each",
            )
        elif name in ("actor", "critic", "reference") and num_gpus < len(processes):
            yield Problem(
                f"{PLACEMENT}.{name}",
                f"has {len(processes)} processes on {num_gpus} GPUs, and NCCL, through which they exchange gradients "
                "and parameters, refuses two on one. Give each a GPU of its own",
            )


@rule("cluster.runtime", PLACEMENT, "cluster.num_nodes")
def _local_runtime_is_one_process(config: BaseConfig, plan: Any) -> Iterator[Problem]:
    if config.cluster.runtime != "local":
        return
    local, instead = "cluster.runtime is local: workers are threads of one process", "set cluster.runtime to ray"
    if config.cluster.num_nodes > 1:
        yield Problem("cluster.num_nodes", f"is {config.cluster.num_nodes}, and {local}. Set it to 1, or {instead}")
    for name in ("actor", "critic", "reference"):
        if (num_ranks := plan.size(name) or 0) > 1:
            text = f"gives it {num_ranks} ranks, which exchange gradients between processes, and {local}"
            yield Problem(f"{PLACEMENT}.{name}", f"{text}. Give it one rank, or {instead}")


@rule("cluster.runtime", "control.enabled")
def _local_runtime_restarts_nothing(config: BaseConfig, plan: Any) -> Iterator[Problem]:
    if config.cluster.runtime == "local" and config.control.enabled is True:
        text = "is true, and with cluster.runtime: local there is no process to start again: an exception ends the run"
        yield Problem("control.enabled", f"{text} with its own traceback. Set it to auto or false")


@rule("cluster.fuse", "runner.task_type", PLACEMENT, "algorithm.adv_type", "algorithm.kl.place")
def _roles_can_share(config: BaseConfig, plan: Any) -> Iterator[Problem]:
    key, roles, known = "cluster.fuse", fused_roles(config), SHARING[config.runner.task_type]
    unknown = [role for role in roles if role not in known]
    if roles and not known:
        text = f"is set, and roles of runner.task_type: {config.runner.task_type} share no process. Leave it out"
        yield Problem(key, text)
        return
    for role in unknown:
        yield Problem(key, f"there is no role {role!r} that could share. {registry.did_you_mean(role, known)}")
    if unknown:
        return
    if len(names_in_fuse(config)) == 1:
        text = f"names {config.cluster.fuse} alone, which shares nothing. Name two roles or more, or set it to null"
        yield Problem(key, text)
    if len(set(roles)) < len(roles):
        yield Problem(key, f"{config.cluster.fuse} names a role twice. Name each once")
    placed = {role: [process.slots for process in plan.placements[role]] for role in roles if role in plan.placements}
    first = next(iter(placed), "")
    if different := [role for role in placed if placed[role] != placed[first]]:
        text = f"{first} and {different[0]} share processes, and {PLACEMENT} puts them in different places"
        yield Problem(key, f"{text}. Give them one line")


@rule("runner.mode", "cluster.fuse", kinds=(*PLAYED, "reasoning"))
def _generates_beside_training(config: BaseConfig, plan: Any) -> Iterator[Problem]:
    together = [role for role in fused_roles(config) if role != "rollout"]  # a reward waits for another rank's part
    if config.runner.mode == "async" and together and "rollout" in fused_roles(config):
        yield Problem(
            "cluster.fuse",
            f"has rollout and {', '.join(together)} share processes, and with runner.mode: async one of them generates "
            "while the others train. Take rollout out of it (null: none are shared), or set runner.mode to sync",
        )


@rule("rollout.offload", "rollout.dtype", "cluster.fuse", kinds=REINFORCED)
def _fused_rollout_has_the_actors_weights(config: Any, plan: Any) -> Iterator[Problem]:
    if not {"actor", "rollout"} <= set(fused_roles(config)):
        return
    reason = "and with cluster.fuse rollout workers act with the actor's own parameters, or gather them in its process"
    if config.rollout.offload:
        yield Problem("rollout.offload", f"is true, {reason}. Set it to false, or take rollout out of cluster.fuse")
    if config.rollout.dtype == "bf16":
        yield Problem("rollout.dtype", f"is bf16, {reason}. Leave it out, or take rollout out of cluster.fuse")


@rule("actor.offload", "rollout.offload", "runner.mode")
def _offload_needs_phases(config: Any, plan: Any) -> Iterator[Problem]:
    for component in ("actor", "rollout"):
        if getattr(config, component).offload and config.runner.mode == "async":
            yield Problem(
                f"{component}.offload",
                "is true, and with runner.mode: async acting and training go on at the same time, so that there is no "
                "phase in which its memory could be another's. Set it to false, or runner.mode to sync",
            )


@rule("actor.frozen_dtype", "actor.precision", kinds=SIMULATED)
def _bf16_parameters_compute_in_bf16(config: Config, plan: Plan) -> Iterator[Problem]:
    if config.actor.frozen_dtype == "bf16" and config.actor.precision == "fp32":
        text = "is bf16, and actor.precision: fp32 computes with fp32 parameters. Set that to bf16, or this to fp32"
        yield Problem("actor.frozen_dtype", text)


def _splits_layers(config: BaseConfig) -> bool:
    try:
        return registry.strategy_needs(config.actor.strategy).ranks_per_model
    except registry.PartError:  # reported by its own rule
        return False


@rule("actor.strategy", kinds=SIMULATED)
def _only_language_models_split_layers(config: Config, plan: Plan) -> Iterator[Problem]:
    if _splits_layers(config):
        text = f"{config.actor.strategy} splits layers of language models only. Use fsdp or replicated"
        yield Problem("actor.strategy", text)


@rule("actor.fsdp_size", "actor.strategy", PLACEMENT)
def _ranks_are_groups_of_shards(config: BaseConfig, plan: Plan | ReasoningPlan) -> Iterator[Problem]:
    size, strategy, key = config.actor.fsdp_size, config.actor.strategy, "actor.fsdp_size"
    if size is None:
        return
    try:
        divides = registry.strategy_needs(strategy).fsdp_size
    except registry.PartError:  # reported by its own rule
        return
    if not divides:
        yield Problem(key, f"is {size}, and actor.strategy: {strategy} does not read it. Use fsdp, or null")
    elif size == 1:
        yield Problem(key, "1 divides nothing. Use 2 or more, or actor.strategy: replicated")
    trained = (
        set(roles_of(config)) & {"actor", "reference", "critic"} if isinstance(config, ReasoningConfig) else {"actor"}
    )
    for role in sorted(trained) if divides and size > 1 else ():
        ranks = plan.size(role)
        if ranks and ranks > 1 and ranks % size:
            text = f"{ranks} ranks of {role} form no whole number of groups of {size} ({quotient(ranks, size)})"
            yield Problem(key, f"{text}. Use a divisor, or place the role on {near_multiples(ranks, size)}")


@rule("actor.strategy", _TP, PLACEMENT, "algorithm.adv_type", "algorithm.kl.place", kinds=("reasoning",))
def _ranks_form_whole_models(config: ReasoningConfig, plan: ReasoningPlan) -> Iterator[Problem]:
    size, strategy = config.actor.tensor_model_parallel_size, config.actor.strategy
    if not _splits_layers(config):
        if size > 1:
            text = f"{size} ranks share layers with actor.strategy: tensor_parallel only, and that is {strategy}. Use 1"
            yield Problem(_TP, text)
        return
    if size == 1:
        yield Problem(_TP, "1 splits nothing. Use 2 or more, or actor.strategy: replicated")
    for role in ("actor", "reference", "critic"):
        ranks = plan.size(role) if role in roles_of(config) else None
        if ranks and ranks % size:
            text = f"{ranks} ranks of {role} form no whole number of models of {size} ({quotient(ranks, size)})"
            yield Problem(_TP, f"{text}. Use a divisor, or place the role on {near_multiples(ranks, size)}")
