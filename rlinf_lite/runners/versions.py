"""What a run was made with."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from pathlib import Path

PACKAGES = ("rlinf_lite", "torch", "ray", "transformers", "numpy", "gymnasium", "mani_skill", "peft")


def write_versions(run_dir: Path) -> None:
    """Write `versions.json`: Python, the machine and the packages that results depend on, as far as installed."""
    found = {"python": platform.python_version(), "machine": f"{platform.platform()}, {os.cpu_count()} CPU cores"}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    (run_dir / "versions.json").write_text(json.dumps(found, indent=1) + "\n")
