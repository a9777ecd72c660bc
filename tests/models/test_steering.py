"""DSRL: a frozen flow that acts from noise that is given to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_lite.config import ConfigError, load_config
from rlinf_lite.envs import get_env_spec, make_env
from rlinf_lite.models import NOISE_KEY, build_policy, load_policy
from rlinf_lite.models.sampling import START_NOISE, noise_keys

FLOW = "assets/tabletop_flow"


def seen() -> tuple[Any, dict[str, Any]]:
    cfg = load_config("embodiment/tabletop_dsrl_flow")
    env = make_env(cfg.env, "train", 6)
    obs = env.reset(list(range(6)))
    return get_env_spec(env, obs), {**obs, NOISE_KEY: noise_keys(3, np.arange(6), 5)}


def test_with_the_noise_that_it_would_have_drawn_a_flow_acts_as_it_does() -> None:
    _, obs = seen()
    flow: Any = load_policy(FLOW)
    shape = flow.cfg.horizon, flow.cfg.max_action_dim
    start = flow.sampler.draw_noise(obs[NOISE_KEY], shape)[:, 0]
    with torch.inference_mode():
        drawn = flow.predict_action_batch(obs, "sampled").actions
        given = flow.predict_action_batch({**obs, START_NOISE: start}, "sampled").actions
        other = flow.predict_action_batch({**obs, START_NOISE: start + 1}, "sampled").actions
    assert torch.equal(drawn, given) and not torch.equal(drawn, other)


def test_it_acts_from_what_it_chooses_and_a_checkpoint_has_the_flow(tmp_path: Path) -> None:
    spec, obs = seen()
    policy: Any = build_policy(load_config("embodiment/tabletop_dsrl_flow"), spec).eval()
    trained = {name for name, _ in policy.named_parameters()}
    assert trained and all(name.startswith("head.") for name in trained)
    before = {name: x.clone() for name, x in policy.flow.state_dict().items()}
    with torch.inference_mode():
        acted = policy.predict_action_batch(obs, "train")
        start = 1.5 * acted.forward_inputs["chosen"].view(6, 4, 3)
        expected = policy.flow.predict_action_batch({**obs, START_NOISE: start}, "sampled").actions
    assert torch.equal(acted.actions, expected) and start.abs().max() <= 1.5
    noise = torch.randn(6, 1, policy.chosen_dim)
    chosen, logprobs = policy.sample_with_logprob(policy.sft_inputs(obs), noise)
    (chosen.sum() + logprobs.sum()).backward()
    assert all(x.grad is None for x in policy.flow.parameters())
    assert policy.head.mean.weight.grad.abs().sum() > 0 and policy.head.encoder.words.weight.grad.abs().sum() > 0

    policy.save_pretrained(tmp_path)
    again: Any = load_policy(tmp_path).eval()
    with torch.inference_mode():
        assert torch.equal(
            again.predict_action_batch(obs, "greedy").actions, policy.predict_action_batch(obs, "greedy").actions
        )
    assert all(torch.equal(x, again.flow.state_dict()[name]) for name, x in before.items())


def test_another_sentence_is_another_choice() -> None:
    spec, obs = seen()
    policy = build_policy(load_config("embodiment/tabletop_dsrl_flow"), spec)
    changed = {**obs, "instruction": ["push it away"] * 6}
    with torch.inference_mode():
        one, two = (policy.predict_action_batch(x, "train").forward_inputs["chosen"] for x in (obs, changed))
    assert not torch.equal(one, two)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.options.flow_dir=null"], r"flow_dir: is null, and there is no flow to steer"),
        (["model.options.flow_dir=nowhere"], r"flow_dir: nowhere holds no policy"),
        (["off_policy.random_steps=2"], r"random_steps: is above 0"),
        (["replay.shares={demonstrations: 1.0}"], r"replay\.shares: gives demonstrations a share"),
    ],
)
def test_what_cannot_be_steered_is_named(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config("embodiment/tabletop_dsrl_flow", overrides)
