"""Weights that change while an engine generates: every token is drawn from the weights that it is marked with."""

import copy

import numpy as np
import pytest
import torch

from rlinf_lite.generation import SamplingParams, sequence_keys
from rlinf_lite.generation.engine import TransformersEngine
from tests.generation.test_transformers_engine import QWEN2, STOPS, make, make_prompts


class Changing:
    """Offers version 1, 2, ... after so many looks; each changes the weights."""

    def __init__(self, model, at):
        self.model, self.version, self._looks, self._at = model, 0, 0, at
        self.models = {0: copy.deepcopy(model)}

    def offered(self):
        self._looks += 1
        return "an offer" if self._looks in self._at else None

    def take(self, offer):
        assert offer == "an offer"
        self.version += 1
        with torch.no_grad():
            torch.manual_seed(self.version)
            for parameter in self.model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
        self.models[self.version] = copy.deepcopy(self.model)


def generate(within, at, max_batch_size=5, **sizes):
    model, prompts = make(QWEN2), make_prompts(9)
    engine = TransformersEngine(model, max_batch_size, 40, **sizes)
    engine.weights, engine.within_responses = Changing(model, at), within
    params = SamplingParams(20, n=2, temperature=0.9, stop_token_ids=STOPS[:3])
    done = engine.generate(prompts, params, sequence_keys(0, range(9), 2))
    assert len(done) == 18 and all(len(g.versions) == len(g.token_ids) for g in done)
    return done, prompts, engine.weights


def check_scored(done, prompts, weights):
    """Against a whole pass of each version's own model over the response."""
    for g in done:
        ids = torch.tensor([[*prompts[g.index], *g.token_ids]])
        for version in set(g.versions):
            scored = weights.models[version](ids, torch.ones_like(ids), len(g.token_ids), temperature=0.9).logprobs[0]
            of_it = np.array(g.versions) == version
            np.testing.assert_allclose(np.array(g.logprobs)[of_it], scored.detach().numpy()[of_it], atol=2e-5)


@pytest.mark.parametrize(
    "sizes", [{}, {"max_prefill_tokens": 20}, {"max_batch_size": 64}], ids=["", "small passes", "all"]
)
def test_within_responses(sizes):
    done, prompts, weights = generate(True, at=(4, 9, 10, 22), **sizes)
    assert weights.version == 4
    assert any(len(set(g.versions)) > 1 for g in done) and all(g.versions == sorted(g.versions) for g in done)
    check_scored(done, prompts, weights)


def test_between_responses():
    done, prompts, weights = generate(False, at=(4, 30))
    assert weights.version == 2
    assert all(len(set(g.versions)) == 1 for g in done) and len({g.versions[0] for g in done}) > 1
    check_scored(done, prompts, weights)


@pytest.mark.parametrize("within", [False, True])
def test_weights_that_come_at_the_very_end_are_taken(within):
    whole = generate(within, at=())[2]._looks
    assert generate(within, at=(whole - 1, whole))[2].version >= 1


def test_unchanged_weights_change_nothing():
    class Same(Changing):
        def take(self, offer):
            self.version += 1

    model, prompts = make(), make_prompts(9)
    params, keys = SamplingParams(20, n=2, stop_token_ids=STOPS[:3]), sequence_keys(0, range(9), 2)
    expected = TransformersEngine(model, 5, 40).generate(prompts, params, keys)
    for within in (False, True):
        engine = TransformersEngine(model, 5, 40)
        engine.weights, engine.within_responses = Same(model, at=(3, 8, 15)), within
        found = engine.generate(prompts, params, keys)
        assert [g.token_ids for g in found] == [g.token_ids for g in expected]
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert max(g.versions[-1] for g in found) == 3
