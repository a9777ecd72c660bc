"""Several micro-batches at once give what one after the other gives, bit for bit, whatever the model is like."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlinf_lite.config import load_config
from rlinf_lite.config.schema import ModelConfig
from rlinf_lite.envs import EnvSpec
from rlinf_lite.models import MLPGaussianPolicy
from rlinf_lite.models.base import recompute_in_backward
from rlinf_lite.models.check import random_obs
from rlinf_lite.models.flow.policy import Pi0Policy, Pi05Policy, SmolVLAPolicy
from rlinf_lite.models.vla.policy import OpenVLAPolicy
from rlinf_lite.scheduler import Worker
from rlinf_lite.training.lanes import Lanes, shared_copy
from rlinf_lite.training.learner import Learner
from rlinf_lite.training.metrics import MetricSums
from tests.models.zoo import VOCAB_SIZE, tiny_model

ROWS = 12


def learner(model: Any, num_threads: int) -> Learner:
    cfg = load_config("embodiment/gym_pendulum_ppo_mlp", [f"actor.num_threads={num_threads}", "actor.optim.lr=0.01"])
    made = Learner(Worker(), model, cfg, "actor")
    made.start_training(cfg.actor.optim, 10)
    return made


def policy_and_loss(kind: Any, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    spec = EnvSpec(3, 4, {} if kind is MLPGaussianPolicy else {"front": (64, 64)}, [-1.0] * 3, [1.0] * 3, 24, True)
    policy = kind.from_config(ModelConfig(id=kind.policy_id, num_action_chunks=2, options=options), spec)
    with torch.no_grad():
        acted = policy.eval().predict_action_batch(random_obs(spec, rows=ROWS))

    def loss(model: Any, part: np.ndarray, found: MetricSums) -> Tensor:
        output = model({name: x[torch.from_numpy(part)].clone() for name, x in acted.forward_inputs.items()})
        value = (output.logprobs.sum() + output.values.sum() + output.entropy.sum()) / ROWS
        found.add({"loss": value, "largest_max": output.logprobs.max()}, float(len(part)))
        return value

    return policy.train(), loss


def language_model_and_loss(family: str) -> tuple[Any, Any]:
    model = tiny_model(family, window=4)
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, VOCAB_SIZE, (ROWS, 9)))

    def loss(model: Any, part: np.ndarray, found: MetricSums) -> Tensor:
        output = model(input_ids=ids[part], use_cache=False)
        value = output.logits.float().log_softmax(-1)[..., 0].sum() / ROWS
        found.add({"loss": value}, float(len(part)))
        return value

    return model, loss


POLICIES = [
    (MLPGaussianPolicy, {}),
    (OpenVLAPolicy, {"size": "tiny"}),
    (OpenVLAPolicy, {"size": "tiny", "lora": {"rank": 2}}),
    *((kind, {"size": "tiny", "num_steps": 2}) for kind in (Pi0Policy, Pi05Policy, SmolVLAPolicy)),
    (Pi0Policy, {"size": "tiny", "num_steps": 2, "trainable": "expert", "keep_prefix": True}),
]


@pytest.mark.parametrize(("kind", "options"), POLICIES)
def test_every_policy(kind: Any, options: dict[str, Any]) -> None:
    check_equal(lambda: policy_and_loss(kind, **options))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral", "qwen3_next", "mamba", "gpt_oss"])
def test_every_kind_of_language_model(family: str) -> None:
    """With tied weights, sliding windows, experts, recurrent states."""
    check_equal(lambda: language_model_and_loss(family))


def check_equal(make: Any) -> None:
    parts = np.array_split(np.arange(ROWS), 5)
    torch.set_num_threads(1)
    expected, loss = make()
    optimizer, metrics = learner(expected, 1), []
    for _ in range(2):
        sums = MetricSums()
        optimizer.update(parts, loss, sums, "", str)
        metrics.append(sums.result(lambda values, how=None: values))
    for num_lanes in (2, 3, 8):
        model, loss = make()
        trained = learner(model, num_lanes)
        assert trained.lanes.number == num_lanes
        for step in range(2):
            sums = MetricSums()
            trained.update(parts, loss, sums, "", str)
            assert sums.result(lambda values, how=None: values) == metrics[step]
        names = dict(expected.named_parameters())
        assert all(torch.equal(parameter, names[name]) for name, parameter in model.named_parameters())


class Careless(nn.Module):
    """Keeps what it computes in itself, and has two names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("offset", torch.ones(3))
        self.meeting: threading.Barrier | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.first(x)
        if self.meeting is not None:
            self.meeting.wait(30)
        return self.second(self.kept) + self.offset


def test_what_a_pass_keeps_in_its_module_is_its_own() -> None:
    model, inputs = Careless(), torch.randn(4, 1, 3)

    def compute(model: Any, x: Tensor) -> Tensor:
        model(x).sum().backward()
        return model.kept.detach()

    alone = [compute(model, x) for x in inputs]
    expected = model.first.weight.grad.clone()
    model.zero_grad()
    lanes = Lanes(model, 2)
    assert len(list(lanes.passes("look", compute, inputs[:1]))) == 1
    model.zero_grad()
    model.meeting = threading.Barrier(2)  # each pass is in the middle while the other is
    together = list(lanes.passes("look", compute, inputs))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    assert torch.equal(model.first.weight.grad, expected)


def test_a_copy_shares_values_and_follows_updates() -> None:
    model = Careless()
    copy = shared_copy(model)
    with torch.no_grad():
        model.first.weight.add_(1.0)
        model.offset.add_(1.0)
    x = torch.randn(2, 3)
    assert torch.equal(model(x), copy(x))
    assert copy.first.weight is copy.second.weight and copy.first.weight is not model.first.weight
    assert [name for name, _ in copy.named_parameters()] == [name for name, _ in model.named_parameters()]


def test_random_numbers_are_drawn_in_order(caplog: pytest.LogCaptureFixture) -> None:
    def results(num_lanes: int) -> list[float]:
        torch.manual_seed(3)
        lanes = Lanes(nn.Linear(1, 1), num_lanes)
        draw = lambda model, _: float(torch.rand(()))  # noqa: E731
        return [x for _ in range(20) for x in lanes.passes("draw", draw, range(4))]

    assert results(1) == results(2)
    assert caplog.text.count("draws random numbers") == 1


def test_an_error_in_a_lane_is_raised_when_all_lanes_are_done() -> None:
    ended = []

    def compute(model: Any, number: int) -> int:
        if number in (1, 2):
            raise ValueError(f"of {number}")
        ended.append(number)
        return number

    lanes, found = Lanes(nn.Linear(1, 1), 3), []
    with pytest.raises(ValueError, match="of 1"):
        found.extend(lanes.passes("count", compute, [0, 3, 1, 4, 5]))
    assert ended == [0, 3, 4] or ended == [0, 4, 3]
    assert torch.get_num_threads() == 1


def test_who_has_lanes() -> None:
    assert learner(nn.Linear(2, 2), 4).lanes.number == 4
    recomputed = nn.Sequential(nn.Linear(2, 2))
    recompute_in_backward(recomputed)
    assert learner(recomputed, 4).lanes.number == 1
    assert learner(nn.Linear(10_000, 1_000), 4).lanes.number == 4
    assert learner(nn.Linear(10_000, 5_000), 4).lanes.number == 1  # three times 200 MB of gradients
    hooked = nn.Linear(2, 2)
    hooked.weight.register_hook(lambda gradient: gradient * 2)
    assert learner(hooked, 4).lanes.number == 1
    parts = learner(nn.Linear(2, 2), 4).for_lanes
    assert [len(part) for part in parts(np.arange(10))] == [3, 3, 2, 2]
    assert [len(part) for part in parts(np.arange(2))] == [1, 1]
    assert [len(part) for part in parts(np.arange(0))] == [0]
