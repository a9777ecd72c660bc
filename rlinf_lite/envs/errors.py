"""Errors of environments: one exception for each kind of mistake."""

from __future__ import annotations

import copyreg
from collections.abc import Sequence
from typing import Any

from rlinf_lite.registry import pip_command

WHY_NOT_FINITE = "look for a division by zero or a diverged simulation; no policy learns from NaN or infinity"


class EnvError(Exception):
    """Base of all errors that environments raise on purpose. All of them can be pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        # not with __init__, which takes other arguments than `args`
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class EnvContractError(EnvError, ValueError):
    """An environment breaks the protocol. `problems` holds a sentence for each violation, with the remedy."""

    def __init__(self, problems: str | Sequence[str], what: str = "the environment") -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        listed = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"{what} breaks the environment contract in {len(self.problems)} way(s):\n{listed}")


class NoTimeLimitError(EnvContractError):
    """Neither the environment nor the config has a time limit for episodes."""


class EpisodeError(EnvError, RuntimeError):
    """An error in a row's episode, or in one of a batch of rows. The message begins with the place."""

    env_ids: Sequence[int] = ()
    """Numbers of `rows` in the whole run, if an env worker has set them."""

    def __init__(self, what: str, rows: Sequence[int], step: int | None = None, seed: int | None = None) -> None:
        """`step`: number of env steps into the episode, 0 at its start. `step` and `seed` are None if not known."""
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
        """Set the numbers of the rows in the whole run; `env_ids` are those of all rows."""
        self.env_ids = [int(env_ids[row]) for row in self.rows]


class EpisodeContractError(EpisodeError, EnvContractError):
    """A row of an environment breaks the protocol in an episode."""


class NonFiniteError(EpisodeError, ValueError):
    """A reward, an observation or an action is NaN or infinite."""


class SimulatorError(EpisodeError):
    """A simulator raised an error, which is the `__cause__`."""

    def __init__(
        self, method: str, error: BaseException, rows: Sequence[int], step: int | None = None, seed: int | None = None
    ) -> None:
        self.raised = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        super().__init__(f"{method} raised {self.raised}", rows, step, seed)


class StepRewardError(EnvError, ValueError):
    """A reward function of observations cannot judge these, or returns something else than one number per row."""


class RowError(Exception):
    """Raised by a simulator that steps its rows in turn, `from` the exception of one row, to name that row."""

    def __init__(self, row: int) -> None:
        self.row = row
        super().__init__(row)


class MissingExtraError(EnvError, ImportError):
    """A package that an adapter needs is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        self.package, self.extra = package, extra
        super().__init__(f"this environment needs {package}, which is not installed: {pip_command(extra)}")


class MissingAssetsError(EnvError, FileNotFoundError):
    """Files that a simulator needs, and that are in no package, are missing."""

    def __init__(self, text: str, key: str) -> None:
        """`key`: the config key with which the message begins."""
        super().__init__(f"{key}: {text}")
        self.text, self.key = text, key


class RenderUnavailableError(EnvError, RuntimeError):
    """Images are wanted, but no device can render them."""


def _listed(what: str, numbers: Sequence[int]) -> str:
    """Numbers with their noun: `row 3`, `rows 0 to 15`, `rows 0, 3, 4`."""
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{what}s {numbers[0]} to {numbers[-1]}"
    return f"{what}s {', '.join(str(number) for number in numbers)}"
