"""Generated problems: right, in GSM8K's format, the same every time, and never in both splits."""

import re

import pytest

from rlinf_lite.data.arithmetic import ProblemSpaceError, generate, split_of


def test_solutions_are_right_and_end_as_gsm8k_does():
    for row in generate(300, seed=0, num_terms=5, max_number=30):
        problem, solution = row["prompt"].removesuffix("=?\n"), row["extra_info"]["solution"]
        numbers = [int(number) for number in re.findall(r"\d+", problem)]
        assert re.fullmatch(r"\d+([+-]\d+){4}", problem) and min(numbers) >= 1 and max(numbers) <= 30
        *steps, last = solution.split("\n")
        totals = [numbers[0]]
        for step in steps:
            left, right = step.split("=")
            assert left.startswith(str(totals[-1])) and eval(left) == int(right) >= 0
            totals.append(int(right))
        assert len(steps) == 4 and totals[-1] == eval(problem)
        assert last == f"#### {totals[-1]}" and row["reward_model"] == {
            "style": "rule",
            "ground_truth": str(totals[-1]),
        }
        assert row["data_source"] == "arithmetic"


def test_rows_repeat_by_seed_and_never_within_a_set():
    first, again, other = (generate(200, seed) for seed in (3, 3, 4))
    assert first == again != other
    assert len({row["prompt"] for row in first}) == 200
    assert generate(50, 3) == first[:50]


def test_splits_share_no_problem():
    train, test = ({row["prompt"] for row in generate(1000, 0, split)} for split in ("train", "test"))
    assert not train & test
    assert all(split_of(prompt.removesuffix("=?\n")) == "test" for prompt in test)


def test_too_few_problems_are_counted():
    with pytest.raises(ProblemSpaceError, match=r"9 train rows were asked for, and 900 draws .* gave \d different"):
        generate(9, 0, num_terms=2, max_number=1)
    with pytest.raises(ProblemSpaceError, match="num_terms is 1"):
        generate(9, 0, num_terms=1)


def test_terse_solutions_are_the_answer_alone() -> None:
    worked, terse = (generate(400, 3, terse_frac=share) for share in (0.0, 0.5))
    assert [row["prompt"] for row in worked] == [row["prompt"] for row in terse]
    short = [row for row in terse if "\n" not in row["extra_info"]["solution"]]
    assert 150 < len(short) < 250
    assert all(row["extra_info"]["solution"] == f"#### {row['reward_model']['ground_truth']}" for row in short)
