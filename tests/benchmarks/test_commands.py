"""Benchmarks call commands that there are."""

import re
from pathlib import Path

from rlinf_lite.cli import COMMANDS


def test_commands_that_benchmarks_call_exist(repo: Path) -> None:
    texts = [file.read_text() for file in (repo / "benchmarks").glob("*.py")]
    called = [word for text in texts for word in re.findall(r'"rlinf_lite\.cli", (.+?)[,\]]', text)]
    assert len(called) >= 4 and {word.strip('"') for word in called} <= set(COMMANDS), called
