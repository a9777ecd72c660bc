"""The exit code of a script that waits for its jobs after its last line, when Python offers no other way to set it.

Imported with this package, so that functions which are registered with `atexit` later run before `_exit`.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys

_exit_code = 0


def exit_with(code: int) -> None:
    """Let the process exit with `code`, unless an earlier call gave another than 0. For use while the script exits."""
    global _exit_code
    _exit_code = _exit_code or code


@atexit.register
def _exit() -> None:
    if _exit_code:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_code)
