"""Checkpoint directories: written beside, checksummed, renamed when complete.

    <save_path>/<run>/checkpoints/step_000040/policy/  training_state/  checksums.json
                                  last -> step_000040

A crash at any instant leaves `last` whole: it moves only after the new directory is complete and on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from functools import cache
from pathlib import Path

CHECKSUMS = "checksums.json"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, found, or trusted."""


class CheckpointStore:
    """The checkpoints of one run, newest `keep` of them. Those that need not outlive the machine are not `durable`:
    neither checksummed nor forced to disk."""

    def __init__(self, run_dir: Path, keep: int, durable: bool = True) -> None:
        self.root = run_dir / "checkpoints"
        self._keep, self._durable = keep, durable

    def begin(self, step: int) -> Path:
        """An empty directory to write the checkpoint of `step` into; leftovers of interrupted writes are removed."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for leftover in self.root.glob(".step_*.partial"):
                shutil.rmtree(leftover)
            partial = self.root / f".{_name(step)}.partial"
            (partial / "training_state").mkdir(parents=True)
        except OSError as error:
            raise _write_error(error, self.root) from error
        return partial

    def commit(self, step: int, partial: Path) -> Path:
        """Checksum, make durable, rename, move `last`, and delete what is older than the newest `keep`."""
        final = self.root / _name(step)
        try:
            write_checksums(partial, of_files=self._durable)
            if self._durable:
                _sync_tree(partial)
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
            link = self.root / ".last.new"
            link.unlink(missing_ok=True)
            link.symlink_to(final.name)
            link.replace(self.root / "last")
            if self._durable:
                _sync_directory(self.root)
        except OSError as error:
            raise _write_error(error, partial) from error
        for old in self.steps()[: -self._keep]:
            if old != final:
                shutil.rmtree(old, ignore_errors=True)
        return final

    def discard(self, partial: Path) -> None:
        """Remove what a failed write left."""
        shutil.rmtree(partial, ignore_errors=True)

    def steps(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(path for path in self.root.glob("step_*") if (path / CHECKSUMS).is_file())


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` means: itself, or the last one of a run directory or `checkpoints` directory."""
    for candidate in (path, path / "last", path / "checkpoints" / "last"):
        if (candidate / CHECKSUMS).is_file():
            return candidate.resolve()
    raise CheckpointError(
        f"{path} holds no complete checkpoint (a step_* directory with {CHECKSUMS}, or a run of them)"
    )


def newest_run(save_path: Path, run_name: str) -> Path | None:
    """The newest run directory of `run_name` that has a checkpoint."""
    runs = sorted(path.parent.parent for path in save_path.glob(f"{run_name}-*/checkpoints/last"))
    runs = [run for run in runs if run.name[: -len("-YYYYmmdd-HHMMSS")] == run_name]
    return runs[-1] if runs else None


@cache
def verify(checkpoint: Path) -> None:
    """Compare every file with its checksum, once per process.

    Raises:
        CheckpointError: naming the file that differs, and the checkpoint before this one.
    """
    for name, (size, digest) in json.loads((checkpoint / CHECKSUMS).read_text()).items():
        file = checkpoint / name
        if not file.is_file():
            problem = "is missing"
        elif file.stat().st_size != size:
            problem = f"has {file.stat().st_size} of {size} bytes"
        elif _digest(file) != digest:
            problem = "does not match its checksum"
        else:
            continue
        earlier = [path for path in CheckpointStore(checkpoint.parent.parent, 1).steps() if path.name < checkpoint.name]
        advice = (
            f"Resume from the one before it: runner.resume={earlier[-1]}" if earlier else "There is none before it."
        )
        raise CheckpointError(f"{file} {problem}: this checkpoint is damaged. {advice}")


def write_checksums(directory: Path, of_files: bool = True) -> None:
    """Write `checksums.json`: size and SHA-256 of every file below `directory`, or of none."""
    files = sorted(path for path in directory.rglob("*") if path.is_file()) if of_files else []
    sums = {str(path.relative_to(directory)): (path.stat().st_size, _digest(path)) for path in files}
    (directory / CHECKSUMS).write_text(json.dumps(sums, indent=1))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _sync_tree(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_dir():
            _sync_directory(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _sync_directory(directory)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_error(error: OSError, path: Path) -> CheckpointError:
    reason = error.strerror or error
    return CheckpointError(f"cannot write the checkpoint {path}: {reason}. Earlier ones are untouched.")
