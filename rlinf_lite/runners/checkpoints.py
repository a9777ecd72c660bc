"""Checkpoint directories: written beside, checksummed, renamed when complete.

    <save_path>/<run>/checkpoints/step_000040/policy/  training_state/  checksums.json
                                  last -> step_000040

A crash at any instant leaves a whole one: `last` moves only after the new directory is complete and on disk, and a step
that is written again is put aside (`.step_000040.old`) until its successor is in its place. Only a run's owner calls
`CheckpointStore`'s methods that write; `find_checkpoint` and `verify` read, also beside a living run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from rlinf_lite.file_modes import follow_umask

log = logging.getLogger(__name__)

CHECKSUMS = "checksums.json"
SUPERSEDED = "superseded"
_STEP = re.compile(r"step_\d+")
_PUT_ASIDE = re.compile(r"\.step_\d+\.old")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, found, or trusted."""


class CheckpointStore:
    """The checkpoints of one run, newest `keep` of them. Those that need not outlive the machine are not `durable`:
    neither checksummed nor forced to disk."""

    def __init__(self, run_dir: Path, keep: int, durable: bool = True) -> None:
        self.root = run_dir / "checkpoints"
        self._keep, self._durable = keep, durable

    def write(self, step: int, write: Callable[[Path], object]) -> Path:
        """The checkpoint of `step`, of what `write` puts into a directory; nothing is left where that fails. Raises
        CheckpointError, and what `write` raises."""
        partial = self.begin(step)
        try:
            write(partial)
            return self.commit(step, partial)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def begin(self, step: int) -> Path:
        """An empty directory to write the checkpoint of `step` into; leftovers of interrupted writes are removed."""
        with _writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            self.tidy()
            partial = self.root / f".{_name(step)}.partial"
            (partial / "training_state").mkdir(parents=True)
        return partial

    def commit(self, step: int, partial: Path) -> Path:
        """Checksum, make durable, rename, move `last`, and delete what is older than the newest `keep`."""
        final, replaced = self.root / _name(step), self.root / f".{_name(step)}.old"
        with _writing(partial):
            files = sorted(path for path in partial.rglob("*") if path.is_file())
            follow_umask(files)
            sums = {str(f.relative_to(partial)): (f.stat().st_size, _digest(f)) for f in files if self._durable}
            (partial / CHECKSUMS).write_text(json.dumps(sums, indent=1))
            if self._durable:
                for path in (*partial.rglob("*"), partial):
                    _sync(path)
            if final.exists():
                final.rename(replaced)
            partial.rename(final)
            self._point_last_to(final)
            if self._durable:
                _sync(self.root)
        for old in (replaced, *self.steps()[: -self._keep]):
            if old != final and old.exists():
                with suppress(OSError):  # the new one is there, and the next `begin` tries again
                    _remove(old)
        return final

    def tidy(self) -> None:
        """Remove what interrupted writes left; a step that was put aside comes back where its successor never came."""
        with _writing(self.root):
            for replaced in _named(self.root, _PUT_ASIDE):
                final = self.root / replaced.name.removeprefix(".").removesuffix(".old")
                if not _is_whole(replaced) or _is_whole(final):
                    _remove(replaced)
                    continue
                if final.exists():
                    _remove(final)
                replaced.rename(final)
            for leftover in (*self.root.glob(".step_*.partial"), *self.root.glob(".step_*.trash")):
                shutil.rmtree(leftover)

    def go_on_from(self, step: int, resumed: Path | None = None) -> list[Path]:
        """Move the checkpoints of later steps into `superseded/` before these steps are done again, or they would be
        taken for the newest; also one of this step that is not the `resumed` one. Returns where they are now."""
        moved = []
        with _writing(self.root):
            later = [path for path in self.steps() if step_number(path) > step]
            if resumed is not None:
                same = (path for path in self.steps() if step_number(path) == step)
                later = [*(path for path in same if path.resolve() != resumed.resolve()), *later]
            if later:
                kept = [path for path in self.steps() if path not in later]
                self._point_last_to(kept[-1] if kept else None)
                (self.root / SUPERSEDED).mkdir(exist_ok=True)
            for path in later:
                target = self.root / SUPERSEDED / path.name
                if resumed is not None and target.resolve() == resumed.resolve():
                    target = target.with_name(f"{path.name}-2")  # what is resumed stays where it is
                if target.exists():
                    _remove(target)
                moved.append(path.rename(target))
        return moved

    def steps(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(filter(_is_whole, _named(self.root, _STEP)), key=step_number)

    def newest(self) -> Path | None:
        """The last of `steps`."""
        return next(reversed(self.steps()), None)

    def _point_last_to(self, checkpoint: Path | None) -> None:
        if checkpoint is None:
            (self.root / "last").unlink(missing_ok=True)
            return
        link = self.root / ".last.new"
        link.unlink(missing_ok=True)
        link.symlink_to(checkpoint.name)
        link.replace(self.root / "last")


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` means: itself, or the last one of a run directory or `checkpoints` directory. Where
    `last` leads nowhere it is the newest whole one, and a warning says which."""
    if _is_whole(path):
        return path.resolve()
    roots = [path, path / "checkpoints", *([path.parent] if path.name == "last" else [])]
    for root in roots:
        found = newest_checkpoint(root)
        if found is not None:
            if not _is_whole(root / "last"):
                log.warning("%s leads to no complete checkpoint: %s is the newest that is", root / "last", found)
            return found
    raise CheckpointError(
        f"{path} holds no complete checkpoint (a step_* directory with {CHECKSUMS}, or a run of them)"
    )


def newest_checkpoint(root: Path) -> Path | None:
    """What `last` in a `checkpoints` directory names, or else the whole checkpoint of the highest step; one that was
    put aside counts where it is the only one of its step."""
    if _is_whole(root / "last"):
        return (root / "last").resolve()
    whole = [path for path in (*_named(root, _STEP), *_named(root, _PUT_ASIDE)) if _is_whole(path)]
    return max(whole, key=step_number).resolve() if whole else None


def step_number(checkpoint: Path) -> int:
    """The step of a checkpoint's directory; names of more than a million steps do not sort by themselves."""
    found = re.search(r"\d+", checkpoint.name)
    return int(found[0]) if found else -1


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What the runner that wrote a checkpoint, or a snapshot, said of itself: `completed_steps` and more. Raises
    CheckpointError."""
    file = checkpoint / "training_state" / "runner.json"
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read: {checkpoint} is no checkpoint of a run") from error


def verify(checkpoint: Path) -> None:
    """Compare every file with its checksum, once per process.

    Raises:
        CheckpointError: naming the file that differs, and the checkpoint before this one.
    """
    try:
        _verify(checkpoint, (checkpoint / CHECKSUMS).stat().st_mtime_ns)
    except OSError as error:
        raise CheckpointError(f"{error.filename or checkpoint} cannot be read: {error.strerror or error}") from error


@cache
def _verify(checkpoint: Path, _written_ns: int) -> None:
    try:
        content = json.loads((checkpoint / CHECKSUMS).read_text())
        sums = {name: (size, digest) for name, (size, digest) in content.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint / CHECKSUMS} {_damaged('cannot be read', checkpoint)}") from error
    for name, (size, digest) in sums.items():
        file = checkpoint / name
        if not file.is_file():
            problem = "is missing"
        elif file.stat().st_size != size:
            problem = f"has {file.stat().st_size} of {size} bytes"
        elif _digest(file) != digest:
            problem = "does not match its checksum"
        else:
            continue
        raise CheckpointError(f"{file} {_damaged(problem, checkpoint)}")


def _damaged(problem: str, checkpoint: Path) -> str:
    earlier = []
    if checkpoint.parent.name == "checkpoints":
        steps = CheckpointStore(checkpoint.parent.parent, 1).steps()
        earlier = [path for path in steps if step_number(path) < step_number(checkpoint)]
    advice = f"Resume from the one before it: runner.resume={earlier[-1]}" if earlier else "There is none before it."
    return f"{problem}: this checkpoint is damaged. {advice}"


def _is_whole(checkpoint: Path) -> bool:
    return (checkpoint / CHECKSUMS).is_file()


def _named(root: Path, pattern: re.Pattern[str]) -> list[Path]:
    return [path for path in root.glob("*step_*") if pattern.fullmatch(path.name)]


def _remove(directory: Path) -> None:
    """Half of a checkpoint must not be taken for a whole one: it is renamed before it is deleted."""
    name = directory.name.removeprefix(".").removesuffix(".old")
    trash = directory.with_name(f".{name}.trash")
    shutil.rmtree(trash, ignore_errors=True)
    directory.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _sync(path: Path) -> None:
    """Wait until a file's content, or a directory's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """What the system refuses inside is a CheckpointError of `path`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"cannot write the checkpoint {path}: {reason}. Earlier ones are untouched.") from error
