"""What a run would do, without starting it: the resolved config, the placement map, the arithmetic, the memory."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from rlinf_lite.config.names import ROLES
from rlinf_lite.config.placing import placements
from rlinf_lite.config.plan import Plan, complete_plan, slots
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.reasoning_checks import ReasoningPlan
from rlinf_lite.config.roles import roles_of
from rlinf_lite.config.schema import Config
from rlinf_lite.preview.memory import estimate
from rlinf_lite.preview.reasoning_memory import decoder_of, estimate_reasoning
from rlinf_lite.registry import estimator_needs


def describe(config: Config | ReasoningConfig) -> str:
    """Sections of text about a config that has passed its checks; imports neither torch nor ray."""
    from rlinf_lite.scheduler.placement import HybridComponentPlacement  # see plan.py about the direction

    names = roles_of(config) if isinstance(config, ReasoningConfig) else None
    sections = {
        "config": yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).rstrip(),
        "placement": HybridComponentPlacement(config).describe(names),
    }
    if isinstance(config, ReasoningConfig):
        placed = placements(config.cluster, ROLES, (), set())[0]
        reasoning = ReasoningPlan(config, placed)
        sections["one step"] = "\n".join(_reasoning_arithmetic(reasoning))
        sections["memory per rank, estimated"] = "\n".join(_reasoning_memory(reasoning))
    else:
        plan = complete_plan(config)
        arithmetic = _sft_arithmetic(plan) if config.runner.task_type == "sft" else _arithmetic(plan)
        sections["one step"] = "\n".join(arithmetic)
        sections["memory per rank, estimated"] = "\n".join(_memory(plan))
    return "\n\n".join(f"{title}\n{_indent(text)}" for title, text in sections.items())


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _reasoning_arithmetic(plan: ReasoningPlan) -> Iterator[str]:
    config, actor = plan.config, plan.config.actor
    algorithm, prompts, ranks = config.algorithm, config.data.num_prompts, plan.size("actor")
    assert ranks  # the checks have passed
    share = -(-actor.global_batch_size // ranks)
    greedy = ", and a greedy one each" if estimator_needs(algorithm.adv_type).greedy else ""
    yield f"roles         {', '.join(roles_of(config))}; in one process: {config.cluster.fuse or 'none'}"
    yield (
        f"responses     {prompts} prompts x {algorithm.group_size} = {plan.num_samples}{greedy}, of at most "
        f"{config.rollout.max_response_length} tokens; {-(-prompts // (plan.size('rollout') or 1))} prompts a worker"
    )
    updates = plan.num_samples // actor.global_batch_size * algorithm.update_epochs
    yield (
        f"updates       {plan.num_samples} responses / global batch {actor.global_batch_size} "
        f"x {algorithm.update_epochs} epochs = {updates}"
    )
    yield (
        f"per update    {actor.global_batch_size} / {ranks} actor ranks = {share} responses a rank, "
        f"{actor.max_tokens_per_micro_batch} tokens or less per forward and backward pass"
    )
    sft = config.sft
    yield from [f"before        {sft.num_steps} supervised updates of {sft.batch_size} solutions"] * bool(sft.num_steps)


def _reasoning_memory(plan: ReasoningPlan) -> Iterator[str]:
    decoder = decoder_of(plan.config)
    if decoder is None:
        yield "known once the model is loaded: its config.json is of no kind that is known here"
        return
    yield f"model         {decoder.parameters} parameters"
    for role, parts in estimate_reasoning(plan, decoder).items():
        shown = " + ".join(f"{part} {byte_text(count)}" for part, count in parts.items() if count)
        yield f"{role:<13} {shown} = {byte_text(sum(parts.values()))}"
    yield "On top: per process what torch, CUDA and Ray take (see docs/memory.md)."


def _sft_arithmetic(plan: Plan) -> Iterator[str]:
    config, actor, ranks = plan.config, plan.config.actor, plan.size("actor")
    assert ranks  # the checks have passed
    share, data = actor.global_batch_size // ranks, config.data
    yield f"demonstrations {data.num_episodes} episodes, by {data.teacher_dir or 'the expert of ' + config.env.id}"
    yield (
        f"per step       one update: {actor.global_batch_size} chunks of {config.model.num_action_chunks} actions "
        f"/ {ranks} actor ranks = {share} a rank; / micro batch {actor.micro_batch_size} "
        f"= {-(-share // actor.micro_batch_size)} forward and backward passes"
    )
    yield f"the run        {plan.num_steps} steps = {plan.num_steps * actor.global_batch_size} chunks"


def _arithmetic(plan: Plan) -> Iterator[str]:
    config, actor = plan.config, plan.config.actor
    workers, rollout_workers, ranks = (plan.size(name) for name in ("env", "rollout", "actor"))
    stages = config.rollout.pipeline_stage_num
    assert workers and ranks and plan.num_chunks and plan.num_samples  # the checks have passed
    num_envs, chunk, epochs = config.env.train.num_envs, config.model.num_action_chunks, config.algorithm.update_epochs
    minibatches, share = plan.num_samples // actor.global_batch_size, actor.global_batch_size // ranks
    yield (
        f"environments  {num_envs} / {workers} env workers / {stages} stages = {num_envs // workers // stages} "
        f"at a time per env worker; rollout workers: {rollout_workers}"
    )
    yield (
        f"samples       {num_envs} environments x {plan.num_chunks} decisions = {plan.num_samples}; "
        f"x {chunk} actions = {plan.num_samples * chunk} env steps; {plan.num_samples // ranks} samples per actor rank"
    )
    yield (
        f"updates       {plan.num_samples} samples / global batch {actor.global_batch_size} = {minibatches}; "
        f"x {epochs} epochs = {minibatches * epochs}"
    )
    yield (
        f"per update    {actor.global_batch_size} / {ranks} actor ranks = {share} samples a rank; "
        f"/ micro batch {actor.micro_batch_size} = {-(-share // actor.micro_batch_size)} forward and backward passes"
    )
    env_steps, updates = plan.num_steps * plan.num_samples * chunk, plan.num_steps * minibatches * epochs
    yield f"the run       {plan.num_steps} steps = {env_steps} env steps, {updates} updates"


def _memory(plan: Plan) -> Iterator[str]:
    found = estimate(plan)
    if found is None:
        yield f"known once {plan.config.env.task} and {plan.config.model.id} are built"
        return
    accelerator, _ = slots(plan.config.cluster)
    sizes = found.sizes
    yield (
        f"policy        {sizes.parameters} parameters, {sizes.trained} of them train; "
        f"{sizes.sample_bytes} bytes per sample"
    )
    for name, rank in found.ranks.items():
        places = {"GPU: ": rank.device, "host: ": rank.host}
        if accelerator == "cpu":
            places = {"": {**rank.device, **rank.host}}
        parts = [
            place + " + ".join(f"{part} {byte_text(count)}" for part, count in content.items())
            for place, content in places.items()
            if content
        ]
        yield f"{name:<13} {'; '.join(parts)}"
    if accelerator == "cuda":
        slot, count = max(found.slot_bytes.items(), key=lambda item: item[1])
        yield f"slots         {byte_text(count)} on slot {slot}, the fullest"
    shared = f"of it up to {byte_text(found.shared_bytes)} in /dev/shm"
    yield f"host          {byte_text(found.node_host_bytes)} on the fullest node, {shared}"
    yield "On top: the simulator's own, and per process what torch, CUDA and Ray take (see docs/memory.md)."


def byte_text(count: int) -> str:
    """`1.5 GiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
