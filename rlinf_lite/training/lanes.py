"""Parts of a micro-batch at the same time, on the cores of one process.

torch's own threads share each operation and wait for each other behind it, so that all of them wait for the one whose
core something else uses: beside one busy process, two of them took four times as long over an update as idle. A lane
computes a whole part of a micro-batch in a Python thread, with one torch thread unless the model is too large for a
lane on every core; lanes wait for each other once per micro-batch.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from types import CellType, FunctionType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

log = logging.getLogger(__name__)

B = TypeVar("B")  # a part of a micro-batch
R = TypeVar("R")

_MAX_BYTES = 2**29
"""Of gradients that lanes hold besides the model's own: 134 million parameters in two lanes."""
_LEAST_WORK = 2**25
"""Positions times parameters of a part, where there are more than two: the interpreter's share of a pass, a millisecond
for a small network, is one lane's at a time, so that many lanes with little each wait for it and for each other."""
_COPIED = ("_parameters", "_buffers", "_modules")


def lanes_for(num_threads: int, num_parameters: int) -> int:
    """How many of them can train a model on a CPU, which have `num_threads` together."""
    return min(num_threads, 1 + _MAX_BYTES // (4 * max(num_parameters, 1)))


class Lanes:
    """`number` threads that compute passes of `model`, a module on the CPU that is whole in this process, each with
    `torch_threads` of torch's.

    Where a pass draws from torch's random numbers or changes buffers, parts are computed one after the other: who comes
    first would be chance. Other sources of chance in a model are its author's to avoid.
    """

    def __init__(self, model: nn.Module, number: int, torch_threads: int = 1) -> None:
        self.model, self.number = model, number
        self._num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._at_once: dict[str, int] = {}  # of each kind of pass, once one was seen
        # threads begin with as many of torch's as the machine has cores
        self._pool = ThreadPoolExecutor(max(number - 1, 1), "lane", torch.set_num_threads, (torch_threads,))

    def cut(self, part: np.ndarray, positions: int = 1) -> list[np.ndarray]:
        """A micro-batch's indices [b], of `positions` each that the model computes (tokens), for the lanes: as many as
        there are, or fewer where there is little to compute; of fewer indices, one each."""
        worth = max(2, len(part) * positions * self._num_parameters // _LEAST_WORK)
        return np.array_split(part, max(min(self.number, worth, len(part)), 1))

    def passes(self, kind: str, compute: Callable[[Any, B], R], micro_batches: Iterable[Sequence[B]]) -> Iterator[R]:
        """`compute(model, part)` of each part of each micro-batch, in order; those of a micro-batch, of which there are
        at most `number`, at the same time: each lane has a copy of the modules that shares their tensors. Gradients of
        backward passes in `compute` add up in the model's parameters, bit for bit as if one part were computed after
        the other.

        `kind`: a name; parts of the first micro-batch of each kind are computed alone, to see what else they change.
        `compute` enters `no_grad` or `autocast` itself: they hold in one thread. Raises what it raises.
        """
        model: Any = self.model
        if self.number == 1:
            yield from (compute(model, part) for parts in micro_batches for part in parts)
            return
        parameters = list(model.parameters())
        twins: list[Any] = []
        state = self._state()
        for parts in micro_batches:
            at_once = self._at_once.get(kind, 1)
            for first in range(0, len(parts), at_once):
                some = parts[first : first + at_once]
                twins += [shared_copy(model) for _ in range(len(some) - 1 - len(twins))]
                of_twins = list(zip(twins, some[1:], strict=False))
                futures = [self._pool.submit(compute, twin, part) for twin, part in of_twins]
                try:
                    result = compute(model, some[0])
                finally:
                    wait(futures)
                yield result
                for future, (twin, _) in zip(futures, of_twins, strict=True):
                    result = future.result()
                    add_gradients(parameters, list(twin.parameters()))
                    yield result
            before, state = state, self._state()
            self._at_once.setdefault(kind, self.number)
            if state != before and self._at_once[kind] > 1:
                self._at_once[kind] = 1
                log.warning("%s: the model draws random numbers or changes buffers; it is computed by one core", kind)

    def _state(self) -> tuple[Any, ...]:
        """What a pass changes besides gradients, as far as one can see."""
        return torch.get_rng_state().numpy().tobytes(), [
            (id(x), x.is_inference() or x._version) for x in self.model.buffers()
        ]


def can_be_copied(model: nn.Module) -> bool:
    """Whether `shared_copy` of it is a model of its own: all that refers to modules or parameters is where torch keeps
    them, no layer was compiled or has a `forward` of its own."""
    for module in model.modules():
        for name, value in vars(module).items():
            replaced = name in ("forward", "_compiled_call_impl") and value is not None
            if replaced or (name not in _COPIED and _refers_to_modules(value)):
                return False
    return True


def _refers_to_modules(value: Any, depth: int = 3) -> bool:
    """Itself, through what it holds, or as a method of one."""
    if isinstance(value, nn.Module | nn.Parameter):
        return True
    if isinstance(value, type) or depth == 0:
        return False
    inner: list[Any] = [getattr(value, "__self__", None)]
    if isinstance(value, partial):
        inner += [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, dict):
        inner += value.values()
    elif isinstance(value, list | tuple | set):
        inner += value
    elif isinstance(value, FunctionType):
        cells = [cell for cell in value.__closure__ or () if cell != CellType()]  # one that is empty has no contents
        inner += [*(cell.cell_contents for cell in cells), *(value.__defaults__ or ()), value.__kwdefaults__]
    elif isinstance(value, weakref.ref):
        inner.append(value())
    elif hasattr(value, "__dict__") and not callable(value):
        inner += vars(value).values()
    return any(_refers_to_modules(found, depth - 1) for found in inner if found is not None)


def shared_copy(model: nn.Module) -> nn.Module:
    """A copy of all modules that has the same buffers, and parameters with the same values, yet gradients of their own.
    What a forward pass keeps as an attribute of a module, or in a dict or list that is one, it keeps in the copy."""
    copies: dict[int, nn.Module] = {}
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        copy = copies[id(module)] = module.__new__(type(module))
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in parameters:  # tied ones stay tied
                parameters[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
        own = {name: x.copy() if type(x) in (dict, list) else x for name, x in vars(module).items()}
        own["_parameters"] = {name: parameters.get(id(x)) for name, x in module._parameters.items()}
        copy.__dict__ |= own
    for module in model.modules():
        copies[id(module)].__dict__["_modules"] = {name: copies.get(id(x)) for name, x in module._modules.items()}
    return copies[id(model)]


def add_gradients(parameters: list[nn.Parameter], others: list[nn.Parameter]) -> None:
    """Move the gradients of `others` to `parameters`, which are as many."""
    for own, other in zip(parameters, others, strict=True):
        if other.grad is not None:
            own.grad = other.grad if own.grad is None else own.grad.add_(other.grad)
            other.grad = None
