"""Tables on a terminal, and in a pipe."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

LONG = ("evidence", "directory", "doing")
"""Columns of long texts, which a reader may want to copy."""
GAP = "  "


def print_table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Nothing where there are no rows. Where the terminal is too narrow, long texts are beneath their rows: paths stay
    whole."""
    texts = [[str(value) for value in row] for row in rows]
    columns = list(range(len(titles)))
    widths = [max(len(row[i]) for row in [list(titles), *texts]) for i in columns]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 160
    fits = sum(widths) + len(GAP) * (len(widths) - 1) <= width
    beneath = [i for i in columns if titles[i] in LONG and not fits]
    beside = [i for i in columns if i not in beneath]
    for row in [titles, *texts] if rows else []:
        print(GAP.join(row[i].ljust(widths[i]) for i in beside).rstrip())
        for i in beneath if row is not titles else []:
            print(
                textwrap.fill(
                    row[i],
                    width,
                    initial_indent="    ",
                    subsequent_indent="    ",
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            )
