"""The child process of an `IsolatedFunction`: `python -m rlinf_lite.rewards.child fd log_fd path timeout_s`.

It ends itself if a call takes too long, even if its parent has ended. The interpreter's watchdog thread does that
without a lock, so that it also stops loops in C. The log then has the traceback of the call.
"""

from __future__ import annotations

import faulthandler
import inspect
import os
import re
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from numbers import Real
from typing import Any

from rlinf_lite.rewards.registry import Answer, RewardFn, import_reward

_LARGEST = (2 - 2**-23) * 2.0**127  # largest float32, the type of scores
_MAX_NAME = 80


def main(fd: int, log_fd: int, path: str, timeout_s: float) -> None:
    """Answer calls until the parent closes the connection.

    First sends None, or the traceback of importing `path`; then for each tuple of arguments an Answer or a traceback.
    """
    with Connection(fd) as connection, os.fdopen(log_fd, "wb") as log:
        faulthandler.enable(log)
        try:
            function = import_reward(path)
        except BaseException:  # any error of the user's module, SystemExit too
            connection.send(traceback.format_exc())
            return
        connection.send(None)
        while True:
            try:
                arguments = connection.recv()
            except EOFError:
                return
            faulthandler.dump_traceback_later(timeout_s, exit=True, file=log)
            answer = _call(function, arguments)
            faulthandler.cancel_dump_traceback_later()
            connection.send(answer)


def _call(function: RewardFn, arguments: tuple[Any, ...]) -> Answer | str:
    """The function's answer, or a traceback."""
    try:
        value: Any = function(*arguments)
        if inspect.iscoroutine(value):
            import asyncio

            value = asyncio.run(value)
        return _read(value)
    except BaseException:  # any error of the user's function, SystemExit too
        return traceback.format_exc()


def _read(value: Any) -> Answer:
    """The answer in a function's return value: a number, or the `score` of a dict with its other finite numbers."""
    if not isinstance(value, Mapping):
        return _number(value), {}
    if "score" not in value:
        raise KeyError(f"a reward function returned a dict without 'score' ({', '.join(map(repr, value))[:80]})")
    found = dict[str, float]()
    for name, entry in value.items():
        with suppress(Exception):  # values that are not numbers are left out, with any error of their class
            if name != "score":
                found[re.sub(r"[^\w.@/-]", "_", str(name))[:_MAX_NAME]] = _number(entry)
    return _number(value["score"]), found


def _number(value: Any) -> float:
    """A value as a float; numpy and torch numbers are accepted, and True is 1. Raises TypeError for other types, and
    ValueError for numbers that float32 cannot hold, nan and inf."""
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, Real):
        raise TypeError(f"a reward function returned {type(value).__name__} {value!r:.80}; a number is needed")
    if not -_LARGEST <= number <= _LARGEST:  # type: ignore[operator]  # ints may be too large for a float
        raise ValueError(f"a reward function returned {number!s:.80}; a finite number that float32 holds is needed")
    return float(number)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
