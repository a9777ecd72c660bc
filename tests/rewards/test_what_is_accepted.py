"""Everything that a reward function may say, and what is made of it: the table below is run against a real scorer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rlinf_lite.rewards import RewardError, RewardScorer
from rlinf_lite.rewards.registry import import_reward

FAILS = None
"""The response scores 0, is counted in `rollout/failed_rewards`, and the text beside is in its traceback."""

WHAT_IS_RETURNED: dict[str, tuple[Any, Any]] = {
    # expression of answers.py: (score, metrics), or (FAILS, what the traceback says)
    # numbers
    "2": (2.0, {}),
    "True": (1.0, {}),
    "-0.5": (-0.5, {}),
    "Fraction(1, 4)": (0.25, {}),
    "np.float32(0.5)": (0.5, {}),
    "np.bool_(True)": (1.0, {}),
    "np.array([[3]])": (3.0, {}),
    "torch.tensor(0.25, requires_grad=True)": (0.25, {}),
    "torch.tensor([True])": (1.0, {}),
    "3.4e38": (pytest.approx(3.4e38), {}),
    # what is called at once, and waited for
    "coroutine(0.5)": (0.5, {}),
    "coroutine({'score': 1, 'acc': 0})": (1.0, {"acc": 0.0}),
    # dicts: score is read, other finite numbers are metrics, all else is left out
    "{'score': 1.0}": (1.0, {}),
    "{'score': True, 'acc': False, 'pred': '42', 'len': 7}": (1.0, {"acc": 0.0, "len": 7.0}),
    "{'score': np.float64(0.5), 'x': torch.tensor([2.0])}": (0.5, {"x": 2.0}),
    "{'score': 0, 'a': nan, 'b': inf, 'c': None, 'd': '1', 'e': [1], 'f': {'g': 1}, 'h': np.ones(2)}": (0.0, {}),
    "{'score': 1, 'embedding': torch.ones(3)}": (1.0, {}),
    "{'score': 0, 'huge': 10**400, 'fine': 1}": (0.0, {"fine": 1.0}),
    "{'score': 0, 'für %': 1, 'a/b.c@8': 2, 3: 4}": (0.0, {"für__": 1.0, "a/b.c@8": 2.0, "3": 4.0}),
    "{'score': 0, 'n' * 200: 1}": (0.0, {"n" * 80: 1.0}),
    "UserDict(score=0.5, acc=1)": (0.5, {"acc": 1.0}),
    # no score
    "{'acc': 1.0, 'reward': 1.0}": (FAILS, "returned a dict without 'score' ('acc', 'reward')"),
    "{}": (FAILS, "returned a dict without 'score'"),
    "defaultdict(float)": (FAILS, "returned a dict without 'score'"),
    "{'score': '1.0'}": (FAILS, "returned str '1.0'; a number is needed"),
    "{'score': None}": (FAILS, "returned NoneType None"),
    "{'score': {'score': 1}}": (FAILS, "returned dict {'score': 1}"),
    "{'score': nan}": (FAILS, "returned nan"),
    "None": (FAILS, "returned NoneType None"),
    "'1.0'": (FAILS, "returned str '1.0'; a number is needed"),
    "b'1'": (FAILS, "returned bytes b'1'"),
    "[1.0]": (FAILS, "returned list [1.0]"),
    "(1.0, {'acc': 1})": (FAILS, "returned tuple (1.0, {'acc': 1})"),
    "{1.0}": (FAILS, "returned set {1.0}"),
    "(x for x in [1.0])": (FAILS, "returned generator <generator"),
    "1j": (FAILS, "returned complex 1j"),
    "np.complex64(1)": (FAILS, "returned complex64"),
    "np.array('1.0')": (FAILS, "returned ndarray"),
    "np.ones(2)": (FAILS, "can only convert an array of size 1"),
    "torch.ones(2)": (FAILS, "Tensor with 2 elements cannot be converted to Scalar"),
    "len": (FAILS, "returned builtin_function_or_method"),
    # no finite number of float32
    "nan": (FAILS, "returned nan; a finite number"),
    "-inf": (FAILS, "returned -inf"),
    "np.float32(nan)": (FAILS, "returned nan"),
    "torch.tensor(inf)": (FAILS, "returned inf"),
    "3.5e38": (FAILS, "returned 3.5e+38"),
    "10**400": (FAILS, "returned 1000"),
    # no return at all
    "raises()": (FAILS, "RuntimeError: something is wrong"),
    "exits()": (FAILS, "SystemExit: 3"),
    "asks()": (FAILS, "EOFError"),
    "coroutine(raises)": (FAILS, "RuntimeError: something is wrong"),
    # beside a return
    "prints(0.5)": (0.5, {}),
}

HOW_IT_IS_DECLARED = {
    # function in own_rewards.py: None where it is accepted, else what the refusal says before anything starts
    "plain": None,
    "of_verl_without_data_source": None,
    "with_a_default": None,
    "of_anything": None,
    "asynchronous": None,
    "as_verl_calls_it": "begins with data_source, and is called as (solution, ground_truth, extra_info)",
    "the_other_way_round": "takes (ground_truth, solution, extra_info), and is called as",
    "extra_info_second": "takes (solution, extra_info, ground_truth), and is called as",
    "data_source_last": "takes (solution_str, ground_truth, extra_info, data_source), and is called as",
    "of_two": "too many positional arguments. Take these three",
    "of_four": "missing a required argument: 'tokenizer'",
    "of_keywords": "too many positional arguments. Take these three",
    "OWN": "no function. Name one",
    "nothing": "has no 'nothing'",
}


@pytest.fixture(scope="module")
def scorer() -> Iterator[RewardScorer]:
    scorer = RewardScorer("tests.rewards.answers:says", timeout_s=20.0)
    yield scorer
    scorer.close()


@pytest.mark.parametrize("returned", WHAT_IS_RETURNED)
def test_what_is_returned(scorer: RewardScorer, returned: str) -> None:
    score, known = WHAT_IS_RETURNED[returned]
    result = scorer.score_batch([returned, "2"], ["", ""], ["any"] * 2, [{}] * 2)
    assert result.scores.tolist() == [0.0 if score is FAILS else score, 2.0]
    if score is FAILS:
        assert list(result.failures) == [0] and known in result.failures[0]
    else:
        assert result.failures == {} and list(result.metrics) == [known, {}]


@pytest.mark.parametrize("name", HOW_IT_IS_DECLARED)
def test_how_it_is_declared(name: str) -> None:
    said = HOW_IT_IS_DECLARED[name]
    path = f"tests.rewards.own_rewards:{name}"
    if said is None:
        scorer = RewardScorer(path)
        result = scorer.score_batch(["a", "a"], ["a", "b"], ["any"] * 2, [{}] * 2)
        scorer.close()
        assert (result.scores.tolist(), result.failures) == ([1.0, 0.0], {})
    else:
        with pytest.raises(RewardError) as caught:
            import_reward(path)
        assert said in str(caught.value)
