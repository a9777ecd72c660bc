"""Everything that an override may say, and what is made of it: the tables below are run against `load_config`."""

from __future__ import annotations

import shlex
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from rlinf_lite.config import ConfigError, load_config
from rlinf_lite.config.loading import as_override

PPO = Path(__file__).parent / "yaml" / "ppo.yaml"
NAME, PATH, TEXT = "runner.run_name", "runner.logger.log_path", "runner.logger.project_name"
KWARGS = "env.options.kwargs"

ACCEPTED: dict[str, Any] = {
    # override: the value of its key
    # letters beyond ASCII, with and without quotes, in lists, dicts, keys and beside references
    f"{NAME}=läufer": "läufer",
    f"{NAME}='läufer'": "läufer",
    f'{NAME}="läufer"': "läufer",
    f"{NAME}=日本 1": "日本 1",
    f"{NAME}=Qä QQ": "Qä QQ",
    f"{NAME}=1é3": "1é3",
    f"+{NAME}=ñull": "ñull",
    f"{PATH}=/tmp/jörg/läufe (2)".replace("(2)", "2"): "/tmp/jörg/läufe 2",
    f"{PATH}='/tmp/jörg/läufe (2), neu'": "/tmp/jörg/läufe (2), neu",
    f"{TEXT}=${{runner.seed}}/ä": "3/ä",
    f"{TEXT}='ä=${{runner.seed}}'": "ä=3",
    f"{KWARGS}.größe=[ä,'ö ü',1]": ["ä", "ö ü", 1],
    f"{KWARGS}={{ä: {{ö: ü}}}}": {"ä": {"ö": "ü"}},
    # what is read as no text, unless it is in quotes
    f"{TEXT}='1e3'": "1e3",
    f"{TEXT}='null'": "null",
    f"{TEXT}='a,b'": "a,b",
    f"{TEXT}='it\\'s'": "it's",
    f"{TEXT}= a  b ": "a  b",
    f"{TEXT}=007": "007",
    f"{TEXT}=a\\b": "a\\b",
    "runner.seed=1_000": 1000,
    "runner.seed=+5": 5,
    "actor.optim.lr=.5": 0.5,
    "env.train.auto_reset=TRUE": True,
    # run names
    f"{NAME}=a.b-c_d+1": "a.b-c_d+1",
    f"{NAME}=a..b": "a..b",
    f"{NAME}=null": "ppo",  # the config's name
    f"{NAME}={'ä' * 127}": "ä" * 127,
}

REFUSED = {
    # override: what is said of it; texts that Hydra cannot read come with what to type instead
    f"{NAME}=a#b": "cannot be read as an override (token recognition error at: '#'). A text with such signs has quotes "
    f"within those of the shell: '{NAME}=\"a#b\"'",
    f"{NAME}=it's": f"within those of the shell: '{NAME}=\"it'\"'\"'s\"'",
    f"{PATH}=/tmp/ä (2)": f"within those of the shell: '{PATH}=\"/tmp/ä (2)\"'",
    f"{PATH}=/tmp/a=b": f"within those of the shell: '{PATH}=\"/tmp/a=b\"'",
    f"{NAME}": "cannot be read as an override",
    f"{NAME}=ä,ö": "a run has one value of it, here are several (ä,ö)",
    f"{NAME}=1e3": "is 1000.0. It must be a text (in quotes)",
    f"{NAME}=nan": "is nan. It must be a text (in quotes)",
    f"{NAME}=true": "is True. It must be a text (in quotes)",
    f"{NAME}=[ä]": "is ['ä']. It must be a text (in quotes)",
    "runner.seed=３": "is '３'. It must be a whole number",
    "runner.seed=0x10": "is '0x10'. It must be a whole number",
    "env.train.auto_reset=jä": "is 'jä'. It must be true or false",
    "runner.größe=1": "there is no such key",
    # run names that are paths, or no names of files
    f"{NAME}=a/b": "'a/b' has / or \\",
    f"{NAME}=a/../../b": "'a/../../b' has / or \\",
    f"{NAME}=a\\b": "has / or \\",
    f"{NAME}=..": "'..' begins with a dot or a dash",
    f"{NAME}=.a": "begins with a dot or a dash",
    f"{NAME}=-a": "begins with a dot or a dash",
    f"{NAME}=": "'' is empty",
    f"{NAME}=' '": "' ' is empty",
    f"{NAME}='a '": "'a ' begins or ends with a space",
    f"{NAME}=a\tb": "'a\\tb' has signs that cannot be printed",
    f"{NAME}='a\nb'": "'a\\nb' has signs that cannot be printed",
    f"{NAME}='a\0b'": "'a\\x00b' has signs that cannot be printed",
    f"{NAME}='a\u202eb'": "has signs that cannot be printed",
    f"{NAME}='a\udcff'": "has signs that cannot be printed",
    f"{NAME}={'ä' * 128}": "is longer than a file's name may be, 255 bytes",
    # directories
    f"{PATH}=": "'' is empty",
    f"{PATH}='~/runs'": "'~/runs' begins with ~, which only shells read as a home directory",
    f"{PATH}='a\nb'": "has control characters",
    f"{PATH}='a\0b'": "has control characters",
    f"{PATH}=/tmp/{'ä' * 128}": "has a name of more than 255 bytes",
}

BY_KEY = ["läufer", "a#b", "a,b", "it's", 'say "a"', "1e3", "null", "[a]", "{a: b}", "a=b", "a\nb", " a "]
BY_KEY += ["a\\b", "a\\", 'a\\"b']
"""Values that overrides as a mapping give are taken as they are."""


@pytest.mark.parametrize("override", ACCEPTED)
def test_what_is_accepted(override: str) -> None:
    config = load_config(PPO, ["runner.seed=3", override])
    key = override.partition("=")[0].lstrip("+")
    found = config.env.options.kwargs["größe"] if key.endswith("größe") else attrgetter(key)(config)
    assert found == ACCEPTED[override]


@pytest.mark.parametrize("override", REFUSED)
def test_what_is_refused(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(PPO, [override])
    [problem] = caught.value.problems
    assert problem.startswith(override.partition("=")[0]) and REFUSED[override] in problem
    assert str(caught.value).encode(errors="surrogateescape")


@pytest.mark.parametrize("override", [override for override, said in REFUSED.items() if "those of the shell" in said])
def test_what_to_type_instead_is_read_as_the_text(
    override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(PPO, [override])
    [word] = shlex.split(caught.value.problems[0].rpartition("of the shell: ")[2])
    key, _, value = override.partition("=")
    assert attrgetter(key)(load_config(PPO, [word])) == value


@pytest.mark.parametrize("value", BY_KEY)
def test_values_by_key_are_taken_as_they_are(value: str) -> None:
    config = load_config(PPO, {TEXT: value, KWARGS: {"ä": [value, {"b": value}]}})
    assert config.runner.logger.project_name == value
    assert config.env.options.kwargs == {"ä": [value, {"b": value}]}
    assert load_config(PPO, [as_override(TEXT, value)]).runner.logger.project_name == value


def test_the_last_of_several_counts() -> None:
    assert load_config(PPO, ["runner.run_name=ä", "runner.run_name=ö"]).runner.run_name == "ö"


def test_a_config_and_its_directory_may_have_any_letters(tmp_path: Path) -> None:
    directory = tmp_path / "jö rg, (2)"
    (directory / "my" / "sizes").mkdir(parents=True)
    path = directory / "läufer.yaml"
    path.write_text("defaults:\n  - embodiment/gym_pendulum_ppo_mlp\n  - my/sizes: ä\n  - _self_\n")
    for name, number in (("ä", 16), ("ö", 32)):
        (directory / "my" / "sizes" / f"{name}.yaml").write_text(f"# @package env.train\nmax_episode_steps: {number}\n")
    config = load_config(path)
    assert (config.runner.run_name, config.env.train.max_episode_steps) == ("läufer", 16)
    assert load_config(path, ["my/sizes=ö"]).env.train.max_episode_steps == 32


def test_a_configs_own_name_is_held_to_the_same(tmp_path: Path) -> None:
    path = tmp_path / "-a.yaml"
    path.write_text(PPO.read_text())
    with pytest.raises(ConfigError, match=r"runner\.run_name: '-a' begins with a dot or a dash"):
        load_config(path)
    assert load_config(path, ["runner.run_name=a"]).runner.run_name == "a"
