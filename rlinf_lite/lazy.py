"""Imports that cost less: names loaded when first used (an environment's process needs no torch, a config no Ray), and
large packages loaded without the garbage collector."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


def lazy_names(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """The module-level `__getattr__` of `package`: `modules` says which names each of its modules has."""
    home = {name: module for module, names in modules.items() for name in names}

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{home[name]}"), name)

    return load


@contextmanager
def imports_without_gc() -> Iterator[None]:
    """Import inside: torch and transformers make 700,000 objects that stay, and looking for garbage among them takes a
    seventh of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
