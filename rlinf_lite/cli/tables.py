"""Tables on a terminal, and in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def print_table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Nothing where there are no rows. Long texts are wrapped, the rest is not."""
    if rows:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for title in titles:
            is_text = title in ("evidence", "directory", "doing")
            table.add_column(title, no_wrap=not is_text, overflow="fold")
        for row in rows:
            table.add_row(*map(str, row))
        console = Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False, emoji=False)
        console.print(table)
