"""Built-in rules: functions `(solution, ground_truth, extra_info)` that return 0.0 or 1.0."""

from __future__ import annotations

import logging
import re
from typing import Any

from rlinf_lite.registry import install_command
from rlinf_lite.rewards.registry import RewardError

GSM8K_TAIL = 300  # characters; the answer comes last, and searching all of a long text would take time

_GSM8K_ANSWER = re.compile(r"#### (-?\$?-?[0-9.,]+)")
_BOXED = "\\boxed{"
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_NO_MATTER = ("\\left", "\\right", "\\!", "\\,", "\\;", "\\ ", "\\$", "$", "^{\\circ}", "^\\circ", "\\%", "%")


def gsm8k(solution: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """1.0 if the last `#### number` in the last 300 characters equals the ground truth as text, without commas and `$`.

    Source: Cobbe et al. 2021, arXiv:2110.14168, as verl scores it.
    """
    found = _GSM8K_ANSWER.findall(solution[-GSM8K_TAIL:])
    return float(bool(found) and _plain_number(found[-1]) == _plain_number(ground_truth))


def boxed(solution: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    r"""1.0 if the content of the last `\boxed{...}` equals the ground truth, as text or as mathematics.

    The ground truth may itself be in a box. Texts are compared without spaces and signs of no meaning. If they differ,
    math-verify decides; its time is not bounded for some expressions. Raises RewardError if it is not installed.
    """
    answer = last_boxed(solution)
    if answer is None:
        return 0.0
    truth = last_boxed(ground_truth)
    truth = ground_truth if truth is None else truth
    if _plain_text(answer) == _plain_text(truth):
        return 1.0
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise RewardError(
            f"the boxed rule needs math-verify, which is not installed. {install_command('math')}"
        ) from error
    # its own time limits need signals, so that they work only in a main thread; it warns if they are off
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold, found = (parse(f"{_BOXED}{text}}}", parsing_timeout=None) for text in (truth, answer))
    return float(verify(gold, found, timeout_seconds=None))


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` or `\fbox{...}`, up to its own closing brace; None without a box, or if it is
    not closed."""
    boxes = [box.end() for box in _BOX.finditer(text)]
    if not boxes:
        return None
    start, depth = boxes[-1], 1
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start:i]
    return None


def _plain_number(text: str) -> str:
    return text.replace(",", "").replace("$", "").strip()


def _plain_text(latex: str) -> str:
    for sign in _NO_MATTER:
        latex = latex.replace(sign, "")
    latex = latex.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").strip().rstrip(".")
    if not re.search(r"[(\[]|\\{", latex):  # (1,234) is two numbers, 1,234 is one, and 1, 234 is two again
        latex = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", latex)
    return re.sub(r"(?<!\d) +| +(?!\d)", "", latex)
