"""Generated arithmetic problems in GSM8K's format: one operation per line, and `#### ` before the answer.

7+8-9+5=?
7+8=15
15-9=6
6+5=11
#### 11
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import numpy as np

DATA_SOURCE = "arithmetic"
_TEST_SHARE = 8
"""One in this many problems belongs to the test split."""
_MAX_DRAWS = 100
"""Most draws per requested row; if these do not suffice, there are too few different problems."""


class ProblemSpaceError(ValueError):
    """The settings allow no problem, or fewer different problems than were requested."""


def generate(
    num_rows: int,
    seed: int,
    split: Literal["train", "test"] = "train",
    num_terms: int = 4,
    max_number: int = 9,
    terse_frac: float = 0.0,
) -> list[dict[str, Any]]:
    """Make `num_rows` different problems of `num_terms` numbers from 1 to `max_number`; no intermediate result is
    negative.

    Rows are `{data_source, prompt, reward_model: {style: "rule", ground_truth}, extra_info: {solution, split, index}}`.
    A solution has the steps and the answer; for a share of `terse_frac` it is the answer alone, so that a model that
    imitates them learns to guess as well as to calculate. Equal arguments give equal rows. A hash of the problem
    decides its split, so that no seed puts a problem into both splits.

    Raises:
        ProblemSpaceError: if `num_terms` is below 2, `max_number` below 1, or there are too few such problems.
    """
    if num_terms < 2 or max_number < 1:
        raise ProblemSpaceError(
            f"num_terms is {num_terms} and max_number {max_number}; a sum has at least 2 terms, of 1 or more"
        )
    rng = np.random.default_rng(seed)
    rows: dict[str, dict[str, Any]] = {}
    for _ in range(_MAX_DRAWS * num_rows):
        if len(rows) == num_rows:
            break
        problem, steps, answer = _draw(rng, num_terms, max_number)
        if split_of(problem) == split and problem not in rows:
            solution = "\n".join([*steps, f"#### {answer}"])
            rows[problem] = {
                "data_source": DATA_SOURCE,
                "prompt": f"{problem}=?\n",
                "reward_model": {"style": "rule", "ground_truth": str(answer)},
                "extra_info": {"solution": solution, "split": split, "index": len(rows)},
            }
    terse = np.random.default_rng([seed, 1]).random(len(rows)) < terse_frac
    for row, is_terse in zip(rows.values(), terse, strict=True):
        if is_terse:
            row["extra_info"]["solution"] = row["extra_info"]["solution"].rpartition("\n")[2]
    if len(rows) < num_rows:
        raise ProblemSpaceError(
            f"{num_rows} {split} rows were asked for, and {_MAX_DRAWS * num_rows} draws of {num_terms} terms up to "
            f"{max_number} gave {len(rows)} different problems. Ask for fewer, or raise num_terms or max_number"
        )
    return list(rows.values())


def split_of(problem: str) -> Literal["train", "test"]:
    """The split that a problem belongs to, from a hash of its text."""
    digest = hashlib.blake2b(problem.encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "little") % _TEST_SHARE == 0 else "train"


def _draw(rng: np.random.Generator, num_terms: int, max_number: int) -> tuple[str, list[str], int]:
    """A random problem, as (problem, steps, answer)."""
    numbers = rng.integers(1, max_number + 1, num_terms).tolist()
    signs = rng.integers(0, 2, num_terms - 1).tolist()
    total, problem, steps = numbers[0], str(numbers[0]), []
    for number, sign in zip(numbers[1:], signs, strict=True):
        minus = sign and number <= total
        before, total = total, total - number if minus else total + number
        operation = f"{'-' if minus else '+'}{number}"
        problem += operation
        steps.append(f"{before}{operation}={total}")
    return problem, steps, total
