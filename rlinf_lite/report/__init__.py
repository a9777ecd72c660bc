"""One HTML page about a run, made from the files in its directory: `write_report("results/<run>")`.

On the command line: rlinf-lite report results/<run>
"""

from __future__ import annotations

from pathlib import Path

from rlinf_lite.file_modes import write_whole
from rlinf_lite.report.page import render_page
from rlinf_lite.report.run_files import ReportError, RunFiles

__all__ = ["ReportError", "RunFiles", "write_report"]


def write_report(run_dir: str | Path) -> Path:
    """Write `<run_dir>/report.html` and return its path. Raises ReportError where there is no run to report on."""
    path = Path(run_dir) / "report.html"
    write_whole(path, render_page(RunFiles(run_dir)))
    return path
