"""Configs, overrides and runs from before keys were renamed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import yaml

from rlinf_lite import renamed_keys
from rlinf_lite.config import ConfigError, load_config
from rlinf_lite.runners.run_config import find_changes, read_config

OLD = Path(__file__).parent / "old"  # as they were written before


@pytest.fixture(autouse=True)
def nothing_said_yet() -> None:
    renamed_keys._say.cache_clear()


@pytest.mark.parametrize("name", ["tabletop_sft_vla", "maniskill_pickcube_ppo_vla", "gym_pendulum_ppo_mlp"])
def test_an_old_config_loads_to_the_same_values(name: str, caplog: pytest.LogCaptureFixture) -> None:
    now = load_config(name)
    assert load_config(OLD / f"{name}.yaml") == now
    [line] = [record.message for record in caplog.records]
    assert line.startswith("keys have new names: ") and " -> " in line


def test_old_overrides_set_the_same_values_and_win_over_the_files(caplog: pytest.LogCaptureFixture) -> None:
    old = [
        "env.tabletop.num_blocks=[1,2]",
        "model.max_prompt_length=9",
        "model.lora.rank=2",
        "model.mlp.activation=relu",
    ]
    new = ["env.options.num_blocks=[1,2]", "model.options.max_prompt_length=9", "model.options.lora.rank=2"]
    assert load_config("tabletop_ppo_vla", old) == load_config("tabletop_ppo_vla", new)
    assert caplog.records[0].message == (
        "keys have new names: env.tabletop.num_blocks -> env.options.num_blocks, model.max_prompt_length -> "
        "model.options.max_prompt_length, model.lora.rank -> model.options.lora.rank; keys of other parts, without "
        "effect here, are left out: model.mlp.activation"
    )
    kwargs = load_config("gym_pendulum_ppo_mlp", ["env.kwargs.g=9.0", "runner.allow_changes=[env.kwargs]"])
    assert kwargs.env.options == {"g": 9.0} and kwargs.runner.allow_changes == ["env.options"]


def test_a_policy_built_on_ours_keeps_its_options() -> None:
    custom = load_config("gym_pendulum_ppo_mlp", ["model.id=examples.embodiment.custom_policy:SquashedGaussianPolicy"])
    assert custom.model.options.model_dump() == {"hidden_size": 128}
    built_on = load_config("gym_pendulum_ppo_mlp", ["model.id=rlinf_lite.models.mlp.policy:MLPGaussianPolicy"])
    assert built_on.model.options.hidden_sizes == [64, 64]


def test_a_cap_on_importance_weights_is_a_correction_by_now(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In a file, as an override, and as the config that an old run wrote."""
    now = load_config("math_arithmetic_grpo", ["algorithm.correction={kind: tis, high: 3}"])
    assert load_config("math_arithmetic_grpo", ["algorithm.importance_cap=3"]) == now
    [line] = [record.message for record in caplog.records]
    assert line == "keys have new names: algorithm.importance_cap -> algorithm.correction"
    file = tmp_path / "math_arithmetic_grpo.yaml"
    file.write_text("defaults: [math/math_arithmetic_grpo, _self_]\nalgorithm: {importance_cap: 3.0}\n")
    assert load_config(file) == now
    content = now.model_dump(mode="json")
    del content["algorithm"]["correction"]
    file.write_text(yaml.safe_dump(content | {"algorithm": content["algorithm"] | {"importance_cap": None}}))
    saved = read_config(file)
    assert saved is not None and saved["algorithm"]["correction"] == {"kind": "none"}
    assert [str(change) for change in find_changes(saved, now)] == ["algorithm.correction.kind: none -> tis"]
    off = load_config("math_arithmetic_grpo", ["algorithm.importance_cap=null"])
    assert off.algorithm.correction.kind == "none"
    allowed = load_config("math_arithmetic_grpo", ["runner.allow_changes=[algorithm.importance_cap]"])
    assert allowed.runner.allow_changes == ["algorithm.correction"]
    with pytest.raises(ConfigError, match=r"algorithm.importance_cap: there is no such key"):
        load_config("tabletop_ppo_vla", ["algorithm.importance_cap=3"])


@pytest.mark.parametrize("name", ["tabletop_ppo_vla", "maniskill_pushcube_ppo_mlp"])
def test_the_config_of_an_old_run_is_that_of_a_new_one(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """As a run wrote it: whole, with the sections of other parts and their defaults."""
    file = OLD / f"run_of_{name}.yaml"
    assert {"maniskill", "tabletop", "kwargs"} <= set(yaml.safe_load(file.read_text())["env"])
    now = load_config(name, ["cluster.accelerator=cpu", "actor.checkpoint_save_path=results"])  # as was the default
    assert load_config(file, ["cluster.accelerator=cpu", f"runner.run_name={name}"]) == now
    with caplog.at_level(logging.WARNING):
        saved = read_config(file)
    assert saved is not None
    assert [change for change in find_changes(saved, now) if change.key != "cluster.accelerator"] == []
    other = now.env.model_copy(update={"options": type(now.env.options)(obs_mode="rgb+state")})
    [change] = [c for c in find_changes(saved, now.model_copy(update={"env": other})) if c.key.startswith("env")]
    assert (change.key, change.now, change.is_fixed) == ("env.options.obs_mode", "rgb+state", True)
