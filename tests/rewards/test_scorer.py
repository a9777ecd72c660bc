"""Scoring batches: which rule, and what becomes of samples that raise, hang or give no number."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rlinf_lite.rewards import RewardError, RewardScorer, UnknownSourceError, register_reward, registry
from tests.rewards.own_rewards import length

OWN = "tests.rewards.own_rewards"


@pytest.fixture(scope="module")
def misbehaving() -> Iterator[RewardScorer]:
    scorer = RewardScorer(f"{OWN}:misbehaves", timeout_s=1.0)
    yield scorer
    scorer.close()


def score(scorer: RewardScorer, *solutions: str) -> tuple[list[float], int, str]:
    result = scorer.score_batch(solutions, [""] * len(solutions), ["any"] * len(solutions), [{}] * len(solutions))
    return result.scores.tolist(), result.num_failed, next(iter(result.failures.values()), "")


def test_the_rule_is_that_of_the_row() -> None:
    result = RewardScorer().score_batch(
        ["#### 1", "#### 2", "#### 3"],
        ["1", "0", "3"],
        np.array(["openai/gsm8k", "arithmetic", "arithmetic"]),
        [{}] * 3,
    )
    assert result.scores.tolist() == [1.0, 0.0, 1.0] and result.scores.dtype == np.float32
    assert result.failures == {}


def test_boxed_answers_are_compared_in_a_process_that_can_be_stopped() -> None:
    pytest.importorskip("math_verify")
    scorer = RewardScorer(timeout_s=20.0)
    solutions = [r"\boxed{0.5}", r"\boxed{3}"]
    assert scorer.score_batch(
        solutions, [r"\frac{1}{2}", "2"], ["MATH", "lighteval/MATH"], [{}] * 2
    ).scores.tolist() == [1, 0]
    result = RewardScorer(timeout_s=3.0).score_batch([r"\boxed{9^{9^{9^{9}}}}"], ["7"], ["MATH"], [{}])
    assert result.scores.tolist() == [0]


def test_a_function_of_ones_own_scores_all_rows() -> None:
    scorer = RewardScorer(f"{OWN}:length")
    scorer.check_sources(["never heard of"])
    result = scorer.score_batch(["ab", "abcd"], ["", ""], ["x", "y"], np.array([{"scale": 2}, {"scale": 8}]))
    assert result.scores.tolist() == [1.0, 0.5]


@pytest.mark.parametrize(
    ("solution", "said"),
    [
        ("raise", "RuntimeError: something is wrong with this one"),
        ("nan", "returned nan; a finite number that"),
        ("inf", "returned inf"),
        ("huge", "returned 1e+300; a finite number that float32 holds is needed"),
        ("text", "returned str '1.0'; a number is needed"),
        ("none", "returned NoneType None"),
        ("list", "returned list [1.0]"),
        ("exit", "SystemExit: 3"),
        ("die", "ended its process (exit code 4)"),
        ("crash", "Segmentation fault"),
        ("hang", "took longer than 1.0 s and was stopped"),
        ("hang in C", "took longer than 1.0 s and was stopped"),
        ("sleep in C", "took longer than 1.0 s and was stopped"),
    ],
)
def test_a_sample_that_fails_costs_only_itself(misbehaving: RewardScorer, solution: str, said: str) -> None:
    scores, num_failed, first_traceback = score(misbehaving, "int", solution, "int")
    assert (scores, num_failed) == ([2.0, 0.0, 2.0], 1)
    assert said in first_traceback
    assert "own_rewards.py" in first_traceback or solution in ("nan", "inf", "huge", "text", "none", "list", "die")


def test_the_first_traceback_is_kept(misbehaving: RewardScorer) -> None:
    scores, num_failed, first_traceback = score(misbehaving, "text", "raise", "true", "numpy", "numpy bool")
    assert (scores, num_failed) == ([0.0, 0.0, 1.0, 0.5, 1.0], 2)
    assert "returned str" in first_traceback


def test_what_a_hanging_function_started_ends_with_it(misbehaving: RewardScorer, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    assert misbehaving.score_batch(["spawn"], [str(pid_file)], ["any"], [{}]).num_failed == 1
    assert ends(int(pid_file.read_text()))


def test_the_process_ends_when_nobody_asks_any_more(tmp_path: Path) -> None:
    code = (
        "import os\n"
        "from rlinf_lite.rewards.isolated import IsolatedFunction\n"
        f"function = IsolatedFunction('{OWN}:misbehaves', timeout_s=2.0)\n"
        "function._child.connection.send(('hang', '', {}))\n"
        "print(function._child.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)
    assert ends(pid)


def test_an_exception_in_a_built_in_rule_is_counted_too() -> None:
    result = RewardScorer().score_batch(["#### 1"], [None], ["arithmetic"], [{}])  # type: ignore[list-item]
    assert (result.scores.tolist(), result.num_failed) == ([0.0], 1)
    assert "AttributeError" in next(iter(result.failures.values()))


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        ("nowhere:f", "No module named 'nowhere'"),
        (f"{OWN}:nothing", "has no 'nothing'"),
        ("gsm8k", "Write pkg.module:function"),
        (
            f"{OWN}:as_verl_calls_it",
            r"begins with data_source, and is called as \(solution, ground_truth, ext",
        ),
    ],
)
def test_a_function_that_cannot_be_imported_is_refused_at_once(fn: str, said: str) -> None:
    with pytest.raises(RewardError, match=said):
        RewardScorer(fn)


def test_an_unknown_source_is_answered_with_the_known_ones() -> None:
    scorer = RewardScorer()
    scorer.check_sources(["openai/gsm8k", "arithmetic"])
    with pytest.raises(UnknownSourceError, match=r"'gsm8k'\. Did you mean openai/gsm8k\? Correct it"):
        scorer.check_sources(["arithmetic", "gsm8k"])
    with pytest.raises(UnknownSourceError, match=r"'x'\. Known: MATH, arithmetic, lighteval/MATH, openai/gsm8k\. Co"):
        scorer.check_sources(["x"])
    with pytest.raises(UnknownSourceError, match="rows without a data_source"):
        scorer.check_sources([""])


def test_a_rule_without_its_package_is_refused_when_sources_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlinf_lite.rewards.scorer.find_spec", lambda name: None)
    RewardScorer().check_sources(["arithmetic"])
    with pytest.raises(RewardError, match=r"'MATH' needs math_verify.*pip install 'rlinf_lite\[math\]'"):
        RewardScorer().check_sources(["MATH"])


def test_a_registered_function_scores_its_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    register_reward("essays", "letters")(length)
    scorer = RewardScorer()
    scorer.check_sources(["essays", "letters"])
    assert scorer.score_batch(["abc"], [""], ["letters"], [{"scale": 3}]).scores.tolist() == [1.0]
    with pytest.raises(RewardError, match="'MATH' has a rule already"):
        register_reward("MATH")(length)
    with pytest.raises(RewardError, match="cannot be imported by another process"):
        register_reward("other")(lambda solution, ground_truth, extra_info: 1.0)


def ends(pid: int) -> bool:
    """Whether the process is gone within 30 s."""
    deadline = time.monotonic() + 30
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
