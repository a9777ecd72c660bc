"""Reward functions for the tests of the language loop."""

import os
from contextlib import suppress
from pathlib import Path


def arbitrary(solution, ground_truth, extra_info):
    """A reward that every policy gets sometimes, and that differs within a group."""
    return (1 + sum(map(ord, solution)) % 89) / 100


def always_one(solution, ground_truth, extra_info):
    return 1.0


def odd_prompts(solution, ground_truth, extra_info):
    """A reward that differs only for problems with an odd answer."""
    return arbitrary(solution, ground_truth, extra_info) if int(ground_truth) % 2 else 0.0


def raises_sometimes(solution, ground_truth, extra_info):
    if sum(map(ord, solution)) % 2:
        raise RuntimeError("this answer is too odd")
    return 0.5


def raises_always(solution, ground_truth, extra_info):
    raise LookupError(f"nothing is known of {ground_truth}")


def raises_in_one_process(solution, ground_truth, extra_info):
    """Fails in the first process that calls it, which writes its id into a file that the row names."""
    claim = Path(extra_info["claim"])
    with suppress(FileExistsError), claim.open("x") as file:
        file.write(str(os.getpid()))
    if claim.read_text() == str(os.getpid()):
        raise RuntimeError("not in this process")
    return 1.0


def as_verl_returns_it(solution, ground_truth, extra_info):
    score = arbitrary(solution, ground_truth, extra_info)
    found = {"score": score, "acc": score > 0.5, "third": score / 3, "pred": solution}
    return found | ({"odd": 3} if int(ground_truth) % 2 else {})
