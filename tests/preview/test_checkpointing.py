"""`gradient_checkpointing: auto`: the fastest way that fits, by the estimate of each."""

from typing import Any

import pytest

from rlinf_lite.config import load_config
from rlinf_lite.preview import checkpointing, dry_run, memory, placements
from rlinf_lite.preview.checkpointing import choose, chosen
from rlinf_lite.preview.dry_run import describe

WAYS = ["none", "selective", "full"]
VLA = ["rollout.model_dir=null", "model.options.size=small", "actor.micro_batch_size=64", "env.train.num_envs=16"]
VLA += [
    "cluster.accelerator=cuda",
    "cluster.num_gpus_per_node=1",
    "model.options.gradient_checkpointing=auto",
    "actor.global_batch_size=64",
]
ONE_RANK = "cluster.component_placement={actor: '0', rollout: '0', reference: '0', critic: '0', reward: '0'}"
CONFIGS = {
    "model.options": ("tabletop_ppo_vla", VLA),
    "model": (
        "math_arithmetic_grpo",
        [
            ONE_RANK,
            "cluster.accelerator=cuda",
            "cluster.num_gpus_per_node=1",
            "model.gradient_checkpointing=auto",
            "actor.max_tokens_per_micro_batch=65536",
        ],
    ),
}


def room_of(size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing, "room_for", lambda _: size)


@pytest.mark.parametrize("section", CONFIGS)
def test_the_fastest_that_fits_is_chosen(section: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    name, overrides = CONFIGS[section]
    config = load_config(name, overrides)
    room_of(0, monkeypatch)
    needed = choose(config).needed
    assert list(needed) == WAYS and needed["full"] < needed["selective"] < needed["none"]
    for way in WAYS:
        room_of(needed[way], monkeypatch)
        done = chosen(config)
        options = done.model if section == "model" else done.model.options
        assert options.gradient_checkpointing == way
        assert done.model_dump() != config.model_dump() and chosen(done) is done
        assert f"{section}.gradient_checkpointing: {way} (needed: none " in capsys.readouterr().out
    room_of(None, monkeypatch)
    assert choose(config).way == "full" and "free memory is not known here" in str(choose(config))


def test_a_dry_run_for_gpus_says_what_each_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placements, "gpu_bytes", lambda: 80 * 2**30)
    text = describe(load_config("tabletop_ppo_vla", VLA))
    assert "the fastest gradient checkpointing that fits\n  model.options.gradient_checkpointing: none" in text
    assert "there are 80.0 GiB" in text


def test_what_has_no_such_layers_is_left_alone() -> None:
    config = load_config("gym_pendulum_ppo_mlp")
    assert choose(config) is None and chosen(config) is config
    assert choose(load_config("tabletop_ppo_vla", ["runner.task_type=eval"])) is None


@pytest.mark.parametrize(("said", "meant"), [("true", "full"), ("false", "none"), ("selective", "selective")])
def test_other_libraries_true_and_false_are_read(said: str, meant: str) -> None:
    config = load_config("tabletop_ppo_vla", [f"model.options.gradient_checkpointing={said}"])
    assert config.model.options.gradient_checkpointing == meant
    language = load_config("math_arithmetic_grpo", [f"model.gradient_checkpointing={said}"])
    assert language.model.gradient_checkpointing == meant


def test_copies_are_proposed_where_little_trains_and_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    four = ["cluster.num_gpus_per_node=4", "cluster.component_placement={env: '0', rollout: '0', actor: '0-3'}"]
    settings = [*(x for x in VLA if "num_gpus" not in x), *four, "actor.micro_batch_size=16"]
    title = "a faster way to spread the model over ranks"
    for more, room, proposed in (
        (["model.options.lora.rank=4"], 80 * 2**30, True),
        (["model.options.lora.rank=4"], 2**30, False),
        (["model.options.lora.rank=4", "actor.strategy=replicated"], 80 * 2**30, False),
        ([], 80 * 2**30, False),
    ):
        monkeypatch.setattr(placements, "gpu_bytes", lambda room=room: room)
        monkeypatch.setattr(dry_run, "room_for", placements.room_for)
        text = describe(load_config("tabletop_ppo_vla", [*settings, *more]))
        assert (title in text) == proposed, (more, room)
        assert ("actor.strategy=replicated fits (" in text) == proposed


def test_what_is_not_known_is_not_taken_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without activations all ways would need the same, and the first would fit."""
    config = load_config("tabletop_ppo_vla", VLA)
    room_of(80 * 2**30, monkeypatch)

    def broken(*_: Any) -> Any:
        raise RuntimeError("it reads numbers")

    monkeypatch.setattr(memory, "policy_passes", broken)
    assert (choice := choose(config)).needed == {} and choice.way == "full"
    assert "full (needed: not known; " in str(choice)


def test_a_dry_run_estimates_each_way_once(monkeypatch: pytest.MonkeyPatch) -> None:
    room_of(0, monkeypatch)
    estimate, ways = memory.estimate, []

    def counted(plan: Any) -> Any:
        ways.append(plan.config.model.options.gradient_checkpointing)
        return estimate(plan)

    monkeypatch.setattr(memory, "estimate", counted)
    describe(load_config("tabletop_ppo_vla", VLA))
    assert ways == ["auto", "none", "selective"], "auto runs its layers as full does"
