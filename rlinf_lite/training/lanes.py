"""Micro-batches of one model at the same time, on the cores of one process.

torch's own threads share each operation and wait for each other behind it, so that all of them wait for the one whose
core something else uses: beside one busy process, two of them took four times as long over an update as idle. A lane
computes a whole micro-batch in a Python thread with one torch thread; lanes wait for each other once per micro-batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import nn

log = logging.getLogger(__name__)

B = TypeVar("B")  # a micro-batch
R = TypeVar("R")


class Lanes:
    """`number` threads that compute passes of `model`, a module on the CPU that is whole in this process.

    Where a pass draws from torch's random numbers, micro-batches are computed one after the other: who draws first
    would be chance.
    """

    def __init__(self, model: nn.Module, number: int) -> None:
        self.model, self.number = model, number
        self._at_once: dict[str, int] = {}  # of each kind of pass, once one was seen
        # threads begin with as many of torch's as the machine has cores
        self._pool = ThreadPoolExecutor(max(number - 1, 1), "lane", torch.set_num_threads, (1,))

    def passes(self, kind: str, compute: Callable[[Any, B], R], micro_batches: Iterable[B]) -> Iterator[R]:
        """`compute(model, micro_batch)` of each, in order, `number` of them at the same time: each lane has a copy of
        the modules that shares their tensors. Gradients of backward passes in `compute` add up in the model's
        parameters, bit for bit as if one micro-batch were computed after the other.

        `kind`: a name; the first micro-batch of each kind is computed alone, to see whether it draws random numbers.
        `compute` enters `no_grad` or `autocast` itself: they hold in one thread. Raises what it raises.
        """
        model: Any = self.model
        remaining = iter(micro_batches)
        if kind not in self._at_once:
            for micro_batch in islice(remaining, 1):
                state = torch.get_rng_state()
                yield compute(model, micro_batch)
                is_random = not torch.equal(torch.get_rng_state(), state)
                self._at_once[kind] = 1 if is_random else self.number
                if is_random and self.number > 1:
                    log.warning("%s: the model draws random numbers, so one core computes it, to be repeatable", kind)
        at_once = self._at_once.get(kind, 1)
        parameters = list(model.parameters())
        twins: list[Any] = [shared_copy(model) for _ in range(at_once - 1)]
        while some := list(islice(remaining, at_once)):
            of_twins = zip(twins, some[1:], strict=False)
            futures = [self._pool.submit(compute, twin, micro_batch) for twin, micro_batch in of_twins]
            try:
                result = compute(model, some[0])
            finally:
                wait(futures)
            yield result
            for future, twin in zip(futures, twins, strict=False):
                result = future.result()
                add_gradients(parameters, list(twin.parameters()))
                yield result


def shared_copy(model: nn.Module) -> nn.Module:
    """A copy of all modules that has the same buffers, and parameters with the same values, yet gradients of their own.
    What a forward pass keeps as an attribute of a module, it keeps in the copy."""
    copies: dict[int, nn.Module] = {}
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        copy = copies[id(module)] = module.__new__(type(module))
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in parameters:  # tied ones stay tied
                parameters[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
        copy.__dict__ |= module.__dict__ | {
            "_parameters": {name: parameters.get(id(x)) for name, x in module._parameters.items()},
            "_buffers": module._buffers.copy(),
        }
    for module in model.modules():
        copies[id(module)].__dict__["_modules"] = {name: copies.get(id(x)) for name, x in module._modules.items()}
    return copies[id(model)]


def add_gradients(parameters: list[nn.Parameter], others: list[nn.Parameter]) -> None:
    """Move the gradients of `others` to `parameters`, which are as many."""
    for own, other in zip(parameters, others, strict=True):
        if other.grad is not None:
            own.grad = other.grad if own.grad is None else own.grad.add_(other.grad)
            other.grad = None
