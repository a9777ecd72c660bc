"""`rlinf-lite info`: what is installed, and which names a config may use. Reads metadata; imports neither torch nor
ray."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement

from rlinf_lite import __version__
from rlinf_lite.config.loading import config_names
from rlinf_lite.registry import REGISTRIES
from rlinf_lite.scheduler.placement import detect_slots
from rlinf_lite.shipped import PACKAGE


def info(arguments: Sequence[str]) -> int:
    """Print the lists. Returns the exit code 0."""
    parser = argparse.ArgumentParser(
        prog="rlinf-lite info", description="List what is installed, and which names a config may use."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    found = gather()
    if parser.parse_args(arguments).json:
        print(json.dumps(found, indent=2))
        return 0
    for title, content in found.items():
        if isinstance(content, dict):
            content = [f"{name:<14} {value}" for name, value in content.items()]
        print("\n  ".join([title, *([content] if isinstance(content, str) else content)]))
    return 0


def gather() -> dict[str, Any]:
    """All that `info` prints, by title."""
    required = requirements()
    kind, num_slots = detect_slots("auto", None)
    slots = "GPUs" if kind == "cuda" else "virtual, CPU; cluster.num_gpus_per_node makes more"
    return {
        "versions": {
            "rlinf_lite": f"{__version__} ({PACKAGE})",
            "python": f"{platform.python_version()} ({platform.platform()})",
            **{one.name: _version(one.name) or "not installed" for one in required[""]},
        },
        "extras": {
            extra: ", ".join(f"{one.name} {_version(one.name) or 'is not installed'}" for one in of_extra)
            for extra, of_extra in required.items()
            if extra
        },
        "slots": f"{num_slots} ({slots})",
        **{key: registry.names() for key, registry in REGISTRIES.items()},
        "configs": config_names(),
    }


def requirements() -> dict[str, list[Requirement]]:
    """The packages that rlinf_lite requires on this machine, by extra; under "" those that are always required."""
    extras = metadata.metadata("rlinf_lite").get_all("Provides-Extra") or []
    required = [Requirement(line) for line in metadata.requires("rlinf_lite") or []]
    core = [one for one in required if one.marker is None or one.marker.evaluate({"extra": ""})]
    found = {"": core}
    for extra in extras:
        found[extra] = [one for one in required if one not in core and one.marker.evaluate({"extra": extra})]  # type: ignore[union-attr]
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
