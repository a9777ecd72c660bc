"""Rules that several cards of environments or policies share; each card calls those that apply to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlinf_lite import registry
from rlinf_lite.cards import Observed, Problem
from rlinf_lite.config.resources import start_key
from rlinf_lite.config.rules import near_multiples, quotient


def uneven_episodes(config: Any, num_tasks: int) -> Iterator[Problem]:
    """The problem that an evaluation would play some of a simulator's tasks more often than others."""
    episodes = config.env.eval.num_episodes
    if episodes % num_tasks:
        text = f"{episodes} episodes do not divide over {num_tasks} tasks ({quotient(episodes, num_tasks)})"
        yield Problem("env.eval.num_episodes", f"{text}. Use {near_multiples(episodes, num_tasks)}")


def misfits(config: Any, state_dim: int, action_dim: int, seen: Observed) -> Iterator[Problem]:
    """The problem that the starting policy has states or actions of another size than the environment. The arguments
    are the policy's sizes; 0: it has none, or the size is not known."""
    for what, own, shown in (("state", state_dim, seen.state_dim), ("action", action_dim, seen.action_dim)):
        if own not in (0, shown):
            text = f"the policy's {what} has {own} numbers, and that of {config.env.task} {shown}: it is of another "
            advice = "task, or of other env.options. Name one that was trained on these"
            yield Problem(start_key(config), text + advice)


def task_sentences(config: Any) -> Sequence[str]:
    """The instructions of the tasks that a run plays; (): only the simulator knows them."""
    return registry.env_card(config.env.id).sentences(config.env.task)


def long_prompt(config: Any, length: int, count: Callable[[str], int]) -> Iterator[Problem]:
    """The problem that the longest prompt of the tasks' sentences has more than `length` tokens. `count` returns the
    number of tokens of a sentence's prompt."""
    tokens, sentence = max((count(one), one) for one in task_sentences(config))
    if tokens > length:
        text = f"is {length}, and the prompt of {sentence!r}, which is a task of {config.env.task}, has {tokens} tokens"
        yield Problem("model.options.max_prompt_length", f"{text}. Set it to {tokens} or more: padding is masked")


def imitates_no_state(config: Any) -> bool:
    """Whether a run imitates a dataset without reading its states."""
    data = config.data
    return bool(config.runner.task_type == "sft" and data.source == "folder" and data.keys.state is None)
