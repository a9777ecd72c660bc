"""Rules for imitation: the expert or the dataset of its demonstrations, and its length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlinf_lite import registry
from rlinf_lite.cards import Problem
from rlinf_lite.config.names import reads_demonstrations
from rlinf_lite.config.plan import Plan, env_card_of, observed, policy_card_of
from rlinf_lite.config.resources import chunk_of, policy_config, policy_directory
from rlinf_lite.config.rules import DEMONSTRATED, TRAINED, near_multiples, quotient, rule
from rlinf_lite.config.schema import Config, DataConfig
from rlinf_lite.hub import hub_problem, on_hub


@rule("runner.max_steps", kinds=("sft",))
def _imitation_has_a_length(config: Config, plan: Plan) -> Iterator[Problem]:
    if config.runner.max_steps < 1:
        text = f"is {config.runner.max_steps}, and an sft run needs its number of optimizer updates"
        yield Problem("runner.max_steps", f"{text}. Set it, for example to 1000")


@rule("data", "env.id", "env.task", "env.options", "replay.shares", kinds=DEMONSTRATED)
def _demonstrations_have_an_expert(config: Config, plan: Plan) -> Iterator[Problem]:
    card = env_card_of(config)
    asks = _writes_demonstrations(config) or config.data.dagger.rounds > 0
    if card is None or config.data.teacher_dir is not None or not asks:
        return
    if config.data.teacher_mode != DataConfig.model_fields["teacher_mode"].default:
        text = f"is {config.data.teacher_mode}, and data.teacher_dir is null: an environment's expert has no modes"
        yield Problem("data.teacher_mode", f"{text}. Leave it out, or name a policy")
    lacking = card.lacks_expert(config.env.task, config.env.options)
    if lacking is not None:
        text = f"{lacking}. Name a trained policy, or in data.demos_dir demonstrations that are there"
        yield Problem("data.teacher_dir", text)


@rule("data", "env.id", "env.task", "env.options", "replay.shares", kinds=DEMONSTRATED)
def _videos_have_even_sizes(config: Config, plan: Plan) -> Iterator[Problem]:
    seen = observed(config)
    if seen is None or config.data.pictures != "video" or not _writes_demonstrations(config):
        return
    for name, (height, width) in seen.cameras.items():
        if height % 2 or width % 2:
            text = f"video has pictures of even height and width, and those of {name} have {height} x {width}"
            yield Problem("data.pictures", f"{text}. Use image, or another size (env.options)")


@rule("runner.task_type", "replay.shares", kinds=DEMONSTRATED)
def _datasets_can_be_read(config: Config, plan: Plan) -> Iterator[Problem]:
    if not reads_demonstrations(config):
        return
    missing = [module for module in ("pyarrow", "av") if not registry.is_installed(module)]
    if missing:
        text = f"demonstrations are LeRobot datasets, and {' and '.join(missing)} to read them are not installed"
        yield Problem("runner.task_type", f"{text}. {registry.install_command('data')}")


@rule("data.source", "data.demos_dir", "replay.shares", kinds=DEMONSTRATED)
def _dataset_is_there(config: Config, plan: Plan) -> Iterator[Problem]:
    if not reads_demonstrations(config):
        return
    key, folder, is_read = "data.demos_dir", config.data.demos_dir, config.data.source == "folder"
    if folder is None:
        if is_read:
            yield Problem(key, "is null, and data.source: folder reads a dataset. Name its folder")
    elif on_hub(folder):
        wrong = hub_problem(folder, needs_file=False)
        if wrong is not None or not is_read:
            yield Problem(key, f"{wrong or 'is on the Hub, to be read'}. Correct it, with data.source: folder")
    elif is_read and not Path(folder).is_dir():
        yield Problem(key, f"no directory {folder!r} (looked for {Path(folder).absolute()}). Correct it")
    elif is_read and not _is_dataset(folder):
        text = f"{folder!r} is no LeRobotDataset: it has no meta/info.json. Name a dataset's own folder"
        yield Problem(key, text)


@rule("data.source", "data.demos_dir", "runner.task_type", kinds=("embodied",))
def _only_imitation_reads_a_dataset(config: Config, plan: Plan) -> Iterator[Problem]:
    for name, value in (("source", config.data.source), ("demos_dir", config.data.demos_dir)):
        if value != DataConfig.model_fields[name].default:
            text = f"is {value}, and runner.task_type: embodied reads no dataset. Set that to sft, or leave this out"
            yield Problem(f"data.{name}", text)


@rule("data.dagger", "data.stride", "data.source", "model.num_action_chunks", "runner.task_type", kinds=TRAINED)
def _the_expert_labels_whole_chunks(config: Config, plan: Plan) -> Iterator[Problem]:
    data, chunk = config.data, config.model.num_action_chunks
    if not data.dagger.rounds:
        return
    if config.runner.task_type != "sft":
        text = f"is {data.dagger.rounds}, and DAgger is imitation. Set runner.task_type to sft, or leave this out"
        yield Problem("data.dagger.rounds", text)
    elif (data.stride or (1 if data.source == "folder" else chunk)) != chunk:
        text = "in rounds of DAgger the expert says a chunk at each of the student's decisions, and chunks that begin"
        yield Problem("data.stride", f"{text} between these would be no plan of its. Set it to {chunk}")


@rule("data", "runner.task_type", "model.id", kinds=TRAINED)
def _recap_fits(config: Config, plan: Plan) -> Iterator[Problem]:
    data, key = config.data, "data.recap.rounds"
    if not data.recap.rounds:
        return
    if config.runner.task_type != "sft":
        text = f"is {data.recap.rounds}, and RECAP is imitation. Set runner.task_type to sft, or leave this out"
        yield Problem(key, text)
    if data.dagger.rounds:
        yield Problem(key, "and data.dagger.rounds are both set, and a round is of one of the two. Set one to 0")
    card = policy_card_of(config)
    if card is not None and not card.reads_condition:
        others = [name for name in registry.POLICIES.names() if registry.policy_card(name).reads_condition]
        text = f"{config.model.id} has no prompt with RECAP's condition. Use {' or '.join(others)}"
        yield Problem("model.id", text)


@rule("data.teacher_dir", "env.id", "env.options", "model.num_action_chunks", kinds=DEMONSTRATED)
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
        text = f"a chunk of {chunk} is no whole number of the teacher's chunks of {of_teacher}"
        advice = f"({quotient(chunk, of_teacher)}). Use {near_multiples(chunk, of_teacher)}"
        yield Problem("model.num_action_chunks", f"{text} {advice}")
    lacking = card.lacks_state(config.env.options) if card is not None and _reads_state(said) else None
    if lacking is not None:
        yield Problem(lacking.key, f"{lacking.text}, which data.teacher_dir acts on. Use rgb+state")


def _writes_demonstrations(config: Config) -> bool:
    """Whether a run collects its demonstrations instead of reading an existing dataset, or none."""
    data = config.data
    return (
        reads_demonstrations(config)
        and data.source != "folder"
        and (data.demos_dir is None or not _is_dataset(data.demos_dir))
    )


def _is_dataset(directory: str) -> bool:
    return (Path(directory) / "meta" / "info.json").is_file()


def _reads_state(said: Mapping[str, Any]) -> bool:
    """Whether the policy with this config.json reads only the state, and no images."""
    try:
        return registry.policy_card(str(said.get("policy_id"))).reads_state  # a published policy has none, and looks
    except registry.PartError:
        return False
