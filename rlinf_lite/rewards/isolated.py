"""A function that runs in its own process, which is killed if a call takes too long, and started again."""

from __future__ import annotations

from typing import Any

from rlinf_lite.child_process import ChildProcess
from rlinf_lite.rewards.registry import Answer, RewardError

START_TIMEOUT_S = 120.0
_GRACE_S = 1.0  # the process ends itself at its limit; after so much more it is killed


class CallFailedError(Exception):
    """A call raised, returned no score, took too long or ended its process. The message is a traceback."""


class IsolatedFunction:
    """The function `pkg.module:function` in its own process, with a limit of `timeout_s` seconds per call.

    Raises RewardError where the function cannot be imported.
    """

    def __init__(self, path: str, timeout_s: float) -> None:
        self.path, self.timeout_s = path, timeout_s
        self._start()

    def __call__(self, *arguments: Any) -> Answer:
        """Call the function. Raises CallFailedError."""
        if self._child.has_ended():
            self._start()
        connection = self._child.connection
        try:
            connection.send(arguments)
            if not connection.poll(self.timeout_s + _GRACE_S):
                raise CallFailedError(self._ended(f"took longer than {self.timeout_s} s and was killed"))
            answer: Answer | str = connection.recv()
        except (EOFError, OSError) as error:
            raise CallFailedError(self._ended("ended its process")) from error
        if isinstance(answer, str):
            raise CallFailedError(answer)
        return answer

    def close(self) -> None:
        self._child.close()

    def _start(self) -> None:
        self._child = ChildProcess("rlinf_lite.rewards.child", self.path, str(self.timeout_s))
        connection = self._child.connection
        try:
            problem = connection.recv() if connection.poll(START_TIMEOUT_S) else "the import takes too long"
        except (EOFError, OSError):
            problem = self._ended("ended its process")
        if problem is not None:
            self._child.close()
            raise RewardError(f"reward function {self.path!r} cannot be imported. Correct reward.fn.\n{problem}")

    def _ended(self, how: str) -> str:
        """Text about a process that ended without an answer: how it ended, and its log."""
        code, log = self._child.last_words()
        if log.startswith("Timeout"):
            return f"{self.path} took longer than {self.timeout_s} s and was stopped.\n{log}"
        return f"{self.path} {how} (exit code {code}).\n{log}"
