"""Weights with several names: in files, under adapters, and in a policy of a user's own."""

from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, load_model
from torch import nn
from transformers import AutoModelForCausalLM

from rlinf_lite.cli.export import export
from rlinf_lite.envs import EnvSpec
from rlinf_lite.models import check_policy, load_policy
from rlinf_lite.models.lora import add_adapters, merge_adapters
from rlinf_lite.models.tensor_files import read_tensors, write_tensors
from rlinf_lite.models.text.causal_lm import CausalLM
from rlinf_lite.models.text.presets import preset
from rlinf_lite.training.sharding import full_policy_state, load_policy_state
from rlinf_lite.weights.sync import synced_tensors
from tests.models.tied import TiedPolicy

SPEC = EnvSpec(2, 5, {}, [-1.0] * 2, [1.0] * 2, 10, False)


def make() -> TiedPolicy:
    torch.manual_seed(0)
    policy = TiedPolicy(SPEC, {})
    policy.policy_id = "tests.models.tied:TiedPolicy"
    return policy


def test_a_tied_policy_keeps_the_contract_and_is_exported(tmp_path):
    assert check_policy(TiedPolicy, SPEC) == []
    policy = make()
    policy.save_pretrained(tmp_path / "policy")
    assert export([str(tmp_path / "policy"), "--to", "hf", str(tmp_path / "out"), "--license", "mit"]) == 0
    found = load_policy(tmp_path / "out")
    assert all(torch.equal(x, found.state_dict()[name]) for name, x in policy.state_dict().items())
    assert found.back.weight is found.embed.weight and found.second is found.first


def test_what_is_shared_is_in_a_file_once_and_others_read_it(tmp_path):
    policy = make()
    policy.save_pretrained(tmp_path)
    once = sum(x.nbytes for x in policy.parameters())
    assert sum(x.nbytes for x in load_file(tmp_path / "model.safetensors").values()) == once
    assert read_tensors(tmp_path / "model.safetensors").keys() == policy.state_dict().keys()
    torch.manual_seed(1)
    other = TiedPolicy(SPEC, {})
    assert not torch.equal(other.embed.weight, policy.embed.weight)
    load_model(other, tmp_path / "model.safetensors")
    assert all(torch.equal(x, other.state_dict()[name]) for name, x in policy.state_dict().items())


def test_views_of_one_memory_come_back_as_they_were(tmp_path):
    whole = torch.arange(12.0).view(3, 4)
    views = {"whole": whole, "row": whole[1], "turned": whole.T, "again": whole[:], "none": whole[:0]}
    write_tensors(views | {"alone": torch.ones(2)}, tmp_path / "file")
    found = read_tensors(tmp_path / "file")
    assert found.keys() == {*views, "alone"}
    assert all(torch.equal(found[name], x) for name, x in views.items())
    assert found["again"].data_ptr() == found["whole"].data_ptr() != found["row"].data_ptr()


def test_a_layer_that_is_used_twice_has_one_adapter():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = nn.Linear(6, 6)
            self.again, self.block = self.q_proj, nn.ModuleDict({"v_proj": nn.Linear(6, 6)})
            self.same = self.block

        def forward(self, x):
            return self.same["v_proj"](self.again(self.block["v_proj"](self.q_proj(x)).tanh())).sum(-1)

    torch.manual_seed(0)
    model, x = Twice(), torch.randn(3, 6)
    before = model(x)
    add_adapters(model, {"rank": 2, "alpha": 2, "targets": ["q_proj", "v_proj"]})
    assert isinstance(model.again, LoraLayer) and model.again is model.q_proj
    torch.testing.assert_close(model(x), before)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                parameter.normal_()
    trained = model(x)
    assert (trained - before).abs().max() > 0.1
    merge_adapters(model)
    assert not any(isinstance(module, LoraLayer) for module in model.modules()) and model.again is model.q_proj
    torch.testing.assert_close(model(x), trained)


def test_an_adapter_of_weights_that_another_layer_has_too_is_refused():
    with pytest.raises(ValueError, match=r"model\.options\.lora\.targets: back shares its weights with another module"):
        add_adapters(make(), {"rank": 2, "alpha": 2, "targets": ["back"]})


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 2, "targets": "all-linear"}])
def test_a_tied_language_model_is_exported_for_plain_transformers(lora, tmp_path):
    torch.manual_seed(0)
    model = CausalLM.from_config(preset("tiny") | {"tie_word_embeddings": True})
    if lora:
        model.add_adapters(lora)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    ids = torch.arange(4, 24).view(2, 10)
    expected = model(ids, torch.ones_like(ids), 4).logprobs
    model.save_pretrained(tmp_path / "policy")
    assert export([str(tmp_path / "policy"), "--to", "hf", str(tmp_path / "out"), "--license", "mit"]) == 0
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    found, said = loaded
    assert not any(said.values()) and found.lm_head.weight is found.model.embed_tokens.weight
    logprobs = torch.log_softmax(found(input_ids=ids).logits[:, -5:-1], -1).gather(-1, ids[:, -4:, None])[..., 0]
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)


class SharedStatistics(nn.Module):
    """A buffer of two names, the first of which is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scratch", torch.arange(3.0), persistent=False)
        self.register_buffer("kept", self.scratch)
        self.weight = nn.Parameter(torch.zeros(1))


def test_a_buffer_that_is_saved_under_its_second_name_alone_is_sent_saved_and_loaded():
    module, other = SharedStatistics(), SharedStatistics()
    other.kept.fill_(7)
    assert [name for name, _ in synced_tensors(module, trainable_only=False)] == ["weight", "kept"]
    state = full_policy_state(other)
    load_policy_state(module, state)
    assert state.keys() == {"kept", "weight"} and module.kept.tolist() == [7, 7, 7]


def test_lazy_views_are_written_as_what_they_show(tmp_path):
    x = torch.tensor([1 + 2j, 3 - 1j])
    write_tensors({"x": x, "conjugate": x.conj()}, tmp_path / "f")
    found = read_tensors(tmp_path / "f")
    assert torch.equal(found["x"], x) and torch.equal(found["conjugate"], x.conj().resolve_conj())


def test_two_values_for_one_tied_weight_are_refused():
    module = nn.ModuleDict({"first": nn.Linear(2, 2, bias=False)})
    module["second"] = module["first"]
    state = {"first.weight": torch.zeros(2, 2), "second.weight": torch.ones(2, 2)}
    with pytest.raises(ValueError, match=r"second\.weight and first\.weight are one tensor in this policy, and differ"):
        load_policy_state(module, state)
