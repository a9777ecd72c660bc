"""What a runner needs to go on after workers were started again: copies of the training state."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from rlinf_lite.runners.checkpoints import CHECKSUMS, CheckpointError, CheckpointStore
from rlinf_lite.scheduler.context import get_context
from rlinf_lite.scheduler.segments import no_room

log = logging.getLogger(__name__)

_AUTO_SHARE = 0.01
_BYTES_PER_PARAMETER = 12
"""A weight and two moments of AdamW, in fp32."""


class Snapshots:
    """The newest state of the training groups in this node's shared memory, in the format of a checkpoint.

    There are none where the groups are on other nodes, or memory does not suffice.
    """

    def __init__(self, interval: int | Literal["auto"], num_parameters: int, nodes: Sequence[str]) -> None:
        """`nodes`: ids of those that the training groups are on."""
        here = get_context()
        self._interval, self.took_s, self._began = interval, 0.0, -float("inf")
        self.store = CheckpointStore(Path(here.shm_dir) / f"snapshots-{os.getpid()}", keep=1, durable=False)
        self._num_bytes = _BYTES_PER_PARAMETER * num_parameters
        free, needed = shutil.disk_usage(here.shm_dir).free, 2 * self._num_bytes
        self.why_none = ""
        if interval == 0:
            self.why_none = "control.snapshot_interval is 0"
        elif set(nodes) != {here.node_id}:
            self.why_none = "the actor is not on this node alone"
        elif needed > free / 2:
            self.why_none = f"two would take {needed / 2**30:.1f} of {free / 2**30:.1f} GiB of shared memory"

    def due(self, step: int, is_only_way: bool = False) -> bool:
        """Whether to take one after `step` steps. `is_only_way`: updates take longer than a run that is asked to stop
        can wait, so that without one of the last step there would be nothing to save."""
        if self.why_none:
            return False
        if self._interval == "auto":
            return is_only_way or self.took_s <= _AUTO_SHARE * (time.monotonic() - self._began)
        return step % self._interval == 0

    def take(self, step: int, write: Callable[[Path], None]) -> None:
        """Have the state written. One that finds no room is done without, as are all after it (`why_none`); an earlier
        one stays."""
        self._began = time.monotonic()
        try:
            self.store.write(step, write)
        except (CheckpointError, OSError) as error:
            self.why_none = str(error)
            here = self.store.root.parent
            if shutil.disk_usage(here.parent).free < self._num_bytes:
                self.why_none = str(no_room(str(here), "a snapshot of the training state", self._num_bytes))
            log.warning("no more snapshots: %s", self.why_none)
        self.took_s = time.monotonic() - self._began

    def newest(self) -> Path | None:
        return self.store.newest()

    def keep_newest(self, store: CheckpointStore, step: int) -> Path:
        """Make a checkpoint of the newest one, which is of `step`; no worker is needed. Raises CheckpointError."""
        kept, sums = self.store.steps()[-1], shutil.ignore_patterns(CHECKSUMS)
        try:
            return store.write(step, lambda partial: shutil.copytree(kept, partial, dirs_exist_ok=True, ignore=sums))
        except OSError as error:
            raise CheckpointError(f"cannot copy the snapshot {kept} to {store.root}: {error}") from error

    def remove(self) -> None:
        shutil.rmtree(self.store.root.parent, ignore_errors=True)
