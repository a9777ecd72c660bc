"""How a run is asked to stop, by Ctrl-C, SIGTERM or `rlinf-lite job stop`, and where it takes notice.

The first request is noted and taken where the runner waits for workers, between one completed operation and the next:
no file is left half written, and no update half submitted. The second one raises KeyboardInterrupt on the spot.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SAME_REQUEST_S = 1.0
"""A terminal, make and a batch system may each pass on one and the same request."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """The run was asked to stop, and is at a point where it can."""


class StopRequest:
    """Notes requests inside `with stop:`. Outside of it nothing is ever requested."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._raises = False

    @property
    def requested(self) -> bool:
        return self._since is not None

    def check(self, grace_s: float = 0.0) -> None:
        """Raise Stopped where the run was asked to stop, `grace_s` ago or earlier."""
        if self._since is not None and time.monotonic() - self._since >= grace_s:
            raise Stopped("the run is being stopped")

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, the first request raises Stopped on the spot: for what may take long and leaves nothing to save."""
        self.check()
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def __enter__(self) -> StopRequest:
        self._since = None
        self._before = [signal.signal(number, self._note) for number in _SIGNALS]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(_SIGNALS, self._before, strict=True):
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
            if self._raises:
                raise Stopped("the run is being stopped")
        elif now - self._since > SAME_REQUEST_S:
            raise KeyboardInterrupt
