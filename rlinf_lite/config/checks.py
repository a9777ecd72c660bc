"""What must hold between keys. Each check names the keys that it reads, and is left out where one of them is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlinf_lite.config import resources
from rlinf_lite.config.names import COMPONENTS, did_you_mean
from rlinf_lite.config.placing import placements, touches
from rlinf_lite.config.plan import TASKS, Plan, episode_steps, observed, slots
from rlinf_lite.config.schema import Config
from rlinf_lite.envs.maniskill import expert as experts

if TYPE_CHECKING:
    pass

Check = Callable[[Config, Plan], Iterator[str]]
_CHECKS: list[tuple[tuple[str, ...], str | None, Check]] = []
_LEVELS = ("chunk_level", "action_level", "token_level")  # from coarse to fine
_GROUP_ESTIMATORS = ("grpo", "rloo", "opo", "reinforce_plus_plus_baseline")
_WHOLE_EPISODE_ESTIMATORS = (*_GROUP_ESTIMATORS, "reinforce_plus_plus")

_ENVS = "env.train.num_envs"
_EPISODE = ("env.id", "env.task", "env.train.max_episode_steps")
_T = ("rollout.num_chunks", "model.num_action_chunks", *_EPISODE)


def _check(*keys: str, task_type: str | None = None) -> Callable[[Check], Check]:
    """A check of all runs, or of those of one `runner.task_type`."""

    def add(function: Check) -> Check:
        _CHECKS.append((keys, task_type, function))
        return function

    return add


def find_problems(config: Config, suspects: set[str]) -> list[str]:
    """Every violated rule. `suspects` are keys whose values are not what their author wrote."""
    found, problems = placements(config.cluster, COMPONENTS, COMPONENTS, suspects)
    plan = Plan(config, found)
    for keys, task_type, function in _CHECKS:
        if task_type in (None, config.runner.task_type) and not touches(keys, suspects):
            problems += function(config, plan)
    problems += [text for key, text in resources.find_problems(config) if not touches((key,), suspects)]
    return problems


def _near_multiples(value: int, unit: int) -> str:
    below, above = value // unit * unit, -(-value // unit) * unit
    return f"{below} or {above}" if below else str(above)


def _quotient(value: int, divisor: int) -> str:
    return f"{value} / {divisor} = {value / divisor:.4g}"


def _largest_divisor(value: int, at_most: int) -> int:
    return max(size for size in range(1, min(at_most, value) + 1) if value % size == 0)


# who gets which environments


def _add_split_over_stages(split: Literal["train", "eval"]) -> None:
    key = f"env.{split}.num_envs"

    @_check(key, "rollout.pipeline_stage_num")
    def envs_split_over_stages(config: Config, plan: Plan) -> Iterator[str]:
        num_envs, stages = getattr(config.env, split).num_envs, config.rollout.pipeline_stage_num
        workers = plan.size("env")
        if workers and num_envs % (workers * stages):
            yield (
                f"{key}: {num_envs} environments do not divide over {workers} env workers x {stages} stages "
                f"= {workers * stages} slices ({_quotient(num_envs, workers * stages)}). Use "
                f"{_near_multiples(num_envs, workers * stages)}, or change rollout.pipeline_stage_num or the env "
                "placement"
            )


_add_split_over_stages("train")
_add_split_over_stages("eval")


@_check("algorithm.group_size", _ENVS, "rollout.pipeline_stage_num", task_type="embodied")
def _groups_stay_in_one_stage(config: Config, plan: Plan) -> Iterator[str]:
    size, num_envs = config.algorithm.group_size, config.env.train.num_envs
    stages, workers = config.rollout.pipeline_stage_num, plan.size("env")
    if workers and size > 1 and num_envs % (workers * stages * size):
        per_stage = num_envs / (workers * stages)
        yield (
            f"algorithm.group_size: a stage holds {num_envs} environments / {workers} env workers / {stages} stages "
            f"= {per_stage:g}, which are no whole number of groups of {size} "
            f"({per_stage:g} / {size} = {per_stage / size:.4g}). "
            f"Use {_near_multiples(num_envs, workers * stages * size)} for {_ENVS}, or another group_size"
        )


@_check("algorithm.group_size", _ENVS, task_type="embodied")
def _trajectories_split_over_actors(config: Config, plan: Plan) -> Iterator[str]:
    size, num_envs, actors = config.algorithm.group_size, config.env.train.num_envs, plan.size("actor")
    if actors and num_envs % actors:
        yield (
            f"{_ENVS}: {num_envs} trajectories do not divide over {actors} actor ranks "
            f"({_quotient(num_envs, actors)}). "
            f"Use {_near_multiples(num_envs, actors * size)}, or change the actor placement"
        )
    elif actors and num_envs % (actors * size):
        yield (
            f"algorithm.group_size: an actor gets {num_envs} trajectories / {actors} ranks = {num_envs // actors}, "
            f"which are no whole number of groups of {size} ({_quotient(num_envs // actors, size)}). Use "
            f"{_near_multiples(num_envs, actors * size)} for {_ENVS}, or another group_size"
        )


@_check(_ENVS, "rollout.pipeline_stage_num")
def _every_rollout_worker_has_rows(config: Config, plan: Plan) -> Iterator[str]:
    num_envs, stages, workers = config.env.train.num_envs, config.rollout.pipeline_stage_num, plan.size("rollout")
    if workers and num_envs // stages < workers:
        yield (
            f"{_ENVS}: {num_envs} environments / {stages} stages = {num_envs / stages:g} rows at a time are fewer than "
            f"the {workers} rollout workers. Use {workers * stages} or more, or fewer rollout workers"
        )


# samples, minibatches, updates


@_check("actor.global_batch_size", _ENVS, *_T, task_type="embodied")
def _samples_fill_global_batches(config: Config, plan: Plan) -> Iterator[str]:
    batch, num_envs, samples = config.actor.global_batch_size, config.env.train.num_envs, plan.num_samples
    if samples and samples % batch:
        smaller = _largest_divisor(samples, batch)
        yield (
            f"actor.global_batch_size: a step collects {num_envs} environments x {plan.num_chunks} decisions "
            f"= {samples} samples, which are no whole number of batches of {batch} ({_quotient(samples, batch)}). "
            f"Use {smaller}, or change {_ENVS} or rollout.num_chunks"
        )


@_check("actor.global_batch_size", "actor.micro_batch_size")
def _batches_split_over_ranks(config: Config, plan: Plan) -> Iterator[str]:
    batch, micro, actors = config.actor.global_batch_size, config.actor.micro_batch_size, plan.size("actor")
    if not actors:
        return
    if batch % actors:
        yield (
            f"actor.global_batch_size: {batch} samples do not divide over {actors} actor ranks "
            f"({_quotient(batch, actors)}). Use {_near_multiples(batch, actors)}"
        )
    elif micro < batch // actors and (batch // actors) % micro:
        share = batch // actors
        smaller = _largest_divisor(share, micro)
        yield (
            f"actor.micro_batch_size: a rank's share of a batch is {batch} / {actors} = {share} samples, which are no "
            f"whole number of passes of {micro} ({_quotient(share, micro)}). Use {smaller}, or {share} for one pass"
        )


# chunks and episodes


@_check(*_T)
def _chunks_fit_episodes(config: Config, plan: Plan) -> Iterator[str]:
    chunk, limit = config.model.num_action_chunks, episode_steps(config, config.env.train)
    if limit is not None and chunk > limit:
        yield (
            f"model.num_action_chunks: a chunk of {chunk} actions is longer than an episode of {limit} env steps. "
            f"Use {limit} or less"
        )
    if plan.num_chunks is None and config.runner.task_type == "embodied":
        yield (
            f"rollout.num_chunks: null means one whole episode, and how long {config.env.task} lasts is not known "
            "before its simulator starts. Set it, or env.train.max_episode_steps"
        )


@_check("algorithm.adv_type", "env.train.auto_reset", *_T, task_type="embodied")
def _whole_episodes(config: Config, plan: Plan) -> Iterator[str]:
    adv_type, limit = config.algorithm.adv_type, episode_steps(config, config.env.train)
    if adv_type not in _WHOLE_EPISODE_ESTIMATORS:
        return
    if config.env.train.auto_reset:
        yield f"env.train.auto_reset: {adv_type} scores one whole episode per environment and step. Set it to false"
    if limit is None:
        yield f"env.train.max_episode_steps: is null, and {adv_type} needs steps that cover whole episodes. Set it"
    elif plan.num_chunks is not None and plan.num_chunks * config.model.num_action_chunks < limit:
        chunk = config.model.num_action_chunks
        yield (
            f"rollout.num_chunks: {plan.num_chunks} chunks of {chunk} = {plan.num_chunks * chunk} env steps "
            f"do not cover an episode of {limit}, as {adv_type} needs. Use {-(-limit // chunk)}, or null"
        )


@_check("env.eval.auto_reset")
def _eval_plays_each_episode_once(config: Config, plan: Plan) -> Iterator[str]:
    if config.env.eval.auto_reset:
        yield "env.eval.auto_reset: an evaluation plays each of its seeded episodes once. Set it to false"


@_check("env.eval.seed", "runner.seed", "data.seed", "runner.task_type")
def _eval_plays_unseen_episodes(config: Config, plan: Plan) -> Iterator[str]:
    of_training = ("runner.seed", config.runner.seed, "episodes of training")
    of_demonstrations = ("data.seed", config.data.seed, "the episodes that were demonstrated")
    key, seed, episodes = of_demonstrations if config.runner.task_type == "sft" else of_training
    if config.env.eval.seed == seed:
        yield (
            f"env.eval.seed: is {seed}, like {key}, so that evaluations would play {episodes}. Use another number for "
            "one of them"
        )


# algorithm


@_check("algorithm.adv_type", "algorithm.group_size", "algorithm.filter_groups", task_type="embodied")
def _group_sizes(config: Config, plan: Plan) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.adv_type in _GROUP_ESTIMATORS and algorithm.group_size < 2:
        yield (
            f"algorithm.group_size: {algorithm.adv_type} compares the episodes of a group, and a group has "
            f"{algorithm.group_size}. Use 2 or more"
        )
    if algorithm.filter_groups and algorithm.adv_type in ("gae", "reinforce_plus_plus"):
        yield f"algorithm.filter_groups: {algorithm.adv_type} has no groups to drop. Set it to false"


@_check("algorithm.adv_type", task_type="embodied")
def _baselines_to_subtract(config: Config, plan: Plan) -> Iterator[str]:
    if config.algorithm.adv_type == "remax":
        yield (
            "algorithm.adv_type: remax compares with a greedy answer to the same prompt, which simulators do not "
            "play. Use rloo, or grpo"
        )


@_check("algorithm.adv_type", "algorithm.critic_warmup_steps", task_type="embodied")
def _critic_to_warm_up(config: Config, plan: Plan) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.critic_warmup_steps and algorithm.adv_type in _WHOLE_EPISODE_ESTIMATORS:
        yield f"algorithm.critic_warmup_steps: {algorithm.adv_type} has no critic to warm up. Set it to 0"


@_check("algorithm.adv_type", "algorithm.reward_type", "model.value_type", task_type="embodied")
def _values_match_rewards(config: Config, plan: Plan) -> Iterator[str]:
    reward, value = config.algorithm.reward_type, config.model.value_type
    if config.algorithm.adv_type == "gae" and reward != value:
        yield (
            f"model.value_type: {value} does not match algorithm.reward_type: {reward}, and gae subtracts one from the "
            f"other. Set it to {reward}"
        )


@_check("algorithm.reward_type", "algorithm.logprob_type", "algorithm.entropy_type", task_type="embodied")
def _levels_match_rewards(config: Config, plan: Plan) -> Iterator[str]:
    algorithm = config.algorithm
    for key in ("logprob_type", "entropy_type"):
        level = getattr(algorithm, key)
        if _LEVELS.index(level) < _LEVELS.index(algorithm.reward_type):
            yield (
                f"algorithm.{key}: {level} is coarser than algorithm.reward_type: {algorithm.reward_type}, so that one "
                f"number would meet several advantages. Set it to {algorithm.reward_type} or finer"
            )


@_check("algorithm.clip_ratio_c")
def _dual_clip(config: Config, plan: Plan) -> Iterator[str]:
    dual = config.algorithm.clip_ratio_c
    if dual is not None and dual <= 1:
        yield f"algorithm.clip_ratio_c: is {dual:g}, and the dual clip must be above 1. Use 3, or null to turn it off"


# what runs where


@_check("env.id", "env.maniskill", "cluster")
def _gpu_simulation_has_gpus(config: Config, plan: Plan) -> Iterator[str]:
    wanted = config.env.id == "maniskill" and config.env.maniskill.sim_backend == "physx_cuda"
    if wanted and plan.placements and slots(config.cluster)[0] == "cpu":
        yield "env.maniskill.sim_backend: physx_cuda simulates on GPUs, and accelerator=cpu here. Use auto or physx_cpu"


@_check("model.attn_implementation", "actor.precision")
def _flash_attention_is_bf16(config: Config, plan: Plan) -> Iterator[str]:
    if config.model.attn_implementation == "flash_attention_2" and config.actor.precision == "fp32":
        yield "actor.precision: flash_attention_2 cannot compute in fp32. Use bf16, or model.attn_implementation: sdpa"


@_check("env.id", "env.maniskill", "env.tabletop", "model.id")
def _mlp_has_state(config: Config, plan: Plan) -> Iterator[str]:
    env = config.env
    if config.model.id != "mlp_gaussian":
        return
    if env.id == "maniskill" and env.maniskill.obs_mode == "rgb":
        yield "env.maniskill.obs_mode: rgb has no state, which is what mlp_gaussian reads. Use state"
    if env.id == "tabletop" and env.tabletop.obs_mode == "rgb":
        yield "env.tabletop.obs_mode: rgb has no blocks in its state, which is what mlp_gaussian reads. Use state"


@_check("env.id", "env.task")
def _tabletop_has_the_task(config: Config, plan: Plan) -> Iterator[str]:
    tasks = [task for env_id, task in TASKS if env_id == "tabletop"]
    if config.env.id == "tabletop" and config.env.task not in tasks:
        yield f"env.task: tabletop has no task {config.env.task!r}. {did_you_mean(config.env.task, tasks)}"


@_check("env.tabletop.num_blocks")
def _fewest_and_most_blocks(config: Config, plan: Plan) -> Iterator[str]:
    fewest, most = config.env.tabletop.num_blocks
    if fewest > most:
        yield f"env.tabletop.num_blocks: fewest {fewest} is more than most {most}. Use [{most}, {fewest}]"


@_check("model", "rollout.model_dir", "actor.checkpoint_load_path", "env")
def _vla_fits_the_run(config: Config, plan: Plan) -> Iterator[str]:
    seen = observed(config)
    if config.model.id != "openvla" or seen is None:
        return
    try:
        from rlinf_lite.preview.footprint import vla_config

        cameras = vla_config(config, seen).cameras
    except ValueError as error:
        yield str(error)
        return
    unknown = [name for name in cameras if name not in seen.cameras]
    if unknown or not seen.cameras:
        yield (
            f"model.cameras: the policy looks through {', '.join(cameras) or 'cameras'}, and what {config.env.task} "
            f"shows is {', '.join(seen.cameras) or 'a state alone'}. Set it, or env.{config.env.id}.obs_mode"
        )


# supervised training


@_check("runner.max_steps", task_type="sft")
def _sft_has_a_length(config: Config, plan: Plan) -> Iterator[str]:
    if config.runner.max_steps < 1:
        yield (
            f"runner.max_steps: is {config.runner.max_steps}, and an sft run needs its number of optimizer updates. "
            "Set it, for example to 1000"
        )


@_check("data", "env.id", "env.task", "env.maniskill", task_type="sft")
def _demonstrations_have_an_expert(config: Config, plan: Plan) -> Iterator[str]:
    data, env = config.data, config.env
    there = data.demos_dir is not None and (Path(data.demos_dir) / "meta.json").is_file()
    if env.id not in ("maniskill", "gymnasium") or data.teacher_dir is not None or there:
        return
    problem = env.id + " has no expert of its own"
    if env.id == "maniskill":
        control, sim = env.maniskill.control_mode, env.maniskill.sim_backend
        if env.task in experts.TASKS and control in experts.CONTROL_MODES and sim != "physx_cuda":
            return
        problem = (
            f"no scripted expert for {env.task} under {control} in {sim}: there is one for {', '.join(experts.TASKS)} "
            f"under {' and '.join(experts.CONTROL_MODES)}, in physx_cpu"
        )
    yield (f"data.teacher_dir: {problem}. Name a trained policy, or in data.demos_dir demonstrations that are there")


@_check("data.teacher_dir", "env.id", "env.maniskill", "model.num_action_chunks", task_type="sft")
def _teacher_fits(config: Config, plan: Plan) -> Iterator[str]:
    teacher, chunk = config.data.teacher_dir, config.model.num_action_chunks
    if teacher is None or not Path(teacher).is_dir():
        return
    file = resources.policy_directory(teacher) / "config.json"
    if not file.is_file():
        yield f"data.teacher_dir: {teacher} holds no policy (no {file}). Name a checkpoint or a policy directory"
        return
    of_teacher = json.loads(file.read_text()).get("num_action_chunks", 1)
    if chunk % of_teacher:
        yield (
            f"model.num_action_chunks: a chunk of {chunk} is no whole number of the teacher's chunks of {of_teacher} "
            f"({_quotient(chunk, of_teacher)}). Use {_near_multiples(chunk, of_teacher)}"
        )
    if config.env.id == "maniskill" and config.env.maniskill.obs_mode == "rgb":
        yield "env.maniskill.obs_mode: rgb has no state, which data.teacher_dir acts on. Use rgb+state"
