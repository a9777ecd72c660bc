"""A reward function that returns whatever a test asks for."""

import asyncio
import sys
from collections import UserDict, defaultdict  # noqa: F401  (in expressions)
from fractions import Fraction  # noqa: F401
from math import inf, nan  # noqa: F401
from typing import Any

import numpy as np  # noqa: F401
import torch  # noqa: F401


def says(solution: str, ground_truth: str, extra_info: dict[str, Any]) -> Any:
    """What the solution is as an expression of Python."""
    return eval(solution, globals())


def raises() -> None:
    raise RuntimeError("something is wrong")


def exits() -> None:
    sys.exit(3)


def asks() -> str:
    return input("a score, please: ")


def prints(value: float) -> float:
    print("said on the way", flush=True)
    return value


async def coroutine(value: Any) -> Any:
    await asyncio.sleep(0)
    return value() if callable(value) else value
