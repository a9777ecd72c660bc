"""The exit code of a script that waits for its jobs after its last line, when Python offers no other way to set it.

It is imported with this package, so that functions that are registered with `atexit` later run before `_exit`.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys

_exit_code = 0


def exit_with(code: int) -> None:
    """Make the process exit with `code`, unless an earlier call gave a code other than 0. For use while the script
    exits."""
    global _exit_code
    _exit_code = _exit_code or code


@atexit.register
def _exit() -> None:
    if _exit_code:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_code)
