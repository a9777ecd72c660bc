"""Errors of environments, one exception per kind of mistake."""

from __future__ import annotations

import copyreg
from collections.abc import Sequence
from typing import Any

from rlinf_lite.registry import pip_command

WHY_NOT_FINITE = "look for a division by zero or a diverged simulation; no policy learns from NaN or infinity"


class EnvError(Exception):
    """Base of every error that environments raise on purpose. All of them travel between processes."""

    def __reduce__(self) -> tuple[Any, ...]:
        # not by __init__, which takes other arguments
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class EnvContractError(EnvError, ValueError):
    """An environment breaks the protocol; `problems` holds one sentence per violation, each with the remedy."""

    def __init__(self, problems: str | Sequence[str], what: str = "the environment") -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        listed = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"{what} breaks the environment contract in {len(self.problems)} way(s):\n{listed}")


class NoTimeLimitError(EnvContractError):
    """Neither the environment nor the config says when an episode ends at the latest."""


class EpisodeError(EnvError, RuntimeError):
    """Something went wrong in a row's episode, or somewhere in a batch of rows; the message begins by saying where."""

    env_ids: Sequence[int] = ()
    """Numbers of `rows` in the whole run, where an env worker has set them."""

    def __init__(self, what: str, rows: Sequence[int], step: int | None = None, seed: int | None = None) -> None:
        """`step`: env steps into the episode, 0 at its start; None, like `seed`, where it is not known."""
        self.what, self.rows, self.step, self.seed = what, list(rows), step, seed
        super().__init__(what)

    def __str__(self) -> str:
        one = len(self.rows) == 1
        where = _listed("row", self.rows) + ("" if one else ", one of them")
        if self.env_ids:
            where = f"{_listed('environment', self.env_ids)} ({where})"
        if self.step is not None:
            where += f", step {self.step}" if self.step else ", at the start"
        if self.seed is not None:
            where += f" of the episode with seed {self.seed}"
        return f"{where}: {self.what}"

    def number(self, env_ids: Sequence[int]) -> None:
        """Say which environment every row is."""
        self.env_ids = [int(env_ids[row]) for row in self.rows]


class EpisodeContractError(EpisodeError, EnvContractError):
    """A row of an environment breaks the protocol in an episode."""


class NonFiniteError(EpisodeError, ValueError):
    """A reward, an observation or an action is NaN or infinite."""


class SimulatorError(EpisodeError):
    """A simulator raised; `__cause__` is what it raised, where that was raised."""

    def __init__(
        self, method: str, error: BaseException, rows: Sequence[int], step: int | None = None, seed: int | None = None
    ) -> None:
        self.raised = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        super().__init__(f"{method} raised {self.raised}", rows, step, seed)


class RowError(Exception):
    """Raised by a simulator `from` the exception of one of the rows that it steps in turn, to say which row it was."""

    def __init__(self, row: int) -> None:
        self.row = row
        super().__init__(row)


class MissingExtraError(EnvError, ImportError):
    """A package that an adapter needs is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        self.package, self.extra = package, extra
        super().__init__(f"this environment needs {package}, which is not installed: {pip_command(extra)}")


class MissingAssetsError(EnvError, FileNotFoundError):
    """Files that a simulator needs, and that no package brings, are not there."""

    def __init__(self, text: str, key: str) -> None:
        """`key`: the config key that the message begins with."""
        super().__init__(f"{key}: {text}")
        self.text, self.key = text, key


class RenderUnavailableError(EnvError, RuntimeError):
    """Images were asked for where nothing can render them."""


def _listed(what: str, numbers: Sequence[int]) -> str:
    """`row 3`, `rows 0 to 15`, `rows 0, 3, 4`."""
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{what}s {numbers[0]} to {numbers[-1]}"
    return f"{what}s {', '.join(str(number) for number in numbers)}"
