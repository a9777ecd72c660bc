"""Run the commands of README and docs, as a newcomer does in a new clone, and report which fail.

python tools/type_commands.py                         # README and the four pages of first steps
python tools/type_commands.py docs/math.md --list     # only list the commands

Bash runs each line of each `bash` block in the clone. Commands that would train for minutes are shortened by overrides;
nothing else is changed. `make test` is left to CI.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
PAGES = ("README.md", *(f"docs/{name}.md" for name in ("getting_started", "command_line", "python", "acting")))
FENCE = re.compile(r"^```bash\n(.*?)^```", re.M | re.S)
SHORT = ("runner.max_steps=1", "runner.val_check_interval=-1")
LIMIT_S = 900
SERVES_S = 30
NOT_TYPED = ("make test", "make setup", "make clean")  # run by CI, or necessary before this script


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", default=PAGES, help="default: README and the pages of first steps")
    parser.add_argument("--list", action="store_true", help="list the commands; exit")
    options = parser.parse_args()
    failed = 0
    for page in options.pages:
        for command in typed(page):
            if options.list:
                print(f"{page}: {command}")
                continue
            code, took, output = run(command)
            failed += code != 0
            print(f"{'ok' if code == 0 else f'FAILED ({code})'}  {took:4.0f} s  {page}: {command}", flush=True)
            if code:
                print("    " + "\n    ".join(output.splitlines()[-15:]), flush=True)
    return 1 if failed else 0


def typed(page: str) -> list[str]:
    """The lines of a page's `bash` blocks, shortened."""
    text = (REPO / page).read_text(encoding="utf-8")
    lines = [line for body in FENCE.findall(text) for line in body.replace("\\\n", " ").splitlines()]
    commands = [" ".join(line.partition(" # ")[0].split()) for line in lines]
    return [shortened(command) for command in commands if command and not command.startswith(NOT_TYPED)]


def shortened(command: str) -> str:
    """A command that trains, shortened to one step. Other commands are unchanged."""
    words = shlex.split(command)
    if "--dry-run" in words:
        return command
    if words[:2] in (["make", "train"], ["make", "train-math"]):
        given = next((word.removeprefix("ARGS=") for word in words if word.startswith("ARGS=")), "")
        others = [word for word in words if not word.startswith("ARGS=")]
        # a command for GPUs becomes a dry run, for machines without any
        args = f"{given} --dry-run" if "accelerator=cuda" in given else " ".join([given, *short_for(command)]).strip()
        return shlex.join([*others, f"ARGS={args}"])
    trains = words[:2] == [".venv/bin/rlinf-lite", "train"] or any("/train_" in word for word in words)
    return shlex.join([*words, *short_for(command)]) if trains else command


def short_for(command: str) -> list[str]:
    return [*SHORT, *(["sft.num_steps=1"] if "math" in command else [])]


def run(command: str) -> tuple[int, float, str]:
    """Run a command; returns its exit code, seconds and output. A server is stopped after SERVES_S, which counts as
    exit code 0. A file that an earlier `init` wrote is removed first."""
    began = time.monotonic()
    words = shlex.split(command)
    if words[1:2] == ["init"]:
        (REPO / f"{words[3]}.py").unlink(missing_ok=True)
    limit = SERVES_S if words[1:2] == ["serve"] else LIMIT_S
    prefix = ["timeout", "--signal=INT", "--kill-after=60", str(limit)]
    done = subprocess.run(
        [*prefix, "bash", "-c", f"exec {command}"], cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    code = 0 if words[1:2] == ["serve"] and done.returncode == 124 else done.returncode
    return code, time.monotonic() - began, done.stdout.decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
