"""Reward functions as users write them, some of them badly."""

import ctypes
import itertools
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np

OWN = 1.0
"""No function."""


def length(solution: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    return len(solution) / extra_info["scale"]


def as_verl_calls_it(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(solution_str == ground_truth)


def misbehaves(solution: str, ground_truth: str, extra_info: dict[str, Any]) -> Any:
    """What the solution says."""
    if solution == "raise":
        raise RuntimeError("something is wrong with this one")
    if solution == "hang":
        while True:
            pass
    if solution == "hang in C":
        for _ in itertools.repeat(None):
            sum(itertools.repeat(0, 10**12))
    if solution == "sleep in C":
        ctypes.PyDLL(None).sleep(1000)  # with the interpreter's lock held
    if solution == "crash":
        ctypes.string_at(0)
    if solution == "exit":
        sys.exit(3)
    if solution == "die":
        os._exit(4)
    if solution == "spawn":
        child = subprocess.Popen(["sleep", "1000"])
        with open(ground_truth, "w") as file:
            file.write(str(child.pid))
        time.sleep(1000)
    answers = {"nan": float("nan"), "inf": float("inf"), "huge": 1e300, "text": "1.0", "none": None, "list": [1.0]}
    answers |= {"true": True, "int": 2, "numpy": np.float32(0.5), "numpy bool": np.bool_(True)}
    return answers[solution]


def plain(solution: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    return float(solution == ground_truth)


async def asynchronous(solution: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    return plain(solution, ground_truth, extra_info)


def of_verl_without_data_source(solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    return {"score": float(solution_str == ground_truth)}


def with_a_default(solution: str, ground_truth: str, extra_info: Any, strict: bool = True) -> float:
    return float(solution == ground_truth)


def of_anything(*arguments: Any, **others: Any) -> float:
    return float(arguments[0] == arguments[1])


def the_other_way_round(ground_truth: str, solution: str, extra_info: Any) -> float:
    return float(solution == ground_truth)


def extra_info_second(solution: str, extra_info: Any, ground_truth: str) -> float:
    return float(solution == ground_truth)


def data_source_last(solution_str: str, ground_truth: str, extra_info: Any, data_source: Any = None) -> float:
    return float(solution_str == ground_truth)


def of_two(answer: str, truth: str) -> float:
    return float(answer == truth)


def of_four(answer: str, truth: str, row: Any, tokenizer: Any) -> float:
    return float(answer == truth)


def of_keywords(*, solution_str: str, ground_truth: str, **others: Any) -> float:
    return float(solution_str == ground_truth)
