"""Timed spans of a worker, for the timeline, and the row map between groups of different size."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """A named piece of work; times are `time.time()`."""

    name: str
    start: float
    end: float


class SpanRecorder:
    def __init__(self) -> None:
        self._spans: list[Span] = []

    @contextmanager
    def record(self, name: str) -> Iterator[None]:
        start = time.time()
        try:
            yield
        finally:
            self._spans.append(Span(name, start, time.time()))

    def pop(self) -> list[Span]:
        spans, self._spans = self._spans, []
        return spans
