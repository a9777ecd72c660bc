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
"""Rows times parameters. Handing a network to another thread, and gradients back, takes a fifth of a millisecond."""
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
    spare, which is on CPUs while a policy trains, and `network` is an `nn.Sequential` of linear layers and activations
    without hooks and with enough to compute. Gradients of gradients raise NotImplementedError there.
    """
    begin = _begin.get()
    if begin is None or not _is_plain(network) or torch.is_autocast_enabled("cpu") or torch.is_inference_mode_enabled():
        return lambda: network(x)
    parameters = list(network.parameters())
    if len(x) * sum(parameter.numel() for parameter in parameters) < _LEAST_BRANCH:
        return lambda: network(x)
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    if not torch.is_grad_enabled() or not (learning or x.requires_grad):
        return begin(_without_gradients, network, x).result
    branch = _Branch(begin, network, x, learning)
    begun = _Begin.apply(branch, x, *learning)
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
    """What another thread computes: `y`, and in the backward pass gradients of `x` and `parameters`."""

    gradients: Future[tuple[Tensor | None, ...]]

    def __init__(self, begin: Begin, network: nn.Module, x: Tensor, parameters: list[nn.Parameter]) -> None:
        self.begin, self.parameters = begin, parameters
        self.x = x.detach().requires_grad_(x.requires_grad)
        self.y: Future[Tensor] = begin(network, self.x)

    def backward(self, of_y: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [*([self.x] if self.x.requires_grad else []), *self.parameters]
        found = torch.autograd.grad(self.y.result(), inputs, of_y, retain_graph=True)  # until the branch is forgotten
        return found if self.x.requires_grad else (None, *found)


class _Begin(torch.autograd.Function):
    """Before all that is computed beside the branch, so that the backward pass, which goes from the last to the first,
    waits here when the rest is done."""

    @staticmethod
    def forward(ctx: Any, branch: _Branch, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.branch = branch
        return x.new_empty(0)

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


def _without_gradients(network: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        y: Tensor = network(x)
    return y
