"""Language models as policies and critics: what they score, and directories that others can read."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from rlinf_lite.config import load_config
from rlinf_lite.models import CheckpointFormatError
from rlinf_lite.models.text import causal_lm
from rlinf_lite.models.text.causal_lm import CausalLM, CausalValueModel, SequenceShapeError
from rlinf_lite.models.text.presets import CHAR_VOCAB_SIZE, preset
from rlinf_lite.models.training_options import TrainingOptions
from rlinf_lite.shipped import shipped
from rlinf_lite.training.precision import cast_parameters
from rlinf_lite.workers.reasoning.base import build_model
from tests.models.zoo import VOCAB_SIZE, tiny_config, tiny_model

TOKENIZER = shipped("assets") / "char_tokenizer"
LLAMA = preset("tiny") | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
QWEN2 = LLAMA | {"model_type": "qwen2", "tie_word_embeddings": False}


def make(config=LLAMA, cls=CausalLM):
    torch.manual_seed(0)
    return cls.from_config(config, TOKENIZER).eval()


def rows(lengths=(9, 5, 12), padding=0):
    """Left-padded rows of random tokens."""
    generator = torch.Generator().manual_seed(1)
    width = max(lengths) + padding
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(4, CHAR_VOCAB_SIZE, (length,), generator=generator)
        mask[row, width - length :] = 1
    return ids, mask


def reference(model, ids, mask, num_response, temperature):
    """Each row alone and unpadded, all logits, through transformers' own forward."""
    logprobs, entropy = [], []
    for row, valid in zip(ids, mask.bool(), strict=True):
        tokens = row[valid]
        logits = model.language_model(input_ids=tokens[None]).logits[0, :-1] / temperature
        distribution = torch.distributions.Categorical(logits=logits)
        logprobs.append(distribution.log_prob(tokens[1:])[-num_response:])
        entropy.append(distribution.entropy()[-num_response:])
    return torch.stack(logprobs), torch.stack(entropy)


@pytest.mark.parametrize("config", [LLAMA, QWEN2], ids=["llama", "qwen2"])
@pytest.mark.parametrize("padding", [0, 3])
def test_scores_are_those_of_each_row_alone(config, padding):
    model = make(config)
    ids, mask = rows(padding=padding)
    output = model(ids, mask, 4, temperature=0.7)
    logprobs, entropy = reference(model, ids, mask, 4, 0.7)
    torch.testing.assert_close(output.logprobs, logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(output.entropy, entropy, atol=1e-5, rtol=0)


def test_chunks_of_logits_change_neither_scores_nor_gradients(monkeypatch):
    model = make()
    ids, mask = rows()

    def scored():
        model.zero_grad()
        output = model(ids, mask, 4)
        (output.logprobs.sum() + 0.1 * output.entropy.sum()).backward()
        return output.logprobs.detach(), model.language_model.model.embed_tokens.weight.grad.clone()

    whole = scored()
    monkeypatch.setattr(causal_lm, "LOGITS_PER_CHUNK", 5 * CHAR_VOCAB_SIZE)
    torch.testing.assert_close(scored(), whole)


@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite", "qwen2"])
def test_heads_that_cap_or_scale_their_logits_are_transformers_own(monkeypatch, family):
    """A cap, a factor, a divisor and neither of them. No logits are computed but those of responses, in chunks."""
    own = tiny_model(family, window=64)
    ids = torch.randint(3, VOCAB_SIZE, (3, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = torch.log_softmax(own(input_ids=ids, use_cache=False).logits[:, -6:-1].float(), -1)
    computed = []
    own.get_output_embeddings().register_forward_hook(lambda _module, inputs, _output: computed.append(len(inputs[0])))
    monkeypatch.setattr(causal_lm, "LOGITS_PER_CHUNK", 4 * VOCAB_SIZE)
    with torch.no_grad():
        output = CausalLM(own)(ids, torch.ones_like(ids), 5)
    torch.testing.assert_close(output.logprobs, expected.gather(-1, ids[:, -5:, None])[..., 0], atol=1e-5, rtol=0)
    torch.testing.assert_close(output.entropy, -(expected.exp() * expected).sum(-1), atol=1e-5, rtol=0)
    assert computed == [4, 4, 4, 3]


def test_checkpointing_keeps_the_gradients():
    ids, mask = rows()
    gradients, passes = [], []
    for checkpointing in (False, True):
        model = make().train()
        layer = model.language_model.model.layers[0].mlp.up_proj
        layer.register_forward_hook(lambda *_, checkpointing=checkpointing: passes.append(checkpointing))
        if checkpointing:
            model.prepare(TrainingOptions(gradient_checkpointing="full"))
        model(ids, mask, 4).logprobs.mean().backward()
        gradients.append(layer.weight.grad)
    torch.testing.assert_close(*gradients)
    assert passes == [False, True, True]  # recomputed once


def test_autocast_scores_in_float32():
    model = make()
    ids, mask = rows()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(ids, mask, 4)
    assert output.logprobs.dtype == output.entropy.dtype == torch.float32
    torch.testing.assert_close(output.logprobs, model(ids, mask, 4).logprobs, atol=0.1, rtol=0)


def test_values_are_of_the_states_before_each_token():
    critic = make(cls=CausalValueModel)
    ids, mask = rows()
    values = critic(ids, mask, 4)
    assert values.shape == (3, 4) and values.dtype == torch.float32
    changed = ids.clone()
    changed[:, -2] = (changed[:, -2] + 1) % CHAR_VOCAB_SIZE
    torch.testing.assert_close(critic(changed, mask, 4)[:, :3], values[:, :3])
    assert not torch.allclose(critic(changed, mask, 4)[:, 3], values[:, 3])


def test_shapes_that_do_not_fit_are_refused():
    model = make()
    ids, mask = rows()
    with pytest.raises(SequenceShapeError, match="response_length is 12 of 12 columns"):
        model(ids, mask, 12)
    with pytest.raises(SequenceShapeError, match=r"\[3, 12\] and attention_mask is \[3, 11\]"):
        model(ids, mask[:, 1:], 4)


@pytest.mark.parametrize("config", [LLAMA, QWEN2], ids=["tied", "untied"])
def test_directories_load_elsewhere_and_come_back(tmp_path, config):
    model = make(config)
    model.save_pretrained(tmp_path, {name: x.clone() for name, x in model.state_dict().items()})
    ids, mask = rows()
    again = CausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(ids, mask, 4).logprobs, model(ids, mask, 4).logprobs)
    assert model.read_state(tmp_path).keys() == model.state_dict().keys()

    elsewhere = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(elsewhere(ids, mask).logits, again.language_model(ids, mask).logits)
    assert (tmp_path / "tokenizer.json").read_bytes() == (TOKENIZER / "tokenizer.json").read_bytes()
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["architectures"] == [type(model.language_model).__name__] and stored["dtype"] == "float32"


def test_sharded_files_are_read(tmp_path):
    model = make()
    model.language_model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ids, mask = rows()
    again = CausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(ids, mask, 4).logprobs, model(ids, mask, 4).logprobs)


def test_a_critic_starts_from_a_policy_and_comes_back_as_a_critic(tmp_path):
    policy = make(QWEN2)
    policy.save_pretrained(tmp_path / "policy")
    critic = CausalValueModel.from_pretrained(tmp_path / "policy").eval()
    assert torch.equal(critic.language_model.model.embed_tokens.weight, policy.language_model.model.embed_tokens.weight)
    critic.save_pretrained(tmp_path / "critic")
    ids, mask = rows()
    torch.testing.assert_close(
        CausalValueModel.from_pretrained(tmp_path / "critic")(ids, mask, 4), critic(ids, mask, 4)
    )
    assert {id(p) for p in critic.value_parameters()} < {id(p) for p in critic.parameters()}


def test_what_does_not_fit_is_listed(tmp_path):
    make().save_pretrained(tmp_path / "good")
    with pytest.raises(CheckpointFormatError, match=r"has no config.json"):
        CausalLM.from_pretrained(tmp_path)
    shutil.copytree(tmp_path / "good", tmp_path / "empty", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(CheckpointFormatError, match="cannot be loaded"):
        CausalLM.from_pretrained(tmp_path / "empty")

    file = tmp_path / "good" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    tensors |= {"foreign": torch.ones(1), "model.layers.0.mlp.up_proj.weight": torch.ones(3, 3)}
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointFormatError) as raised:
        CausalLM.from_pretrained(tmp_path / "good")
    for problem in ("missing model.norm.weight", "unexpected foreign", "has shape (3, 3), the config needs (48, 32)"):
        assert problem in str(raised.value)


@pytest.mark.parametrize("loader", [PreTrainedTokenizerFast, AutoTokenizer])
def test_presets_fit_the_character_tokenizer(tmp_path, loader):
    CausalLM.from_config(preset("tiny"), TOKENIZER).save_pretrained(tmp_path)
    tokenizer = loader.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer("12 + 7 = 19\n")["input_ids"]) == "12 + 7 = 19\n"
    assert len(tokenizer) == CHAR_VOCAB_SIZE == preset("small")["vocab_size"]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, preset("tiny")["eos_token_id"])
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "3 + 4 = ?"}, {"role": "assistant", "content": "#### 7"}], tokenize=False
    )
    assert text == "3 + 4 = ?\n#### 7</s>"
    sizes = {
        size: sum(p.numel() for p in CausalLM.from_config(preset(size)).parameters()) for size in ("tiny", "small")
    }
    assert 0.5e6 < sizes["tiny"] < 1e6 and 4e6 < sizes["small"] < 6e6
    with pytest.raises(ValueError, match="There are tiny, small"):
        preset("huge")


def test_units_are_the_layers():
    model = make()
    assert model.fsdp_units() == list(model.language_model.model.layers)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "qwen3_moe", "beam"])
def test_bf16_is_as_transformers_loads_it(tmp_path, family):
    """Buffers, rotary frequencies among them, keep their type; logits at position 1,000 are equal to the bit."""
    config = tiny_config(family, 2048)
    config.max_position_embeddings = 1024
    torch.manual_seed(0)
    CausalLM(AutoModelForCausalLM.from_config(config)).save_pretrained(tmp_path)
    model = CausalLM.from_pretrained(tmp_path)
    cast_parameters(model, torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    for named in ("named_parameters", "named_buffers"):
        ours, theirs = (dict(getattr(x, named)()) for x in (model.language_model, loaded))
        assert {name: x.dtype for name, x in ours.items()} == {name: x.dtype for name, x in theirs.items()}
        assert all(torch.equal(x, theirs[name]) for name, x in ours.items())
    ids = torch.randint(3, 64, (1, 1010), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model.language_model(ids).logits, loaded(ids).logits)


def test_a_checkpoint_has_the_tokenizer_that_it_was_trained_with(tmp_path):
    """Not the one beside the weights that it started from, whose other files stay."""
    start, other = tmp_path / "start", tmp_path / "other"
    build_model(load_config("math/math_arithmetic_grpo"), None, "sdpa").save_pretrained(start)
    (start / "chat_template.jinja").write_text("of the model")
    (start / "LICENSE").write_text("theirs")
    shutil.copytree("assets/char_tokenizer", other)
    (other / "chat_template.jinja").write_text("of the run")
    trained = load_config("math/math_arithmetic_grpo", [f"actor.tokenizer.tokenizer_model={other}"])
    build_model(trained, str(start), "sdpa").save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "chat_template.jinja").read_text() == "of the run"
    assert (tmp_path / "saved" / "LICENSE").read_text() == "theirs"
