"""`rlinf-lite report RUN`: write a run's report.html. Imports neither torch nor ray."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rlinf_lite.report import ReportError, write_report


def report(arguments: Sequence[str]) -> int:
    """Write the report and print its path. Returns the exit code: 2 where there is no run."""
    parser = argparse.ArgumentParser(prog="rlinf-lite report", description="Write a run's report.")
    parser.add_argument("run", metavar="RUN", help="a run's directory, for example results/<run>")
    try:
        print(write_report(parser.parse_args(arguments).run))
    except ReportError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
