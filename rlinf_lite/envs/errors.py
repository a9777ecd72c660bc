"""What can be wrong with an environment, one exception per kind of mistake."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any


class EnvError(Exception):
    """Base of every error that environments raise on purpose. All of them travel between processes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.args, self.__dict__)


def _rebuilt(kind: type[EnvError], args: tuple[Any, ...], state: dict[str, Any]) -> EnvError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class UnknownEnvError(EnvError, ValueError):
    """No environment or task of that name."""

    def __init__(self, where: str, name: str, known: Iterable[str], hint: str = "") -> None:
        names = sorted(known)
        nearest = get_close_matches(name, names, n=1, cutoff=0.5)
        meant = f" Did you mean {nearest[0]!r}?" if nearest else ""
        listed = f" Known: {', '.join(names)}." if len(names) <= 12 else ""
        super().__init__(f"{where}: there is no environment {name!r}.{meant}{listed}{' ' + hint if hint else ''}")


class EnvContractError(EnvError, ValueError):
    """An environment breaks the protocol; `problems` holds one sentence per violation, each with the remedy."""

    def __init__(self, problems: Sequence[str], what: str = "the environment") -> None:
        self.problems = list(problems)
        listed = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"{what} breaks the environment contract in {len(self.problems)} way(s):\n{listed}")


class MissingExtraError(EnvError, ImportError):
    """A package that an adapter needs is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        self.package, self.extra = package, extra
        super().__init__(f"this environment needs {package}, which is not installed: pip install 'rlinf_lite[{extra}]'")


class RenderUnavailableError(EnvError, RuntimeError):
    """Images were asked for where nothing can render them."""
