"""`rlinf-lite eval RUN`: measure a saved policy, by the script in examples/."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf_lite.cli.examples import EVAL, load_example


def eval(arguments: Sequence[str]) -> int:
    code: int = load_example(EVAL).main(arguments)
    return code
