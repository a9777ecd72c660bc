"""Acting by recorded calls: the same actions as without, whatever changed since, and nothing of another call."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rlinf_lite.config.schema import ModelConfig
from rlinf_lite.envs import EnvSpec
from rlinf_lite.models import graphs
from rlinf_lite.models.base import NOISE_KEY
from rlinf_lite.models.flow.policy import Pi0Policy, Pi05Policy, SmolVLAPolicy
from rlinf_lite.models.sampling import noise_keys
from rlinf_lite.models.vla.policy import OpenVLAPolicy
from rlinf_lite.training.precision import autocast
from tests.models.emulated_graphs import Emulation
from tests.models.emulated_graphs import emulation as emulation
from tests.models.settings import openvla

SPEC = EnvSpec(3, 4, {"front": (64, 64), "wrist": (64, 64)}, [-2.0, 0.0, -1.0], [2.0, 1.0, 1.0], 24, True)
TASKS = ["pick up the red block", "push the green cube to the blue bowl", "lift it"]
LOOKS_AT_MASKS = ({"parallel_decoding": True, "attn_implementation": "eager"}, {"name": "smolvla"})
"""Whether there is any padding, so that they are launched."""
FLOWS = {policy.policy_id: policy for policy in (Pi0Policy, Pi05Policy, SmolVLAPolicy)}


def make_policy(name="openvla", seed=0, **settings):
    torch.manual_seed(seed)
    if name in FLOWS:
        config = ModelConfig(id=name, num_action_chunks=2, options={"size": "tiny", "num_steps": 3, **settings})
        return FLOWS[name].from_config(config, SPEC).eval()
    given = {"num_action_chunks": 2, "parallel_decoding": False, "use_proprio": True, "temperature": 1.3, **settings}
    policy = OpenVLAPolicy.from_config(openvla(**given), SPEC).eval()
    with torch.no_grad():
        for parameter_name, parameter in policy.named_parameters():
            if "lora_B" in parameter_name:  # which start as zeros
                parameter.normal_(0, 0.1)
    return policy


def make_obs(num_rows=3, seed=1):
    """Prompts of different lengths."""
    rng = np.random.default_rng(seed)
    return {
        "images": {name: rng.integers(0, 256, (num_rows, 64, 64, 3), dtype=np.uint8) for name in SPEC.cameras},
        "state": rng.normal(size=(num_rows, 4)).astype(np.float32),
        "instruction": [TASKS[(i + seed) % 3] for i in range(num_rows)],
        NOISE_KEY: noise_keys(seed, np.arange(num_rows), 0),
    }


def act(policy, obs, mode="train", recorded=True, precision="fp32"):
    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), autocast("cpu", precision):
        patch.setattr(graphs, "enabled", recorded)
        return policy.predict_action_batch(obs, mode)


def tensors(output):
    return {"actions": output.actions, "logprobs": output.logprobs, "values": output.values, **output.forward_inputs}


def check_same(policy, obs, mode="train", tolerance=1e-5, precision="fp32"):
    """Acts recorded and not; returns what the former gives."""
    found, expected = (tensors(act(policy, obs, mode, recorded, precision)) for recorded in (True, False))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=tolerance, rtol=0, msg=lambda text, n=name: f"{n}: {text}")
    return found


@pytest.mark.parametrize("mode", ["train", "sampled", "greedy"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"parallel_decoding": True},
        {"use_proprio": False},
        {"lora": {"rank": 4}},
        {"gradient_checkpointing": True},
        {"max_prompt_length": 30},
        {"attn_implementation": "eager"},
        LOOKS_AT_MASKS[0],
        {"name": "pi0"},
        {"name": "pi0", "method": "flow_noise"},
        {"name": "pi05"},
        LOOKS_AT_MASKS[1],
    ],
    ids=lambda settings: "-".join(map(str, settings.values())) or "plain",
)
def test_acting_is_what_it_is_without(emulation: Emulation, mode, settings):
    policy = make_policy(**settings)
    for seed in (1, 2):
        check_same(policy, make_obs(seed=seed), mode)
    assert (emulation.recorded, emulation.replayed) == ((0, 0) if settings in LOOKS_AT_MASKS else (1, 2))


@pytest.mark.parametrize("name", ["openvla", "pi0"])
def test_a_call_leaves_nothing_for_the_next_and_keeps_what_it_gave(emulation: Emulation, name):
    policy = make_policy(name)
    first = check_same(policy, make_obs())
    kept = {name: tensor.clone() for name, tensor in first.items()}
    check_same(policy, make_obs(seed=2))
    check_same(policy, make_obs(5, seed=3))
    check_same(policy, make_obs(seed=4), "greedy")
    check_same(policy, make_obs(seed=4))
    assert all(torch.equal(tensor, kept[name]) for name, tensor in first.items())
    assert emulation.recorded == 3, "three rows, five, and greedy ones"


def test_inference_mode_and_its_absence_take_turns(emulation: Emulation):
    policy = make_policy()
    with torch.inference_mode():
        check_same(policy, make_obs())
    check_same(policy, make_obs(seed=2))
    with torch.inference_mode():
        check_same(policy, make_obs(seed=3))
    assert emulation.recorded == 1


@pytest.mark.parametrize("name", ["openvla", "pi0"])
def test_weights_may_change_and_move(emulation: Emulation, name):
    policy = make_policy(name)
    before = check_same(policy, make_obs())
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    assert not torch.equal(check_same(policy, make_obs())["logprobs"], before["logprobs"])
    assert emulation.recorded == 1, "changed where they are"
    for parameter in policy.parameters():
        parameter.data = parameter.data * 0.9
    check_same(policy, make_obs())
    assert emulation.recorded == 2, "they lie elsewhere"


def test_other_modules_are_read(emulation: Emulation):
    policy = make_policy(lora={"rank": 4})
    check_same(policy, make_obs())
    policy.merge_adapters()
    check_same(policy, make_obs())
    policy.requires_grad_(False).to(torch.bfloat16)
    check_same(policy, make_obs(), precision="bf16", tolerance=0.1)
    assert emulation.recorded == 3


def test_autocast_is_part_of_what_is_recorded(emulation: Emulation):
    policy = make_policy()
    exact = check_same(policy, make_obs())
    rounded = check_same(policy, make_obs(), precision="bf16", tolerance=0.1)
    assert emulation.recorded == 2 and not torch.equal(exact["logprobs"], rounded["logprobs"])


def test_calls_are_given_back_and_bounded(emulation: Emulation):
    policy = make_policy()
    for num_rows in range(1, graphs._KEPT + 3):
        check_same(policy, make_obs(num_rows))
    assert len(policy.calls._kept) == len(policy.calls._recordings._passes) == graphs._KEPT
    policy.release()
    assert not policy.calls._kept and policy.calls._recordings._where is None
    check_same(policy, make_obs(1))
    assert emulation.recorded == graphs._KEPT + 3


def test_copies_and_files_have_none(emulation: Emulation):
    policy = make_policy()
    names = policy.state_dict().keys()
    check_same(policy, make_obs())
    assert policy.state_dict().keys() == names
    for other in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert not other.calls._kept
        check_same(other.eval(), make_obs(seed=2))
    assert emulation.recorded == 3


@pytest.mark.parametrize("parallel", [False, True])
def test_windows_of_attention_are_kept(emulation: Emulation, parallel):
    """Where a language model has some, transformers makes the masks."""
    fresh = make_policy(parallel_decoding=parallel)
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    policy = OpenVLAPolicy(replace(fresh.cfg, text={**fresh.cfg.text, "model_type": "qwen2", **windows}), fresh.prompts)
    for seed in (1, 2):
        check_same(policy.eval(), make_obs(seed=seed))


def test_what_comes_once_is_launched(emulation: Emulation, monkeypatch):
    monkeypatch.setattr(graphs, "_LAUNCHED", 2)
    policy = make_policy()
    recorded = []
    for seed in range(4):
        check_same(policy, make_obs(seed=seed))
        recorded.append(emulation.recorded)
    assert recorded == [0, 0, 1, 1]
    for _ in range(3):
        for num_rows in range(1, graphs._KEPT + 2):  # each is forgotten before it comes again
            check_same(policy, make_obs(num_rows + 3))
    assert emulation.recorded == 1


def test_a_call_that_is_interrupted_leaves_nothing(emulation: Emulation, monkeypatch):
    policy = make_policy()
    check_same(policy, make_obs())

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.Tensor, "copy_", interrupted)
        act(policy, make_obs(seed=2))
    check_same(policy, make_obs(seed=3))
    assert emulation.recorded == 1


def test_gradients_and_hooks_are_not_recorded(emulation: Emulation):
    policy = make_policy()
    policy.predict_action_batch(make_obs())
    calls = []
    policy.projector.register_forward_hook(lambda *_: calls.append(1))
    check_same(policy, make_obs())
    assert len(calls) == 2 and not emulation.recorded


def test_operations_are_counted_one_by_one(monkeypatch):
    monkeypatch.setattr(graphs, "enabled", True)
    assert graphs.can_record(torch.device("cuda")) and not graphs.can_record(torch.device("cpu"))
    with FlopCounterMode(display=False):
        assert not graphs.can_record(torch.device("cuda"))


def test_what_cannot_be_recorded_is_launched(emulation: Emulation, caplog):
    policy = make_policy()
    emulation.breaks = True
    for seed in (1, 2):
        check_same(policy, make_obs(seed=seed))
    assert caplog.text.count("cannot be recorded as a CUDA graph") == 1
