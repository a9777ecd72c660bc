"""rlinf-lite report results/<run>: write the run's report.html."""

from __future__ import annotations

import argparse
import sys

from rlinf_lite.report import ReportError, write_report


def main() -> int:
    parser = argparse.ArgumentParser(prog="rlinf-lite report", description="Write a run's report.")
    parser.add_argument("run_dir", help="a run's directory, for example results/<run>")
    try:
        print(write_report(parser.parse_args().run_dir))
    except ReportError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
