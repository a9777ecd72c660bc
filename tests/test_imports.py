"""The layers of the package: an import only runs down, and no two modules import each other in a circle.

Imports inside functions and for type checkers count as well: who reads a module has to know what it stands on.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

LAYERS = [
    {
        *("cards", "checksums", "child_process", "copies", "file_modes", "hub", "lazy", "machine", "script", "shipped"),
        "threads",
    },
    {"registry", "dimensions"},
    {"scheduler"},  # placement, messages, errors and progress need neither ray nor torch
    {"config"},
    {"algorithms", "rewards", "metrics", "weights"},
    {"envs"},
    {"models"},
    {"data", "generation", "serving"},
    {"training"},
    {"workers"},
    {"preview", "report"},
    {"control"},
    {"jobs", "runners"},
    {"launch"},
    {"cli"},
]
"""From the lowest up; those of one layer do not import each other."""

LEVEL = {package: level for level, layer in enumerate(LAYERS) for package in layer}


def imports(repo: Path) -> Iterator[tuple[str, str]]:
    """(a, b) where module a of the package imports module b, without the package's name in front."""
    files = {path: path.relative_to(repo).with_suffix("").parts[1:] for path in (repo / "rlinf_lite").rglob("*.py*")}
    files = {path: parts for path, parts in files.items() if path.suffix in (".py", ".pyi")}  # stubs: lazy packages
    files = {path: parts[:-1] if parts[-1] == "__init__" else parts for path, parts in files.items()}
    modules = {".".join(parts) for parts in files.values()}
    for path, parts in files.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not any(name.name.startswith("rlinf_lite.") for name in node.names), f"{path}: import from"
            if isinstance(node, ast.ImportFrom):
                is_stub = path.suffix == ".pyi"
                assert node.level == is_stub, f"{path}:{node.lineno}: a relative import, or a stub's absolute one"
                absolute = ".".join(["rlinf_lite", *parts, str(node.module)]) if is_stub else node.module or ""
                package, _, module = absolute.partition(".")
                for name in node.names if package == "rlinf_lite" else ():
                    inner = f"{module}.{name.name}".strip(".")
                    yield ".".join(parts), inner if inner in modules else module


def test_imports_run_down(repo: Path) -> None:
    up = set()
    for module, imported in imports(repo):
        here, there = module.partition(".")[0], imported.partition(".")[0]
        if here and there and here != there and LEVEL[here] <= LEVEL[there]:
            up.add((module, there))
    assert up == set(), "imports of a package that stands higher, or beside (see LAYERS)"


def test_no_modules_import_each_other_in_a_circle(repo: Path) -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for module, imported in imports(repo):
        if module and imported and module != imported:  # the package itself has a version and nothing else
            graph[module].add(imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"a circle of imports: {' -> '.join(reversed(error.args[1]))}") from None
