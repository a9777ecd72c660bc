"""What a run would do, without starting it: the resolved config, the placement map, the arithmetic, the memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import yaml

from rlinf_lite.config.plan import TASKS, Plan, complete_plan
from rlinf_lite.config.schema import Config


def describe(config: Config) -> str:
    """Four sections of text about a config that has passed its checks; imports neither torch nor ray."""
    from rlinf_lite.scheduler.placement import HybridComponentPlacement  # see plan.py about the direction

    plan = complete_plan(config)
    resolved = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).rstrip()
    sections = {
        "config": resolved,
        "placement": HybridComponentPlacement(config).describe(),
        "one step": "\n".join(_arithmetic(plan)),
        "memory per rank, estimated": "\n".join(_memory(plan)),
    }
    return "\n\n".join(f"{title}\n{_indent(text)}" for title, text in sections.items())


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


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
    sizes = _sizes(plan.config)
    if sizes is None:
        yield f"known once {plan.config.env.task} and {plan.config.model.id} are built"
        return
    parameters, sample_bytes = sizes
    num_actors, num_rollout_workers = plan.size("actor"), plan.size("rollout")
    assert plan.num_samples and num_actors and num_rollout_workers
    weights, share = 4 * parameters, 4 * parameters // num_actors
    samples = plan.num_samples * sample_bytes
    yield f"policy        {parameters} parameters; {sample_bytes} bytes per sample"
    yield (
        f"actor         weights {_bytes(share)} + gradients {_bytes(share)} + AdamW {_bytes(2 * share)} "
        f"+ trajectories {_bytes(samples // num_actors)} "
        f"+ weight sync {_bytes(min(weights, plan.config.weight_sync.bucket_bytes))}"
    )
    yield f"rollout       weights {_bytes(weights)} + trajectories {_bytes(samples // num_rollout_workers)}"
    yield "env           the simulator's own; observations are sent on, not kept"
    yield "Activations, and what torch and the simulator take for themselves, come on top."


def _sizes(config: Config) -> tuple[int, int] | None:
    """Parameters of the policy and bytes of a sample, where both follow from the config."""
    task, known_controller = TASKS.get((config.env.id, config.env.task)), "pd_joint_delta_pos"
    if config.model.id != "mlp_gaussian" or task is None or config.env.kwargs:
        return None
    if config.env.id == "maniskill" and (
        config.env.maniskill.control_mode != known_controller or config.env.maniskill.obs_mode != "state"
    ):
        return None
    chunk = config.model.num_action_chunks
    num_values = 1 if config.model.value_type == "chunk_level" else chunk
    hidden = [task.state_dim, *config.model.mlp.hidden_sizes]
    actions = chunk * task.action_dim
    parameters = _parameters([*hidden, actions]) + _parameters([*hidden, num_values]) + actions
    # float32: state, sampled actions and their log-probabilities, rewards, values, next value; bool: dones, mask
    sample_bytes = 4 * (task.state_dim + 2 * actions + chunk + num_values + 1) + 2 * chunk
    return parameters, sample_bytes


def _parameters(widths: list[int]) -> int:
    return sum((num_in + 1) * num_out for num_in, num_out in itertools.pairwise(widths))


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
