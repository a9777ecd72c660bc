"""Every causal family of transformers against its own forward pass: it agrees, or it is refused.

The models have dropout and noise configured, windows that the rows exceed, and heads that scale and cap.
"""

import logging

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import pad
from transformers import AutoModelForTokenClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

from rlinf_lite.generation import SamplingParams, sequence_keys
from rlinf_lite.generation.engine import TransformersEngine
from rlinf_lite.models.text.causal_lm import CausalLM, CausalValueModel, UnsupportedModelError
from rlinf_lite.models.text.supported import check_supported
from rlinf_lite.models.training_options import TrainingOptions
from tests.models.zoo import FAMILIES, VOCAB_SIZE, names, tiny_config, tiny_model

MULTIMODAL = names("""
    blt dots3_note emu3 fuyu gemma3 gemma3n gemma4 gemma4_unified git got_ocr2 llama4 mllama
    moss_transcribe_diarize phi4_multimodal qwen3_5 qwen3_5_moe qwen4_exp musicgen musicgen_melody
    """)
"""Need more than token ids, or more sizes than fit here; their text parts are families of their own."""
NOT_BUILT = {
    **dict.fromkeys(MULTIMODAL, "not a model of text alone"),
    "dbrx": "transformers cannot build its default config",
    "gemma4_assistant": "drafts tokens for another model",
    "gemma4_unified_assistant": "drafts tokens for another model",
    "reformer": "axial positions of fixed lengths",
    "xlstm": "its kernels compute lengths of whole chunks",
    "xmod": "needs a language for every row",
    "zamba": "transformers cannot build it with few layers",
}
BIDIRECTIONAL = names("""
    bert bert-generation big_bird camembert cpmant data2vec-text electra ernie megatron-bert rembert
    roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet
    """)
COUNTS_PADDING = names("""
    bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet
    recurrent_gemma rwkv trocr
    """)
OTHER_OUTPUT = ["llama4_text", "modernbert-decoder"]
NOT_SCORED = {*BIDIRECTIONAL, *COUNTS_PADDING, *OTHER_OUTPUT}
NOT_GENERATED = {
    *names("""
    axk2 bailing_hybrid bamba bloom codegen deepseek_v32 deepseek_v4 dots3_note_text falcon_h1
    falcon_mamba flint gemma2 gemma4_unified_text glm_moe_dsa gpt_neo gpt_neox_japanese gpt_oss gptj
    granite_swa granitemoe_swa granitemoehybrid hrm_text hy_v4 inkling2_text inkling_text jamba
    kimi_linear lfm3 mamba mamba2 mimo_v2_flash minimax mpt nemotron_h olmo_hybrid openai-gpt
    qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text vaultgemma xglm zamba2 zaya
    """)
}
"""Without sdpa, with recurrent or indexed layers, or with a cache of their own."""

WINDOW, LONGEST, RESPONSE = 8, 24, 5
EXACT = 1e-5
"""Of the largest logit, float32."""


@pytest.fixture(autouse=True, scope="module")
def silence():
    logging.disable(logging.WARNING)  # of kernels that are not installed
    yield
    logging.disable(logging.NOTSET)


def rows(lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator) for length in lengths]


def padded(tokens):
    width = max(map(len, tokens))
    left = [(width - len(row), 0) for row in tokens]
    mask = [pad(torch.ones_like(row), where) for row, where in zip(tokens, left, strict=True)]
    return torch.stack([pad(row, where) for row, where in zip(tokens, left, strict=True)]), torch.stack(mask)


@torch.no_grad()
def own_logits(model, row):
    """Of a row alone, without padding or cache."""
    return model(input_ids=row[None], use_cache=False).logits[0].float()


def of_tokens(logits, row, temperature=1.0):
    """Log-probabilities of the last tokens of a row, and what rounding may change."""
    found = torch.log_softmax(logits[:-1] / temperature, -1).gather(1, row[1:, None])[-RESPONSE:, 0]
    return found, EXACT * float(logits.abs().max()) / temperature


def check_generation(model, own, length):
    prompts = [row.tolist() for row in rows((length - RESPONSE, 2))]
    params = SamplingParams(RESPONSE, temperature=0.7, n=2, add_greedy=True)
    for done in TransformersEngine(model, 4, length).generate(prompts, params, sequence_keys(0, range(2), 2)):
        row = torch.tensor([*prompts[done.index], *done.token_ids])
        logits = own_logits(own, row)
        expected, limit = of_tokens(logits, row, 0.7)
        np.testing.assert_allclose(done.logprobs, expected, rtol=0, atol=limit)
        if done.sample == params.n:
            assert done.token_ids == logits[:-1].argmax(-1)[-RESPONSE:].tolist()


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in NOT_BUILT])
def test_family(family):
    own = tiny_model(family, WINDOW)
    tokens = rows((LONGEST, 9))
    expected = [of_tokens(own_logits(own, row), row) for row in tokens] if family not in NOT_SCORED else []
    model = CausalLM(own).train()
    if family in NOT_SCORED:
        with pytest.raises(UnsupportedModelError, match=f"'{family}'"):
            check_supported(model, LONGEST)
        return
    check_supported(model, LONGEST)
    if model.fsdp_units():
        model.prepare(TrainingOptions(gradient_checkpointing="full"))
    ids, mask = padded(tokens)
    output = model(ids, mask, RESPONSE)
    for found, (logprobs, limit) in zip(output.logprobs, expected, strict=True):
        torch.testing.assert_close(found, logprobs, rtol=0, atol=limit)
    assert torch.equal(model(ids, mask, RESPONSE).logprobs, output.logprobs)
    output.logprobs.sum().backward()
    assert own.get_input_embeddings().weight.grad.abs().sum() > 0

    if family in NOT_GENERATED:
        with pytest.raises(UnsupportedModelError):
            TransformersEngine(model, 4, WINDOW)
        return
    length = LONGEST
    try:
        TransformersEngine(model, 4, LONGEST)
    except UnsupportedModelError as error:
        assert f"see {WINDOW} tokens" in str(error)
        length = WINDOW
    check_generation(model, own, length)


def test_every_family_is_there():
    """Those of a newer transformers are tried; the lists name what is there, and most are supported."""
    assert set(NOT_BUILT) | NOT_SCORED | NOT_GENERATED <= set(FAMILIES)
    assert len(set(FAMILIES) - set(NOT_BUILT) - NOT_SCORED) > 120
    assert len(set(FAMILIES) - set(NOT_BUILT) - NOT_SCORED - NOT_GENERATED) > 80


CRITICS = sorted(set(MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES) & set(FAMILIES) - set(NOT_BUILT))


@pytest.mark.parametrize("family", CRITICS)
def test_critic(family):
    """Values are those of the token classifier's own forward, in every call; or the family is refused."""
    torch.manual_seed(0)
    config = tiny_config(family, WINDOW)
    config.num_labels = 1
    try:
        own = AutoModelForTokenClassification.from_config(config, attn_implementation="sdpa").eval()
    except ValueError:
        own = AutoModelForTokenClassification.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.normal_(0, 0.3)
    tokens = rows((LONGEST, 9))
    critic = CausalValueModel(own).train()
    if family in NOT_SCORED - set(OTHER_OUTPUT):
        with pytest.raises(UnsupportedModelError, match=f"'{family}'"):
            check_supported(critic, LONGEST)
        return
    expected = torch.stack([own_logits(own, row)[-RESPONSE - 1 : -1, 0] for row in tokens])
    check_supported(critic, LONGEST)
    values = critic(*padded(tokens), RESPONSE)
    torch.testing.assert_close(values, expected, rtol=0, atol=EXACT * float(1 + expected.abs().max()))
    assert torch.equal(critic(*padded(tokens), RESPONSE), values)


def test_a_family_nobody_heard_of_is_refused():
    """Not by a list: what its forward does to the logits shows."""

    class Shifted(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * torch.linspace(0.5, 1.5, VOCAB_SIZE)
            return output

    model = CausalLM(Shifted(tiny_config("llama", WINDOW)))
    with pytest.raises(UnsupportedModelError, match=r"'llama' with this config .* differ by"):
        check_supported(model, LONGEST)
    with pytest.raises(UnsupportedModelError, match=r"generated log-probabilities .* differ by"):
        TransformersEngine(CausalLM(Shifted(tiny_config("llama", WINDOW)).requires_grad_(False)), 4, LONGEST)


def test_frequencies_that_depend_on_the_longest_row_are_refused_beyond_their_length():
    """Phi-3's long context: a short row in long company has other frequencies than alone."""
    factors = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = tiny_config("phi3", 64)
    config.rope_parameters = factors | {"original_max_position_embeddings": 16}
    config.original_max_position_embeddings = 16
    torch.manual_seed(0)
    model = CausalLM(transformers.Phi3ForCausalLM._from_config(config, attn_implementation="sdpa"))
    check_supported(model, 16)
    with pytest.raises(UnsupportedModelError, match=r"a smaller data.max_prompt_length"):
        check_supported(model, LONGEST)
