"""`rlinf-lite compare RUN RUN...`: one page about several runs. Imports neither torch nor ray."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from rlinf_lite.report import ReportError, write_comparison


def compare(arguments: Sequence[str]) -> int:
    """Write the page and print its path. Returns the exit code: 2 where the runs cannot be compared."""
    parser = argparse.ArgumentParser(
        prog="rlinf-lite compare",
        description="Write one page about several runs: their curves, what each reached, where their configs differ.",
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run's directory, for example results/<run>"
    )
    parser.add_argument("--out", type=Path, default=Path("compare.html"), metavar="FILE", help="default: compare.html")
    options = parser.parse_intermixed_args(arguments)
    try:
        print(write_comparison(options.runs, options.out))
    except ReportError as error:
        print(error, file=sys.stderr)
        return 2
    except (OSError, ValueError, yaml.YAMLError) as error:
        print(f"{options.out}: cannot be written from these runs ({' '.join(str(error).split())})", file=sys.stderr)
        return 2
    return 0
