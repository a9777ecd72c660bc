"""`rlinf-lite info`: what is installed and what a config may name. Reads metadata; imports neither torch nor ray."""

from __future__ import annotations

import argparse
import json
import platform
import re
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

from rlinf_lite import __version__
from rlinf_lite.config.compose import config_names
from rlinf_lite.config.names import NAMED_KEYS, known_names
from rlinf_lite.scheduler.placement import detect_slots
from rlinf_lite.shipped import PACKAGE

_REQUIREMENT = re.compile(r"^(?P<package>[\w.-]+)(?:.*\bextra == [\"'](?P<extra>\w+)[\"'])?")


def info(arguments: Sequence[str]) -> int:
    """Print the lists; returns 0."""
    parser = argparse.ArgumentParser(prog="rlinf-lite info", description="What is installed, what configs may name.")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    found = gather()
    if parser.parse_args(arguments).json:
        print(json.dumps(found, indent=2))
        return 0
    for title, content in found.items():
        lines = content if isinstance(content, list) else [content]
        if isinstance(content, dict):
            lines = [f"{name:<14} {value}" for name, value in content.items()]
        print(f"{title}\n" + "\n".join(f"  {line}" for line in lines))
    return 0


def gather() -> dict[str, Any]:
    """Everything that `info` prints, by title."""
    required = list(_requirements())
    core = [package for package, extra in required if extra is None]
    kind, num_slots = detect_slots("auto", None)
    what = "GPUs" if kind == "cuda" else "virtual, CPU; cluster.num_gpus_per_node makes more"
    return {
        "versions": {
            "rlinf_lite": f"{__version__} ({PACKAGE})",
            "python": f"{platform.python_version()} ({platform.platform()})",
            **{package: _version(package) or "not installed" for package in core},
        },
        "extras": {
            extra: ", ".join(f"{p} {_version(p) or 'is not installed'}" for p, of in required if of == extra)
            for extra in dict.fromkeys(extra for _, extra in required if extra is not None)
        },
        "slots": f"{num_slots} ({what})",
        **{key: known_names(key) for key in NAMED_KEYS},
        "configs": config_names(),
    }


def _requirements() -> Iterator[tuple[str, str | None]]:
    """Packages that rlinf_lite needs, each with the extra it belongs to, if any."""
    for line in metadata.requires("rlinf_lite") or []:
        match = _REQUIREMENT.match(line)
        assert match is not None, line
        yield match["package"], match["extra"]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
