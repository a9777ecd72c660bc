"""HTML pages about one run or several, made from the files in their directories:
`write_report("results/<run>")`, `write_comparison(["results/<run>", "results/<run>"], "compare.html")`.

On the command line: rlinf-lite report RUN, rlinf-lite compare RUN RUN...
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlinf_lite.file_modes import write_whole
from rlinf_lite.report.compare import render_comparison
from rlinf_lite.report.page import render_page
from rlinf_lite.report.run_files import ReportError, RunFiles

__all__ = ["ReportError", "RunFiles", "write_comparison", "write_report"]


def write_report(run_dir: str | Path) -> Path:
    """Write `<run_dir>/report.html` and return its path. Raises ReportError where there is no run to report on."""
    path = Path(run_dir) / "report.html"
    write_whole(path, render_page(RunFiles(run_dir)))
    return path


def write_comparison(run_dirs: Sequence[str | Path], out: str | Path) -> Path:
    """Write a page about several runs to `out` and return its path. Raises ReportError where a directory holds no run,
    or where the runs are of different kinds and cannot be compared."""
    page = render_comparison([RunFiles(run_dir) for run_dir in run_dirs])
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    write_whole(Path(out), page)
    return Path(out)
