"""Every key of the schema is read somewhere, so that no setting is silently without effect."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from rlinf_lite.config import reasoning, schema

NOT_READERS = {
    *("schema.py", "reasoning.py", "checks.py", "reasoning_checks.py", "placing.py", "resources.py", "plan.py"),
    *("reasoning_memory.py", "dry_run.py", "explain.py", "sizes.py", "memory.py"),
}


def sections() -> Iterator[type[BaseModel]]:
    for value in {**vars(schema), **vars(reasoning)}.values():
        if isinstance(value, type) and issubclass(value, schema.Section) and value is not schema.Section:
            yield value


def names_read(package: Path) -> set[str]:
    """Attributes, and text keys of what was dumped into a dict."""
    files = [path for path in package.rglob("*.py") if not (path.parent.name == "config" and path.name in NOT_READERS)]
    found = set()
    for node in (node for path in files for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            found.add(str(node.slice.value))
    return found


def test_every_key_is_read(repo: Path) -> None:
    read = names_read(repo / "rlinf_lite")
    dead = sorted(f"{cls.__name__}.{name}" for cls in sections() for name in cls.model_fields if name not in read)
    assert dead == []
