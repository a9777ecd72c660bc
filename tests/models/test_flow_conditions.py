"""RECAP's condition in the prompts of flow policies, and guidance."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlinf_lite.config.schema import ModelConfig
from rlinf_lite.envs import EnvSpec
from rlinf_lite.models import NOISE_KEY, load_policy
from rlinf_lite.models.check import random_obs
from rlinf_lite.models.conditions import CONDITION, NEGATIVE, POSITIVE, UNSAID, conditioned, drawn_conditions
from rlinf_lite.models.flow.policy import Pi0Policy, Pi05Policy, SmolVLAPolicy
from rlinf_lite.models.sampling import noise_keys

SPEC = EnvSpec(3, 4, {"top": (64, 64)}, [-1.0, -2.0, 0.0], [1.0, 2.0, 1.0], 24, True)
FAMILIES = (Pi0Policy, Pi05Policy, SmolVLAPolicy)
SENTENCE = "pick up the red block"


def policy_with(cls, guidance):
    options = {"guidance": guidance, "max_prompt_length": 96}
    torch.manual_seed(0)
    return cls.from_config(ModelConfig(id=cls.policy_id, num_action_chunks=2, options=options), SPEC).eval()


def observations(sentence=SENTENCE):
    obs = {**random_obs(SPEC), "instruction": [sentence] * 5}
    return {**obs, NOISE_KEY: noise_keys(0, np.arange(5), 0)}


def acted(policy, obs, mode="sampled"):
    with torch.inference_mode():
        return policy.predict_action_batch(obs, mode).actions


@pytest.mark.parametrize("cls", FAMILIES)
def test_guidance_of_1_is_the_conditional_pass_and_of_0_the_unconditional_one(cls):
    plain, positive = policy_with(cls, None), conditioned([SENTENCE])[0]
    obs = observations()
    by_weight = {w: acted(policy_with(cls, w), obs) for w in (0.0, 1.0, 2.0)}
    assert torch.equal(by_weight[1.0], acted(plain, observations(positive)))
    assert torch.equal(by_weight[0.0], acted(plain, obs))
    assert not torch.equal(by_weight[0.0], by_weight[1.0]) and not torch.equal(by_weight[2.0], by_weight[1.0])


@pytest.mark.parametrize("guidance", [1.0, 1.5])
def test_a_checkpoint_acts_with_its_guidance_and_explored_actions_are_scored_with_it(tmp_path, guidance):
    policy, obs = policy_with(Pi0Policy, guidance), observations()
    policy.save_pretrained(tmp_path)
    assert torch.equal(acted(load_policy(tmp_path).eval(), obs), acted(policy, obs))
    with torch.inference_mode():
        explored = policy.predict_action_batch(obs)
    scored = policy({name: x.clone() for name, x in explored.forward_inputs.items()})
    assert torch.equal(scored.logprobs, explored.logprobs)


@pytest.mark.parametrize("cls", FAMILIES)
def test_conditions_give_different_tokens_and_without_one_a_row_is_as_without_guidance(cls):
    obs, policy = observations(), policy_with(cls, 1.0)
    obs["state"][:] = obs["state"][0]
    tokens = policy.sft_inputs({**obs, CONDITION: [POSITIVE, NEGATIVE, UNSAID, UNSAID, UNSAID]})["tokens"]
    assert len({tuple(row) for row in tokens.tolist()}) == 3
    assert torch.equal(tokens[2], policy_with(cls, None).sft_inputs(obs)["tokens"][2])
    assert torch.equal(tokens[0], policy.sft_inputs(obs)["tokens"][0]), "imitation without labels is of good actions"


def test_conditions_are_dropped_by_seed_step_and_row_alone():
    positive, rows = np.arange(20_000) % 3 == 0, np.arange(20_000)
    keys = noise_keys(0, rows, 7)
    found = drawn_conditions(positive, keys, 0.2)
    assert abs((found == UNSAID).mean() - 0.2) < 0.01
    assert (found[found != UNSAID] == np.where(positive, POSITIVE, NEGATIVE)[found != UNSAID]).all()
    some = rows[::-1][:100]
    assert (drawn_conditions(positive[some], noise_keys(0, some, 7), 0.2) == found[some]).all()
    assert (drawn_conditions(positive, noise_keys(0, rows, 8), 0.2) != found).any()
    assert (drawn_conditions(positive, noise_keys(1, rows, 7), 0.2) != found).any()
    assert (drawn_conditions(positive, keys, 1.0) == UNSAID).all() and UNSAID not in drawn_conditions(positive, keys, 0)
    time = policy_with(Pi0Policy, 1.0).sampler.draw_imitation(keys, (2, 3))["time"].numpy()
    assert abs(time[found == UNSAID].mean() - time.mean()) < 0.02, "the drop has nothing to do with the row's time"


def test_other_guidance_than_the_checkpoints_is_noted(tmp_path, caplog):
    policy = policy_with(Pi0Policy, 1.0)
    policy.save_pretrained(tmp_path)
    model = ModelConfig(id="pi0", num_action_chunks=2, options={"guidance": 3.0})
    assert load_policy(tmp_path, model).cfg == replace(policy.cfg, guidance=3.0)
    assert "guidance 3.0, where it was 1.0" in caplog.text
