"""Steps that are recorded as graphs against those that are launched; graphs are emulated."""

import copy

import numpy as np
import pytest
import torch

from rlinf_lite.generation import SamplingParams, engine, sequence_keys
from rlinf_lite.generation.engine import TransformersEngine
from rlinf_lite.models import graphs
from rlinf_lite.models.text.causal_lm import CausalLM
from tests.generation.test_newer_weights import Changing, check_scored
from tests.generation.test_transformers_engine import LLAMA, QWEN2, STOPS, make, make_prompts
from tests.models.emulated_graphs import emulation as emulation
from tests.models.zoo import VOCAB_SIZE, tiny_model

PARAMS = SamplingParams(20, temperature=0.9, n=2, stop_token_ids=STOPS[:3], add_greedy=True)


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    """So that rows and columns are rounded, and responses go on over several of these sizes."""
    monkeypatch.setattr(engine, "_ROWS", 2)
    monkeypatch.setattr(engine, "_COLUMNS", 4)


def of_family(family):
    return CausalLM(tiny_model(family, 64)).requires_grad_(False)


def generate(model, recorded, monkeypatch, params=PARAMS, prompts=None, max_batch_size=5):
    monkeypatch.setattr(graphs, "enabled", recorded)
    prompts = prompts or make_prompts(9)
    keys = sequence_keys(0, range(len(prompts)), params.n)
    return TransformersEngine(model, max_batch_size, 40).generate(prompts, params, keys)


def check_equal(found, expected):
    assert [g.token_ids for g in found] == [g.token_ids for g in expected]
    assert [g.finish_reason for g in found] == [g.finish_reason for g in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


@pytest.mark.parametrize("max_batch_size", [1, 5, 64])
@pytest.mark.parametrize("config", [LLAMA, QWEN2], ids=["llama", "qwen2"])
def test_tokens_are_those_of_launched_steps(emulation, monkeypatch, config, max_batch_size):
    """More requests than rows, of all lengths, and rows that end, move, and are free."""
    found, expected = (generate(make(config), x, monkeypatch, max_batch_size=max_batch_size) for x in (True, False))
    assert len({len(g.token_ids) for g in expected}) > 3
    check_equal(found, expected)
    assert 3 < emulation.recorded < emulation.replayed / 2


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text", "mixtral", "phi3", "opt", "gpt_neox", "olmo2", "qwen3_moe"])
def test_families(emulation, monkeypatch, family):
    prompts = [[token % VOCAB_SIZE for token in prompt] for prompt in make_prompts(9)]
    found, expected = (generate(of_family(family), x, monkeypatch, prompts=prompts) for x in (True, False))
    check_equal(found, expected)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(20, greedy=True),
        SamplingParams(7, n=3, top_k=9, top_p=0.8),
        SamplingParams(1, n=3),
        SamplingParams(20, n=3, top_p=0.9, add_greedy=True, stop_token_ids=STOPS),
    ],
    ids=["greedy", "truncated", "one token", "greedy ones among them"],
)
def test_all_ways_to_draw(emulation, monkeypatch, params):
    found, expected = (generate(make(), recorded, monkeypatch, params) for recorded in (True, False))
    check_equal(found, expected)


def test_few_recordings_serve_a_stream(emulation, monkeypatch):
    monkeypatch.setattr(engine, "_SIZES", 2)
    generate(make(), True, monkeypatch, max_batch_size=16)  # and the two short ones that the engine begins with
    assert emulation.recorded <= 4 + 2 and emulation.replayed >= 40


class Moving(Changing):
    """Whose weights are in other memory each time, as what was gathered or came back from the host is."""

    def take(self, offer):
        self.version += 1
        torch.manual_seed(self.version)
        for parameter in self.model.parameters():
            parameter.data = parameter.data + 0.05 * torch.randn_like(parameter)
        self.models[self.version] = copy.deepcopy(self.model)


@pytest.mark.parametrize("source", [Changing, Moving])
@pytest.mark.parametrize("within", [True, False])
def test_newer_weights(emulation, within, source):
    model, prompts = make(QWEN2), make_prompts(9)
    rows = TransformersEngine(model, 5, 40)
    rows.weights, rows.within_responses = source(model, at=(4, 9, 10, 22, 40)), within
    params = SamplingParams(20, n=2, temperature=0.9, stop_token_ids=STOPS[:3])
    done = rows.generate(prompts, params, sequence_keys(0, range(9), 2))
    assert rows.weights.version > 1
    check_scored(done, prompts, rows.weights)
    assert 3 < emulation.recorded < emulation.replayed


def test_a_second_stream_reads_where_weights_are_then(emulation, monkeypatch):
    model = make()
    one, params, keys = TransformersEngine(model, 5, 40), SamplingParams(20), sequence_keys(0, range(9), 1)
    before = one.generate(make_prompts(9), params, keys)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter + 0.05
    found = one.generate(make_prompts(9), params, keys)
    check_equal(found, generate(model, False, monkeypatch, params))
    assert [g.token_ids for g in found] != [g.token_ids for g in before]


def test_weights_that_move_while_a_caller_has_a_response(emulation, monkeypatch):
    """An actor in the same process may give their memory back, and have them again elsewhere."""
    model, prompts, keys = make(), make_prompts(9), sequence_keys(0, range(9), PARAMS.n)
    expected = generate(model, False, monkeypatch)
    monkeypatch.setattr(graphs, "enabled", True)
    done = []
    for generation in TransformersEngine(model, 5, 40).stream(prompts, PARAMS, keys):
        done.append(generation)
        for tensor in model.parameters():
            gone, tensor.data = tensor.data, tensor.data.clone()
            gone.fill_(torch.nan)
    check_equal(sorted(done, key=lambda g: (g.index, g.sample)), expected)


@pytest.mark.parametrize("how", ["recording breaks", "the model waits"])
def test_what_cannot_be_recorded_is_launched(emulation, monkeypatch, caplog, how):
    model = make()
    expected = generate(model, False, monkeypatch)
    if how == "recording breaks":
        emulation.breaks = True
    else:
        rotary = model.language_model.model.rotary_emb
        rotary.register_forward_pre_hook(
            lambda _, args, named: named["position_ids"].max().item() and None, with_kwargs=True
        )
    check_equal(generate(model, True, monkeypatch), expected)
    check_equal(generate(model, True, monkeypatch), expected)
    reason = "an emulated one" if how == "recording breaks" else "waits for the GPU"
    said = [x.getMessage() for x in caplog.records if "cannot be recorded as a CUDA graph" in x.getMessage()]
    assert len(said) == 1 and reason in said[0] and emulation.replayed == 0


def test_off_or_on_a_cpu_nothing_is_recorded(monkeypatch):
    monkeypatch.setattr(graphs, "_captured", None)
    assert graphs.enabled and not graphs.can_record(torch.device("cpu"))
    generate(make(), True, monkeypatch)
    assert graphs.can_record(torch.device("cuda", 0))
    monkeypatch.setattr(graphs, "enabled", False)
    assert not graphs.can_record(torch.device("cuda", 0))
