"""Whether a checkpoint is what was written: its files against their checksums."""

from __future__ import annotations

import hashlib
import json
import re
from functools import cache
from pathlib import Path

CHECKSUMS = "checksums.json"
STEP, PUT_ASIDE = re.compile(r"step_\d+"), re.compile(r"\.step_\d+\.old")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, found, or trusted."""


def is_whole(checkpoint: Path) -> bool:
    """Whether a directory is a checkpoint: the list of its files is written last."""
    return (checkpoint / CHECKSUMS).is_file()


def step_number(checkpoint: Path) -> int:
    """The step of a checkpoint's directory; names of more than a million steps do not sort by themselves."""
    found = re.search(r"\d+", checkpoint.name)
    return int(found[0]) if found else -1


def newest_checkpoint(root: Path) -> Path | None:
    """What `last` in a `checkpoints` directory names, or else the whole checkpoint of the highest step; one that was
    put aside counts where it is the only one of its step."""
    if is_whole(root / "last"):
        return (root / "last").resolve()
    whole = [path for path in (*named(root, STEP), *named(root, PUT_ASIDE)) if is_whole(path)]
    return max(whole, key=step_number).resolve() if whole else None


def named(root: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Entries of `root` with such a name."""
    return [path for path in root.glob("*step_*") if pattern.fullmatch(path.name)]


def digest_of(path: Path) -> str:
    """SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(checkpoint: Path, part: str = "") -> None:
    """Compare every file, or those whose name begins with `part`, with its checksum; a file is read once per process
    until it is written again.

    Raises:
        CheckpointError: naming the file that differs, and the checkpoint before this one.
    """
    checkpoint = checkpoint.resolve()  # `last` is a link, and of no step
    listed = checkpoint / CHECKSUMS
    try:
        sums = {name: (size, digest) for name, (size, digest) in json.loads(listed.read_text()).items()}
    except OSError as error:
        raise CheckpointError(f"{error.filename or checkpoint} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{listed} {_damaged('cannot be read', checkpoint)}") from error
    for name, (size, digest) in sums.items():
        if not name.startswith(part):
            continue
        file = checkpoint / name
        try:
            problem = _problem(file, size, digest)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
        if problem is not None:
            raise CheckpointError(f"{file} {_damaged(problem, checkpoint)}")


def _problem(file: Path, size: int, digest: str) -> str | None:
    if not file.is_file():
        return "is missing"
    now = file.stat()
    if now.st_size != size:
        return f"has {now.st_size} of {size} bytes"
    return None if _digest(file, size, now.st_mtime_ns) == digest else "does not match its checksum"


@cache
def _digest(file: Path, _size: int, _written_ns: int) -> str:
    return digest_of(file)


def _damaged(problem: str, checkpoint: Path) -> str:
    earlier = []
    if checkpoint.parent.name == "checkpoints":
        steps = [path for path in checkpoint.parent.iterdir() if STEP.fullmatch(path.name) and is_whole(path)]
        earlier = [path for path in steps if step_number(path) < step_number(checkpoint)]
    before = max(earlier, key=step_number, default=None)
    advice = "There is none before it." if before is None else f"Take the one before it: {before}"
    return f"{problem}: this checkpoint is damaged. {advice}"
