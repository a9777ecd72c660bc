"""Write docs/config_reference.md: every key of the schema, with its default, accepted values and help.

python tools/make_config_reference.py
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlinf_lite.cards import Card, EnvCard
from rlinf_lite.config.names import built_in_cards
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.schema import Config, NodeGroup, PlacementSpec
from rlinf_lite.registry import REGISTRIES

OUT = Path(__file__).resolve().parents[1] / "docs" / "config_reference.md"
HEAD = """# Config reference

Every key of a config: from the schemas in [rlinf_lite/config/schema.py](../rlinf_lite/config/schema.py) and, for
`runner.task_type: reasoning`, in [rlinf_lite/config/reasoning.py](../rlinf_lite/config/reasoning.py), and from the
cards of environments and policies that come with rlinf_lite. The defaults here are theirs; the files under `configs/`
set others on top ([how configs compose](configuration.md)). Written by `python tools/make_config_reference.py`.
"""
LIST_ITEMS: dict[str, type[BaseModel]] = {
    "An entry of `cluster.node_groups`": NodeGroup,
    "An entry of `cluster.component_placement`, written out": PlacementSpec,
}
BOUNDS = ((annotated_types.Gt, ">"), (annotated_types.Ge, ">="), (annotated_types.Lt, "<"), (annotated_types.Le, "<="))


def reference() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, field in Config.model_fields.items():
        parts += [f"## {name}", _table(list(_rows(_section(field), f"{name}.")))]
        described: dict[Any, str] = {}
        for card in built_in_cards().get(f"{name}.options", ()):
            parts += list(_part(card, f"{name}.options", described.get(card.Options)))
            if card.Options is not None:
                described.setdefault(card.Options, card.name)
    parts.append("# Of reasoning runs\n\nSections that are not listed here are as above.")
    cards = built_in_cards(ReasoningConfig)
    for name, field in ReasoningConfig.model_fields.items():
        section = (cards[name][0].Options if name in cards else None) or _section(field)
        if name not in Config.model_fields or section is not _section(Config.model_fields[name]):
            parts += [f"## {name} (reasoning)", _table(list(_rows(section, f"{name}.")))]
    for title, model in LIST_ITEMS.items():
        parts += [f"## {title}", _table(list(_rows(model, "")))]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _part(card: Card, key: str, like: str | None) -> Iterator[str]:
    """The section about the card of an environment or policy. `like`: name of one whose options are the same."""
    yield f"### {key} of `{card.name}`"
    yield inspect.cleandoc(type(card).__doc__ or "")
    if like is not None:
        yield f"Its options are those of `{like}`."
    elif card.Options is not None:
        yield _table(list(_rows(card.Options, f"{key}.")))
    else:
        yield "Its options are names to any value."
    if isinstance(card, EnvCard) and card.tasks:
        rows = [
            (
                f"`{name}`",
                f"{task.max_episode_steps}",
                f"{task.state_dim}",
                f"{task.action_dim}",
                ", ".join(task.cameras),
            )
            for name, task in card.tasks.items()
        ]
        yield "Tasks that are known before the simulator starts" + (", among others:" if card.has_other_tasks else ":")
        head = ["| `env.task` | env steps | state | action | cameras |", "|---|---|---|---|---|"]
        yield "\n".join([*head, *("| " + " | ".join(row) + " |" for row in rows)])


def _section(field: FieldInfo) -> type[BaseModel]:
    assert isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    return field.annotation


def _table(rows: list[tuple[str, str, str, str]]) -> str:
    lines = ["| key | default | type | meaning |", "|---|---|---|---|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _rows(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str, str]]:
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _rows(annotation, f"{prefix}{name}.")
            continue
        default = "(required)" if field.is_required() else f"`{_yaml(field.get_default())}`"
        help_text = " ".join((field.description or "").split())
        registry = REGISTRIES.get(f"{prefix}{name}")
        kind = ", ".join(f"`{one}`" for one in registry.names()) if registry else _type_of(field)
        yield f"`{prefix}{name}`", _cell(default), _cell(kind), _cell(help_text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _yaml(value: object) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    text: str = yaml.safe_dump(plain, default_flow_style=True, width=1000)
    return text.removesuffix("\n").removesuffix("\n...")


def _type_of(field: FieldInfo) -> str:
    return _with_bounds(_type_name(field.annotation), field.metadata)


def _with_bounds(name: str, metadata: Any) -> str:
    bounds = []
    for item in metadata:
        for one in item.metadata if isinstance(item, FieldInfo) else [item]:
            bounds += [
                f"{sign} {getattr(one, kind.__name__.lower())}" for kind, sign in BOUNDS if isinstance(one, kind)
            ]
    return " ".join([name, ", ".join(bounds)]).strip()


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _with_bounds(_type_name(arguments[0]), arguments[1:])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_type_name(one) for one in arguments)
    if origin in (list, tuple):
        inner = list(dict.fromkeys(_type_name(one) for one in arguments))
        return f"{len(arguments)} of " * (origin is tuple) + "list of " * (origin is list) + ", ".join(inner)
    if origin is dict:
        return f"names to {_type_name(arguments[1])}"
    names = {int: "int", float: "float", bool: "bool", str: "text", type(None): "null", Any: "any value"}
    return names.get(annotation) or annotation.__name__


def main() -> None:
    OUT.write_text(reference())
    print(f"written to {OUT}")


if __name__ == "__main__":
    main()
