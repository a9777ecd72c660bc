"""Hidden states, logits and tokens of the published code on a small checkpoint, from the same directory."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rlinf_lite.models import load_policy
from rlinf_lite.models.vla.inputs import resize_images
from rlinf_lite.models.vla.policy import OpenVLAPolicy
from tests.models.settings import openvla

DIRECTORY = Path(__file__).parent / "tiny_openvla"
GOLDEN = {name: torch.from_numpy(array) for name, array in np.load(DIRECTORY / "golden.npz").items()}
cases = pytest.mark.parametrize("case", [0, 1])


def load(**settings):
    policy = load_policy(DIRECTORY, openvla(**settings) if settings else None)
    assert isinstance(policy, OpenVLAPolicy)
    return policy.eval()


def inputs(policy, case):
    ids = GOLDEN[f"input_ids{case}"]
    ids = torch.where(ids == 29871, 3, ids)  # the small vocabulary's empty token
    return {
        "images": resize_images(GOLDEN[f"image{case}"][None, None], policy.cfg),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids, dtype=torch.bool),
    }


@cases
@torch.no_grad()
def test_parallel_decoding_equals_the_published_code(case):
    policy = load()
    states = policy._parallel_states(inputs(policy, case))
    logits = policy.language_model.lm_head(states)
    torch.testing.assert_close(states, GOLDEN[f"oft_hidden{case}"], atol=1e-4, rtol=0)
    torch.testing.assert_close(logits, GOLDEN[f"oft_logits{case}"], atol=1e-4, rtol=0)
    assert torch.equal(logits.argmax(-1), GOLDEN[f"oft_logits{case}"].argmax(-1))


@cases
@torch.no_grad()
def test_one_by_one_decoding_equals_the_published_code(case):
    policy = load(parallel_decoding=False)
    tokens = GOLDEN[f"ar_tokens{case}"]
    prompt, mask = policy._prompt(inputs(policy, case))
    given = policy._embed(tokens[:, :-1])
    mask = torch.cat([mask, mask.new_ones(given.shape[:2])], dim=1)
    logits = policy.language_model.lm_head(policy._language_states(torch.cat([prompt, given], dim=1), mask)[:, -7:])
    torch.testing.assert_close(logits, GOLDEN[f"ar_logits{case}"], atol=1e-4, rtol=0)
    assert torch.equal(logits.argmax(-1), tokens)


@cases
def test_actions_of_tokens_equal_the_published_code(case):
    policy = load()
    tokens = GOLDEN[f"oft_logits{case}"].argmax(-1).view(8, 7)  # of the whole vocabulary: text too stands for an action
    bins = (tokens - policy.cfg.first_action_id).clamp(0, 255)
    expected = GOLDEN[f"oft_actions_full_vocab_argmax{case}"].float()
    torch.testing.assert_close(policy.codec.decode(bins), expected, atol=1e-6, rtol=0)
