"""Several micro-batches at once give what one after the other gives, bit for bit, whatever the model is like."""

from __future__ import annotations

import copy
import threading
import weakref
from collections import OrderedDict, deque
from functools import lru_cache
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
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
from rlinf_lite.training.lanes import Lanes
from rlinf_lite.training.learner import Learner
from rlinf_lite.training.metrics import MetricSums
from rlinf_lite.training.precision import autocast
from rlinf_lite.twins import Parts
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


def test_layers_that_are_recomputed() -> None:
    def make() -> tuple[Any, Any]:
        model, loss = language_model_and_loss("llama")
        recompute_in_backward(model.model.layers)
        return model, loss

    check_equal(make)


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
            assert trained.lanes._at_once == {"update": num_lanes}
            assert sums.result(lambda values, how=None: values) == metrics[step]
        names = dict(expected.named_parameters())
        assert all(torch.equal(parameter, names[name]) for name, parameter in model.named_parameters())


MEETING: list[threading.Barrier] = []


class Careless(nn.Module):
    """Keeps what it computes in itself, and has two names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("offset", torch.ones(3))
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.kept["first"] = self.first(x)
        if MEETING:
            MEETING[0].wait(30)
        return self.second(self.kept["first"]) + self.offset


def passes(model: nn.Module, num_lanes: int, compute: Any, parts: Any) -> list[Any]:
    """The second call: in the first, lanes see what the model is like."""
    lanes = Lanes(model, num_lanes)
    list(lanes.passes("look", compute, [parts[:2]]))
    model.zero_grad()
    groups = [parts[first : first + num_lanes] for first in range(0, len(parts), num_lanes)]
    return list(lanes.passes("look", compute, groups))


def test_what_a_pass_keeps_in_its_module_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = Careless(), torch.randn(4, 1, 3)

    def compute(model: Any, x: Tensor) -> Tensor:
        model(x).sum().backward()
        return model.kept["first"].detach()

    alone = [compute(model, x) for x in inputs]
    expected = model.first.weight.grad.clone()
    model.zero_grad()
    lanes = Lanes(model, 2)
    assert len(list(lanes.passes("look", compute, [[*inputs[:2]]]))) == 2
    model.zero_grad()
    monkeypatch.setitem(globals(), "MEETING", [threading.Barrier(2)])  # each pass is in the middle while the other is
    together = list(lanes.passes("look", compute, [[*inputs[:2]], [*inputs[2:]]]))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    assert torch.equal(model.first.weight.grad, expected)


def test_a_copy_shares_values_and_follows_updates() -> None:
    model = Careless()
    twin: Any = Parts(model).twin()
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
    assert lanes._at_once == {}
    list(lanes.passes("look", run, [[torch.ones(1)] * 2]))
    assert lanes._at_once == {"look": 2}
    list(lanes.passes("look", run, [[torch.ones(1)] * 2]))
    assert lanes._at_once == {"look": 2}
    model.train()
    list(lanes.passes("look", run, [[torch.ones(1)] * 2]))
    assert lanes._at_once == {"look": 1}


def test_an_actor_and_its_critic_at_the_same_time() -> None:
    """PushCube's network is too small for lanes: with two threads, one has the critic, forth and back."""
    spec, found = EnvSpec(4, 35, {}, [-1.0] * 4, [1.0] * 4, 50, True), []
    for num_threads in (1, 2):
        torch.manual_seed(0)
        policy = MLPGaussianPolicy.from_config(ModelConfig(id="mlp_gaussian", num_action_chunks=1), spec)
        with torch.no_grad():
            inputs = policy.predict_action_batch(random_obs(spec, rows=256)).forward_inputs
        ways: set[str] = set()

        def loss(model: Any, part: np.ndarray, _: MetricSums, inputs: Any = inputs, ways: Any = ways) -> Tensor:
            output = model({name: x[torch.from_numpy(part)] for name, x in inputs.items()})
            ways.add(output.values.grad_fn.name())
            total: Tensor = output.logprobs.mean() + output.values.square().mean() + output.entropy.mean()
            return total

        trained = learner(policy, num_threads)
        for _ in range(3):
            parts = trained.lanes.cut(np.arange(256))
            trained.update([parts], loss, MetricSums(), "", str)
        scored = list(trained.passes("score", lambda model, _, inputs=inputs: model(inputs).values, [parts]))
        assert len(parts) == 1 and ways == {"_EndBackward" if num_threads == 2 else "AddmmBackward0"}
        found.append((policy.state_dict(), scored[0]))
        ways.clear()
        for _ in range(2):  # lanes have no threads to lend
            trained.update([np.array_split(np.arange(256), 2)], loss, MetricSums(), "", str)
        assert ways == {"AddmmBackward0"}
    assert torch.equal(found[0][1], found[1][1])
    assert all(torch.equal(x, found[1][0][name]) for name, x in found[0][0].items())


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
        found.extend(lanes.passes("count", compute, [[0, 0], [3, 1, 4], [5]]))
    assert sorted(ended) == [0, 0, 0, 3, 4] and torch.get_num_threads() == 1


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
    list(lanes.passes("count", compute, [[1]] * 6 + [[1] * 2]))
    assert most == 1
    list(lanes.passes("count", compute, [[1] * 4] * 3))
    assert most == 4


class Shelf(nn.Module):
    """Keeps what it is given for `Reader`, in a dict that both have."""

    def __init__(self, shelf: dict[str, Tensor], layer: nn.Module) -> None:
        super().__init__()
        self.shelf, self.layer = shelf, layer

    def forward(self, x: Tensor) -> Tensor:
        self.shelf["x"] = self.layer(x)
        return x


class Reader(nn.Module):
    def __init__(self, shelf: dict[str, Tensor]) -> None:
        super().__init__()
        self.shelf = shelf

    def forward(self, x: Tensor) -> Tensor:
        return x * self.shelf["x"]


class Slots:
    __slots__ = ("layer",)

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Delegates:
    """Has whatever `inner` has."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


NOTHING = object()


class Odd(nn.Module):
    """Refers to its layers, or keeps numbers, in a way that torch does not know of."""

    scale: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(3, 3), nn.Linear(3, 1)
        self.register_buffer("scale", torch.ones(3))
        self.count, self.mean, self.kept = 0, torch.zeros(3), {"x": [torch.zeros(3)]}
        self.how, layer = how, self.layer
        if how == "list":
            self.layers = [[[[[layer]]]]]
        elif how == "deque":
            self.layers = deque([layer])
        elif how == "key":
            self.layers = {layer: 1}
        elif how == "method":
            self.run = layer.forward
        elif how == "other method":
            self.run = MethodType(lambda self, x: self(x), layer)
        elif how == "object":
            self.engine = SimpleNamespace(layer=layer)
        elif how == "callable":
            self.run = Slots(layer)
        elif how == "cache":
            self.run = lru_cache(layer.forward)
        elif how == "weight":
            self.weights = {"w": layer.weight}
        elif how == "view":
            self.turned = layer.weight.t()
        elif how == "compiled":
            layer.compile(backend="eager")
        elif how == "hook":
            layer.register_forward_hook(self.look)
        elif how == "closure":
            self.register_forward_hook(lambda module, args, output: output + layer(args[0]).sum())
        elif how == "default":
            self.run = lambda x, layer=layer: layer(x)
        elif how == "weak reference":
            self.owner = weakref.ref(layer)
        elif how == "delegates":
            self.engine = Delegates(SimpleNamespace(layer=layer))
        elif how == "attribute of a weight":
            layer.weight.gain = 2.0
        elif how == "identity":
            self.kept["scale"] = NOTHING
        elif how == "workspace":
            self.kept["rows"] = [torch.zeros(16, 3)]
        elif how in ("shared dict", "shared ordered dict"):
            shelf: dict[str, Tensor] = {} if how == "shared dict" else OrderedDict()
            self.pair = nn.Sequential(Shelf(shelf, layer), Reader(shelf))
        elif how == "dict of a closure":
            found: dict[str, Tensor] = {}
            layer.register_forward_hook(lambda module, args, output: found.update(x=output))
            self.read = lambda: found["x"]

    def look(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.kept["x"][0] = output
        return self.kept["x"][0] * 2

    def forward(self, x: Tensor) -> Tensor:
        if self.how in ("list", "deque", "key"):
            [found] = self.layers[0][0][0][0] if self.how == "list" else self.layers
            x = found(x)
        elif self.how == "weight":
            x = x @ self.weights["w"] + self.layer.bias
        elif self.how == "view":
            x = x @ self.turned + self.layer.bias
        elif hasattr(self, "run"):
            x = self.run(x)
        elif hasattr(self, "pair"):
            x = self.pair(x)
        elif self.how == "dict of a closure":
            x = self.layer(x) + self.read()
        else:
            x = self.engine.layer(x) if hasattr(self, "engine") else self.layer(x)
        if self.how == "attribute of a weight":
            x = x * self.layer.weight.gain
        elif self.how == "identity" and self.kept["scale"] is not NOTHING:  # which a copy has another one of
            x = x * 2
        elif self.how == "features":  # with a gradient, which the next pass does not go back through
            x, self.before = x + getattr(self, "before", x).mean(0).detach(), x
        elif self.how == "largest":
            self.most = max(getattr(self, "most", 0.0), float(x.detach().max()))
            x = x / self.most
        elif self.how == "workspace":
            rows = self.kept["rows"][0].copy_(x.detach())
            x = x + rows.mean(0)
            rows.zero_()
        with torch.no_grad():
            if self.how == "new buffer":
                self.scale = self.scale * 0.9
            elif self.how == "buffer's data":
                self.scale.data *= 0.9
            elif self.how == "number":
                self.count += 1
            elif self.how == "tensor":
                self.mean = 0.9 * self.mean + x.mean(0)
            elif self.how == "numbers":
                self.kept["x"].append(x[0])
        return self.last(x * self.scale + self.mean + self.count) * len(self.kept["x"])


COPIED = [
    "list",
    "deque",
    "key",
    "method",
    "other method",
    "object",
    "callable",
    "weight",
    "hook",
    "shared dict",
    "shared ordered dict",
    "attribute of a weight",
    "not",
]
NOT_COPIED = ["delegates", "cache", "view", "compiled", "closure", "default", "weak reference", "dict of a closure"]
LEAVING = ["new buffer", "buffer's data", "number", "tensor", "numbers", "identity", "features", "largest", "workspace"]


@pytest.mark.parametrize("how", ["not", *COPIED, *NOT_COPIED, *LEAVING])
def test_whatever_a_model_refers_to_or_keeps(how: str) -> None:
    inputs = torch.randn(3, 4, 16, 3, generator=torch.Generator().manual_seed(0))
    inputs[0, 0] *= 10  # no later part has anything larger

    def gradients(num_threads: int) -> tuple[list[Tensor], Lanes]:
        torch.manual_seed(0)
        model: Any = Odd(how)
        lanes = learner(model, num_threads).lanes
        torch.set_num_threads(1)
        for _ in lanes.passes("update", lambda model, x: model(x).square().mean().backward(), list(inputs)):
            pass
        return [parameter.grad.clone() for parameter in model.parameters()], lanes

    expected, _ = gradients(1)
    for _ in range(5):
        found, lanes = gradients(4)
        assert lanes.number == (1 if how in NOT_COPIED else 4)
        assert lanes._at_once == ({} if how in NOT_COPIED else {"update": 1 if how in LEAVING else 4})
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_tokenizer_is_not_copied() -> None:
    """One of a hundred thousand words would take a tenth of a second, at every update."""
    model: Any = Odd("not")
    model.prompts = SimpleNamespace(tokenizer=Tokenizer(WordLevel({"push": 0}, "push")))
    twin: Any = Parts(model).twin()
    assert twin.prompts is not model.prompts and twin.prompts.tokenizer is model.prompts.tokenizer


def test_a_model_that_cannot_be_copied_any_more(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = Odd("not")
    lanes = learner(model, 2).lanes
    run = lambda model, x: model(x)  # noqa: E731
    for _ in range(2):
        list(lanes.passes("look", run, [[torch.ones(1, 3)] * 2]))
    assert lanes._at_once == {"look": 2} and "one core" not in caplog.text
    model.owner = weakref.ref(model.layer)
    assert len(list(lanes.passes("look", run, [[torch.ones(1, 3)] * 2]))) == 2
    assert lanes._at_once == {"look": 1} and "Odd cannot be copied" in caplog.text
    lanes = learner(hooked := nn.Linear(3, 3), 2).lanes
    hooked.weight.register_hook(lambda grad: grad * 2)
    list(lanes.passes("look", run, [[torch.ones(1, 3)] * 2]))
    assert lanes._at_once == {"look": 1} and "a parameter has hooks" in caplog.text


def test_who_has_lanes() -> None:
    assert learner(nn.Linear(2, 2), 4).lanes.number == 4
    recomputed = nn.Sequential(nn.Linear(2, 2))
    recompute_in_backward(recomputed)
    assert learner(recomputed, 4).lanes.number == 4
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
    assert [len(part) for part in small.cut(np.arange(10), positions=1)] == [10]
    small.model.positions_per_sample = 1
    assert [len(part) for part in Lanes(small.model, 4).cut(np.arange(10))] == [10]
    large = learner(nn.Linear(10_000, 1_000), 4).lanes
    assert [len(part) for part in large.cut(np.arange(11))] == [4, 4, 3]  # of 3.4 rows at the least
    assert [len(part) for part in large.cut(np.arange(13), positions=1)] == [13]  # of 6.8
    assert [len(part) for part in large.cut(np.arange(10), positions=20)] == [3, 3, 2, 2]
