"""Checkpoint directories: written under a temporary name, checksummed, and renamed when complete.

    <save_path>/<run>/checkpoints/step_000040/policy/  training_state/  checksums.json
                                  last -> step_000040

A crash at any instant leaves a complete checkpoint: `last` moves only after the new directory is complete and on disk.
If a step is written again, the old directory is kept as `.step_000040.old` until the new one is in its place. Only the
owner of a run calls the writing methods of `CheckpointStore`; `find_checkpoint` and `verify` only read, also while the
run is active. Snapshots are checkpoints in shared memory, from which a run recovers after workers were restarted.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from rlinf_lite.checksums import CHECKSUMS as CHECKSUMS
from rlinf_lite.checksums import PUT_ASIDE, STEP, digest_of, is_whole, named
from rlinf_lite.checksums import CheckpointError as CheckpointError
from rlinf_lite.checksums import newest_checkpoint as newest_checkpoint
from rlinf_lite.checksums import step_number as step_number
from rlinf_lite.checksums import verify as verify
from rlinf_lite.config.resources import checkpoint_roots
from rlinf_lite.file_modes import follow_umask
from rlinf_lite.scheduler.context import get_context
from rlinf_lite.scheduler.segments import no_room

log = logging.getLogger(__name__)

SUPERSEDED = "superseded"
_AUTO_SHARE = 0.01  # largest share of the time that snapshots may take
_BYTES_PER_PARAMETER = 12
"""Bytes of a weight and the two moments of AdamW, in fp32."""


class CheckpointStore:
    """The checkpoints of one run; keeps the newest `keep`. If not `durable`, they are neither checksummed nor forced to
    disk, and may be lost with the machine."""

    def __init__(self, run_dir: Path, keep: int, durable: bool = True) -> None:
        self.root = run_dir / "checkpoints"
        self.keep, self._durable = keep, durable

    def write(self, step: int, write: Callable[[Path], object]) -> Path:
        """Make the checkpoint of `step` from the files that `write` puts into a directory. If that fails, nothing is
        left. Raises CheckpointError, and what `write` raises."""
        partial = self.begin(step)
        try:
            write(partial)
            return self.commit(step, partial)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def begin(self, step: int) -> Path:
        """Create an empty directory for the checkpoint of `step`, and remove leftovers of interrupted writes."""
        with _writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            self.tidy()
            partial = self.root / f".{_name(step)}.partial"
            (partial / "training_state").mkdir(parents=True)
        return partial

    def commit(self, step: int, partial: Path) -> Path:
        """Complete a checkpoint: checksum, force to disk, rename, move `last`, and delete all but the newest `keep`."""
        final, replaced = self.root / _name(step), self.root / f".{_name(step)}.old"
        with _writing(partial):
            files = sorted(path for path in partial.rglob("*") if path.is_file())
            follow_umask(files)
            sums = {str(f.relative_to(partial)): (f.stat().st_size, digest_of(f)) for f in files if self._durable}
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
        for old in (replaced, *self.steps()[: -self.keep]):
            if old != final and old.exists():
                with suppress(OSError):  # the new checkpoint is complete, and the next `begin` tries again
                    _remove(old)
        return final

    def tidy(self) -> None:
        """Remove leftovers of interrupted writes. An old checkpoint (`.step_*.old`) whose replacement was never
        completed gets its name back. If a copy (`scp -r`) made `last` a second directory, it becomes a link again."""
        last = self.root / "last"
        with _writing(self.root):
            if last.is_dir() and not last.is_symlink():
                step = self.root / _name(int(read_state(last)["completed_steps"]))
                if is_whole(step):
                    shutil.rmtree(last)
                    self._point_last_to(step)
            for replaced in named(self.root, PUT_ASIDE):
                final = self.root / replaced.name.removeprefix(".").removesuffix(".old")
                if not is_whole(replaced) or is_whole(final):
                    _remove(replaced)
                    continue
                if final.exists():
                    _remove(final)
                replaced.rename(final)
            for leftover in (*self.root.glob(".step_*.partial"), *self.root.glob(".step_*.trash")):
                shutil.rmtree(leftover)

    def go_on_from(self, step: int, resumed: Path | None = None) -> list[Path]:
        """Move the checkpoints of steps after `step` into `superseded/`, since these steps are done again and the old
        ones would count as the newest. Also a checkpoint of `step` itself that is not the `resumed` one. Returns the
        new paths."""
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
                    target = target.with_name(f"{path.name}-2")  # the resumed checkpoint keeps its place
                if target.exists():
                    _remove(target)
                moved.append(path.rename(target))
        return moved

    def steps(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        return sorted(filter(is_whole, named(self.root, STEP)), key=step_number)

    def newest(self) -> Path | None:
        """The newest complete checkpoint, or None."""
        return next(reversed(self.steps()), None)

    def _point_last_to(self, checkpoint: Path | None) -> None:
        if checkpoint is None:
            (self.root / "last").unlink(missing_ok=True)
            return
        link = self.root / ".last.new"
        link.unlink(missing_ok=True)
        link.symlink_to(checkpoint.name)
        link.replace(self.root / "last")


class Snapshots(CheckpointStore):
    """The newest state of the trained groups in this node's shared memory, in the format of a checkpoint.

    No snapshots are taken if the groups are on other nodes or the memory does not suffice; `why_none` says so.
    """

    def __init__(self, interval: int | Literal["auto"], num_parameters: int, nodes: Sequence[str]) -> None:
        """`nodes`: ids of the nodes of the trained groups."""
        here = get_context()
        super().__init__(Path(here.shm_dir) / f"snapshots-{os.getpid()}", keep=1, durable=False)
        self._interval, self.took_s, self._began = interval, 0.0, -float("inf")
        self.num_bytes = _BYTES_PER_PARAMETER * num_parameters
        free, needed = shutil.disk_usage(here.shm_dir).free, 2 * self.num_bytes
        self.why_none = ""
        if interval == 0:
            self.why_none = "control.snapshot_interval is 0"
        elif set(nodes) != {here.node_id}:
            self.why_none = "the actor is not on this node alone"
        elif needed > free / 2:
            self.why_none = f"two would take {needed / 2**30:.1f} of {free / 2**30:.1f} GiB of shared memory"

    def due(self, step: int, is_only_way: bool = False) -> bool:
        """Whether to take a snapshot after `step` steps. `is_only_way`: updates take longer than a stopping run can
        wait, so that only a snapshot can save the last step."""
        if self.why_none:
            return False
        if self._interval == "auto":
            return is_only_way or self.took_s <= _AUTO_SHARE * (time.monotonic() - self._began)
        return step % self._interval == 0

    def take(self, step: int, write: Callable[[Path], None]) -> None:
        """Take a snapshot, unless snapshots are off. If there is no room, it and all later ones are skipped
        (`why_none`); an earlier snapshot stays."""
        if self.why_none:
            return
        self._began = time.monotonic()
        try:
            self.write(step, write)
        except (CheckpointError, OSError) as error:
            self.why_none = str(error)
            here = self.root.parent
            if shutil.disk_usage(here.parent).free < self.num_bytes:
                self.why_none = str(no_room(str(here), "a snapshot of the training state", self.num_bytes))
            log.warning("no more snapshots: %s", self.why_none)
        self.took_s = time.monotonic() - self._began

    def keep_newest(self, store: CheckpointStore, step: int) -> Path:
        """Copy the newest snapshot, which is of `step`, to a checkpoint; no worker is needed. Raises
        CheckpointError."""
        kept, sums = self.steps()[-1], shutil.ignore_patterns(CHECKSUMS)
        try:
            return store.write(step, lambda partial: shutil.copytree(kept, partial, dirs_exist_ok=True, ignore=sums))
        except OSError as error:  # shutil.Error holds the errors of all files
            first = error.args[0][0][2] if isinstance(error, shutil.Error) else error
            raise CheckpointError(f"cannot copy the snapshot {kept} to {store.root}: {first}") from error

    def remove(self) -> None:
        shutil.rmtree(self.root.parent, ignore_errors=True)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` means: the checkpoint itself, or the last one of a run directory (in the place that
    its config names) or of a `checkpoints` directory. If `last` is broken it is the newest complete one, with a
    warning. Raises CheckpointError."""
    if is_whole(path):
        return path.resolve()
    of_run = checkpoint_roots(path)
    roots = [path, *of_run, *([path.parent] if path.name == "last" else [])]
    for root in roots:
        found = newest_checkpoint(root)
        if found is not None:
            if not is_whole(root / "last"):
                log.warning(
                    "%s leads to no complete checkpoint: using the newest complete one, %s", root / "last", found
                )
            return found
    if not path.exists():
        raise CheckpointError(f"{path}: no such directory (looked for {path.absolute()}). rlinf-lite runs lists runs")
    elsewhere = "".join(f", nor does {root}, where its config.yaml puts them" for root in of_run[1:])
    raise CheckpointError(
        f"{path} holds no complete checkpoint (a step_* directory with {CHECKSUMS}, or a run of them){elsewhere}. A "
        "run writes one every runner.save_interval steps, and after its last"
    )


def run_of(checkpoint: Path) -> Path | None:
    """The run directory that contains a checkpoint, also a superseded one; None if it is in no run."""
    root = checkpoint.parent.parent if checkpoint.parent.name == SUPERSEDED else checkpoint.parent
    return root.parent if root.name == "checkpoints" else None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The driver's state in a checkpoint or snapshot: `completed_steps` and more. Raises CheckpointError."""
    file = checkpoint / "training_state" / "runner.json"
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read: {checkpoint} is no checkpoint of a run") from error


def size_of(checkpoint: Path) -> int:
    """The size of a checkpoint's files in bytes."""
    return sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())


def _remove(directory: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a half-deleted one is never taken for a complete one."""
    name = directory.name.removeprefix(".").removesuffix(".old")
    trash = directory.with_name(f".{name}.trash")
    shutil.rmtree(trash, ignore_errors=True)
    directory.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


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
    """Turn an OSError inside the block into a CheckpointError about `path`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"cannot write the checkpoint {path}: {reason}. Earlier ones are untouched.") from error
