"""Find the private names of other packages that this project uses, for the table of docs/architecture.md.

    python tools/private_names.py                                 # every use, by file and line
    python tools/private_names.py --write docs/architecture.md    # update the table

Uses are read from the syntax trees of the package, examples, benchmarks and tools: imports, attributes of imported
names, and attributes that no file of the same folder defines. UNSEEN lists the others by hand. The table's reasons and
tests are written by hand and kept for each name. A new name gets a "?", which a test refuses.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[1]
FOLDERS = ("rlinf_lite", "examples", "benchmarks", "tools")
BEGIN, END = "<!-- private names: made by tools/private_names.py -->\n", "<!-- end of private names -->\n"
PUBLIC = {"_replace", "_asdict", "_fields", "_make"}
"""Documented names of the standard library's named tuples, which are not counted."""
DISTRIBUTIONS = {"mani_skill": "mani-skill"}
"""Names in constraints.txt of packages that are imported under another name."""
UNSEEN = {
    "rlinf_lite/preview/fake.py": {"torch.nn.init._no_grad_trunc_normal_": 1},
    "rlinf_lite/training/offload.py": {"._local_tensor": 2, "._apply": 1},
    "rlinf_lite/training/precision.py": {"._keep_in_fp32_modules_strict": 1},
    "rlinf_lite/training/tensor_parallel.py": {"._apply": 1},
}
"""Uses by file that the syntax does not show: names in strings, overridden methods, names that a file here also
defines."""


class Use(NamedTuple):
    """A use of a private name."""

    file: str
    line: int  # 0: listed in UNSEEN
    name: str  # dotted from the package, or with a leading dot for an attribute of an object


class Row(NamedTuple):
    """The hand-written cells of a name."""

    package: str = "?"
    reason: str = "?"
    test: str = "?"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in PUBLIC


def up_to_private(name: str) -> str | None:
    """A dotted name up to its last private part; None if it has none, or is of the standard library or this project."""
    parts = name.split(".")
    last = max((i for i, part in enumerate(parts) if is_private(part)), default=None)
    if last is None or parts[0] in sys.stdlib_module_names or parts[0] in (*FOLDERS, "tests"):
        return None
    return ".".join(parts[: last + 1])


def defined(tree: ast.AST) -> Iterator[str]:
    """Names that a file defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            yield node.attr


def is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


class _Reader(ast.NodeVisitor):
    """Collects the uses of one file. `own`: names that its folder defines."""

    def __init__(self, file: str, own: set[str]) -> None:
        self.file, self.own = file, own
        self.imported: dict[str, str] = {}
        self.uses: list[Use] = []

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.partition(".")[0]
            self.imported[alias.asname or top] = alias.name if alias.asname else top
            self._add(node, up_to_private(alias.name))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        names = {alias.name: f"{module}.{alias.name}" for alias in node.names}
        self.imported.update({alias.asname or alias.name: names[alias.name] for alias in node.names})
        if up_to_private(module):
            self._add(node, module)  # one use for all names imported from it
        else:
            for name in names.values():
                self._add(node, up_to_private(name))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        parts: list[str] = []
        value: ast.expr = node
        while isinstance(value, ast.Attribute):
            parts.insert(0, value.attr)
            value = value.value
        root = self.imported.get(value.id) if isinstance(value, ast.Name) else None
        if root is None:
            for part in parts:
                if is_private(part) and part not in self.own:
                    self._add(node, f".{part}")
            self.visit(value)
        elif any(is_private(part) for part in parts):
            self._add(node, up_to_private(".".join([root, *parts])))

    def visit_Constant(self, node: ast.Constant) -> None:
        """Add a dotted name in a string, as for `import_module`."""
        parts = node.value.split(".") if isinstance(node.value, str) else []
        packages = {name.partition(".")[0] for name in self.imported.values()}
        if len(parts) > 1 and parts[0] in packages and all(part.isidentifier() for part in parts):
            self._add(node, up_to_private(".".join(parts)))

    def _add(self, node: ast.AST, name: str | None) -> None:
        if name is not None:
            self.uses.append(Use(self.file, node.lineno, name))  # type: ignore[attr-defined]


def find_uses(repo: Path = REPO) -> list[Use]:
    """All uses, by file and line."""
    trees = {
        path.relative_to(repo): ast.parse(path.read_text())
        for folder in FOLDERS
        for path in sorted((repo / folder).rglob("*.py"))
    }
    own: dict[Path, set[str]] = defaultdict(set)  # by folder; a subpackage includes its folders
    folders = {path: Path(*path.parts[:-1][:2]) for path in trees}
    for path, tree in trees.items():
        own[folders[path]].update(defined(tree))
    uses = []
    for path, tree in trees.items():
        reader = _Reader(path.as_posix(), own[folders[path]])
        reader.visit(tree)
        uses += [Use(path.as_posix(), 0, name) for name, n in UNSEEN.get(path.as_posix(), {}).items() for _ in range(n)]
        uses += reader.uses
    return uses


def rows_of(page: str) -> dict[str, Row]:
    """The hand-written cells of a page's table, by name."""
    table = page.partition(BEGIN)[2].partition(END)[0]
    rows = {}
    for line in table.splitlines()[2:]:
        name, package, _, reason, test = (cell.strip() for cell in line.strip("|").split(" | "))
        rows[name.strip("`")] = Row(package.split()[0], reason, test.strip("`"))
    return rows


def versions(repo: Path = REPO) -> dict[str, str]:
    """The version of each package in constraints.txt."""
    pinned = re.findall(r"^([\w.-]+)==([^\s;]+)", (repo / "constraints.txt").read_text(), re.M)
    return {name.lower().replace("_", "-"): version.split("+")[0] for name, version in pinned}


def table_of(uses: list[Use], rows: dict[str, Row]) -> str:
    """The table in Markdown, ordered by package and name."""
    files: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for use in uses:
        files[use.name][use.file] += 1
    known, lines = versions(), []
    for name, counts in files.items():
        row = rows.get(name, Row())
        package = row.package if name.startswith(".") else name.partition(".")[0]
        version = known.get(DISTRIBUTIONS.get(package, package).lower().replace("_", "-"), "")
        places = ", ".join(f"`{file}`" + (f" x{n}" if n > 1 else "") for file, n in sorted(counts.items()))
        package = f"{package} {version}".strip()
        lines.append((package, name, f"| `{name}` | {package} | {places} | {row.reason} | `{row.test}` |\n"))
    head = "| name | package, version | used in | why | fails first |\n|---|---|---|---|---|\n"
    return head + "".join(line for *_, line in sorted(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="the page whose table is updated")
    page = parser.parse_args().write
    uses = find_uses()
    if page is not None:
        before, _, rest = page.read_text().partition(BEGIN)
        if END not in rest:
            raise SystemExit(f"{page} has no place for the table. Add these lines:\n{BEGIN}{END}")
        rows = rows_of(page.read_text())
        page.write_text(before + BEGIN + table_of(uses, rows) + END + rest.partition(END)[2])
        for name in sorted({use.name for use in uses} - set(rows)):
            print(f"{page}: {name} is new: replace each ? in its row")
    else:
        for use in uses:
            print(f"{use.file}:{use.line or ' see UNSEEN'}: {use.name}")
        print(f"{len(uses)} uses of {len({use.name for use in uses})} names")


if __name__ == "__main__":
    main()
