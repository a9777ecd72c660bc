"""One HTML page about a run, made from the files in its directory: `write_report("results/<run>")`.

python -m rlinf_lite.report results/<run>
"""

from __future__ import annotations

import os
from pathlib import Path

from rlinf_lite.report.page import render_page
from rlinf_lite.report.run_files import ReportError, RunFiles, read_run

__all__ = ["ReportError", "RunFiles", "read_run", "write_report"]


def write_report(run_dir: str | Path) -> Path:
    """Write `<run_dir>/report.html` and return its path. Raises ReportError where there is no run to report on."""
    path = Path(run_dir) / "report.html"
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(render_page(read_run(run_dir)), encoding="utf-8")
    os.replace(unfinished, path)
    return path
