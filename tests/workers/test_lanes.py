"""Several micro-batches at once give what one after the other gives, bit for bit, whatever the model is like."""

from __future__ import annotations

import copy
import threading
import weakref
from types import SimpleNamespace
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
from rlinf_lite.training.precision import autocast
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
        optimizer.update([[part] for part in parts], loss, sums, "", str)
        metrics.append(sums.result(lambda values, how=None: values))
    for num_lanes in (2, 3, 8):
        model, loss = make()
        trained = learner(model, num_lanes)
        assert trained.lanes.number == num_lanes
        for step in range(2):
            sums = MetricSums()
            groups = [parts[first : first + num_lanes] for first in range(0, len(parts), num_lanes)]
            trained.update(groups, loss, sums, "", str)
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
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.kept["first"] = self.first(x)
        if self.meeting is not None:
            self.meeting.wait(30)
        return self.second(self.kept["first"]) + self.offset


def passes(model: nn.Module, num_lanes: int, compute: Any, parts: Any) -> list[Any]:
    """The second call: in the first, lanes see what the model is like."""
    lanes = Lanes(model, num_lanes)
    list(lanes.passes("look", compute, [parts[:1]]))
    model.zero_grad()
    groups = [parts[first : first + num_lanes] for first in range(0, len(parts), num_lanes)]
    return list(lanes.passes("look", compute, groups))


def test_what_a_pass_keeps_in_its_module_is_its_own() -> None:
    model, inputs = Careless(), torch.randn(4, 1, 3)

    def compute(model: Any, x: Tensor) -> Tensor:
        model(x).sum().backward()
        return model.kept["first"].detach()

    alone = [compute(model, x) for x in inputs]
    expected = model.first.weight.grad.clone()
    model.zero_grad()
    lanes = Lanes(model, 2)
    assert len(list(lanes.passes("look", compute, [[*inputs[:1]]]))) == 1
    model.zero_grad()
    model.meeting = threading.Barrier(2)  # each pass is in the middle while the other is
    together = list(lanes.passes("look", compute, [[*inputs[:2]], [*inputs[2:]]]))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    assert torch.equal(model.first.weight.grad, expected)


def test_a_copy_shares_values_and_follows_updates() -> None:
    model = Careless()
    twin: Any = shared_copy(model)
    with torch.no_grad():
        model.first.weight.add_(1.0)
        model.offset.add_(1.0)
    x = torch.randn(2, 3)
    assert torch.equal(model(x), twin(x))
    assert twin.first.weight is twin.second.weight and twin.first.weight is not model.first.weight
    assert [name for name, _ in twin.named_parameters()] == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(3)])
def test_what_is_drawn_and_what_is_averaged_comes_in_order(layer: nn.Module, caplog: Any) -> None:
    parts = [torch.randn(4, 3) for _ in range(6)]

    def results(num_lanes: int) -> Any:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 3), copy.deepcopy(layer), nn.Linear(3, 1))
        run = lambda model, x: model(x).sum().backward()  # noqa: E731
        for _ in range(5):
            passes(model, num_lanes, run, parts)
        return [p.grad.clone() for p in model.parameters()], [b.clone() for b in model.buffers()]

    for alone, together in zip(results(1), results(3), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    assert "computed by one core" in caplog.text


def test_a_model_that_begins_to_draw_is_noticed() -> None:
    model = nn.Sequential(nn.Dropout(0.5))
    lanes = Lanes(model.eval(), 2)
    run = lambda model, x: model(x)  # noqa: E731
    list(lanes.passes("look", run, [[torch.ones(1)]]))
    assert lanes._at_once == {"look": 2}
    list(lanes.passes("look", run, [[torch.ones(1)] * 2]))
    assert lanes._at_once == {"look": 2}
    model.train()
    list(lanes.passes("look", run, [[torch.ones(1)] * 2]))
    assert lanes._at_once == {"look": 1}


def test_bf16_is_the_same_in_lanes() -> None:
    """autocast keeps cast weights in a table of the process, which any thread clears."""
    parts = [torch.randn(2, 64) for _ in range(8)]

    def compute(model: Any, x: Tensor) -> None:
        with autocast("cpu", "bf16"):
            for _ in range(4):
                x = model(x)
        x.float().sum().backward()

    def gradient(num_lanes: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        passes(model, num_lanes, compute, parts)
        assert model.weight.grad is not None
        return model.weight.grad

    expected = gradient(1)
    assert all(torch.equal(gradient(4), expected) for _ in range(10))


def test_an_error_in_a_lane_is_raised_when_all_lanes_are_done() -> None:
    ended = []

    def compute(model: Any, number: int) -> int:
        if number in (1, 2):
            raise ValueError(f"of {number}")
        ended.append(number)
        return number

    lanes, found = Lanes(nn.Linear(1, 1), 3), []
    with pytest.raises(ValueError, match="of 1"):
        found.extend(lanes.passes("count", compute, [[0], [3, 1, 4], [5]]))
    assert sorted(ended) == [0, 3, 4] and torch.get_num_threads() == 1


def test_an_update_that_failed_leaves_nothing_for_the_next() -> None:
    def loss(model: Any, part: Any, found: MetricSums) -> Tensor:
        if part is None:
            raise ValueError
        return model(part).sum()

    x, weights = torch.ones(1, 2), []
    for fails in (False, True):
        torch.manual_seed(0)
        trained = learner(nn.Linear(2, 1), 2)
        if fails:
            with pytest.raises(ValueError):
                trained.update([[x, x], [x, None]], loss, MetricSums(), "", str)
        trained.update([[x, x]], loss, MetricSums(), "", str)
        weights.append(trained.model.weight.detach())
    assert torch.equal(*weights)


def test_a_micro_batch_bounds_what_is_computed_at_once() -> None:
    running, most = 0, 0
    lock = threading.Lock()

    def compute(model: Any, part: int) -> None:
        nonlocal running, most
        with lock:
            running += part
            most = max(most, running)
        threading.Event().wait(0.01)
        with lock:
            running -= part

    lanes = Lanes(nn.Linear(1, 1), 4)
    list(lanes.passes("count", compute, [[1]] + [[1]] * 6))
    assert most == 1
    list(lanes.passes("count", compute, [[1] * 4] * 3))
    assert most == 4


class Lists(nn.Module):
    """Refers to its layer in a way that torch does not know of."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        if how == "list":
            self.layers = [self.layer]
        elif how == "method":
            self.run = self.layer.forward
        elif how == "object":
            self.engine = SimpleNamespace(layer=self.layer)
        elif how == "weight":
            self.weights = {"w": self.layer.weight}
        elif how == "compiled":
            self.layer.compile(backend="eager")
        elif how == "hook":
            self.layer.register_forward_hook(self.look)
        elif how == "closure":
            layer = self.layer
            self.register_forward_hook(lambda module, args, output: output + layer(args[0]))
        elif how == "default":
            self.run = lambda x, layer=self.layer: layer(x)
        elif how == "weak reference":
            self.owner = weakref.ref(self.layer)
        else:
            self.sizes = {"list": [1, 2], "config": SimpleNamespace(width=2, names=["a"]), "f": lambda x, n=2: x * n}

    def look(self, *_: Any) -> None: ...


REFERRING = ["list", "method", "object", "weight", "compiled", "hook", "closure", "default", "weak reference"]


@pytest.mark.parametrize("how", [*REFERRING, "not"])
def test_what_refers_to_modules_has_one_lane(how: str) -> None:
    assert learner(Lists(how), 2).lanes.number == (2 if how == "not" else 1)


def test_who_has_lanes() -> None:
    assert learner(nn.Linear(2, 2), 4).lanes.number == 4
    recomputed = nn.Sequential(nn.Linear(2, 2))
    recompute_in_backward(recomputed)
    assert learner(recomputed, 4).lanes.number == 1
    assert learner(nn.Linear(10_000, 1_000), 4).lanes.number == 4
    assert learner(nn.Linear(10_000, 5_000), 4).lanes.number == 3  # a fourth would take the third 200 MB of gradients
    shared = learner(nn.Linear(10_000, 10_000, device="meta").to_empty(device="cpu"), 5)  # 400 MB each
    assert shared.lanes.number == 2 and shared._torch_threads == 2
    hooked = nn.Linear(2, 2)
    hooked.weight.register_hook(lambda gradient: gradient * 2)
    assert learner(hooked, 4).lanes.number == 1
    small = learner(nn.Linear(2, 2), 4).lanes  # the interpreter's time is what counts, and lanes share it
    assert [len(part) for part in small.cut(np.arange(10))] == [5, 5]
    assert [len(part) for part in small.cut(np.arange(1))] == [1]
    assert [len(part) for part in small.cut(np.arange(0))] == [0]
    large = learner(nn.Linear(10_000, 1_000), 4).lanes
    assert [len(part) for part in large.cut(np.arange(11))] == [4, 4, 3]  # of 3.4 rows at the least
    assert [len(part) for part in large.cut(np.arange(10), positions=20)] == [3, 3, 2, 2]
