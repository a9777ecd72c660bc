"""Checks that several cards of environments or policies share; each card calls those that apply to it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from rlinf_lite import registry
from rlinf_lite.cards import Observed, Problem
from rlinf_lite.config.resources import start_key
from rlinf_lite.config.rules import near_multiples, quotient


def named_tasks(
    name: str, tasks: Collection[str], sets: Mapping[str, tuple[str, ...]], word_for_set: str
) -> tuple[str, ...]:
    """The tasks that `env.task` names: those of one of `sets`, or of a comma-separated list. Raises UnknownEnvError."""
    names = sets.get(name) or tuple(part.strip() for part in name.split(","))
    for task in names:
        if task not in tasks:
            known = registry.did_you_mean(task, {*tasks, *sets})
            why = f"is a {word_for_set}; name it alone" if task in sets else f"is no task. {known}"
            raise registry.UnknownEnvError(f"{task!r} {why}", "env.task")
    twice = sorted({task for task in names if names.count(task) > 1})
    if twice:
        raise registry.UnknownEnvError(f"{', '.join(twice)} is named twice", "env.task")
    return names


def uneven_episodes(config: Any, num_tasks: int) -> Iterator[Problem]:
    """A problem if an evaluation would play some of a simulator's tasks more often than others."""
    episodes = config.env.eval.num_episodes
    if evaluates(config) and episodes % num_tasks:
        text = f"{episodes} episodes do not divide over {num_tasks} tasks ({quotient(episodes, num_tasks)})"
        yield Problem("env.eval.num_episodes", f"{text}. Use {near_multiples(episodes, num_tasks)}")


def evaluates(config: Any) -> bool:
    """Whether a run has evaluations."""
    return bool(config.runner.task_type == "eval" or config.runner.val_check_interval > 0)


def misfits(config: Any, state_dim: int, action_dim: int, seen: Observed) -> Iterator[Problem]:
    """Problems if states or actions of a run's first policy have other sizes than those of the environment. `state_dim`
    and `action_dim` are the policy's sizes; 0: none, or not known."""
    for what, own, shown in (("state", state_dim, seen.state_dim), ("action", action_dim, seen.action_dim)):
        if own not in (0, shown):
            text = f"the policy's {what} has {own} numbers, and that of {config.env.task} {shown}: it is of another "
            advice = "task, or of other env.options. Name one that was trained on these"
            yield Problem(start_key(config), text + advice)


def task_sentences(config: Any) -> Sequence[str]:
    """The instructions of the tasks that a run plays; (): only the simulator knows them."""
    return registry.env_card(config.env.id).sentences(config.env.task)


def long_prompt(config: Any, length: int, count: Callable[[str], int]) -> Iterator[Problem]:
    """A problem if the longest prompt of the tasks has more than `length` tokens; `count(sentence)` is their number."""
    tokens, sentence = max((count(one), one) for one in task_sentences(config))
    if tokens > length:
        text = f"is {length}, and the prompt of {sentence!r}, which is a task of {config.env.task}, has {tokens} tokens"
        yield Problem("model.options.max_prompt_length", f"{text}. Set it to {tokens} or more: padding is masked")


def imitates_no_state(config: Any) -> bool:
    """Whether a run imitates a dataset without reading its states."""
    data = config.data
    return bool(config.runner.task_type == "sft" and data.source == "folder" and data.keys.state is None)
