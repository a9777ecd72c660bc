"""The built-in rules."""

import sys
from importlib.util import find_spec

import pytest

from rlinf_lite.rewards import RewardError, boxed, gsm8k
from rlinf_lite.rewards.rules import last_boxed

needs_math_verify = pytest.mark.skipif(find_spec("math_verify") is None, reason="needs the extra math")


@pytest.mark.parametrize(
    ("solution", "ground_truth", "score"),
    [
        # reference values: verl 0.9.1, strict
        ("#### -7.5", "-7.5", 1.0),
        ("#### 41 #### 42", "42", 1.0),
        ("#### 42" + " " * 400, "42", 0.0),
        # the rule, case by case
        ("12 + 30 = 42\n#### 42", "42", 1.0),
        ("the answer is 42", "42", 0.0),
        ("#### 1,234", "1234", 1.0),
        ("#### $1,234", "$1234", 1.0),
        ("#### 42", " 42\n", 1.0),
        ("#### 42.0", "42", 0.0),
        ("#### 42 #### 41", "42", 0.0),
        ("#### 42" + " " * 293, "42", 1.0),
        ("", "42", 0.0),
    ],
)
def test_gsm8k(solution: str, ground_truth: str, score: float) -> None:
    assert gsm8k(solution, ground_truth, {}) == score


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (r"\boxed{1} and then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{}", ""),
        (r"\boxed{1} or rather \fbox{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\fbox{1}, no, \boxed {2}", "2"),
        (r"\boxed{\frac{1}{2}", None),
        (r"\frac{1}{2}", None),
    ],
)
def test_the_last_box_with_balanced_braces(text: str, held: str | None) -> None:
    assert last_boxed(text) == held


@pytest.mark.parametrize(
    ("solution", "ground_truth"),
    [
        (r"so \boxed{42}", "42"),
        (r"so \boxed{42}", r"it is \boxed{42}"),
        (r"so \boxed{42}", r"it is \fbox{42}"),
        (r"so \fbox{42}", "42"),
        (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left( 1, 2 \right)}", "(1,2)"),
        (r"\boxed{90^\circ}", "90"),
        (r"\boxed{\$1,234.}", "1234"),
    ],
)
def test_boxed_answers_that_are_the_same_text(
    solution: str, ground_truth: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert boxed(solution, ground_truth, {}) == 1.0


@needs_math_verify
@pytest.mark.parametrize(
    ("solution", "ground_truth", "score"),
    [
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 1.0),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        (r"\boxed{0.6}", r"\frac{1}{2}", 0.0),
        (r"\boxed{(1,3)}", "(1,2)", 0.0),
        (r"\boxed{(1,234)}", "(1234)", 0.0),
        (r"\boxed{1, 100}", "1100", 0.0),
        (r"\boxed{1 2}", "12", 0.0),
        (r"\boxed{}", "1", 0.0),
        ("1", "1", 0.0),
    ],
)
def test_boxed_answers_that_are_the_same_mathematics(solution: str, ground_truth: str, score: float) -> None:
    assert boxed(solution, ground_truth, {}) == score


def test_a_missing_package_names_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(RewardError, match=r"math-verify.*pip install 'rlinf_lite\[math\]'"):
        boxed(r"\boxed{0.5}", r"\frac{1}{2}", {})
