"""The engine against token-by-token decoding without a cache, alone and in company."""

import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlinf_lite.data.tokenizers import stop_token_ids
from rlinf_lite.generation import Generation, PromptError, SamplingError, SamplingParams, sequence_keys
from rlinf_lite.generation.engine import TransformersEngine
from rlinf_lite.models.sampling import uniform_noise
from rlinf_lite.models.text.causal_lm import CausalLM
from rlinf_lite.models.text.presets import CHAR_VOCAB_SIZE, preset
from rlinf_lite.models.training_options import TrainingOptions
from tests.models.zoo import tiny_model

LLAMA = preset("tiny") | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "initializer_range": 0.3}
QWEN2 = LLAMA | {"model_type": "qwen2"}
STOPS = tuple(range(4, 14))  # likely enough that responses end at different lengths


def make(config=LLAMA):
    torch.manual_seed(0)
    return CausalLM.from_config(config)


def make_prompts(num=7):
    rng = np.random.default_rng(0)
    return [rng.integers(4, CHAR_VOCAB_SIZE, rng.integers(1, 12)).tolist() for _ in range(num)]


@torch.no_grad()
def reference(model, prompt, params, key, sample):
    """A response whose every token comes from a pass over all tokens before it."""
    uniform, tokens, logprobs = uniform_noise(np.array([key]), params.max_tokens)[0], [], []
    for i in range(params.max_tokens):
        logits = model.language_model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, -1]
        logprob = torch.log_softmax(logits.double() / params.temperature, -1)
        if params.greedy or sample == params.n:
            token = int(logprob.argmax())
        else:
            cumulative = logprob.exp().cumsum(0)
            token = int((cumulative < uniform[i]).sum())
        tokens.append(token)
        logprobs.append(float(logprob[token]))
        if token in params.stop_token_ids:
            break
    return tokens, logprobs


def check(done, model, prompts, params, keys):
    assert [(g.index, g.sample) for g in done] == [
        (index, sample) for index in range(len(prompts)) for sample in range(params.num_sequences)
    ]
    for g in done:
        key = keys[g.index, min(g.sample, params.n - 1)]
        tokens, logprobs = reference(model, prompts[g.index], params, key, g.sample)
        assert g.token_ids == tokens
        np.testing.assert_allclose(g.logprobs, logprobs, atol=1e-5)
        assert g.finish_reason == ("stop" if tokens[-1] in params.stop_token_ids else "length")


@pytest.mark.parametrize("config", [LLAMA, QWEN2], ids=["llama", "qwen2"])
@pytest.mark.parametrize("max_batch_size", [1, 3, 64])
def test_equals_decoding_without_a_cache(config, max_batch_size):
    model, prompts = make(config), make_prompts()
    engine = TransformersEngine(model, max_batch_size, max_length=40)
    params = SamplingParams(20, temperature=1.3, n=2, stop_token_ids=STOPS, add_greedy=True)
    keys = sequence_keys(1, range(len(prompts)), params.n)
    done = engine.generate(prompts, params, keys)
    assert len({len(g.token_ids) for g in done}) > 3 and {g.finish_reason for g in done} == {"stop", "length"}
    check(done, model, prompts, params, keys)


def test_greedy_takes_the_likeliest():
    model, prompts = make(), make_prompts()
    params = SamplingParams(9, temperature=0.5, greedy=True)
    done = TransformersEngine(model, 4, 40).generate(prompts, params)
    check(done, model, prompts, params, sequence_keys(0, range(len(prompts)), 1))


def test_logprobs_equal_the_forward_passes():
    model, prompts = make(), make_prompts()
    params = SamplingParams(8, temperature=0.7, top_k=5, top_p=0.8)
    for g in TransformersEngine(model, 4, 40).generate(prompts, params):
        ids = torch.tensor([[*prompts[g.index], *g.token_ids]])
        scored = model(ids, torch.ones_like(ids), len(g.token_ids), temperature=0.7).logprobs[0]
        np.testing.assert_allclose(g.logprobs, scored.detach().numpy(), atol=1e-5)


def test_order_and_company_change_nothing():
    model, prompts = make(), make_prompts(9)
    params, ids = SamplingParams(15, n=2, stop_token_ids=STOPS), np.arange(9)
    keys = sequence_keys(3, ids, 2)
    alone = [TransformersEngine(model, 1, 40).generate([prompts[i]], params, keys[i : i + 1]) for i in ids]
    order = np.random.default_rng(1).permutation(9)
    together = TransformersEngine(model, 5, 40).generate([prompts[i] for i in order], params, keys[order])
    found = {(order[g.index], g.sample): g for g in together}
    for i, responses in enumerate(alone):
        for g in responses:
            assert found[i, g.sample].token_ids == g.token_ids
            np.testing.assert_allclose(found[i, g.sample].logprobs, g.logprobs, atol=1e-5)


def test_small_prefills_change_nothing():
    model, prompts = make(), make_prompts()
    params = SamplingParams(10, n=2, stop_token_ids=STOPS)
    keys = sequence_keys(0, range(len(prompts)), 2)
    whole, cut = (
        TransformersEngine(model, 8, 40, max_prefill_tokens=n).generate(prompts, params, keys) for n in (999, 12)
    )
    assert [g.token_ids for g in whole] == [g.token_ids for g in cut]


def test_stream_gives_responses_as_they_end():
    model, prompts = make(), make_prompts()
    params = SamplingParams(25, stop_token_ids=STOPS)
    keys = sequence_keys(1, range(len(prompts)), 1)
    stream = TransformersEngine(model, 64, 40).stream(prompts, params, keys)
    first = next(stream)
    rest = list(stream)
    lengths = [len(g.token_ids) for g in (first, *rest)]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]


def test_samples_of_a_prompt_differ_and_keys_repeat_them():
    engine = TransformersEngine(make(), 8, 40)
    params, keys = SamplingParams(12, n=4), sequence_keys(0, [5], 4)
    first, again, other = (
        [tuple(g.token_ids) for g in engine.generate([[7, 8]], params, k)]
        for k in (keys, keys, sequence_keys(1, [5], 4))
    )
    assert first == again and len(set(first) | set(other)) == 8


def test_a_model_in_training_mode_stays_in_it():
    model = make().train()
    model.prepare(TrainingOptions(gradient_checkpointing="full"))
    params, keys = SamplingParams(5), sequence_keys(0, [0], 1)
    done = TransformersEngine(model, 4, 40).generate([[7, 8]], params, keys)
    assert model.training
    assert done[0].token_ids == TransformersEngine(make(), 4, 40).generate([[7, 8]], params, keys)[0].token_ids


@pytest.mark.parametrize("how", ["dtype", "autocast"])
def test_bf16(how):
    model, prompts = make(), make_prompts()
    exact = TransformersEngine(model, 4, 40).generate(prompts, SamplingParams(1, greedy=True))
    if how == "dtype":
        model = model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        done = TransformersEngine(model, 4, 40).generate(prompts, SamplingParams(6, greedy=True))
    for g, e in zip(done, exact, strict=True):
        assert len(g.token_ids) == 6
        assert abs(g.logprobs[0] - e.logprobs[0]) < 0.2


def test_weights_that_change_elsewhere_change_here():
    engine, params = TransformersEngine(make(), 4, 40), SamplingParams(10, greedy=True)
    before = engine.generate([[7, 8]], params)
    with torch.no_grad():
        engine.model.get_parameter("language_model.model.norm.weight").neg_()
    assert engine.generate([[7, 8]], params) != before


def test_bad_prompts_are_named_before_anything_runs():
    engine = TransformersEngine(make(), 4, max_length=20)
    for prompt, message in (
        ([5] * 11, r"prompt 1 has 11 tokens, and 10 fit: max_length 20 - max_tokens 10"),
        ([], "prompt 1 has no tokens"),
        ([5, CHAR_VOCAB_SIZE], "ids from 5 to 100; the model's go from 0 to 99"),
    ):
        with pytest.raises(PromptError, match=message):
            engine.stream([[5], prompt], SamplingParams(10))
    with pytest.raises(SamplingError, match=r"keys are \[2, 1\].*\[1, 1\]"):
        engine.stream([[5]], SamplingParams(10), sequence_keys(0, [0, 1], 1))
    assert engine.generate([], SamplingParams(10)) == []
    assert isinstance(engine.generate([[5] * 10], SamplingParams(10))[0], Generation)


def test_models_that_it_cannot_serve_are_refused():
    with pytest.raises(ValueError, match="max_length is 1000, and the model has positions for 512"):
        TransformersEngine(make(), 4, 1000)
    sliding = QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    with pytest.raises(ValueError, match="sliding_attention"):
        TransformersEngine(make(sliding), 4, 40)
    with pytest.raises(ValueError, match="needs sdpa, not eager"):
        TransformersEngine(CausalLM.from_config(LLAMA, attn_implementation="eager"), 4, 40)


def test_responses_end_where_generation_config_says_too(tmp_path, repo):
    """Chat models may list the end of a turn there alone; transformers' own generate is the reference."""
    own = tiny_model("llama", 64, 0.0)
    prompt = [5, 9, 11, 20]
    answer = own.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    free = answer[0, 4:].tolist()
    end = next(token for i, token in enumerate(free[2:], 2) if token not in free[:i])
    own.generation_config.eos_token_id = [2, end]
    own.save_pretrained(tmp_path)
    for file in (repo / "assets" / "char_tokenizer").iterdir():
        shutil.copy(file, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, 4:].tolist()
    model = CausalLM.from_pretrained(tmp_path)
    model.save_pretrained(tmp_path / "again")
    for one in (model, CausalLM.from_pretrained(tmp_path / "again")):
        stops = stop_token_ids(AutoTokenizer.from_pretrained(tmp_path), one.language_model)
        params = SamplingParams(12, greedy=True, stop_token_ids=stops)
        found = TransformersEngine(one, 2, 24).generate([prompt], params, None)[0]
        assert (found.token_ids, found.finish_reason) == (expected, "stop") and len(expected) < 12
