"""Scales and ticks of the report's drawings, and the texts of its numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Scale:
    """Maps values [low, high] to pixels [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


class Tick(NamedTuple):
    """A tick of an axis: its place in pixels, its label, and the value it stands for."""

    at: float
    label: str
    value: float

    def middle(self, width: float) -> float:
        """Place of the label's middle in a drawing of this width: the tick, or the nearest place where it fits."""
        half = text_width(self.label) / 2
        return min(max(self.at, half), width - half)


def text_width(text: str, font_size: float = 11) -> float:
    """Approximate width of a label in pixels: the widest common fonts have digits of 0.64 times their size."""
    return 0.64 * font_size * len(text)


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers (1, 2, 2.5 or 5 times a power of ten apart) that cover [low, high]."""
    rough = (high - low) / count if high > low else abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def inner_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """The values of `nice_ticks` that lie inside [low, high]."""
    return [tick for tick in nice_ticks(low, high, count) if low - 1e-9 <= tick <= high * (1 + 1e-9)]


def ticks(values: Sequence[float], scale: Scale, is_percent: bool = False, unit: str = "") -> list[Tick]:
    """A tick for each value, at its place in pixels; the labels end in `unit`."""
    labels = tick_labels(values, is_percent)
    return [Tick(scale(value), f"{label}{unit}", value) for value, label in zip(values, labels, strict=True)]


def tick_labels(ticks: Sequence[float], percent: bool = False) -> list[str]:
    """Labels of ticks, all with the same number of decimals; in thousands or millions if they are that large."""
    largest = max(abs(tick) for tick in ticks)
    if largest < 2e-3 and not percent:
        return [compact(tick) for tick in ticks]
    unit, suffix = (0.01, "%") if percent else _magnitude(largest)
    apart = min((abs(b - a) for a, b in itertools.pairwise(ticks)), default=largest) / unit
    decimals = next((d for d in range(4) if abs(round(apart, d) - apart) < 1e-6 * apart), 4)
    return [f"{tick / unit:.{decimals}f}{suffix if tick or percent else ''}".replace("-", "−") for tick in ticks]


def compact(value: float) -> str:
    """A number with three significant digits: 12.3 k, 0.0123, 1.5e-5."""
    if value == 0:
        return "0"
    unit, suffix = _magnitude(abs(value))
    if unit > 1:
        return f"{_rounded(value / unit)}{suffix}"
    if abs(value) < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e−{abs(int(exponent))}".replace("-", "−")
    return _rounded(value) if abs(value) < 1000 else f"{value:,.0f}".replace("-", "−")


def _rounded(value: float) -> str:
    """A number with three significant digits and without an exponent, which 999.9 would get."""
    return f"{float(f'{value:.3g}'):,.12g}".replace("-", "−")


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def counted(number: float, plural: str) -> str:
    """A number with its noun: 1 step, 2,000 steps."""
    return f"{number:,.0f} {plural.removesuffix('s') if number == 1 else plural}"


def duration(seconds: float) -> str:
    """A time as text: 12 ms, 12.3 s, 4 min 05 s, 3 h 12 min."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _magnitude(largest: float) -> tuple[float, str]:
    return (1e6, " M") if largest >= 1e6 else (1e3, " k") if largest >= 1e4 else (1.0, "")
