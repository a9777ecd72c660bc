"""Timed spans of a worker, for the timeline. Pure: needs neither ray nor torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """What a process did from `start` to `end`, in seconds of `time.time()`."""

    name: str
    start: float
    end: float
    process: str
    """Group and rank, for example `env 0`."""


class SpanRecorder:
    def __init__(self, process: str) -> None:
        self._process = process
        self._spans: list[Span] = []

    @contextmanager
    def record(self, name: str) -> Iterator[None]:
        start = time.time()
        try:
            yield
        finally:
            self._spans.append(Span(name, start, time.time(), self._process))

    def pop(self) -> list[Span]:
        spans, self._spans = self._spans, []
        return spans
