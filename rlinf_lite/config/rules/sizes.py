"""Rules for the sizes of runs in simulators: environments per worker, batches, chunks and episodes."""

from __future__ import annotations

from collections.abc import Iterator

from rlinf_lite.cards import Problem
from rlinf_lite.config.names import needs_of
from rlinf_lite.config.plan import Plan, episode_steps
from rlinf_lite.config.rules import PLAYED, SIMULATED, TRAINED, largest_divisor, near_multiples, quotient, rule
from rlinf_lite.config.schema import Config

_ENVS = "env.train.num_envs"
_BATCH = "actor.global_batch_size"
_DECISIONS = ("rollout.num_chunks", "model.num_action_chunks", "env.id", "env.task", "env.train.max_episode_steps")
"""The keys that determine the number of decisions per environment and step."""


@rule(_ENVS, "rollout.pipeline_stage_num", kinds=TRAINED)
def _envs_split_over_stages(config: Config, plan: Plan) -> Iterator[Problem]:
    num_envs, stages, workers = config.env.train.num_envs, config.rollout.pipeline_stage_num, plan.size("env")
    if workers and num_envs % (slices := workers * stages):
        text = f"{num_envs} environments do not divide over {workers} env workers x {stages} stages = {slices} slices"
        advice = f"Use {near_multiples(num_envs, slices)}, or change rollout.pipeline_stage_num or the env placement"
        yield Problem(_ENVS, f"{text} ({quotient(num_envs, slices)}). {advice}")


@rule("algorithm.group_size", _ENVS, kinds=("embodied",))
def _whole_groups(config: Config, plan: Plan) -> Iterator[Problem]:
    """A group may be split over stages and actors, since advantages are estimated over the whole step."""
    size, num_envs = config.algorithm.group_size, config.env.train.num_envs
    if num_envs % size:
        text = f"{num_envs} environments are no whole number of groups of {size} ({quotient(num_envs, size)})"
        advice = f"Use {near_multiples(num_envs, size)} for {_ENVS}, or another group_size"
        yield Problem("algorithm.group_size", f"{text}. {advice}")


@rule(_ENVS, kinds=PLAYED)
def _trajectories_split_over_actors(config: Config, plan: Plan) -> Iterator[Problem]:
    num_envs, actors = config.env.train.num_envs, plan.size("actor")
    if actors and num_envs % actors:
        text = f"{num_envs} trajectories do not divide over {actors} actor ranks ({quotient(num_envs, actors)})"
        yield Problem(_ENVS, f"{text}. Use {near_multiples(num_envs, actors)}, or change the actor placement")


@rule(_ENVS, "rollout.pipeline_stage_num", kinds=TRAINED)
def _every_rollout_worker_has_rows(config: Config, plan: Plan) -> Iterator[Problem]:
    num_envs, stages, workers = config.env.train.num_envs, config.rollout.pipeline_stage_num, plan.size("rollout")
    if workers and num_envs // stages < workers:
        text = f"{num_envs} environments / {stages} stages = {num_envs / stages:g} rows at a time are fewer than the"
        advice = f"Use {workers * stages} or more, or fewer rollout workers"
        yield Problem(_ENVS, f"{text} {workers} rollout workers. {advice}")


@rule(_BATCH, _ENVS, *_DECISIONS, kinds=("embodied",))
def _decisions_fill_batches(config: Config, plan: Plan) -> Iterator[Problem]:
    batch, num_envs, samples = config.actor.global_batch_size, config.env.train.num_envs, plan.num_samples
    if samples and samples % batch:
        text = f"a step collects {num_envs} environments x {plan.num_chunks} decisions = {samples} samples, which are"
        text += f" no whole number of batches of {batch} ({quotient(samples, batch)})"
        advice = f"Use {largest_divisor(samples, batch)}, or change {_ENVS} or rollout.num_chunks"
        yield Problem(_BATCH, f"{text}. {advice}")


@rule(_BATCH, "actor.micro_batch_size", kinds=TRAINED)
def _batches_split_over_ranks(config: Config, plan: Plan) -> Iterator[Problem]:
    batch, micro, actors = config.actor.global_batch_size, config.actor.micro_batch_size, plan.size("actor")
    if not actors:
        return
    share = batch // actors
    if batch % actors:
        text = f"{batch} samples do not divide over {actors} actor ranks ({quotient(batch, actors)})"
        yield Problem(_BATCH, f"{text}. Use {near_multiples(batch, actors)}")
    elif micro < share and share % micro:
        yield Problem(
            "actor.micro_batch_size",
            f"a rank's share of a batch is {batch} / {actors} = {share} samples, which are no whole number of passes "
            f"of {micro} ({quotient(share, micro)}). Use {largest_divisor(share, micro)}, or {share} for one pass",
        )


@rule(*_DECISIONS, kinds=TRAINED)
def _chunks_fit_episodes(config: Config, plan: Plan) -> Iterator[Problem]:
    chunk, limit = config.model.num_action_chunks, episode_steps(config, config.env.train)
    if limit is not None and chunk > limit:
        text = f"a chunk of {chunk} actions is longer than an episode of {limit} env steps. Use {limit} or less"
        yield Problem("model.num_action_chunks", text)
    if plan.num_chunks is None and config.runner.task_type in PLAYED:
        text = f"null means one whole episode, and how long {config.env.task} lasts is not known before its simulator"
        yield Problem("rollout.num_chunks", f"{text} starts. Set it, or env.train.max_episode_steps")


@rule("algorithm.adv_type", "env.train.auto_reset", *_DECISIONS, kinds=("embodied",))
def _whole_episodes(config: Config, plan: Plan) -> Iterator[Problem]:
    limit, chunk = episode_steps(config, config.env.train), config.model.num_action_chunks
    adv_type, scores_episodes = config.algorithm.adv_type, needs_of(config).whole_episodes
    if scores_episodes and config.env.train.auto_reset:
        text = f"{adv_type} scores one whole episode per environment and step. Set it to false"
        yield Problem("env.train.auto_reset", text)
    elif config.env.train.auto_reset:
        return
    # the result of an episode that a step cuts off is unknown, and those that end early are the successful ones
    why = f"{adv_type} scores" if scores_episodes else "without env.train.auto_reset a step has to play"
    if limit is None:
        text = f"is null, and {why} whole episodes, whose length has to be known. Set it"
        yield Problem("env.train.max_episode_steps", text)
    elif plan.num_chunks is not None and plan.num_chunks * chunk < limit:
        yield Problem(
            "rollout.num_chunks",
            f"{plan.num_chunks} chunks of {chunk} = {plan.num_chunks * chunk} env steps do not cover an episode of "
            f"{limit}, and {why} whole episodes. Use {-(-limit // chunk)}, or null",
        )


@rule("env.eval.auto_reset", kinds=SIMULATED)
def _eval_plays_each_episode_once(config: Config, plan: Plan) -> Iterator[Problem]:
    if config.env.eval.auto_reset:
        yield Problem("env.eval.auto_reset", "an evaluation plays each of its seeded episodes once. Set it to false")


@rule("env.eval.seed", "runner.seed", "data.seed", "runner.task_type", kinds=SIMULATED)
def _eval_plays_unseen_episodes(config: Config, plan: Plan) -> Iterator[Problem]:
    key, seed, episodes = "runner.seed", config.runner.seed, "episodes of training"
    if config.runner.task_type == "sft":
        key, seed, episodes = "data.seed", config.data.seed, "the episodes that were demonstrated"
    if config.env.eval.seed == seed:
        text = f"is {seed}, like {key}, so that evaluations would play {episodes}. Use another number for one of them"
        yield Problem("env.eval.seed", text)
