"""A module computed in another thread gives what it gives by itself, bit for bit, gradients included."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlinf_lite.models import branches
from rlinf_lite.models.branches import beside, spare_threads

ROWS, WIDTH = 64, 400  # 2^23 positions times parameters, and some more


@pytest.fixture
def pool() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as pool, spare_threads(pool):
        yield pool


class Seen(torch.autograd.Function):
    """Calls what it is given in both passes, and changes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forth: Any, back: Any) -> Tensor:
        ctx.back = back
        forth()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, of_y: Tensor) -> tuple[Tensor, None, None]:
        ctx.back()
        return of_y, None, None


def nothing() -> None:
    pass


class Network(nn.Module):
    def __init__(self, forth: Any = nothing, back: Any = nothing) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.calls = forth, back

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Seen.apply(self.layers(x), *self.calls)
        return y


def gradients(in_branch: bool, x_learns: bool, frozen: bool = False) -> list[Tensor | None]:
    """Of a loss of two networks over one input: of the loss itself, the input, and all parameters."""
    torch.manual_seed(0)
    first, second = Network(), Network()
    with torch.no_grad():
        second.layers[0].weight.mul_(0.5)
    second.layers[0].weight.requires_grad_(not frozen)
    x = torch.randn(ROWS, WIDTH)
    if x_learns:
        x = (x.requires_grad_() * 2).detach().requires_grad_()
    read = beside(second, x) if in_branch else None
    y = first(x)
    loss = (y * (read() if read else second(x))).square().mean()
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for network in (first, second) for p in network.parameters())]


@pytest.mark.parametrize("x_learns", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_bits_are_those_of_the_module(pool: Executor, x_learns: bool, frozen: bool) -> None:
    expected, found = gradients(False, x_learns, frozen), gradients(True, x_learns, frozen)
    assert [x is None for x in found] == [x is None for x in expected]
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True) if x is not None and y is not None)
    assert sum(x is None for x in found) == (not x_learns) + frozen


def test_both_passes_run_beside_the_rest(pool: Executor) -> None:
    """Each waits for the other in both passes: in turn nobody would come."""
    there, back = threading.Barrier(2), threading.Barrier(2)
    one, other = (Network(lambda: there.wait(10), lambda: back.wait(10)) for _ in range(2))
    x = torch.randn(ROWS, WIDTH)
    read = beside(one, x)
    (other(x) + read()).sum().backward()
    assert all(p.grad is not None for network in (one, other) for p in network.parameters())


def test_gradients_that_are_asked_for_and_passes_without(pool: Executor) -> None:
    one, x = Network(), torch.randn(ROWS, WIDTH)
    parameters = list(one.parameters())
    found = torch.autograd.grad(beside(one, x)().sum(), parameters)
    assert all(torch.equal(a, b) for a, b in zip(found, torch.autograd.grad(one(x).sum(), parameters), strict=True))
    with torch.no_grad():
        y = beside(one, x)()
    assert not y.requires_grad and torch.equal(y, one(x))
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first = torch.autograd.grad(beside(one, x)().square().sum(), parameters, create_graph=True)
        sum(g.square().sum() for g in first).backward()


def test_where_it_is_computed(pool: Executor) -> None:
    here, threads = threading.get_ident(), []
    one, x = Network(lambda: threads.append(threading.get_ident())), torch.randn(ROWS, WIDTH)
    beside(one, x)()
    beside(one, x[:16])()  # too little
    with torch.autocast("cpu", torch.bfloat16):
        beside(one, x)()
    with torch.inference_mode():
        beside(one, x)()
    with torch.no_grad():
        beside(one, x)()
    branches._spare.set(None)
    beside(one, x)()
    assert [thread == here for thread in threads] == [False, True, True, True, False, True]


def test_errors_of_both_passes_are_the_callers(pool: Executor) -> None:
    def fail() -> None:
        raise ZeroDivisionError("in the branch")

    x = torch.randn(ROWS, WIDTH)
    read = beside(Network(forth=fail), x)
    with pytest.raises(ZeroDivisionError, match="in the branch"):
        read()
    loss = beside(Network(back=fail), x)().sum()
    with pytest.raises(ZeroDivisionError, match="in the branch"):
        loss.backward()
