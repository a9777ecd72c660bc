"""Algorithms by name or import path, and the nearest one to a name that is not there."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar, cast

from rlinf_lite.config.names import did_you_mean

F = TypeVar("F")


class UnknownAlgorithmError(ValueError):
    """A name that no algorithm is registered under."""


def unknown_name(what: str, name: str, known: Iterable[str]) -> UnknownAlgorithmError:
    """The error for `name`: the nearest known one, or all of them."""
    return UnknownAlgorithmError(f"unknown {what} {name!r}. {did_you_mean(name, known)}")


class Registry(Generic[F]):
    """Functions by name. `what` says in errors what the names are."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._entries: dict[str, F] = {}

    def register(self, name: str) -> Callable[[F], F]:
        """A decorator that registers under `name`; raises ValueError where the name is taken."""

        def add(entry: F) -> F:
            if name in self._entries:
                raise ValueError(
                    f"{self._what} {name!r} is registered already ({self._entries[name]!r}). Choose another."
                )
            self._entries[name] = entry
            return entry

        return add

    def get(self, name: str) -> F:
        """The function registered as `name`, or the one at `pkg.module:function`. Raises UnknownAlgorithmError."""
        if ":" in name:
            return self._imported(name)
        if name not in self._entries:
            raise unknown_name(self._what, name, self._entries)
        return self._entries[name]

    def _imported(self, path: str) -> F:
        module_name, _, attribute = path.partition(":")
        try:
            return cast(F, getattr(importlib.import_module(module_name), attribute))
        except (ImportError, AttributeError) as error:
            raise UnknownAlgorithmError(f"{self._what} {path!r} cannot be imported: {error}") from error

    def names(self) -> list[str]:
        return sorted(self._entries)
