"""Parts of a policy that do not need each other, such as an actor and its critic, on two cores at the same time.

A small network gains little where lanes (`training/lanes.py`) take half of its samples each: every operation is there
twice, and most of its time is the interpreter's, which is one thread's at a time. Its branches have half of the
operations each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_LEAST_WORK = 2**23
"""Positions times parameters of a branch. Handing it to another thread, and its gradients back, takes a fifth of a
millisecond."""
_spare: ContextVar[Executor | None] = ContextVar("_spare", default=None)


@contextmanager
def spare_threads(pool: Executor) -> Iterator[None]:
    """What this thread computes inside may have threads of `pool`, each with its own number of torch's."""
    token = _spare.set(pool)
    try:
        yield
    finally:
        _spare.reset(token)


def beside(module: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """Begins `module(x)`, a tensor, and returns what waits for it, to be called once. The backward pass, too, computes
    the module beside what the caller has computed in between; the bits are those of `module(x)`.

    Only where a thread is spare, which is on CPUs while a policy trains, and the module has enough to compute; else it
    is computed here and now. It may not draw random numbers, and gradients of gradients do not go through it.
    """
    pool, parameters = _spare.get(), list(module.parameters())
    work = x[..., 0].numel() * sum(parameter.numel() for parameter in parameters)
    if pool is None or work < _LEAST_WORK or torch.is_autocast_enabled("cpu") or torch.is_inference_mode_enabled():
        y: Tensor = module(x)
        return lambda: y
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    if not torch.is_grad_enabled() or not (parameters or x.requires_grad):
        return pool.submit(_without_gradients, module, x).result
    branch = _Branch(pool, x, parameters)
    branch.y = pool.submit(module, branch.x)
    begun = _Begin.apply(branch, x, *parameters)
    return lambda: _End.apply(branch, begun)


class _Branch:
    """Its leaf `x`, its result, and in the backward pass the gradients of `x` and `parameters`."""

    y: Future[Tensor]
    gradients: Future[tuple[Tensor | None, ...]]

    def __init__(self, pool: Executor, x: Tensor, parameters: list[nn.Parameter]) -> None:
        self.pool, self.parameters = pool, parameters
        self.x = x.detach().requires_grad_(x.requires_grad)

    def backward(self, of_y: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [*([self.x] if self.x.requires_grad else []), *self.parameters]
        found = torch.autograd.grad(self.y.result(), inputs, of_y, allow_unused=True)
        return found if self.x.requires_grad else (None, *found)


class _Begin(torch.autograd.Function):
    """Before all that is computed beside the branch, so that the backward pass, which goes from the last to the first,
    waits here when the rest is done."""

    @staticmethod
    def forward(ctx: Any, branch: _Branch, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.branch = branch
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_begun: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.branch.gradients.result()


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, branch: _Branch, begun: Tensor) -> Tensor:
        ctx.branch = branch
        return branch.y.result().detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_y: Tensor) -> tuple[None, Tensor]:
        branch = ctx.branch
        branch.gradients = branch.pool.submit(branch.backward, of_y)
        return None, of_y.new_empty(0)


def _without_gradients(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        y: Tensor = module(x)
    return y
