"""A policy's actor and its critic on two cores at the same time, for small networks.

Where lanes (`training/lanes.py`) take half of the samples each, every operation is there twice, and most of its time is
the interpreter's, which is one thread's at a time. Two networks have half of the operations each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, wait
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

_LEAST_BRANCH = 2**23
"""Rows times parameters that learn. Handing a network over, and its gradients back, takes a fifth of a millisecond."""
_PLAIN = (nn.Linear, nn.Tanh, nn.ReLU, nn.SiLU)

Begin = Callable[..., "Future[Any]"]
_begin: ContextVar[Begin | None] = ContextVar("_begin", default=None)


@contextmanager
def spare_threads(pool: Executor) -> Iterator[None]:
    """What this thread computes inside may have threads of `pool`, which are done at the end."""
    begun = list[Future[Any]]()

    def begin(*call: Any) -> Future[Any]:
        begun.append(pool.submit(*call))
        return begun[-1]

    token = _begin.set(begin)
    try:
        yield
    finally:
        _begin.reset(token)
        wait(begun)


def beside(network: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """What computes `network(x)`, [B, n] of [B, m], when it is called, or waits for another thread that has begun now.
    The backward pass, too, goes through the network beside what was computed between the two calls.

    The bits are those of `network(x)` as long as it has its parameters for itself. Another thread has it where one is
    spare, which is on CPUs while a policy trains, `x` needs no gradient, and `network` is an `nn.Sequential` of linear
    layers and activations without hooks and with enough to learn. Gradients of gradients raise NotImplementedError
    there.
    """
    begin = _begin.get()
    if begin is None or not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or x.requires_grad:
        return lambda: network(x)
    parameters = [p for p in network.parameters() if p.requires_grad] if _is_plain(network) else []
    if len(x) * sum(parameter.numel() for parameter in parameters) < _LEAST_BRANCH:
        return lambda: network(x)
    branch = _Branch(begin, network, x, parameters)
    begun = _Begin.apply(branch, *parameters)
    return lambda: _End.apply(branch, begun)


def _is_plain(network: nn.Module) -> bool:
    """Nothing but a function of its input and parameters: no random numbers, no state, no code of somebody's own."""
    if type(network) is not nn.Sequential:
        return False
    for module in network.modules():
        hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
        if any(hooks) or "forward" in vars(module) or module._compiled_call_impl or getattr(module, "inplace", False):
            return False
        if type(module) not in _PLAIN and module is not network:
            return False
    return not any(parameter._backward_hooks for parameter in network.parameters())


class _Branch:
    """What another thread computes: `y`, and in the backward pass the gradients of `parameters`."""

    gradients: Future[tuple[Tensor, ...]]

    def __init__(self, begin: Begin, network: nn.Module, x: Tensor, parameters: list[nn.Parameter]) -> None:
        self.begin, self.parameters = begin, parameters
        self.y: Future[Tensor] = begin(network, x)

    def backward(self, of_y: Tensor) -> tuple[Tensor, ...]:
        # the caller may have kept the graph; this part of it is there until the branch is forgotten
        return torch.autograd.grad(self.y.result(), self.parameters, of_y, retain_graph=True)


class _Begin(torch.autograd.Function):
    """Before all that is computed beside the branch, so that the backward pass, which goes from the last to the first,
    waits here when the rest is done."""

    @staticmethod
    def forward(ctx: Any, branch: _Branch, *parameters: Tensor) -> Tensor:
        ctx.branch = branch
        return parameters[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, of_begun: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.branch.gradients.result()


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, branch: _Branch, begun: Tensor) -> Tensor:
        ctx.branch = branch
        return branch.y.result().detach()

    @staticmethod
    def backward(ctx: Any, of_y: Tensor) -> tuple[None, Tensor]:
        if torch.is_grad_enabled():
            raise NotImplementedError("create_graph=True: gradients of gradients do not go through models.branches")
        ctx.branch.gradients = ctx.branch.begin(ctx.branch.backward, of_y)
        return None, of_y.new_empty(0)
