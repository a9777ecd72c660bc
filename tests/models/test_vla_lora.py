"""LoRA: what trains, what is sent to rollout workers, and that adapters start as no change."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from peft.tuners.lora import Linear, LoraLayer
from torch.utils._python_dispatch import TorchDispatchMode

from rlinf_lite.config import ConfigError, load_config
from rlinf_lite.envs import EnvSpec
from rlinf_lite.models import load_policy
from rlinf_lite.models.vla.policy import OpenVLAPolicy
from rlinf_lite.shipped import shipped
from rlinf_lite.training.precision import autocast
from rlinf_lite.weights.sync import synced_tensors
from tests.models.settings import openvla

SPEC = EnvSpec(3, 4, {"front": (64, 64)}, [-1.0] * 3, [1.0] * 3, 24, True)


def make_policy(**settings):
    torch.manual_seed(0)
    return OpenVLAPolicy.from_config(openvla(num_action_chunks=2, **settings), SPEC)


def make_obs():
    images = np.random.default_rng(0).integers(0, 256, (3, 64, 64, 3), dtype=np.uint8)
    return {"images": {"front": images}, "state": np.ones((3, 4)), "instruction": ["pick up the red block"] * 3}


def trained(policy):
    return {name for name, parameter in policy.named_parameters() if parameter.requires_grad}


def test_adapters_start_as_no_change_and_the_rest_stays_frozen():
    plain, adapted = make_policy(), make_policy(lora={"rank": 4})
    inputs = plain.predict_action_batch(make_obs()).forward_inputs
    torch.testing.assert_close(adapted(inputs).logprobs, plain(inputs).logprobs)
    names = trained(adapted)
    assert all("lora_" in name or name.startswith("value_head.") for name in names)
    assert {f"value_head.{i}.weight" for i in (0, 2, 4)} <= names
    for layer in ("language_model.model.layers.2.mlp.up_proj", "language_model.lm_head", "projector.fc1"):
        assert f"{layer}.lora_A.default.weight" in names
    assert "vision_backbone.siglip.encoder.layers.0.self_attn.out_proj.lora_B.default.weight" in names

    before = {name: p.detach().clone() for name, p in adapted.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    output = adapted.train()(inputs)
    (output.logprobs.mean() + output.values.mean()).backward()
    optimizer.step()
    changed = {name for name, p in adapted.named_parameters() if not torch.equal(p, before[name])}
    assert changed <= names and any("lora_B" in name for name in changed)


@pytest.mark.parametrize("alpha", [None, 8], ids=["scaled by 1", "scaled by 2"])
def test_adapters_compute_what_pefts_do_in_fewer_operations(alpha):
    found, counts = [], []
    for of_peft in (True, False):
        policy = make_policy(lora={"rank": 4, "alpha": alpha}).train()
        layers = [layer for layer in policy.modules() if isinstance(layer, LoraLayer)]
        for layer in layers:
            layer.lora_B["default"].weight.data.normal_(0, 0.1)
            if of_peft:
                layer.__class__ = Linear
        inputs = policy.predict_action_batch(make_obs()).forward_inputs
        with _Count() as count:
            output = policy(inputs)
            (output.logprobs.mean() + output.values.mean()).backward()
        counts.append(count)
        found.append({name: p.grad for name, p in policy.named_parameters() if p.requires_grad})
        found[-1]["logprobs"] = output.logprobs.detach()
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, atol=1e-6, rtol=1e-5, msg=name)
    of_peft, own = ({name: count.numbers[f"aten.{name}"] for name in _LAUNCHED} for count in counts)
    assert of_peft["mul.Tensor"] - own["mul.Tensor"] == 2 * len(layers)  # one forwards, one backwards
    assert of_peft["add.Tensor"] - own["add.Tensor"] == len(layers)
    assert own["mm.default"] + own["addmm.default"] == of_peft["mm.default"] + of_peft["addmm.default"]


def test_adapters_take_inputs_as_they_come():
    """Under autocast peft would cast each input to the adapters' type, and autocast cast it back."""
    policy = make_policy(lora={"rank": 4}).eval()
    inputs = policy.predict_action_batch(make_obs()).forward_inputs
    found = []
    for of_peft in (False, True):
        for layer in (layer for layer in policy.modules() if of_peft and isinstance(layer, LoraLayer)):
            layer.__class__ = Linear
        with _Count() as count, torch.no_grad(), autocast("cpu", "bf16"):
            policy(inputs)
        found.append(count.numbers["aten._to_copy.default"])
    assert found[0] < found[1]


_LAUNCHED = ("mm.default", "addmm.default", "mul.Tensor", "add.Tensor")


class _Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.numbers = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.numbers[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_only_what_trains_is_sent_after_the_first_sync():
    policy = make_policy(lora={"rank": 4, "targets": ["q_proj", "v_proj"]})
    first, later = (dict(synced_tensors(policy, trainable_only)) for trainable_only in (False, True))
    assert first.keys() == policy.state_dict().keys() and later.keys() == trained(policy)
    num_bytes = [sum(x.numel() for x in tensors.values()) for tensors in (first, later)]
    assert num_bytes[1] < num_bytes[0] / 10


def test_modules_can_train_in_full_beside_adapters():
    policy = make_policy(use_proprio=True, lora={"rank": 2, "also_train": ["proprio_projector", "slot_embeddings"]})
    names = trained(policy)
    assert {"proprio_projector.fc1.weight", "proprio_projector.fc2.bias", "slot_embeddings"} <= names
    assert not any(name.startswith("proprio_projector") and "lora" in name for name in names)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"also_train: the policy has no proprio_projector. It has .*value_head"):
        make_policy(lora={"rank": 2, "also_train": ["proprio_projector"]})
    with pytest.raises(ValueError, match=r"targets: no linear layer is called qproj. There are .*q_proj"):
        make_policy(lora={"rank": 2, "targets": ["qproj"]})


@pytest.mark.parametrize(
    ("task", "asset"), [("tabletop_ppo_vla", "tabletop_vla"), ("tabletop_ppo_flow", "tabletop_flow")]
)
def test_other_adapters_than_the_checkpoints_are_refused_before_anything_starts(
    tmp_path: Path, task: str, asset: str
) -> None:
    lora = "model.options.lora={rank: 2, targets: [q_proj, v_proj]}"
    load_policy(shipped("assets") / asset, load_config(task, [lora]).model).save_pretrained(tmp_path)
    start = f"rollout.model_dir={tmp_path}"
    load_config(task, [start, lora])
    load_config(task, [start])  # rank 0: those that it has
    with pytest.raises(ConfigError) as error:
        load_config(task, [start, lora.replace("2", "3")])
    [problem] = error.value.problems
    assert problem.startswith("model.options.lora: is {'rank': 3, ") and "has adapters of {'rank': 2, " in problem
