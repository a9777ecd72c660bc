"""Files that come with the package but are no code of it: configs, examples, assets."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def shipped(name: str) -> Path:
    """The directory `configs`, `examples` or `assets`: within the installed package, or beside it in a clone.

    Raises:
        FileNotFoundError: where the installation lacks it.
    """
    candidates = [PACKAGE / name, PACKAGE.parent / name]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"no {name} in {' or '.join(map(str, candidates))}. Reinstall rlinf_lite.")
