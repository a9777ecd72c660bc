"""The child process of one row: `python -m rlinf_lite.envs.libero.child fd log_fd`. It ends with its parent."""

from __future__ import annotations

import faulthandler
import os
import sys
from multiprocessing.connection import Connection
from typing import Any

from rlinf_lite.child_process import sendable
from rlinf_lite.envs.libero.world import Row


def main(fd: int, log_fd: int) -> None:
    """Answer the parent's calls (method, arguments) with (True, result) or (False, error), until it disconnects."""
    for stream in (1, 2):  # the library prints to both
        os.dup2(log_fd, stream)
    faulthandler.enable()
    row: Row | None = None
    with Connection(fd) as connection:
        while True:
            try:
                method, arguments = connection.recv()
            except EOFError:
                return
            try:
                if row is None:
                    row = Row(*arguments)
                    answer: Any = None
                else:
                    answer = getattr(row, method)(*arguments)
                connection.send((True, answer))
            except Exception as error:  # any error of the task's own code, which the parent raises
                connection.send((False, sendable(error)))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
