"""Adapters of language models: peft's own arithmetic and files."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlinf_lite.config import ConfigError, load_config
from rlinf_lite.models.base import CheckpointFormatError
from rlinf_lite.models.text import causal_lm
from rlinf_lite.models.text.causal_lm import CausalLM, CausalValueModel
from rlinf_lite.models.text.presets import preset

IDS = torch.arange(4, 40).view(3, 12)
MASK = torch.ones_like(IDS)
NO_CHANGE = {"rank": 3, "alpha": 6, "targets": "all-linear"}


def make(lora=NO_CHANGE, **settings):
    torch.manual_seed(0)
    model = CausalLM.from_config(preset("tiny") | settings)
    model.add_adapters(lora)
    return model


def trained(lora=NO_CHANGE, **settings):
    model = make(lora, **settings)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if ".lora_B" in name:
                x.normal_(0, 0.1)
    return model


def score(model):
    return model(IDS, MASK, 5).logprobs


def test_they_start_as_no_change_and_train_alone():
    plain, adapted = make(NO_CHANGE | {"rank": 0}), make()
    assert torch.equal(score(plain), score(adapted))
    assert plain.lora == {} and not any(".lora_" in name for name in plain.state_dict())
    names = {name for name, x in adapted.named_parameters() if x.requires_grad}
    assert names == {name for name, _ in adapted.named_parameters() if ".lora_" in name}
    assert adapted.lora["targets"] == sorted(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    )


@pytest.mark.parametrize("lora", [NO_CHANGE, {"rank": 2, "alpha": None, "targets": ["v_proj", "q_proj", "lm_head"]}])
def test_peft_reads_what_is_written(tmp_path, lora):
    model = trained(lora, tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tmp_path)
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter")
    logprobs = torch.log_softmax(theirs(input_ids=IDS).logits[:, -6:-1], -1)
    torch.testing.assert_close(score(model), logprobs.gather(-1, IDS[:, -5:, None])[..., 0], atol=1e-5, rtol=0)
    assert (score(model) - score(make(NO_CHANGE | {"rank": 0}, tie_word_embeddings=False))).abs().max() > 0.1

    again = CausalLM.from_pretrained(tmp_path)
    assert torch.equal(score(again), score(model)) and again.lora == model.lora
    assert {name for name, x in again.named_parameters() if x.requires_grad} == {
        name for name, x in model.named_parameters() if x.requires_grad
    }
    again.add_adapters(lora)  # as a run that goes on does
    assert torch.equal(score(again), score(model))
    with pytest.raises(ValueError, match=r"model\.lora: is .*'rank': 5"):
        again.add_adapters(lora | {"rank": 5})


def test_merged_they_are_gone(tmp_path):
    model = trained()
    expected = score(model)
    model.save_pretrained(tmp_path)
    model.merge_adapters()
    torch.testing.assert_close(score(model), expected, atol=1e-5, rtol=0)
    assert all(x.requires_grad for x in model.parameters())
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "adapter").exists()
    torch.testing.assert_close(score(CausalLM.from_pretrained(tmp_path)), expected, atol=1e-5, rtol=0)


def test_a_critic_begins_as_the_policy_with_its_adapters(tmp_path):
    policy = trained({"rank": 2, "alpha": 2, "targets": ["q_proj", "down_proj", "lm_head"]}, tie_word_embeddings=False)
    policy.save_pretrained(tmp_path / "policy")
    critic = CausalValueModel.from_pretrained(tmp_path / "policy")
    critic.merge_adapters()
    states = [model._response_states(IDS, MASK, 5) for model in (policy, critic)]
    torch.testing.assert_close(*states, atol=1e-5, rtol=0)
    assert all(x.requires_grad for x in critic.parameters())


def test_targets_that_are_not_there():
    with pytest.raises(ValueError, match=r"model\.lora\.targets: no linear layer is called query.*There are .*q_proj"):
        make(NO_CHANGE | {"targets": ["query"]})
    with pytest.raises(ValueError, match="no linear layer is called fc1"):  # which policies may lack
        make(NO_CHANGE | {"targets": ["q_proj", "fc1"]})
    with pytest.raises(ValueError, match="output layer shares the embedding's weights"):
        make(NO_CHANGE | {"targets": ["lm_head"]}, tie_word_embeddings=True)


GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
FAMILIES = {
    "gpt2": GPT2,
    "qwen3_moe": SIZES | EXPERTS | {"model_type": "qwen3_moe", "num_key_value_heads": 2},
    "mixtral": SIZES | {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4},
    "phi3": SIZES | {"model_type": "phi3", "num_key_value_heads": 2, "pad_token_id": 0},
}


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_families_with_other_layers(tmp_path, config):
    torch.manual_seed(0)
    model = CausalLM.from_config(config)
    model.add_adapters(NO_CHANGE)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if ".lora_B" in name:
                x.normal_(0, 0.1)
    assert not any("experts" in name for name, x in model.named_parameters() if x.requires_grad)
    model.save_pretrained(tmp_path)
    again = CausalLM.from_pretrained(tmp_path)
    assert torch.equal(score(again), score(model))
    again.add_adapters(NO_CHANGE)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path), tmp_path / "adapter")
    logprobs = torch.log_softmax(theirs(input_ids=IDS).logits[:, -6:-1], -1)
    torch.testing.assert_close(score(model), logprobs.gather(-1, IDS[:, -5:, None])[..., 0], atol=1e-5, rtol=0)
    expected = score(model).detach()
    torch.testing.assert_close(score(again.merge_adapters()), expected, atol=1e-5, rtol=0)


def test_what_was_written_in_part_does_not_load(tmp_path, monkeypatch):
    model = trained()
    model.save_pretrained(tmp_path)

    def full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(causal_lm, "save_torch_state_dict", full)
    with pytest.raises(OSError, match="No space"):
        model.merge_adapters().save_pretrained(tmp_path)
    with pytest.raises(CheckpointFormatError, match=r"config\.json"):
        CausalLM.from_pretrained(tmp_path)


def damaged(directory, what):
    config, weights = directory / "adapter_config.json", directory / "adapter_model.safetensors"
    said, tensors = json.loads(config.read_text()), load_file(weights)
    if what == "another scale":
        config.write_text(json.dumps(said | {"use_rslora": True}))
    elif what == "another start":
        config.write_text(json.dumps(said | {"init_lora_weights": "pissa"}))
    elif what == "on some tokens":
        config.write_text(json.dumps(said | {"alora_invocation_tokens": [5]}))
    elif what == "no weights":
        weights.unlink()
    elif what == "cut off":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif what == "one is missing":
        save_file(dict(list(tensors.items())[1:]), weights)
    elif what == "another rank":
        config.write_text(json.dumps(said | {"r": 5}))


@pytest.mark.parametrize(
    "what, text",
    [
        ("another scale", "this has use_rslora"),
        ("another start", "this has init_lora_weights"),
        ("on some tokens", "this has alora_invocation_tokens"),
        ("no weights", "adapter cannot be read"),
        ("cut off", "adapter cannot be read"),
        ("one is missing", "missing base_model.model.model.layers.0"),
        ("another rank", "has shape"),
    ],
)
def test_damaged_files(tmp_path, what, text):
    trained().save_pretrained(tmp_path)
    damaged(tmp_path / "adapter", what)
    with pytest.raises(CheckpointFormatError, match=text):
        CausalLM.from_pretrained(tmp_path)


def test_layers_that_ranks_share_have_none(tmp_path):
    placement = "cluster.component_placement={actor: 0-1, rollout: '0', reward: '0'}"
    trained().save_pretrained(tmp_path)
    brought = ["actor.strategy=tensor_parallel", "actor.tensor_model_parallel_size=2", f"rollout.model_dir={tmp_path}"]
    with pytest.raises(ConfigError, match=r"model\.lora\.rank: adapters are not split.* merge those of the model"):
        load_config("math/math_arithmetic_grpo", [*brought, placement, "cluster.num_gpus_per_node=2"], elsewhere=True)
    with pytest.raises(ConfigError, match=r"model\.lora\.rank: adapters are not split"):
        placement = "component_placement: {actor: 0-1, rollout: '0', reward: '0'}"
        load_config(
            "math/math_arithmetic_grpo",
            [
                "model.lora.rank=4",
                "actor.strategy=tensor_parallel",
                "actor.tensor_model_parallel_size=2",
                f"cluster={{num_gpus_per_node: 2, {placement}}}",
                "cluster.fuse=null",
            ],
        )


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ("rank: 4", ["model.lora.rank: is 4, and the adapters in {} have 3. Set the same value"]),
        ("rank: 3", ["model.lora.alpha: is 3, and the adapters in {} have 6. Set the same value"]),
        ("rank: 3, alpha: 6", []),
        ("rank: 3, alpha: 6, targets: [v_proj, q_proj, v_proj]", []),
        ("rank: 3, alpha: 6, targets: [v_proj]", ["model.lora.targets: is ['v_proj'], and the adapters in {} have ["]),
        ("rank: 0", []),
    ],
)
def test_other_adapters_than_the_models_are_refused_before_anything_starts(tmp_path, lora, said):
    trained(NO_CHANGE | {"targets": ["q_proj", "v_proj"]}).save_pretrained(tmp_path)
    overrides = [f"model.lora={{{lora}}}", f"rollout.model_dir={tmp_path}"]
    if not said:
        load_config("math_arithmetic_grpo", overrides)
        return
    with pytest.raises(ConfigError) as error:
        load_config("math_arithmetic_grpo", overrides)
    assert len(error.value.problems) == len(said)
    for problem, start in zip(error.value.problems, said, strict=True):
        assert problem.startswith(start.format(tmp_path))


def test_targets_that_are_no_list():
    with pytest.raises(ConfigError) as error:
        load_config("math_arithmetic_grpo", ["model.lora.targets=q_proj"])
    said = "model.lora.targets: is 'q_proj'. It must be a list, such as [a, b], or 'all-linear'"
    assert error.value.problems == [said]
