"""The frame of a command line program: what Ctrl-C and SIGTERM do while it starts and ends. Imports nothing heavy."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_script(main: Callable[[], int]) -> int:
    """The exit code of a program: what `main` returns, and 130 where Ctrl-C or SIGTERM ends it outside of `Runner.run`,
    which deals with them itself. Both raise KeyboardInterrupt, so that what was started is shut down in order, also
    where the shell that started us has it ignore SIGINT."""
    for number in _SIGNALS:
        signal.signal(number, signal.default_int_handler)
    try:
        return main()
    except KeyboardInterrupt:
        print("interrupted: ended where it was", file=sys.stderr)
        return 130
