"""Tables for a terminal or a pipe."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence

LONG = ("name", "evidence", "directory", "doing")
"""Titles of columns that hold long texts, which a reader may want to copy."""
GAP = "  "


def text_width(in_pipe: int) -> int:
    """Width of the terminal in characters, or the value of COLUMNS; `in_pipe` where there is neither."""
    is_known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return shutil.get_terminal_size().columns if is_known else in_pipe


def print_table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; nothing if there are no rows. If the terminal is too narrow, the columns of LONG are printed below
    their rows, so that paths stay whole."""
    texts = [[str(value) for value in row] for row in rows]
    columns = list(range(len(titles)))
    widths = [max(len(row[i]) for row in [list(titles), *texts]) for i in columns]
    width = text_width(in_pipe=160)
    fits = sum(widths) + len(GAP) * (len(widths) - 1) <= width
    below = [i for i in columns if titles[i] in LONG and not fits]
    in_row = [i for i in columns if i not in below]
    wrapper = textwrap.TextWrapper(width, "    ", "    ", break_long_words=False, break_on_hyphens=False)
    for row in [titles, *texts] if rows else []:
        print(GAP.join(row[i].ljust(widths[i]) for i in in_row).rstrip())
        for i in below if row is not titles else []:
            print(wrapper.fill(row[i]))
