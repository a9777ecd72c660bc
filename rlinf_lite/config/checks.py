"""Rules of runs in simulators and of those of language models, and every problem of a config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rlinf_lite import registry
from rlinf_lite.cards import NO_STATE, Problem
from rlinf_lite.config.names import (
    SHARING,
    fused_roles,
    loss_needs_of,
    max_staleness,
    names_in_fuse,
    needs_of,
    roles_of,
)
from rlinf_lite.config.plan import (
    PLACEMENT,
    SLOTS,
    Plan,
    ReasoningPlan,
    env_card_of,
    episode_steps,
    observed,
    plan_and_problems,
    slots,
)
from rlinf_lite.config.proposals import is_auto, proposals
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.resources import chunk_of, labels_of, policy_config, policy_directory, start_dir, start_key
from rlinf_lite.config.rules import (
    REINFORCED,
    SIMULATED,
    TRAINED,
    imitates_no_state,
    largest_divisor,
    near_multiples,
    quotient,
    rule,
    touches,
    violations,
)
from rlinf_lite.config.schema import BaseConfig, Config, DataConfig
from rlinf_lite.dimensions import policy_misfits
from rlinf_lite.hub import hub_problem, on_hub
from rlinf_lite.scheduler.errors import PlacementError

C = TypeVar("C", bound=Config | ReasoningConfig)

_LEVELS = ("chunk_level", "action_level", "token_level")  # from coarse to fine
_ENVS = "env.train.num_envs"
_TP = "actor.tensor_model_parallel_size"
_EPISODE = ("env.id", "env.task", "env.train.max_episode_steps")
_T = ("rollout.num_chunks", "model.num_action_chunks", *_EPISODE)


def find_problems(config: BaseConfig, suspects: set[str]) -> list[Problem]:
    """Everything that is wrong. `suspects` are keys whose values are not what their author wrote. Where the placement
    is to be chosen, what is wrong with the one that comes closest."""
    unknown: list[Problem] = []  # how many slots there are
    try:
        slots(config.cluster)
    except PlacementError as error:
        if not touches(SLOTS, suspects):
            unknown = [Problem(error.about, error.text)]
        if is_auto(config.cluster):
            return unknown
        suspects = {*suspects, error.about}
    if is_auto(config.cluster):
        assert isinstance(config, Config | ReasoningConfig)
        if one_works := {"sft": "imitation", "eval": "an evaluation"}.get(config.runner.task_type):
            text = f"is auto, and in {one_works} there is nothing to choose by. Write 'actor,rollout,env: all'"
            return [Problem(PLACEMENT, text)]
        fewest: list[Problem] | None = None
        for placed in proposals(config):
            problems = find_problems(placed, suspects)
            if fewest is None or len(problems) < len(fewest):
                fewest = problems
            if not problems:
                break
        return fewest or []
    plan, problems = plan_and_problems(config, suspects)
    return [*unknown, *problems, *violations(config, plan, suspects)]


def possible(config: C) -> list[C]:
    """The config on every placement that it may run on: itself where that is given, else one or more of which
    `find_problems` finds as little as in any."""
    if not is_auto(config.cluster):
        return [config]
    found = [(len(find_problems(placed, set())), placed) for placed in proposals(config)]
    return [placed for count, placed in found if count == min(count for count, _ in found)]


# who gets which environments


@rule(_ENVS, "rollout.pipeline_stage_num", kinds=TRAINED)
def _envs_split_over_stages(config: Config, plan: Plan) -> Iterator[Problem]:
    num_envs, stages, workers = config.env.train.num_envs, config.rollout.pipeline_stage_num, plan.size("env")
    if workers and num_envs % (workers * stages):
        yield Problem(
            _ENVS,
            f"{num_envs} environments do not divide over {workers} env workers x {stages} stages "
            f"= {workers * stages} slices ({quotient(num_envs, workers * stages)}). Use "
            f"{near_multiples(num_envs, workers * stages)}, or change rollout.pipeline_stage_num or the env placement",
        )


@rule("algorithm.group_size", _ENVS, kinds=("embodied",))
def _whole_groups(config: Config, plan: Plan) -> Iterator[Problem]:
    """A group may lie in several stages and with several actors: advantages are estimated over all of a step."""
    size, num_envs = config.algorithm.group_size, config.env.train.num_envs
    if num_envs % size:
        yield Problem(
            "algorithm.group_size",
            f"{num_envs} environments are no whole number of groups of {size} ({quotient(num_envs, size)}). "
            f"Use {near_multiples(num_envs, size)} for {_ENVS}, or another group_size",
        )


@rule(_ENVS, kinds=("embodied",))
def _trajectories_split_over_actors(config: Config, plan: Plan) -> Iterator[Problem]:
    num_envs, actors = config.env.train.num_envs, plan.size("actor")
    if actors and num_envs % actors:
        yield Problem(
            _ENVS,
            f"{num_envs} trajectories do not divide over {actors} actor ranks ({quotient(num_envs, actors)}). "
            f"Use {near_multiples(num_envs, actors)}, or change the actor placement",
        )


@rule(_ENVS, "rollout.pipeline_stage_num", kinds=TRAINED)
def _every_rollout_worker_has_rows(config: Config, plan: Plan) -> Iterator[Problem]:
    num_envs, stages, workers = config.env.train.num_envs, config.rollout.pipeline_stage_num, plan.size("rollout")
    if workers and num_envs // stages < workers:
        yield Problem(
            _ENVS,
            f"{num_envs} environments / {stages} stages = {num_envs / stages:g} rows at a time are fewer than "
            f"the {workers} rollout workers. Use {workers * stages} or more, or fewer rollout workers",
        )


@rule(PLACEMENT, "cluster.accelerator")
def _a_process_computes_on_one_gpu(config: BaseConfig, plan: Any) -> Iterator[Problem]:
    if slots(config.cluster)[0] != "cuda":
        return
    for name, processes in plan.placements.items():
        slots_of = next((process.slots for process in processes if len(process.slots) > 1), None)
        if slots_of is not None:
            one_each = f"{min(processes[0].slots)}-{max(processes[-1].slots)}"
            yield Problem(
                f"{PLACEMENT}.{name}",
                f"gives a process the GPUs {slots_of[0]}..{slots_of[-1]}, and it would compute on the first. Write "
                f"'{one_each}': a process each",
            )
        elif name in ("actor", "critic", "reference"):
            num_gpus = len({process.slots for process in processes})
            if num_gpus < len(processes):
                yield Problem(
                    f"{PLACEMENT}.{name}",
                    f"has {len(processes)} processes on {num_gpus} GPUs, and NCCL, through which they exchange "
                    "gradients and parameters, refuses two on one. Give each a GPU of its own",
                )


@rule("cluster.runtime", PLACEMENT, "cluster.num_nodes")
def _threads_of_one_process_suffice(config: BaseConfig, plan: Any) -> Iterator[Problem]:
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
def _what_is_kept_alive_are_processes(config: BaseConfig, plan: Any) -> Iterator[Problem]:
    if config.cluster.runtime == "local" and config.control.enabled is True:
        text = "is true, and with cluster.runtime: local there is no process to start again: an exception ends the run"
        yield Problem("control.enabled", f"{text} with its own traceback. Set it to auto or false")


# asynchronous runs, and log-probabilities that are computed again


@rule("runner.mode", "runner.task_type")
def _mode_has_a_runner(config: BaseConfig, plan: Any) -> Iterator[Problem]:
    if config.runner.mode == "async" and config.runner.task_type == "sft":
        yield Problem("runner.mode", "is async, and imitation has no rollouts to overlap with. Set it to sync")


@rule("runner.mode", "cluster.fuse", kinds=REINFORCED)
def _generates_beside_training(config: BaseConfig, plan: Any) -> Iterator[Problem]:
    together = [role for role in fused_roles(config) if role != "rollout"]  # a reward waits for another rank's part
    if config.runner.mode == "async" and together and "rollout" in fused_roles(config):
        yield Problem(
            "cluster.fuse",
            f"has rollout and {', '.join(together)} share processes, and with runner.mode: async one of them generates "
            "while the others train. Take rollout out of it (null: none are shared), or set runner.mode to sync",
        )


@rule("runner.mode", "rollout.partial_rollouts", kinds=("reasoning",))
def _partial_rollouts_are_asynchronous(config: ReasoningConfig, plan: ReasoningPlan) -> Iterator[Problem]:
    if config.rollout.partial_rollouts and config.runner.mode == "sync":
        text = "is true, and with runner.mode: sync no weights arrive while responses are under way. Set that to async"
        yield Problem("rollout.partial_rollouts", text)


@rule("runner.mode", "runner.max_staleness", "algorithm.correction", "algorithm.loss_type", kinds=REINFORCED)
def _stale_data_is_corrected(config: Any, plan: Any) -> Iterator[Problem]:
    correction = config.algorithm.correction
    if max_staleness(config) and correction.kind == "none" and not loss_needs_of(config).behaviour:
        yield Problem(
            "algorithm.correction.kind",
            f"is none, and with runner.mode: async a step trains on what weights up to {config.runner.max_staleness} "
            "versions older did, which biases the gradient. Choose one (docs/async.md), decoupled for example, or "
            "runner.max_staleness=0",
        )


@rule("algorithm.recompute_logprobs", "algorithm.correction", kinds=REINFORCED)
def _correction_has_something_to_compare(config: Any, plan: Any) -> Iterator[Problem]:
    correction = config.algorithm.correction
    compares = correction.kind != "none" and correction.proximal == "recompute"
    if compares and config.algorithm.recompute_logprobs is False:
        yield Problem(
            "algorithm.recompute_logprobs",
            f"is false, and algorithm.correction.kind: {correction.kind} compares the actor with who "
            "acted. Set it to auto" + ", or algorithm.correction.proximal to interpolate" * (max_staleness(config) > 1),
        )


@rule("algorithm.correction", "runner.mode", "runner.max_staleness", kinds=REINFORCED)
def _interpolates_between_versions(config: Any, plan: Any) -> Iterator[Problem]:
    correction, most = config.algorithm.correction, max_staleness(config)
    if correction.kind != "none" and correction.proximal == "interpolate" and most < 2:
        data = f"runner.max_staleness: {most}" if config.runner.mode == "async" else "runner.mode: sync"
        yield Problem(
            "algorithm.correction.proximal",
            f"is interpolate, and with {data} no version lies between the one that acted and the one that trains: p "
            f"would be b, all weights 1, and {correction.kind} would change nothing. Set it to recompute",
        )


@rule("algorithm.target_kl", "algorithm.correction", "algorithm.loss_type", "runner.mode", kinds=("embodied",))
def _kl_is_of_the_step(config: Config, plan: Plan) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.target_kl is None:
        return
    if algorithm.correction.proximal == "interpolate":
        with_, way_out = "algorithm.correction.proximal: interpolate", ", or proximal to recompute"
    elif max_staleness(config) and loss_needs_of(config).behaviour:
        with_, way_out = f"{algorithm.loss_type} in an asynchronous run", ""
    else:
        return
    yield Problem(
        "algorithm.target_kl",
        f"is {algorithm.target_kl:g}, and with {with_} the KL of an update counts what changed before the step too. "
        f"Set it to null{way_out}",
    )


# memory that is given back between phases, and types of parameters


@rule("actor.offload", "rollout.offload", "runner.mode")
def _phases_follow_each_other(config: Any, plan: Any) -> Iterator[Problem]:
    for component in ("actor", "rollout"):
        if getattr(config, component).offload and config.runner.mode == "async":
            yield Problem(
                f"{component}.offload",
                "is true, and with runner.mode: async acting and training go on at the same time, so that there is no "
                "phase in which its memory could be another's. Set it to false, or runner.mode to sync",
            )


@rule("rollout.offload", "rollout.dtype", "cluster.fuse", kinds=REINFORCED)
def _acts_with_weights_of_its_own(config: Any, plan: Any) -> Iterator[Problem]:
    if not {"actor", "rollout"} <= set(fused_roles(config)):
        return
    reason = "and with cluster.fuse rollout workers act with the actor's own parameters, or gather them in its process"
    if config.rollout.offload:
        yield Problem("rollout.offload", f"is true, {reason}. Set it to false, or take rollout out of cluster.fuse")
    if config.rollout.dtype == "bf16":
        text = f"is bf16, {reason}. Leave it out, or take rollout out of cluster.fuse"
        yield Problem("rollout.dtype", text)


@rule("actor.frozen_dtype", "actor.precision", kinds=SIMULATED)
def _low_parameters_compute_in_low_precision(config: Config, plan: Plan) -> Iterator[Problem]:
    if config.actor.frozen_dtype == "bf16" and config.actor.precision == "fp32":
        text = "is bf16, and actor.precision: fp32 computes with fp32 parameters. Set that to bf16, or this to fp32"
        yield Problem("actor.frozen_dtype", text)


# samples, minibatches, updates


@rule("actor.global_batch_size", _ENVS, *_T, kinds=("embodied",))
def _samples_fill_global_batches(config: Config, plan: Plan) -> Iterator[Problem]:
    batch, num_envs, samples = config.actor.global_batch_size, config.env.train.num_envs, plan.num_samples
    if samples and samples % batch:
        yield Problem(
            "actor.global_batch_size",
            f"a step collects {num_envs} environments x {plan.num_chunks} decisions "
            f"= {samples} samples, which are no whole number of batches of {batch} ({quotient(samples, batch)}). "
            f"Use {largest_divisor(samples, batch)}, or change {_ENVS} or rollout.num_chunks",
        )


@rule("actor.global_batch_size", "actor.micro_batch_size", kinds=TRAINED)
def _batches_split_over_ranks(config: Config, plan: Plan) -> Iterator[Problem]:
    batch, micro, actors = config.actor.global_batch_size, config.actor.micro_batch_size, plan.size("actor")
    if not actors:
        return
    share = batch // actors
    if batch % actors:
        yield Problem(
            "actor.global_batch_size",
            f"{batch} samples do not divide over {actors} actor ranks ({quotient(batch, actors)}). "
            f"Use {near_multiples(batch, actors)}",
        )
    elif micro < share and share % micro:
        yield Problem(
            "actor.micro_batch_size",
            f"a rank's share of a batch is {batch} / {actors} = {share} samples, which are no whole number of passes "
            f"of {micro} ({quotient(share, micro)}). Use {largest_divisor(share, micro)}, or {share} for one pass",
        )


# chunks and episodes


@rule(*_T, kinds=TRAINED)
def _chunks_fit_episodes(config: Config, plan: Plan) -> Iterator[Problem]:
    chunk, limit = config.model.num_action_chunks, episode_steps(config, config.env.train)
    if limit is not None and chunk > limit:
        text = f"a chunk of {chunk} actions is longer than an episode of {limit} env steps. Use {limit} or less"
        yield Problem("model.num_action_chunks", text)
    if plan.num_chunks is None and config.runner.task_type == "embodied":
        yield Problem(
            "rollout.num_chunks",
            f"null means one whole episode, and how long {config.env.task} lasts is not known before its simulator "
            "starts. Set it, or env.train.max_episode_steps",
        )


@rule("algorithm.adv_type", "env.train.auto_reset", *_T, kinds=("embodied",))
def _whole_episodes(config: Config, plan: Plan) -> Iterator[Problem]:
    limit, chunk = episode_steps(config, config.env.train), config.model.num_action_chunks
    adv_type, scores_episodes = config.algorithm.adv_type, needs_of(config).whole_episodes
    if scores_episodes and config.env.train.auto_reset:
        text = f"{adv_type} scores one whole episode per environment and step. Set it to false"
        yield Problem("env.train.auto_reset", text)
    elif config.env.train.auto_reset:
        return
    # of episodes that a step cuts off nothing is known, and those that end early are the successful ones
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
        yield Problem(
            "env.eval.seed",
            f"is {seed}, like {key}, so that evaluations would play {episodes}. Use another number for one of them",
        )


# algorithm


@rule("algorithm.adv_type", kinds=("embodied",))
def _baselines_to_subtract(config: Config, plan: Plan) -> Iterator[Problem]:
    if needs_of(config).greedy:
        yield Problem(
            "algorithm.adv_type",
            f"{config.algorithm.adv_type} compares with a greedy answer to the same prompt, which simulators do not "
            "play. Use rloo, or grpo",
        )


@rule("algorithm.adv_type", "algorithm.reward_type", "model.value_type", kinds=("embodied",))
def _values_match_rewards(config: Config, plan: Plan) -> Iterator[Problem]:
    adv_type, reward, value = config.algorithm.adv_type, config.algorithm.reward_type, config.model.value_type
    if reward != value and needs_of(config).values:
        yield Problem(
            "model.value_type",
            f"{value} does not match algorithm.reward_type: {reward}, and {adv_type} subtracts one from the other. Set "
            f"it to {reward}",
        )


@rule("algorithm.reward_type", "algorithm.logprob_type", "algorithm.entropy_type", kinds=("embodied",))
def _levels_match_rewards(config: Config, plan: Plan) -> Iterator[Problem]:
    algorithm = config.algorithm
    for key in ("logprob_type", "entropy_type"):
        level = getattr(algorithm, key)
        if _LEVELS.index(level) < _LEVELS.index(algorithm.reward_type):
            yield Problem(
                f"algorithm.{key}",
                f"{level} is coarser than algorithm.reward_type: {algorithm.reward_type}, so that one number would "
                f"meet several advantages. Set it to {algorithm.reward_type} or finer",
            )


# environment and policy


@rule("env.id", kinds=SIMULATED)
def _the_simulator_is_installed(config: Config, plan: Plan) -> Iterator[Problem]:
    card = env_card_of(config)
    if card is not None and card.package is not None and not registry.is_installed(card.package):
        advice = registry.install_command(card.extra) if card.extra else f"pip install {card.package}"
        text = f"{card.name} is not installed (no module {card.package}). {advice}"
        yield Problem("env.id", text, of_machine=True)


@rule("env.id", "env.task", kinds=SIMULATED)
def _the_simulator_has_the_task(config: Config, plan: Plan) -> Iterator[Problem]:
    card, task = env_card_of(config), config.env.task
    if card is not None and card.tasks and not card.has_other_tasks and task not in card.tasks:
        yield Problem("env.task", f"{card.name} has no task {task!r}. {registry.did_you_mean(task, card.tasks)}")


@rule("env.id", "env.task", "env.options", "cluster", kinds=SIMULATED)
def _what_the_environments_card_says(config: Config, plan: Plan) -> Iterator[Problem]:
    card = env_card_of(config)
    if card is not None and plan.placements:
        yield from card.problems(config)


@rule("env", "rollout.pipeline_stage_num", PLACEMENT, "cluster.accelerator", kinds=SIMULATED)
def _an_environment_of_ones_own_can_be_made(config: Config, plan: Plan) -> Iterator[Problem]:
    """Not in a cluster of GPUs, where a simulator may take one: this process would keep part of it."""
    card, workers = env_card_of(config), plan.size("env")
    if card is None or not workers or slots(config.cluster)[0] == "cuda":
        return
    if registry.IMPORT_PATH.fullmatch(config.env.id):
        split = "eval" if config.runner.task_type == "eval" else "train"
        of_stage = getattr(config.env, split).num_envs // (workers * config.rollout.pipeline_stage_num)
        yield from registry.problems_of_making(card, config, split, max(of_stage, 1))


@rule("algorithm.critic_warmup_steps", "model.id", kinds=("embodied",))
def _a_policy_of_ones_own_has_a_value_to_warm_up(config: Config, plan: Plan) -> Iterator[Problem]:
    if not config.algorithm.critic_warmup_steps or not registry.IMPORT_PATH.fullmatch(config.model.id):
        return
    try:
        part = registry.policy_part(config.model.id)
    except registry.PartError:  # said by its own rule
        return
    base = registry.import_part(registry.POLICY, "model.id")  # who has a class to compare has imported it
    if getattr(part, "value_parameters", None) is base.value_parameters:
        text = f"is {config.algorithm.critic_warmup_steps}, and {config.model.id} has no value_parameters(), "
        advice = "which would name what trains then. Set it to 0, or write that method"
        yield Problem("algorithm.critic_warmup_steps", text + advice)


@rule("env.id", "env.task", "env.options", "model", "rollout.model_dir", "actor", "data", kinds=SIMULATED)
def _what_the_policys_card_says(config: Config, plan: Plan) -> Iterator[Problem]:
    try:
        card = registry.policy_card(config.model.id)
    except registry.PartError:
        return
    env = env_card_of(config)
    lacking = env.lacks_state(config.env.options) if env is not None and card.reads_state else None
    if lacking is not None:
        yield Problem(lacking.key, f"{lacking.text}, which is what {config.model.id} reads. Use state")
    if card.reads_state and imitates_no_state(config):
        yield Problem("data.keys.state", NO_STATE)
    yield from card.problems(config, seen := observed(config))
    if seen is not None:
        yield from policy_misfits(start_key(config), start_dir(config), seen)


# supervised training


@rule("runner.max_steps", kinds=("sft",))
def _sft_has_a_length(config: Config, plan: Plan) -> Iterator[Problem]:
    if config.runner.max_steps < 1:
        yield Problem(
            "runner.max_steps",
            f"is {config.runner.max_steps}, and an sft run needs its number of optimizer updates. Set it, for example "
            "to 1000",
        )


@rule("data", "env.id", "env.task", "env.options", kinds=("sft",))
def _demonstrations_have_an_expert(config: Config, plan: Plan) -> Iterator[Problem]:
    data, card = config.data, env_card_of(config)
    if card is None or data.teacher_dir is not None or _is_dataset(data.demos_dir) or data.source == "folder":
        return
    lacking = card.lacks_expert(config.env.task, config.env.options)
    if lacking is not None:
        text = f"{lacking}. Name a trained policy, or in data.demos_dir demonstrations that are there"
        yield Problem("data.teacher_dir", text)


@rule("data", "env.id", "env.task", "env.options", kinds=("sft",))
def _videos_have_even_sizes(config: Config, plan: Plan) -> Iterator[Problem]:
    data, seen = config.data, observed(config)
    if seen is None or data.pictures != "video" or data.source == "folder" or _is_dataset(data.demos_dir):
        return
    odd = {name: size for name, size in seen.cameras.items() if size[0] % 2 or size[1] % 2}
    for name, (height, width) in odd.items():
        text = f"video has pictures of even height and width, and those of {name} have {height} x {width}"
        yield Problem("data.pictures", f"{text}. Use image, or another size (env.options)")


@rule("runner.task_type", kinds=("sft",))
def _datasets_can_be_read(config: Config, plan: Plan) -> Iterator[Problem]:
    missing = [module for module in ("pyarrow", "av") if not registry.is_installed(module)]
    if missing:
        text = f"demonstrations are LeRobot datasets, and {' and '.join(missing)} to read them are not installed"
        yield Problem("runner.task_type", f"{text}. {registry.install_command('data')}")


@rule("data.source", "data.demos_dir", kinds=("sft",))
def _the_folder_is_there(config: Config, plan: Plan) -> Iterator[Problem]:
    data = config.data
    if data.source == "folder" and data.demos_dir is None:
        yield Problem("data.demos_dir", "is null, and data.source: folder reads a dataset. Name its folder")
    elif data.demos_dir is not None and on_hub(data.demos_dir):
        wrong = hub_problem(data.demos_dir, needs_file=False)
        if wrong is not None or data.source != "folder":
            yield Problem(
                "data.demos_dir", f"{wrong or 'is on the Hub, to be read'}. Correct it, with data.source: folder"
            )
    elif data.source == "folder" and data.demos_dir is not None and not Path(data.demos_dir).is_dir():
        text = f"no directory {data.demos_dir!r} (looked for {Path(data.demos_dir).absolute()})"
        yield Problem("data.demos_dir", f"{text}. Correct it")
    elif data.source == "folder" and not (Path(data.demos_dir or "") / "meta" / "info.json").is_file():
        text = f"{data.demos_dir!r} is no LeRobotDataset: it has no meta/info.json"
        yield Problem("data.demos_dir", f"{text}. Name a dataset's own folder")


@rule("data.source", "data.demos_dir", "runner.task_type", kinds=("embodied",))
def _a_dataset_is_imitated(config: Config, plan: Plan) -> Iterator[Problem]:
    for name, value in (("source", config.data.source), ("demos_dir", config.data.demos_dir)):
        if value != DataConfig.model_fields[name].default:
            text = f"is {value}, and runner.task_type: embodied reads no dataset. Set that to sft, or leave this out"
            yield Problem(f"data.{name}", text)


@rule("data.teacher_dir", "env.id", "env.options", "model.num_action_chunks", kinds=("sft",))
def _teacher_fits(config: Config, plan: Plan) -> Iterator[Problem]:
    teacher, chunk, card = config.data.teacher_dir, config.model.num_action_chunks, env_card_of(config)
    if teacher is None or not Path(teacher).is_dir():
        return
    file = policy_directory(teacher) / "config.json"
    if not file.is_file():
        text = f"{teacher} holds no policy (no {file}). Name a checkpoint or a policy directory"
        yield Problem("data.teacher_dir", text)
        return
    said = policy_config(file.parent)
    of_teacher = chunk_of(said) or 1
    if chunk % of_teacher:
        yield Problem(
            "model.num_action_chunks",
            f"a chunk of {chunk} is no whole number of the teacher's chunks of {of_teacher} "
            f"({quotient(chunk, of_teacher)}). Use {near_multiples(chunk, of_teacher)}",
        )
    lacking = card.lacks_state(config.env.options) if card is not None and _reads_state(said) else None
    if lacking is not None:
        yield Problem(lacking.key, f"{lacking.text}, which data.teacher_dir acts on. Use rgb+state")


# language models


@rule("data.num_prompts", "algorithm.group_size", "actor.global_batch_size", kinds=("reasoning",))
def _batches(config: ReasoningConfig, plan: ReasoningPlan) -> Iterator[Problem]:
    samples, batch = plan.num_samples, config.actor.global_batch_size
    if samples % batch:
        yield Problem(
            "actor.global_batch_size",
            f"a step has {config.data.num_prompts} prompts x {config.algorithm.group_size} responses = {samples} "
            f"samples, which are no whole number of batches of {batch} ({quotient(samples, batch)}). Use "
            f"{largest_divisor(samples, batch)}, or change data.num_prompts or algorithm.group_size",
        )


@rule(
    *("data.max_prompt_length", "rollout.max_response_length", "actor.max_tokens_per_micro_batch"), kinds=("reasoning",)
)
def _passes_hold_sequences(config: ReasoningConfig, plan: ReasoningPlan) -> Iterator[Problem]:
    prompt, response = config.data.max_prompt_length, config.rollout.max_response_length
    budget = config.actor.max_tokens_per_micro_batch
    if budget < prompt + response:
        yield Problem(
            "actor.max_tokens_per_micro_batch",
            f"{budget} tokens do not hold one sequence of {prompt} + {response} = {prompt + response} "
            "(data.max_prompt_length + rollout.max_response_length). Use that many or more",
        )


@rule(
    *("model", "data.max_prompt_length", "rollout.max_response_length", "rollout.model_dir", "cluster.fuse"),
    *("actor.checkpoint_load_path", "critic.model_dir", _TP),
    kinds=("reasoning",),
)
def _what_the_models_card_says(config: ReasoningConfig, plan: ReasoningPlan) -> Iterator[Problem]:
    shares_process = {"actor", "rollout"} <= set(fused_roles(config))
    yield from registry.language_card().problems(config, shares_process)


def _splits_layers(config: BaseConfig) -> bool:
    try:
        return registry.strategy_needs(config.actor.strategy).ranks_per_model
    except registry.PartError:  # said by its own rule
        return False


@rule("actor.strategy", kinds=SIMULATED)
def _layers_of_language_models_are_split(config: Config, plan: Plan) -> Iterator[Problem]:
    if _splits_layers(config):
        text = f"{config.actor.strategy} splits layers of language models only. Use fsdp or replicated"
        yield Problem("actor.strategy", text)


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


@rule("algorithm.kl", kinds=("reasoning",))
def _kl(config: ReasoningConfig, plan: ReasoningPlan) -> Iterator[Problem]:
    kl = config.algorithm.kl
    for name in ("kind", "coef"):
        if kl.place == "none" and (value := getattr(kl, name)) != (usual := type(kl).model_fields[name].default):
            text = f"is {value}, and algorithm.kl.place: none counts no KL. Set that to loss or reward, or this to"
            yield Problem(f"algorithm.kl.{name}", f"{text} {usual}")
    if kl.place == "loss" and kl.kind == "k1":
        yield Problem(
            "algorithm.kl.kind",
            "k1 in the loss holds nothing back: its gradient, that of log p(token), is 0 on average over tokens drawn "
            "from p. Use k2, whose gradient is that of the KL, or k3; k1 is for algorithm.kl.place: reward",
        )
    if kl.controller == "adaptive" and kl.place != "reward":
        yield Problem(
            "algorithm.kl.controller",
            f"adaptive steers the weight of the KL in the reward, and algorithm.kl.place is {kl.place}. Set that to "
            "reward, or this to fixed",
        )
    responses = config.data.num_prompts * config.algorithm.group_size
    if kl.controller == "adaptive" and responses / 5 >= kl.horizon:  # a fifth is the largest error that it counts
        yield Problem(
            "algorithm.kl.horizon",
            f"is {kl.horizon:g}, and one step of {responses} responses could take the weight of the KL to 0 or below. "
            f"Use more than {responses / 5:g}, {10 * responses} for example",
        )


@rule("algorithm.overlong.buffer_length", "rollout.max_response_length", kinds=("reasoning",))
def _overlong_penalty(config: ReasoningConfig, plan: ReasoningPlan) -> Iterator[Problem]:
    buffer, longest = config.algorithm.overlong.buffer_length, config.rollout.max_response_length
    if buffer >= longest:
        yield Problem(
            "algorithm.overlong.buffer_length",
            f"{buffer} tokens are not fewer than rollout.max_response_length: {longest}, so that every response would "
            f"be too long. A fifth of it, {max(longest // 5, 1)}, is usual",
        )


@rule("cluster.fuse", "runner.task_type", PLACEMENT, "algorithm.adv_type", "algorithm.kl.place")
def _sharing(config: BaseConfig, plan: Any) -> Iterator[Problem]:
    roles, known = fused_roles(config), SHARING[config.runner.task_type]
    if config.runner.task_type == "sft" and roles:
        yield Problem("cluster.fuse", "is for reinforcement learning, where weights go to and fro. Leave it out")
        return
    unknown = [role for role in roles if role not in known]
    for role in unknown:
        yield Problem(
            "cluster.fuse", f"there is no role {role!r} that could share. {registry.did_you_mean(role, known)}"
        )
    if unknown:
        return
    if len(names_in_fuse(config)) == 1:
        text = f"names {config.cluster.fuse} alone, which shares with nobody. Name two roles or more, or set it to null"
        yield Problem("cluster.fuse", text)
    if len(set(roles)) < len(roles):
        yield Problem("cluster.fuse", f"{config.cluster.fuse} names a role twice. Name each once")
    shown = {role: [process.slots for process in plan.placements[role]] for role in roles if role in plan.placements}
    different = [role for role, slots in shown.items() if slots != shown[next(iter(shown))]]
    if different:
        yield Problem(
            "cluster.fuse",
            f"{next(iter(shown))} and {different[0]} share processes, and {PLACEMENT} puts them in different places. "
            "Give them one line",
        )


@rule("reward.fn", kinds=("reasoning",))
def _reward_function(config: ReasoningConfig, plan: ReasoningPlan) -> Iterator[Problem]:
    if config.reward.fn is not None:
        try:
            registry.import_reward_function(config.reward.fn)
        except registry.PartError as error:
            yield Problem("reward.fn", error.text)


@rule("reward", kinds=("reasoning",))
def _something_scores(config: ReasoningConfig, plan: ReasoningPlan) -> Iterator[Problem]:
    reward = config.reward
    if reward.model is None:
        if not reward.weights.rule:
            text = "is 0, and reward.model is null, so that nothing scores. Use 1, or name a reward model"
            yield Problem("reward.weights.rule", text)
        return
    if not reward.weights.model:
        text = "is 0, and reward.model would score in vain. Use another weight, or set reward.model to null"
        yield Problem("reward.weights.model", text)
    try:
        said = policy_config(policy_directory(reward.model))
        labels, room = labels_of(said), said.get("max_position_embeddings")
    except (OSError, ValueError, TypeError, AttributeError):
        return  # no directory, which has its own rule; or loading it will say more
    if reward.label is None and len(labels) != 1:
        text = (
            f"is null, and the classifier in {reward.model} has {len(labels)} labels. Name the one whose logit counts"
        )
        yield Problem("reward.label", f"{text}: {', '.join(labels[:10])}")
    elif reward.label is not None and reward.label not in labels:
        hint = registry.did_you_mean(reward.label, labels)
        yield Problem("reward.label", f"the classifier in {reward.model} has no label {reward.label!r}. {hint}")
    if isinstance(room, int) and 0 < room < (reward.max_length or 0):
        text = f"{reward.max_length} tokens, and the reward model has {room} positions. Use {room} or less, or null"
        yield Problem("reward.max_length", text)


@rule("data.train_files", "data.val_files", "runner.val_check_interval", kinds=("reasoning",))
def _problem_files(config: ReasoningConfig, plan: ReasoningPlan) -> Iterator[Problem]:
    data = config.data
    for key, paths in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        for path in paths:
            if on_hub(path):
                if (wrong := hub_problem(path, needs_file=True)) is not None:
                    yield Problem(key, f"{wrong}. Correct it")
            elif not Path(path).is_file():
                yield Problem(key, f"no file {path!r} (looked for {Path(path).absolute()}). Correct it")
    if config.runner.val_check_interval > 0 and data.train_files and not data.val_files:
        text = "is empty, and runner.val_check_interval is not. Name some, or set that to -1"
        yield Problem("data.val_files", text)


def _is_dataset(directory: str | None) -> bool:
    return directory is not None and (Path(directory) / "meta" / "info.json").is_file()


def _reads_state(said: Mapping[str, Any]) -> bool:
    """Whether the policy of such a config.json sees nothing but the state."""
    try:
        return registry.policy_card(str(said.get("policy_id"))).reads_state  # none: published, of those that look
    except registry.PartError:
        return False
