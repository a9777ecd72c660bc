"""What does not fit a flow policy is said before a run starts, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf_lite.config import ConfigError, load_config
from rlinf_lite.config.plan import plan_of
from rlinf_lite.preview.memory import estimate
from tests.models.flow_checkpoints import FOLDER

CONFIG = "embodiment/tabletop_ppo_flow"


def problems(*overrides: str) -> list[str]:
    try:
        load_config(CONFIG, ["rollout.model_dir=null", *overrides])
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.temperature=1.3"], "model.temperature: is 1.3, and flows have none"),
        (["model.options.noise_range=[0.2,0.1]"], "model.options.noise_range: from 0.2 to 0.1 is no range"),
        (["env.options.obs_mode=state"], "model.id: pi0 looks at images, and pick shows none"),
        (["model.options.horizon=3"], "model.num_action_chunks: is 4, and the policy's horizon is 3 actions"),
        (["model.options.cameras={side: back}"], "model.options.cameras: there is no back; the environment has top"),
        (
            [f"rollout.model_dir={FOLDER / 'tiny-pi0'}", "model.options.cameras={side: top}"],
            "model.options.cameras: the policy knows no camera side. It knows base_0_rgb, left_wrist_0_rgb",
        ),
        (
            ["model.options.trainable=all"],
            "model.options.keep_prefix: is true, but every update changes the prefix",
        ),
        (
            ["runner.task_type=sft", "model.options.trainable=expert", "model.options.keep_prefix=true"],
            "model.options.keep_prefix: is true, but a step of imitation is one update, which reads each observation",
        ),
        (["model.options.state_in_prompt=true"], "model.options.state_in_prompt: is true, and pi0 has no state in its"),
        (["model.options.noise_level=0"], "model.options.noise_level: "),
        (
            ["model.options.method=flow_cps", "model.options.num_steps=1"],
            "model.options.num_steps: is 1, and flow_cps has no noise in its last step: nothing would train",
        ),
        (["model.options.method=flow_sdf"], "model.options.method: "),
        (
            [f"rollout.model_dir={FOLDER / 'tiny-pi0'}"],
            "model.options.cameras: the policy knows base_0_rgb, left_wrist_0_rgb, right_wrist_0_rgb, and the "
            "environment has top. Say which is which, {base_0_rgb: top}",
        ),
        (
            [f"rollout.model_dir={FOLDER / 'tiny-pi0'}", "model.options.asset_id=droid"],
            "rollout.model_dir: ",
        ),
        (
            [f"rollout.model_dir={FOLDER / 'tiny-pi0'}", "model.num_action_chunks=8"],
            "model.num_action_chunks: is 8, and the policy's horizon is 6 actions. Set it to 6 or less",
        ),
        (
            [f"rollout.model_dir={FOLDER / 'tiny-pi05'}", "model.options.cameras={base_0_rgb: top}"],
            "model.id: is pi0, and",
        ),
        (
            [f"rollout.model_dir={FOLDER / 'tiny-pi0'}", "model.options.cameras={base_0_rgb: top}"],
            "rollout.model_dir: its actions have 7 numbers, and those of pick 3: it is for another robot",
        ),
    ],
)
def test_problems(overrides: list[str], expected: str) -> None:
    found = problems(*overrides)
    assert any(problem.startswith(expected) for problem in found), found


def test_the_shipped_configs_are_good() -> None:
    assert problems() == []
    for name in ("tabletop_ppo_flow", "tabletop_ppo_flow_noise", "tabletop_grpo_flow", "tabletop_sft_flow"):
        load_config(f"embodiment/{name}")
    assert problems("model.id=pi05", "model.options.max_prompt_length=48") == []
    assert problems("model.id=smolvla", "model.options.method=flow_noise", "algorithm.logprob_type=token_level") == []
    assert problems("model.id=smolvla", "model.options.trainable=expert", "model.options.keep_prefix=true") == []


@pytest.mark.parametrize(
    ("name", "parameters", "trained", "most"),
    # of the three families as published, and a value head (and a noise head); of facts, GiB on one GPU
    [
        ("libero_ppo_pi0", 3_238_048_528, 314_713_120, 80),
        ("libero_ppo_pi05", 3_353_433_872, 430_098_464, 80),
        ("maniskill_ppo_pi05", 3_353_433_872, 430_098_464, 80),
        ("metaworld_ppo_smolvla", 402_737_376, 99_880_992, 40),
    ],
)
def test_recipes_are_as_large_as_what_is_published(name: str, parameters: int, trained: int, most: int) -> None:
    overrides = [
        "cluster.num_gpus_per_node=1",
        *(["model.options.keep_prefix=true"] if name == "libero_ppo_pi0" else []),
    ]
    config = load_config(f"embodiment/{name}", overrides, elsewhere=True)
    found = estimate(plan_of(config))
    heads = found.models["policy"].parameters - parameters
    assert 0 < heads < 3_000_000
    assert found.models["policy"].trained == trained + heads
    assert found.unknown == []
    rank = found.ranks["actor"]
    assert 8 * 2**30 < rank.device_bytes < most * 2**30
    if config.model.options.keep_prefix:
        tokens = 2 * 256 + 48
        each = 18 * 2 * tokens * 256 * 2 + tokens + 4 * 2048  # keys and values in bf16, the mask, the mean
        assert rank.host["fixed inputs"] == 64 * 384 * each


def test_cards_say_whose_a_published_directory_is(tmp_path: Path) -> None:
    from rlinf_lite.registry import POLICIES, policy_card

    for directory, wanted in (("tiny-pi0", "pi0"), ("tiny-pi05-lerobot", "pi05"), ("tiny-smolvla", "smolvla")):
        found = [name for name in POLICIES.names() if policy_card(name).recognises(FOLDER / directory, {})]
        assert found == [wanted]
    assert not any(policy_card(name).recognises(tmp_path, {}) for name in POLICIES.names())
    assert policy_card("openvla").recognises(tmp_path, {"model_type": "openvla"})
