"""What does not fit a flow policy is said before a run starts, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf_lite.config import ConfigError, load_config
from tests.models.flow_checkpoints import FOLDER

CONFIG = "embodiment/tabletop_ppo_flow"


def problems(*overrides: str) -> list[str]:
    try:
        load_config(CONFIG, overrides)
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.temperature=1.3"], "model.temperature: is 1.3, and flows have none"),
        (["model.options.noise_range=[0.2,0.1]"], "model.options.noise_range: from 0.2 to 0.1 is no range"),
        (["env.options.obs_mode=state"], "model.id: pi0 looks at images, and pick shows none"),
        (["model.options.horizon=3"], "model.num_action_chunks: is 4, and the policy thinks of 3 (its horizon)"),
        (["model.options.cameras={side: top}"], "model.options.cameras: the policy knows no camera side. It knows top"),
        (["model.options.state_in_prompt=true"], "model.options.state_in_prompt: is true, and pi0 has no state in its"),
        (["model.options.noise_level=0"], "model.options.noise_level: "),
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
            "model.num_action_chunks: is 8, and the policy thinks of 6 (its horizon). Set it to 6 or less",
        ),
        (
            [f"rollout.model_dir={FOLDER / 'tiny-pi05'}", "model.options.cameras={base_0_rgb: top}"],
            "model.id: is pi0, and",
        ),
        (
            [f"rollout.model_dir={FOLDER / 'tiny-pi0'}", "model.options.cameras={base_0_rgb: top}"],
            "rollout.model_dir: its actions have 7 numbers, and those of pick 3: it is of another robot",
        ),
    ],
)
def test_problems(overrides: list[str], expected: str) -> None:
    found = problems(*overrides)
    assert any(problem.startswith(expected) for problem in found), found


def test_the_shipped_configs_are_good() -> None:
    assert problems() == []
    assert problems("model.id=pi05", "model.options.max_prompt_length=48") == []
    assert problems("model.id=smolvla", "model.options.method=flow_noise", "algorithm.logprob_type=token_level") == []


def test_cards_say_whose_a_published_directory_is(tmp_path: Path) -> None:
    from rlinf_lite.registry import POLICIES, policy_card

    for directory, wanted in (("tiny-pi0", "pi0"), ("tiny-pi05-lerobot", "pi05"), ("tiny-smolvla", "smolvla")):
        found = [name for name in POLICIES.names() if policy_card(name).recognises(FOLDER / directory, {})]
        assert found == [wanted]
    assert not any(policy_card(name).recognises(tmp_path, {}) for name in POLICIES.names())
    assert policy_card("openvla").recognises(tmp_path, {"model_type": "openvla"})
