"""Every key of the schema and of the built-in cards is read somewhere: no setting is silently without effect."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rlinf_lite.cards import Section
from rlinf_lite.config import Config, ReasoningConfig
from rlinf_lite.config.names import built_in_cards, schema_keys, walk

NOT_READERS = {"preview"}  # what describes a run, and what is in config/ except for:
READERS_OF_CONFIG = {"names.py", "resources.py"}  # which roles a run has, where its policy comes from
DYNAMIC = {"rules": {"train", "eval"}, "found": {"train", "eval"}}  # variables that hold `getattr(cfg, split)`
DYNAMIC["rounds"] = {"dagger", "recap"}  # a property that returns one of the two


def keys_of(schema: type[Section]) -> list[str]:
    keys = schema_keys(schema, built_in_cards(schema))
    sections = {key.rpartition(".")[0] for key in keys}
    return [key for key in keys if key not in sections]


LEAVES = sorted({*keys_of(Config), *keys_of(ReasoningConfig)})
OWNERS = Counter(name for _, name in {("", *key.split("."))[-2:] for key in LEAVES})  # sections that have such a key


def section_classes() -> dict[str, set[str]]:
    """By class, the last names of the sections that it is the schema of."""
    found: dict[str, set[str]] = {}
    for schema in (Config, ReasoningConfig):
        cards = built_in_cards(schema)
        for key, field, _ in walk(schema, cards):
            kinds = [field.annotation, *(card.Options for card in cards.get(key, ()))]
            for kind in kinds:
                if isinstance(kind, type):
                    for base in kind.__mro__:
                        found.setdefault(base.__name__, set()).add(key.rpartition(".")[2])
    return found


CLASSES = section_classes()


def reads(path: Path) -> Iterator[tuple[str, str]]:
    """(section, key) of every attribute that a file reads, "?" for a section that its name does not tell."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    held: dict[str, set[str]] = {name: set(sections) for name, sections in DYNAMIC.items()}
    for node in nodes:
        if isinstance(node, ast.arg) and isinstance(node.annotation, ast.Name) and node.annotation.id in CLASSES:
            held.setdefault(node.arg, set()).update(CLASSES[node.annotation.id])
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                for name, value in pairs:
                    if isinstance(value, ast.Attribute) and isinstance(name, ast.Name | ast.Attribute):
                        held.setdefault(last_name(name), set()).add(value.attr)
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            before = last_name(node.value)
            yield "?", node.attr
            yield from ((section, node.attr) for section in {before, *held.get(before, set())})
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            yield "?", str(node.slice.value)


def last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else "?"


def all_reads(package: Path) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for path in package.rglob("*.py"):
        folder = path.relative_to(package).parts[0]
        if folder not in NOT_READERS and (folder != "config" or path.name in READERS_OF_CONFIG):
            found |= set(reads(path))
    return found


def dead(found: set[tuple[str, str]]) -> list[str]:
    """Keys that nothing reads; where several sections have a key of the name, from that very section."""
    unread = []
    for key in LEAVES:
        section, name = ("", *key.split("."))[-2:]
        if (section if OWNERS[name] > 1 else "?", name) not in found:
            unread.append(key)
    return unread


def test_every_key_is_read(repo: Path) -> None:
    assert dead(all_reads(repo / "rlinf_lite")) == []


def test_a_key_of_the_same_name_in_another_section_does_not_count(repo: Path) -> None:
    found = all_reads(repo / "rlinf_lite") - {("env", "num_threads")}
    assert dead(found) == ["env.num_threads"]
