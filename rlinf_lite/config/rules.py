"""What must hold between keys: every rule yields problems, and says which keys it reads. Those that all kinds of runs
share are here: names, algorithms, packages, files.

A rule is left out where one of those keys is wrong, so that one mistake is not reported twice.
"""

from __future__ import annotations

import netrc
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from rlinf_lite import registry
from rlinf_lite.cards import Observed, Problem
from rlinf_lite.config.names import MAX_FILE_NAME, cards_of, loss_needs_of, needs_of, schema_keys
from rlinf_lite.config.resources import policy_directory, start_dir, start_key, why_no_policy
from rlinf_lite.config.schema import BaseAlgorithmConfig, BaseConfig, CorrectionConfig

Kind = Literal["embodied", "sft", "eval", "reasoning"]
Rule = Callable[[Any, Any], Iterator[Problem]]
"""`rule(config, plan)`."""
SIMULATED: tuple[Kind, ...] = ("embodied", "sft", "eval")
TRAINED: tuple[Kind, ...] = ("embodied", "sft")
"""Of the simulated, those that have sizes of training."""
REINFORCED: tuple[Kind, ...] = ("embodied", "reasoning")
ALL: tuple[Kind, ...] = ("embodied", "sft", "eval", "reasoning")

MIN_FREE_BYTES = 50 * 2**20
"""On a disk that a run writes to: logs, films and a checkpoint of a tiny policy."""

_RULES: list[tuple[tuple[str, ...], tuple[Kind, ...], Rule]] = []


def rule(*keys: str, kinds: tuple[Kind, ...] = ALL) -> Callable[[Rule], Rule]:
    """A rule that reads these keys or sections, of runs of these kinds (`runner.task_type`)."""

    def add(function: Rule) -> Rule:
        _RULES.append((keys, kinds, function))
        return function

    return add


def violations(config: Any, plan: Any, suspects: Set[str]) -> Iterator[Problem]:
    """Every violated rule of a config's kind. `suspects` are keys whose values are not what their author wrote."""
    for keys, kinds, function in _RULES:
        if config.runner.task_type in kinds and not touches(keys, suspects):
            yield from function(config, plan)


def touches(keys: tuple[str, ...], suspects: Set[str]) -> bool:
    """Whether a suspect is one of these keys, within or around it."""
    return any(f"{key}.".startswith(f"{bad}.") or f"{bad}.".startswith(f"{key}.") for key in keys for bad in suspects)


def quotient(value: int, divisor: int) -> str:
    """`30 / 4 = 7.5`."""
    return f"{value} / {divisor} = {value / divisor:.4g}"


def near_multiples(value: int, unit: int) -> str:
    """`28 or 32`: what a value that is no multiple could be."""
    below, above = value // unit * unit, -(-value // unit) * unit
    return f"{below} or {above}" if below else str(above)


def uneven_episodes(config: Any, num_tasks: int) -> Iterator[Problem]:
    """Where an evaluation would play some of a simulator's tasks more often than others."""
    episodes = config.env.eval.num_episodes
    if episodes % num_tasks:
        text = f"{episodes} episodes do not divide over {num_tasks} tasks ({quotient(episodes, num_tasks)})"
        yield Problem("env.eval.num_episodes", f"{text}. Use {near_multiples(episodes, num_tasks)}")


def misfits(config: Any, state_dim: int, action_dim: int, seen: Observed) -> Iterator[Problem]:
    """Where the policy that a run starts with reads or answers other numbers than there are; 0: none, or not known."""
    key = start_key(config)
    for what, own, shown in (("state", state_dim, seen.state_dim), ("action", action_dim, seen.action_dim)):
        if own not in (0, shown):
            text = (
                f"the policy's {what} has {own} numbers, and that of {config.env.task} {shown}: it is of another task"
            )
            yield Problem(key, f"{text}, or of other env.options. Name one that was trained on these")


def told(config: Any) -> Sequence[str]:
    """The sentences that a policy will read, of each task; (): only the simulator knows."""
    return registry.env_card(config.env.id).sentences(config.env.task)


def long_prompt(config: Any, length: int, count: Callable[[str], int]) -> Iterator[Problem]:
    """Where the longest prompt of a task's sentences, whose tokens `count` counts, has more than `length`."""
    tokens, sentence = max((count(one), one) for one in told(config))
    if tokens > length:
        text = f"is {length}, and the prompt of {sentence!r}, which is a task of {config.env.task}, has {tokens} tokens"
        yield Problem("model.options.max_prompt_length", f"{text}. Set it to {tokens} or more: padding is masked")


def imitates_no_state(config: Any) -> bool:
    """Whether a run imitates a folder of whose states it takes none."""
    data = config.data
    return config.runner.task_type == "sft" and data.source == "folder" and data.keys.state is None


def largest_divisor(value: int, at_most: int) -> int:
    return max(size for size in range(1, min(at_most, value) + 1) if value % size == 0)


def _name_rule(key: str) -> None:
    card_of = {"env.id": registry.env_card, "model.id": registry.policy_card}.get(key, registry.REGISTRIES[key].get)
    section, _, last = key.partition(".")

    @rule(key)
    def names_stand_for_parts(config: Any, plan: Any) -> Iterator[Problem]:
        name = getattr(getattr(config, section, None), last, None)
        if name is None or name in registry.REGISTRIES[key].names():  # None: a key of other runs
            return
        try:
            card_of(name)
        except registry.PartError as error:
            yield Problem(key, error.text)


for _key in registry.REGISTRIES:
    _name_rule(_key)


@rule("algorithm.adv_type", "algorithm.group_size", "algorithm.filter_groups", kinds=REINFORCED)
def _groups(config: Any, plan: Any) -> Iterator[Problem]:
    algorithm, reasoning = config.algorithm, config.runner.task_type == "reasoning"
    needs, size = needs_of(config), algorithm.group_size
    if needs.groups and size < 2:
        of_what = f"the responses to a prompt, and there is {size}"
        if not reasoning:
            of_what = f"the episodes of a group, and a group has {size}"
        yield Problem("algorithm.group_size", f"{algorithm.adv_type} compares {of_what}. Use 2 or more")
    if algorithm.filter_groups and not needs.groups and not reasoning:
        yield Problem("algorithm.filter_groups", f"{algorithm.adv_type} has no groups to drop. Set it to false")
    elif algorithm.filter_groups and size < 2:
        text = "a group of 1 has nothing to differ from. Set it to false, or raise group_size"
        yield Problem("algorithm.filter_groups", text)


@rule("algorithm.adv_type", "algorithm.critic_warmup_steps", kinds=REINFORCED)
def _critic_to_warm_up(config: Any, plan: Any) -> Iterator[Problem]:
    if config.algorithm.critic_warmup_steps and not needs_of(config).values:
        text = f"{config.algorithm.adv_type} has no critic to warm up. Set it to 0"
        yield Problem("algorithm.critic_warmup_steps", text)


@rule("algorithm.clip_ratio_c")
def _dual_clip(config: Any, plan: Any) -> Iterator[Problem]:
    dual = config.algorithm.clip_ratio_c
    if dual is not None and dual <= 1:
        text = f"is {dual:g}, and the dual clip must be above 1. Use 3, or null to turn it off"
        yield Problem("algorithm.clip_ratio_c", text)


_OF_LOSSES = ("clip_ratio_c", "behaviour_kl_coef")
"""Keys of `algorithm` that some losses read, and a loss that does not may say so."""


@rule("algorithm.loss_type", *(f"algorithm.{name}" for name in _OF_LOSSES), kinds=REINFORCED)
def _what_the_loss_reads(config: Any, plan: Any) -> Iterator[Problem]:
    for name in _OF_LOSSES:
        value, usual = getattr(config.algorithm, name), BaseAlgorithmConfig.model_fields[name].default
        if value != usual and name in loss_needs_of(config).unread:
            readers = [loss for loss in registry.LOSSES.names() if name not in registry.loss_needs(loss).unread]
            text = f"is {value:g}, and {config.algorithm.loss_type} does not read it. Set it to "
            text += (
                f"{'null' if usual is None else format(usual, 'g')}, or algorithm.loss_type to {' or '.join(readers)}"
            )
            yield Problem(f"algorithm.{name}", text)


@rule("algorithm.loss_type", "algorithm.clip_ratio_low", kinds=REINFORCED)
def _clips_below(config: Any, plan: Any) -> Iterator[Problem]:
    loss, low = config.algorithm.loss_type, config.algorithm.clip_ratio_low
    if low >= 1 and loss_needs_of(config).clips_below:
        text = f"is {low:g}, so that {loss} never clips below: nothing falls so far. Use less than 1, or cispo"
        yield Problem("algorithm.clip_ratio_low", text)


@rule("actor.optim.value_lr", "sft.optim.value_lr", kinds=("reasoning",))
def _who_has_values(config: Any, plan: Any) -> Iterator[Problem]:
    for section in ("actor", "sft"):
        if getattr(config, section).optim.value_lr is not None:
            text = "is of parameters that only values use, and a language model has none. Set it to null"
            yield Problem(f"{section}.optim.value_lr", f"{text}; a critic's rate is critic.optim.lr")


@rule("algorithm.max_refills", "algorithm.filter_groups", kinds=("reasoning",))
def _groups_to_replace(config: Any, plan: Any) -> Iterator[Problem]:
    algorithm = config.algorithm
    usual = type(algorithm).model_fields["max_refills"].default
    if algorithm.max_refills not in (0, usual) and not algorithm.filter_groups:
        text = f"is {algorithm.max_refills}, and with algorithm.filter_groups: false no group is dropped that others"
        yield Problem("algorithm.max_refills", f"{text} could replace. Set that to true, or this to {usual}")


@rule("rollout.top_p", "rollout.top_k", "algorithm.correction.kind", "algorithm.loss_type", kinds=("reasoning",))
def _behaviour_is_what_was_drawn_from(config: Any, plan: Any) -> Iterator[Problem]:
    kind, loss = config.algorithm.correction.kind, config.algorithm.loss_type
    reader = f"algorithm.correction.kind: {kind}" if kind != "none" else f"algorithm.loss_type: {loss}"
    if kind == "none" and not loss_needs_of(config).behaviour:
        return
    for name, usual in (("top_p", 1.0), ("top_k", 0)):
        value = getattr(config.rollout, name)
        if value != usual:
            yield Problem(
                f"rollout.{name}",
                f"is {value:g}, and {reader} weighs tokens by the probability that they were drawn with. Those on "
                "record, as those that train, are of the whole vocabulary: what is left of it is drawn more often than "
                f"they say. Set it to {usual:g}",
            )


_BOUND = {"k1": 0.7, "k2": 0.25, "k3": 0.3}  # of a weight of about 2
_TAKES = {
    "none": (),
    "decoupled": ("high", "proximal"),
    "tis": ("high", "level", "proximal"),
    "icepop": ("low", "high", "proximal"),
    "reject": ("low", "high", "level", "metric", "proximal"),
}


def correction_problems(correction: CorrectionConfig) -> Iterator[Problem]:
    """All that is wrong within `algorithm.correction`: keys that its kind does not use, and bounds that do not fit."""
    key, kind, metric = "algorithm.correction", correction.kind, correction.metric
    unused = False
    for name, field in CorrectionConfig.model_fields.items():
        value = getattr(correction, name)
        if name != "kind" and value != field.default and name not in _TAKES[kind]:
            unused = True
            with_it = " or ".join(other for other, takes in _TAKES.items() if name in takes)
            usual = "null" if field.default is None else field.default
            text = f"is {value}, and kind: {kind} has no {name}. Set it to {usual}, or the kind to {with_it}"
            yield Problem(f"{key}.{name}", text)
    if unused:
        return
    bounds = correction.with_bounds()
    low, high, of_equals = bounds.low, bounds.high, 1 if metric == "ratio" else 0
    if kind == "reject" and low is None and high is None:
        text = f"is null, as is low, and {metric} has no usual bound. Set it, for example to {_BOUND[metric]}"
        yield Problem(f"{key}.high", text)
    elif low is not None and high is not None and low >= high:
        text = f"is {high:g}, not above low ({low:g}), so that nothing is in bounds. Raise it, or lower low"
        yield Problem(f"{key}.high", text)
    elif (low is not None and low > of_equals) or (high is not None and high < of_equals):
        name, bound = ("low", low) if high is None or high >= of_equals else ("high", high)
        text = (
            f"is {bound:g}, which shuts out what has not changed: where both policies agree, {metric} is {of_equals}. "
            f"Use {of_equals} or {'less' if name == 'low' else 'more'}"
        )
        yield Problem(f"{key}.{name}", text)


@rule("algorithm.correction", kinds=REINFORCED)
def _correction(config: Any, plan: Any) -> Iterator[Problem]:
    yield from correction_problems(config.algorithm.correction)


@rule("algorithm.loss_type", "algorithm.correction.kind", kinds=REINFORCED)
def _corrected_once(config: Any, plan: Any) -> Iterator[Problem]:
    loss, kind = config.algorithm.loss_type, config.algorithm.correction.kind
    if kind != "none" and loss_needs_of(config).behaviour:
        text = f"is {kind}, and {loss} forms its ratios against the policy that acted already. Set it to none"
        yield Problem("algorithm.correction.kind", text)


@rule("algorithm.loss_type", "algorithm.logprob_type", "model.id", kinds=("embodied",))
def _probabilities_to_compare(config: Any, plan: Any) -> Iterator[Problem]:
    loss, model, level = config.algorithm.loss_type, config.model.id, config.algorithm.logprob_type
    if not loss_needs_of(config).probabilities:
        return
    try:
        card = registry.policy_card(model)
    except registry.PartError:  # said by its own rule
        return
    if not card.probabilities:
        yield Problem(
            "algorithm.loss_type",
            f"{loss} compares probabilities of actions, and {model} does not say that it has any (`probabilities` of "
            "its card): densities of continuous actions may be above 1. Use ppo, for data of other policies with "
            "algorithm.correction",
        )
    elif level != "token_level":
        yield Problem(
            "algorithm.logprob_type",
            f"is {level}, and {loss} compares probabilities, of which those of many tokens together are all close to "
            "0, so that nothing would bound an update. Set it to token_level",
        )


@rule("runner.logger.backends")
def _loggers_are_installed(config: BaseConfig, plan: Any) -> Iterator[Problem]:
    if "wandb" in config.runner.logger.backends and not registry.is_installed("wandb"):
        text = f"wandb is not installed. {registry.install_command('wandb')}, or leave it out"
        yield Problem("runner.logger.backends", text)
    elif "wandb" in config.runner.logger.backends and not knows_wandb_key():
        text = "wandb has no key on this machine. `wandb login` stores one; WANDB_MODE=offline does without"
        yield Problem("runner.logger.backends", text, of_machine=True)


@rule("model.id", kinds=SIMULATED)
def _the_policy_is_one(config: Any, plan: Any) -> Iterator[Problem]:
    try:
        part = registry.policy_card(config.model.id).part
    except registry.PartError:  # said by its own rule
        return
    base = sys.modules.get("rlinf_lite.models.base")  # a policy's module has imported it
    if part is not None and not (base is not None and isinstance(part, type) and issubclass(part, base.Policy)):
        text = f"{config.model.id} is {part!r}, not a subclass of rlinf_lite.models.Policy. Name one"
        yield Problem("model.id", text)


@rule("rollout.engine", kinds=("reasoning",))
def _the_engine_is_one(config: Any, plan: Any) -> Iterator[Problem]:
    name = config.rollout.engine
    if name == registry.ENGINES.default:  # which imports torch
        return
    try:
        part = registry.ENGINES.get(name)
    except registry.PartError:  # said by its own rule
        return
    methods = ("stream", "generate", "weights_changed")
    if not isinstance(part, type) or not all(hasattr(part, method) for method in methods):
        text = f"{name} is {part!r}, no class with {', '.join(methods)} (rlinf_lite.generation.protocol). Name one"
        yield Problem("rollout.engine", text)


@rule("runner.run_name")
def _run_name_is_one(config: BaseConfig, plan: Any) -> Iterator[Problem]:
    name = str(config.runner.run_name)
    reasons = {
        "is empty": not name.strip(),
        "has / or \\, which paths are made of": "/" in name or "\\" in name,
        "begins with a dot or a dash": name.startswith((".", "-")),
        "begins or ends with a space": name != name.strip(),
        "has signs that cannot be printed": not name.isprintable(),
        f"is longer than a file's name may be, {MAX_FILE_NAME} bytes": len(os.fsencode(name)) > MAX_FILE_NAME,
    }
    if reason := next((reason for reason, is_so in reasons.items() if is_so), None):
        yield Problem("runner.run_name", f"{name!r} {reason}. Choose another, of letters and digits")


def _written_rule(key: str) -> None:
    @rule(key)
    def directories_can_be_written(config: Any, plan: Any) -> Iterator[Problem]:
        """Nothing is made before the run begins: the nearest directory above that is there is looked at."""
        written = attrgetter(key)(config)
        if written is None:
            return
        reasons = {
            "is empty": not written.strip(),
            "has control characters": re.search(r"[\x00-\x1f\x7f]", written) is not None,
            "begins with ~, which only shells read as a home directory": written.startswith("~"),
            f"has a name of more than {MAX_FILE_NAME} bytes": any(
                len(os.fsencode(part)) > MAX_FILE_NAME for part in Path(written).parts
            ),
        }
        if reason := next((reason for reason, is_so in reasons.items() if is_so), None):
            yield Problem(key, f"{written!r} {reason}. Name a directory")
            return
        path = Path(written).absolute()
        above = next(one for one in (path, *path.parents) if one.exists())
        if not above.is_dir():
            yield Problem(key, f"{path} cannot be made: {above} is a file. Name another directory")
        elif not os.access(above, os.W_OK | os.X_OK) or os.statvfs(above).f_flag & os.ST_RDONLY:
            text = f"{path} cannot be written: {above} does not allow it. Name another directory"
            yield Problem(key, text, of_machine=True)
        elif (free := shutil.disk_usage(above).free) < MIN_FREE_BYTES:
            text = (
                f"{free / 2**20:.0f} MiB are free in {above}, and a run writes {MIN_FREE_BYTES / 2**20:.0f} MiB or more"
            )
            yield Problem(key, f"{text}. Free some, or name another directory", of_machine=True)


_written_rule("runner.logger.log_path")
_written_rule("actor.checkpoint_save_path")


def knows_wandb_key() -> bool:
    """Whether Weights & Biases would log in without asking, or not log in at all."""
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return True
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = (Path("wandb/settings"), Path.home() / ".config/wandb/settings")  # where `wandb offline` writes
    if any("offline" in file.read_text() for file in settings if file.is_file()):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


_HUB_NAME = re.compile(r"(?:hf://(?:models/)?)?([\w-][\w.-]*/[\w.-]+)")


def _directory_rule(key: str, is_policy: bool, kinds: tuple[Kind, ...]) -> None:
    @rule(key, kinds=kinds)
    def directories_are_there(config: Any, plan: Any) -> Iterator[Problem]:
        path = attrgetter(key)(config)
        if path is None:
            return
        where = policy_directory(path)
        if not where.is_dir():
            text = f"no directory {path!r} (looked for {Path(path).absolute()})"
            advice = f"Correct it, or set it to null{': random weights' * (key == 'rollout.model_dir')}"
            if (on_hub := _HUB_NAME.fullmatch(path)) and not Path(path).parent.exists():
                advice = f"Models are not downloaded. First `hf download {on_hub[1]} --local-dir DIR`, then name DIR"
            yield Problem(key, f"{text}. {advice}")
        elif is_policy and (lacks := why_no_policy(where)) is not None:
            yield Problem(key, f"{path!r}{lacks}. Correct it, or set it to null")


_directory_rule("rollout.model_dir", True, ALL)
_directory_rule("actor.checkpoint_load_path", True, ALL)
_directory_rule("critic.model_dir", True, ("reasoning",))
_directory_rule("reward.model", True, ("reasoning",))
_directory_rule("actor.tokenizer.tokenizer_model", False, ALL)
_directory_rule("data.teacher_dir", False, SIMULATED)


@rule("actor.tokenizer.tokenizer_model", "rollout.model_dir", "actor.checkpoint_load_path", kinds=SIMULATED)
def _policy_without_a_tokenizer(config: Any, plan: Any) -> Iterator[Problem]:
    if config.actor.tokenizer.tokenizer_model is not None and start_dir(config) is None:
        text = "a policy of random weights brings its tokenizer. Set it to null, or rollout.model_dir to a policy"
        yield Problem("actor.tokenizer.tokenizer_model", text)


@rule("runner.resume")
def _run_to_resume(config: BaseConfig, plan: Any) -> Iterator[Problem]:
    resume = config.runner.resume
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        yield Problem(
            "runner.resume",
            f"no directory {resume!r} (looked for {Path(resume).absolute()}). Use auto, never, or the path of a run or "
            "checkpoint",
        )


@rule("runner.allow_changes")
def _changes_to_allow(config: BaseConfig, plan: Any) -> Iterator[Problem]:
    """Names that `runner.allow_changes` has in vain."""
    known = schema_keys(type(config), cards_of(config.model_dump(), type(config)))
    for name in config.runner.allow_changes:
        if name not in known:
            yield Problem("runner.allow_changes", f"there is no key {name!r}. {registry.did_you_mean(name, known)}")
