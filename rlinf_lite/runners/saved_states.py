"""The saved states of a run, from which it recovers or resumes: snapshots and checkpoints."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from rlinf_lite.runners.checkpoints import CheckpointError, CheckpointStore, Snapshots, read_state, size_of, verify
from rlinf_lite.runners.full_disk import Disk, DiskFullError, has_no_room
from rlinf_lite.runners.stopping import STOP_TIMEOUT_S, StopRequest, command_on
from rlinf_lite.scheduler import SchedulerError, WorkerError, WorkerGroup

log = logging.getLogger(__name__)


class SavedStates:
    """Saves the state after the last completed step: in shared memory (snapshots) and on disk (checkpoints).

    While the disk is full it waits, and the state stays in the workers' memory.
    """

    disk: Disk
    """The driver writes all files through it."""
    snapshots: Snapshots
    _ends_run = False
    """Whether the run is stopping or has failed: the next save is the last, and a stop request does not interrupt
    it."""
    in_update = False
    """Whether an update runs, so that the workers hold neither the state before the step nor the one after it."""

    def __init__(
        self,
        store: CheckpointStore,
        run_dir: Path,
        stop: StopRequest,
        state: Callable[[], dict[str, Any]],
        write: Callable[[Path], None],
        groups: Sequence[WorkerGroup],
        trained: Sequence[WorkerGroup],
    ) -> None:
        """`state` returns the driver's part of the state; `write` writes the whole state into a directory. `groups`:
        all groups of the run; the `trained` ones hold the rest of the state."""
        self._store, self._run_dir, self._stop = store, run_dir, stop
        self._state, self._write, self._groups, self._trained = state, write, groups, trained
        self._saved: dict[str, Any] = {}  # the state in the newest checkpoint
        self.disk = Disk(stop.limit_s, self._check_stop, self._while_disk_is_full)

    def open(self, snapshots: Snapshots, resumed_from: Path | None, say: Callable[[str], None]) -> None:
        """Begin a run. `say` shows a line to the user."""
        self.snapshots, self._say = snapshots, say
        if resumed_from is not None and resumed_from.parent == self._store.root.resolve():
            self._saved = read_state(resumed_from)

    def write(self, directory: Path) -> None:
        """Write the state into a directory. Raises CheckpointError if it cannot be written."""
        try:
            self._write(directory)
        except (OSError, WorkerError) as error:
            problem = error.__cause__ if isinstance(error, WorkerError) else error
            if not isinstance(problem, OSError | SafetensorError):
                raise
            self._free(self._trained)  # the failed wait has aborted those that were still writing
            raise CheckpointError(f"cannot write {directory}: {problem}") from error

    def save(self) -> Path | None:
        """Write a checkpoint of the last completed step. Returns its path; None if it exists already. A failed write
        leaves earlier checkpoints untouched."""
        state = self._present()
        if self._saved == state:
            return None
        write = partial(self._store.write, state["completed_steps"], self.write)
        path = self.disk.write(self._store.root, write, self._num_bytes())
        self._saved = state
        self._say(f"checkpoint {path}")
        return path

    def save_stopped(self) -> int:
        """Save the last completed step of a run that is stopped. Returns the number of steps that are saved."""
        self._ends_run = True
        self._say("stopping: saving the last completed step (Ctrl-C again: stop at once)")
        saved, completed, why_none = self._save_last(), self._state()["completed_steps"], self.snapshots.why_none
        if saved < completed:
            older = "the last snapshot is older (control.snapshot_interval)"
            why = f"there are no snapshots ({why_none})" if why_none else older
            self._say(f"steps {saved + 1} to {completed} are lost: {why}")
        return saved

    def save_failed(self, error: Exception) -> None:
        """Save the last completed step of a run that has failed, and tell the user how to go on."""
        self._ends_run = True
        try:
            if isinstance(error, CheckpointError) and not has_no_room(error) and not isinstance(error, DiskFullError):
                self._save_snapshot()  # the workers could not write theirs
            else:
                self._save_last()
        except CheckpointError as problem:
            log.error("the last completed step cannot be saved: %s", problem)
        if not isinstance(error, DiskFullError):
            self._say(self.how_to_go_on())

    def _save_last(self) -> int:
        """Save the last completed step of a run that ends: from its snapshot, else from the workers. If these are dead
        or in an update, save the newest snapshot, which may be older. Returns the number of steps that are saved.
        Raises DiskFullError."""
        snapshot = self.snapshots.newest()
        if not self.in_update and (snapshot is None or read_state(snapshot) != self._present()):
            try:
                self._free(self._groups)
                self.save()
                return int(self._state()["completed_steps"])
            except DiskFullError:
                raise
            except (SchedulerError, CheckpointError) as error:
                self._say(f"the workers cannot write it: {str(error).splitlines()[0]}")
        return self._save_snapshot()

    def _save_snapshot(self) -> int:
        """Make a checkpoint of the newest snapshot, if that is newer than the newest checkpoint. Returns the number of
        steps that are saved. Raises DiskFullError."""
        checkpoint, snapshot = self._store.newest(), self.snapshots.newest()
        saved = -1 if checkpoint is None else int(read_state(checkpoint)["completed_steps"])
        state = {} if snapshot is None else read_state(snapshot)
        if state and state != self._saved and state["completed_steps"] >= saved:
            try:
                keep = partial(self.snapshots.keep_newest, self._store, state["completed_steps"])
                path = self.disk.write(self._store.root, keep, self._num_bytes())
            except DiskFullError:
                raise
            except CheckpointError as error:
                log.error("the last completed step cannot be saved: %s", error)
            else:
                self._say(f"checkpoint {path}, from its snapshot")
                saved = int(state["completed_steps"])
        return max(saved, 0)

    def newest(self) -> Path:
        """The newest snapshot or checkpoint, to recover from. Raises CheckpointError."""
        saved = self._store.newest()
        found = [path for path in (self.snapshots.newest(), saved) if path is not None]
        if not found:
            raise CheckpointError("the actor cannot be rebuilt: there is neither a snapshot nor a checkpoint")
        # if both are of the same step, the snapshot: a checkpoint of step 0 may be from inside supervised training
        newest = max(found, key=lambda path: int(read_state(path)["completed_steps"]))
        if newest == saved:
            verify(newest)
        return newest

    def how_to_go_on(self) -> str:
        """A sentence that tells the user of a failed run how to go on."""
        newest = self._store.newest()
        if newest is None:
            return "No checkpoint was saved: fix the problem, then begin again"
        return f"To go on from step {read_state(newest)['completed_steps']}: {command_on(self._run_dir)}"

    def _free(self, groups: Sequence[WorkerGroup]) -> None:
        """Abort the running methods of these groups, and let the trained groups serve calls again."""
        for group in groups:
            group.abort("the run is being stopped")
        for group in self._trained:
            group.clear_abort(STOP_TIMEOUT_S)

    def _present(self) -> dict[str, Any]:
        """The driver's state in the form in which a checkpoint stores it."""
        return dict(json.loads(json.dumps(self._state())))

    def _num_bytes(self) -> int:
        """The estimated size of a checkpoint: that of the newest one, unless that has no optimizer moments yet."""
        before = self._store.newest() or self.snapshots.newest()
        has_moments = before is not None and read_state(before)["completed_steps"] > 0
        return size_of(before) if before is not None and has_moments else self.snapshots.num_bytes

    def _check_stop(self) -> None:
        """Raise Stopped if the run was asked to stop, unless this is its last save."""
        if not self._ends_run:
            self._stop.check()

    def _while_disk_is_full(self) -> str:
        if self._ends_run:
            return "Ctrl-C again ends without it"
        kept = f"Step {self._state()['completed_steps']} is kept in memory, and the run goes on once there is room"
        return f"{kept}. Ctrl-C saves that step, to go on later with: {command_on(self._run_dir)}"
