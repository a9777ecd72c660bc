"""Collecting in several processes: `python -m rlinf_lite.workers.collecting_child fd log_fd` plays one part."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf_lite.child_process import ChildProcess, sendable
from rlinf_lite.config import Config
from rlinf_lite.data.demonstrations import DemonstrationError
from rlinf_lite.threads import THREADS, torch_threads
from rlinf_lite.workers.collecting import play_part

if TYPE_CHECKING:
    from rlinf_lite.envs import EnvSpec


def play_parts(
    cfg: Config, directory: Path, shares: Sequence[np.ndarray], report: Callable[[int, int, int], None]
) -> list[tuple[dict[str, Any], EnvSpec]]:
    """What `play_part` does, once for each of `shares` (rows of the environments), in a process each. `report` gets the
    sums over all processes.

    Raises the first error of a process; DemonstrationError if one ends, or if none makes progress for
    `control.hang_timeout_s`. All processes are ended then.
    """
    num_envs, limit_s = sum(map(len, shares)), cfg.control.hang_timeout_s
    children: list[ChildProcess] = []
    try:
        for rank, rows in enumerate(shares):
            children.append(ChildProcess("rlinf_lite.workers.collecting_child", environment=THREADS))
            children[rank].connection.send((cfg, directory, rank, rows, num_envs))
        done = np.zeros((len(shares), 3), int)
        parts: dict[int, tuple[dict[str, Any], EnvSpec]] = {}
        while len(parts) < len(shares):
            playing = {child.connection: rank for rank, child in enumerate(children) if rank not in parts}
            ready = wait(list(playing), limit_s)
            if not ready:
                raise DemonstrationError(f"no process has made progress for {limit_s:g} s (control.hang_timeout_s)")
            for connection in ready:
                rank = playing[connection]  # type: ignore[index]  # wait returns what it was given
                try:
                    what, answer = children[rank].connection.recv()
                except (EOFError, OSError) as error:
                    code, log = children[rank].last_words()
                    text = f"process {rank + 1} of {len(shares)} that collects ended (exit code {code})\n{log[-2000:]}"
                    raise DemonstrationError(text) from error
                if what == "failed":
                    raise answer
                if what == "done":
                    parts[rank] = answer
                else:
                    done[rank] = answer
                    report(*done.sum(0).tolist())
        return [parts[rank] for rank in range(len(shares))]
    finally:
        for child in children:
            child.close()


def main(fd: int, log_fd: int) -> None:
    faulthandler.enable(os.fdopen(log_fd, "wb"))
    with Connection(fd) as connection:
        cfg, directory, rank, rows, num_envs = connection.recv()

        def report(*counts: int) -> None:
            connection.send(("played", counts))

        try:
            with torch_threads(cfg.env.num_threads):
                connection.send(("done", play_part(cfg, directory, rank, rows, num_envs, report)))
        except Exception as error:  # any error of the environment's own code, which the parent raises
            connection.send(("failed", sendable(error)))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
