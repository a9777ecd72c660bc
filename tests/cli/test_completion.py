"""`rlinf-lite completion`: bash offers what a command takes. (zsh runs the same function.)"""

import subprocess
from functools import cache
from pathlib import Path

import pytest

from rlinf_lite.cli import COMMANDS
from rlinf_lite.cli.completion import script

bash = cache(lambda: script("bash"))


def offered(directory: Path, *words: str) -> set[str]:
    """What a tab gives after these words, the last of which is begun."""
    line = " ".join(f"'{word}'" for word in ("rlinf-lite", *words))
    code = f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; _rlinf_lite; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    command = ["bash", "--norc", "-c", f"{bash()}\n{code}"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tr"], {"train"}),
        (["train", "gym"], {"gym_pendulum_ppo_mlp", "gym_pendulum_sac_mlp"}),
        (["train", "gym_pendulum_ppo_mlp", "runner.se"], {"runner.seed="}),
        (["train", "env.train.num"], {"env.train.num_envs="}),
        (["train", "math_arithmetic_grpo", "data.num_p"], {"data.num_prompts="}),
        (["train", "math_arithmetic_grpo", "env."], set()),
        (["sweep", "math_arithmetic_grpo", "data.num_p"], {"data.num_prompts="}),
        (["train", "data.demos_dir", "=", "conf"], {"config.yaml"}),
        (["train", "--dr"], {"--dry-run"}),
        (["train", "--help"], {"--help", "--help-all"}),
        (["eval", "one"], {"results/one_run"}),
        (["compare", "results/one_run", "results/tw"], {"results/two_runs"}),
        (["init", ""], {"env", "policy"}),
        (["info", ""], set()),
    ],
)
def test_what_is_offered(words: list[str], expected: set[str], tmp_path: Path) -> None:
    for name in ("one_run", "two_runs"):
        (tmp_path / "results" / name).mkdir(parents=True)
    (tmp_path / "config.yaml").touch()
    assert offered(tmp_path, *words) == expected


def test_all_commands_are_offered_and_zsh_loads_the_module(tmp_path: Path) -> None:
    assert offered(tmp_path, "") == set(COMMANDS)
    before, _, same = script("zsh").partition("bashcompinit && bashcompinit\n")
    assert before.endswith("autoload -U +X ") and same == bash().partition("\n")[2]
