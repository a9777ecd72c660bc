"""The text of `--dry-run`: the resolved config, the placement map, the arithmetic and the memory of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from textwrap import indent
from typing import TYPE_CHECKING

import yaml

from rlinf_lite.config.checks import find_problems, possible
from rlinf_lite.config.names import roles_of
from rlinf_lite.config.plan import Plan, ReasoningPlan, observed, plan_of, slots
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.resources import start_dir
from rlinf_lite.config.schema import Config
from rlinf_lite.envs import EnvSpec, get_env_spec, make_env
from rlinf_lite.machine import byte_text
from rlinf_lite.preview.checkpointing import choose
from rlinf_lite.preview.placements import check_room, needed_bytes, room_for
from rlinf_lite.registry import IMPORT_PATH, env_card
from rlinf_lite.scheduler.errors import PlacementError
from rlinf_lite.scheduler.placement import HybridComponentPlacement

if TYPE_CHECKING:
    from rlinf_lite.models.base import PolicyInputs
    from rlinf_lite.preview.memory import Estimate


def describe(config: Config | ReasoningConfig) -> str:
    """Sections of text about a config that has passed its checks. Imports torch, to count memory, but not ray."""
    from rlinf_lite.preview.memory import estimate  # loads torch

    candidates = possible(config)
    plan = plan_of(candidates[0])
    if isinstance(plan, ReasoningPlan):
        names, arithmetic = roles_of(plan.config), _reasoning_arithmetic(plan)
    else:
        names = None
        of_kind = {"sft": _sft_arithmetic, "off_policy": _off_policy_arithmetic}
        arithmetic = of_kind.get(plan.config.runner.task_type, _arithmetic)(plan)
    found = estimate(plan)
    sections = {
        "config": yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).rstrip(),
        "placement": HybridComponentPlacement(plan.config).describe(names),
        "one step": "\n".join(arithmetic),
        "memory per rank, estimated": "\n".join(_memory(plan, found)),
    }
    if slots(config.cluster)[0] == "cuda" and (choice := choose(plan.config, found)) is not None:
        sections["the fastest gradient checkpointing that fits"] = str(choice)
    if copies := _copies_fit(plan, found):
        sections["a faster way to spread the model over ranks"] = copies
    lacking = [f"{problem}" for problem in find_problems(config, set()) if problem.of_machine]
    try:
        if placements := check_room(config):
            title = "placements to try, with the memory of the fullest slot, or of the fullest node of a CPU cluster"
            sections[title] = "\n".join(map(str, placements))
    except PlacementError as error:  # its message has these lines
        lacking.append(str(error))
    if lacking:
        sections["it cannot run on this machine"] = "\n".join(lacking)
    return "\n\n".join(f"{title}\n{indent(text, '  ')}" for title, text in sections.items())


_TRIED_PARAMETERS = 20_000_000  # largest policy that is tried here


def shown(config: Config | ReasoningConfig) -> EnvSpec | None:
    """The environment's EnvSpec: from its card, or from an environment that is made here. None if it cannot be made
    here, or needs a simulator of another package."""
    if not isinstance(config, Config):
        return None
    from rlinf_lite.preview.memory import spec_of  # loads torch

    seen = observed(config)
    if seen is not None or env_card(config.env.id).package is not None:
        return None if seen is None else spec_of(seen)
    try:
        env = make_env(config.env, "train", 1)
        spec = get_env_spec(env, env.reset(seeds=[0]))
        getattr(env, "close", lambda: None)()
    except Exception:  # any error of a user's code, which other checks report
        return None
    return spec


def policy_problems(config: Config | ReasoningConfig, spec: EnvSpec | None) -> list[str]:
    """Problems that `check_policy` finds in a user's own policy, built with random weights for `spec`. None are
    returned for a large policy, a policy of rlinf_lite, or if `spec` is None."""
    if not isinstance(config, Config) or not IMPORT_PATH.fullmatch(config.model.id) or start_dir(config) is not None:
        return []
    if spec is None:
        return []
    # these import torch
    from rlinf_lite.models import check_policy
    from rlinf_lite.models.registry import policy_class
    from rlinf_lite.preview.fake import fake_tensors

    kind = policy_class(config.model.id)
    with fake_tensors(), suppress(Exception):  # any error of a user's code, which check_policy reports
        if sum(one.numel() for one in kind.from_config(config.model, spec).parameters()) > _TRIED_PARAMETERS:
            return []
    found = check_policy(kind, spec, config.model)
    return [f"model.id: {config.model.id}: {sentence}" for sentence in found]


def what_is_read(config: Config | ReasoningConfig, spec: EnvSpec | None) -> PolicyInputs | None:
    """The inputs that the run's policy declares, if it is built for `spec` (see `shown`). None if it cannot be built
    here, or declares none."""
    if not isinstance(config, Config) or spec is None:
        return None
    from rlinf_lite.models import build_policy  # loads torch, as does the next
    from rlinf_lite.preview.fake import fake_tensors

    with fake_tensors(), suppress(Exception):  # any error of a user's code, which the estimate of memory reports
        return build_policy(config, spec, read_weights=False).reads()
    return None


def _reasoning_arithmetic(plan: ReasoningPlan) -> Iterator[str]:
    config, actor = plan.config, plan.config.actor
    algorithm, prompts, ranks = config.algorithm, config.data.num_prompts, plan.size("actor")
    assert ranks  # the checks have passed
    ranks_per_model = actor.tensor_model_parallel_size
    share = -(-actor.global_batch_size // (ranks // ranks_per_model))
    parts, part = f"{ranks} actor ranks", "rank"
    if ranks_per_model > 1:
        parts, part = f"{ranks // ranks_per_model} models of {ranks_per_model} actor ranks each", "model"
    greedy = ", and a greedy one each" if algorithm.adv_type == "remax" else ""
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
        f"per update    {actor.global_batch_size} / {parts} = {share} responses a {part}, "
        f"{actor.max_tokens_per_micro_batch} tokens or less per forward and backward pass"
    )
    sft = config.sft
    if sft.num_steps:
        yield f"before        {sft.num_steps} supervised updates of {sft.batch_size} solutions"


def _sft_arithmetic(plan: Plan) -> Iterator[str]:
    config, actor, ranks = plan.config, plan.config.actor, plan.size("actor")
    assert ranks  # the checks have passed
    share, data = actor.global_batch_size // ranks, config.data
    if data.source == "folder":
        yield f"demonstrations the LeRobotDataset in {data.demos_dir}"
    else:
        yield f"demonstrations {data.num_episodes} episodes, by {data.teacher_dir or 'the expert of ' + config.env.id}"
    yield (
        f"per step       one update: {actor.global_batch_size} chunks of {config.model.num_action_chunks} actions "
        f"/ {ranks} actor ranks = {share} a rank; / micro batch {actor.micro_batch_size} "
        f"= {-(-share // actor.micro_batch_size)} forward and backward passes"
    )
    yield f"the run        {plan.num_steps} steps = {plan.num_steps * actor.global_batch_size} chunks"


def _environments(plan: Plan) -> str:
    workers, stages, num_envs = plan.size("env"), plan.config.rollout.pipeline_stage_num, plan.config.env.train.num_envs
    assert workers  # the checks have passed
    return (
        f"environments  {num_envs} / {workers} env workers / {stages} stages = {num_envs // workers // stages} "
        f"at a time per env worker; rollout workers: {plan.size('rollout')}"
    )


def _off_policy_arithmetic(plan: Plan) -> Iterator[str]:
    from rlinf_lite.preview.ranks import FP32  # loads torch

    config, batch, own = plan.config, plan.config.actor.global_batch_size, plan.config.off_policy
    ranks, num_envs, chunk = plan.size("actor"), config.env.train.num_envs, config.model.num_action_chunks
    assert ranks and plan.num_chunks and plan.num_samples  # the checks have passed
    yield _environments(plan)
    yield (
        f"transitions   {num_envs} environments x {plan.num_chunks} decisions = {plan.num_samples}; "
        f"x {chunk} actions = {plan.num_samples * chunk} env steps"
    )
    shares = ", ".join(f"{share:g} {name}" for name, share in config.replay.shares.items() if share)
    yield (
        f"updates       {own.updates_per_step} of {batch} transitions ({shares}); {batch} / {ranks} actor ranks = "
        f"{batch // ranks} a rank; {own.updates_per_step / plan.num_samples:.3g} per transition"
    )
    yield f"the run       {plan.num_steps} steps = {plan.num_steps * plan.num_samples * chunk} env steps"
    seen = observed(config)
    if seen is not None:
        of_obs = FP32 * seen.state_dim + sum(3 * height * width for height, width in seen.cameras.values())
        of_one = of_obs + chunk * (FP32 * (seen.action_dim + 1) + 1) + 3
        kept = min(config.replay.capacity, plan.num_steps * plan.num_samples)
        least, most = kept * (of_one + of_obs // plan.num_chunks), kept * (of_one + of_obs)
        yield (
            f"replay buffer {kept:,} decisions of {of_one:,} bytes, and an observation more behind each step and "
            f"episode: {byte_text(least)} to {byte_text(most)} on disk"
        )


def _arithmetic(plan: Plan) -> Iterator[str]:
    config, actor = plan.config, plan.config.actor
    ranks = plan.size("actor")
    assert ranks and plan.num_chunks and plan.num_samples  # the checks have passed
    num_envs, chunk, epochs = config.env.train.num_envs, config.model.num_action_chunks, config.algorithm.update_epochs
    minibatches, share = plan.num_samples // actor.global_batch_size, actor.global_batch_size // ranks
    yield _environments(plan)
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


_FEW = 0.2  # of the parameters train, at most, where whole copies are proposed


def _copies_fit(plan: Plan | ReasoningPlan, found: Estimate) -> str | None:
    """A sentence where actors divide a model of which little trains, and a GPU has room for all of it."""
    from rlinf_lite.preview.memory import estimate  # loads torch

    config, ranks = plan.config, plan.size("actor") or 1
    if slots(config.cluster)[0] == "cpu" or config.actor.strategy != "fsdp" or ranks == 1:
        return None
    counts = found.models.get("policy") or found.models.get("model")
    if counts is None or counts.trained > _FEW * counts.parameters:
        return None
    actor = config.actor.model_copy(update={"strategy": "replicated", "fsdp_size": None})
    whole, room = plan_of(config.model_copy(update={"actor": actor})), room_for(config)
    needed = needed_bytes(whole, estimate(whole))
    if room is not None and needed > room:
        return None
    of_room = "may fit" if room is None else f"fits ({byte_text(needed)} of {byte_text(room)})"
    element = 2 if config.actor.precision == "bf16" else 4
    gathered = 2 * element * counts.parameters + 4 * counts.trained
    return (
        f"actor.strategy=replicated {of_room}: {counts.trained} of {counts.parameters} parameters train, so that ranks "
        f"exchange {byte_text(8 * counts.trained)} an update in place of {byte_text(gathered)} a micro-batch"
    )


def _memory(plan: Plan | ReasoningPlan, found: Estimate) -> Iterator[str]:
    accelerator = slots(plan.config.cluster)[0]
    for name, counts in found.models.items():
        types = ", ".join(f"{kind} {byte_text(count)}" for kind, count in counts.parameter_bytes.items())
        buffers = f", buffers {byte_text(counts.buffer_bytes)}" if counts.buffer_bytes else ""
        yield f"{name:<13} {counts.parameters} parameters, {counts.trained} of them train ({types}{buffers})"
    for name, rank in found.ranks.items():
        places = {"GPU: ": rank.held | rank.working, "host: ": rank.host}
        if rank.gives_back:
            places = {"GPU: ": rank.held, "GPU, in turn: ": rank.working, "host: ": rank.host}
        if accelerator == "cpu":
            places = {"": rank.host | rank.held | rank.working}
        if rank.start > sum(rank.held.values()) + sum(rank.working.values()):
            places = {"at the start: ": {"the whole model": rank.start}, **places}
        parts = [
            place + " + ".join(f"{part} {byte_text(count)}" for part, count in content.items() if count)
            for place, content in places.items()
            if content
        ]
        total = rank.device_bytes + rank.host_bytes
        yield f"{name:<13} {'; '.join(parts)} = {byte_text(total)}"
    for names, (device, host) in found.processes.items():
        if "+" in names:
            yield f"in a process  {byte_text(device + host)} for {names}, which work in turn"
    if found.ranks:
        yield f"sample        {byte_text(found.sample_bytes)} in a batch"
        if accelerator == "cuda":
            slot, count = max(found.slot_bytes.items(), key=lambda item: item[1])
            yield f"slots         {byte_text(count)} on slot {slot}, the fullest, and 0.5 to 1 GiB per process for CUDA"
        shared = f"of it up to {byte_text(found.shared_bytes)} in /dev/shm"
        when = ", while models are built" if found.node_host_bytes == found.node_start_bytes else ""
        yield f"host          {byte_text(found.node_host_bytes)} on the fullest node{when}, {shared}"
    yield from (f"not known     {sentence}" for sentence in found.unknown)
