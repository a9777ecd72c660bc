"""`rlinf-lite configs`: what there is, as the files and docs/configs.md say."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rlinf_lite.cli.configs import every_config
from rlinf_lite.config import load_config
from rlinf_lite.config.loading import config_names

HEAVY = ("torch", "ray", "gymnasium", "hydra", "mani_skill", "transformers")


def test_times_are_those_of_the_table(repo: Path) -> None:
    """A config's comment and the table of docs/configs.md are two places for one number."""
    lines = (repo / "docs/configs.md").read_text().splitlines()
    title = next(line for line in lines if line.startswith("| config |"))
    hardware = re.search(r"time on (.+?) \|", title)
    assert hardware is not None
    rows = {
        line.split("`")[1]: line.rstrip("| ").rpartition("|")[2].strip() for line in lines if line.startswith("| `")
    }
    found = {one.name: one for one in every_config()}
    times = {name: f"{one.time} on {one.hardware}" if one.time else "-" for name, one in found.items()}
    assert times == {name: f"{time} on {hardware[1]}" if time != "-" else "-" for name, time in rows.items()}
    assert sum(time != "-" for time in times.values()) >= 5
    not_run = {name for name, one in found.items() if one.takes.startswith("not run")}
    said = {line.split("`")[1] for line in lines if line.startswith("| `") and re.search("not run yet|likewise", line)}
    assert not_run == said - {"libero_eval"}  # which a machine of any size can be given


@pytest.mark.parametrize("name", ["tabletop_sft_mlp", "metaworld_ppo_vla", "maniskill_ppo_pi05", "math_arithmetic_ppo"])
def test_what_the_files_say_is_what_hydra_makes_of_them(name: str) -> None:
    config = load_config(name, elsewhere=True)
    one = next(one for one in every_config() if one.name == name)
    assert (one.command, one.kind) == ("train", config.runner.task_type)
    assert one.task == (f"{config.env.id} {config.env.task}" if one.kind != "reasoning" else "arithmetic")


def test_words_filter(capsys: pytest.CaptureFixture[str], command_line: Callable[[list[str]], int]) -> None:
    assert command_line(["configs", "--json"]) == 0
    assert {one["name"] for one in json.loads(capsys.readouterr().out)} == {n.split("/")[1] for n in config_names()}
    assert command_line(["configs", "SFT", "metaworld"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["metaworld_ppo_vla", "train", "16.9", "min", "on", "2", "CPU", "cores"]
    assert lines[1].startswith("    metaworld")
    assert command_line(["configs", "sft", "zebra"]) == 1
    assert capsys.readouterr().err == "no config has sft and zebra. rlinf-lite configs lists all\n"
