"""The exit code of a script that waits for its job behind its last line, where Python has none for what goes wrong.

Imported with this package: what is registered with `atexit` after that, runs before it.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys

_exit_code = 0


def exit_with(code: int) -> None:
    """End with `code`, where nothing before has gone wrong. To be called while the script exits."""
    global _exit_code
    _exit_code = _exit_code or code


def _exit() -> None:
    if _exit_code:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_code)


atexit.register(_exit)
