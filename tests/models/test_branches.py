"""A network computed in another thread gives what it gives by itself, bit for bit, gradients included."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlinf_lite.models import MLPGaussianPolicy, branches
from rlinf_lite.models.branches import beside, spare_threads

ROWS, WIDTH = 64, 400  # 2^23 rows times parameters, and some more


@pytest.fixture
def pool() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as pool, spare_threads(pool):
        yield pool


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def gradients(in_branch: bool, x_learns: bool, frozen: int) -> list[Tensor | None]:
    """Of a loss of two networks over one input: of the loss itself, the input, and all parameters, of which the first
    `frozen` of the branch do not learn."""
    torch.manual_seed(0)
    first, second = network(), network()
    with torch.no_grad():
        second[0].weight.mul_(0.5)
    for parameter in [*second.parameters()][:frozen]:
        parameter.requires_grad_(False)
    x = torch.randn(ROWS, WIDTH).requires_grad_(x_learns)
    read = beside(second, x) if in_branch else None
    y = first(x)
    loss = (y * (read() if read else second(x))).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for network in (first, second) for p in network.parameters())]


@pytest.mark.parametrize("x_learns", [False, True])
@pytest.mark.parametrize("frozen", [0, 1, 4])
def test_bits_are_those_of_the_network(pool: Executor, x_learns: bool, frozen: int) -> None:
    expected, found = gradients(False, x_learns, frozen), gradients(True, x_learns, frozen)
    assert [x is None for x in found] == [x is None for x in expected]
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True) if x is not None and y is not None)
    assert sum(x is None for x in found) == (not x_learns) + frozen


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> threading.Barrier:
    """Every tanh waits for one in another thread: one after the other, nobody would come."""
    barrier, tanh = threading.Barrier(2), torch.tanh

    class Meeting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            barrier.wait(20)
            return tanh(x)

        @staticmethod
        def backward(ctx: Any, of_y: Tensor) -> Tensor:
            barrier.wait(20)
            return of_y

    monkeypatch.setattr(nn.Tanh, "forward", lambda self, x: Meeting.apply(x))
    return barrier


def test_both_passes_run_beside_the_rest(pool: Executor, meeting: threading.Barrier) -> None:
    one, other, x = network(), network(), torch.randn(ROWS, WIDTH)
    read = beside(one, x)
    (other(x) + read()).sum().backward()
    assert all(p.grad is not None for made in (one, other) for p in made.parameters())


def test_an_mlp_policy_has_its_critic_there(pool: Executor, meeting: threading.Barrier) -> None:
    policy = MLPGaussianPolicy(35, [-1.0] * 4, [1.0] * 4)
    output = policy({"state": torch.randn(256, 35), "sampled_actions": torch.randn(256, 1, 4)})
    (output.logprobs.sum() + output.values.sum()).backward()
    assert all(p.grad is not None for made in (policy.actor, policy.critic) for p in made.parameters())


def test_gradients_that_are_asked_for(pool: Executor) -> None:
    one, x = network(), torch.randn(ROWS, WIDTH)
    parameters = list(one.parameters())
    found = torch.autograd.grad(beside(one, x)().sum(), parameters)
    assert all(torch.equal(a, b) for a, b in zip(found, torch.autograd.grad(one(x).sum(), parameters), strict=True))
    with pytest.raises(NotImplementedError, match="gradients of gradients"):
        torch.autograd.grad(beside(one, x)().sum(), parameters, create_graph=True)


class Own(nn.Sequential):
    """Of somebody's own."""


def changed(how: str) -> nn.Sequential:
    made = network()
    if how == "dropout":
        made.append(nn.Dropout(0.1))
    if how == "in place":
        made[1] = nn.ReLU(inplace=True)
    if how == "a class of one's own":
        made = Own(*made)
    if how == "a forward of one's own":
        made[1].forward = torch.sin
    if how == "spectral norm":
        nn.utils.parametrizations.spectral_norm(made[0])
    if how == "a hook":
        made[0].register_forward_hook(lambda *_: None)
    if how == "a parameter's hook":
        made[0].weight.register_hook(lambda gradient: gradient * 0.5)
    return made


OTHERS = ["dropout", "in place", "a class of one's own", "a forward of one's own", "spectral norm", "a hook"]


@pytest.mark.parametrize("how", [*OTHERS, "a parameter's hook"])
def test_what_is_more_than_a_function_is_computed_when_it_is_asked_for(pool: Executor, how: str) -> None:
    made, x, seen = changed(how), torch.randn(ROWS, WIDTH), []
    read = beside(made, x)
    made[-1].register_forward_hook(lambda *_: seen.append(threading.get_ident()))
    y = read()
    assert seen == [threading.get_ident()] and y.grad_fn.name() != "_EndBackward"


def test_where_it_is_computed(pool: Executor) -> None:
    def in_branch(rows: int = ROWS) -> bool:
        found: bool = beside(one, x[:rows])().grad_fn.name() == "_EndBackward"
        return found

    one, x = network(), torch.randn(ROWS, WIDTH)
    assert in_branch() and not in_branch(16)
    with torch.autocast("cpu", torch.bfloat16):
        assert not in_branch()
    assert beside(one, x.clone().requires_grad_())().grad_fn.name() != "_EndBackward"
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            y = beside(one, x)()
        assert not y.requires_grad and torch.equal(y, one(x))
    token = branches._begin.set(None)
    assert not in_branch()
    branches._begin.reset(token)
    assert beside(lambda x: x + 1, x)().shape == x.shape  # whatever can be called


def test_errors_of_both_passes_are_the_callers(pool: Executor) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        beside(network(), torch.randn(ROWS, WIDTH + 1))()
    y = beside(network(), torch.randn(ROWS, WIDTH))()
    with pytest.raises(RuntimeError, match="shape"):
        torch.autograd.backward(y, torch.ones(ROWS + 1, 1))


def test_nothing_runs_on_when_threads_are_given_back() -> None:
    release = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(release.wait, 20)
        threading.Timer(0.3, release.set).start()
        with pytest.raises(ZeroDivisionError), spare_threads(pool):
            beside(made := network(), torch.zeros(ROWS, WIDTH))
            raise ZeroDivisionError
        assert release.is_set() and branches._begin.get() is None and made[0].weight.grad is None
