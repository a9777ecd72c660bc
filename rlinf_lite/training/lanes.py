"""Parts of a micro-batch at the same time, on the cores of one process.

torch's own threads share each operation and wait for each other behind it, so that all of them wait for the one whose
core something else uses: beside one busy process, two of them took four times as long over an update as idle. A lane
computes a whole part of a micro-batch in a Python thread, with one torch thread unless the model is too large for a
lane on every core; lanes wait for each other once per micro-batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from rlinf_lite.models.branches import spare_threads
from rlinf_lite.scheduler.shared_memory import as_bytes
from rlinf_lite.twins import CopyError, Parts

log = logging.getLogger(__name__)

B = TypeVar("B")  # a part of a micro-batch
R = TypeVar("R")

_MAX_BYTES = 2**29
"""Of gradients that lanes hold besides the model's own: 134 million parameters in two lanes."""
_LEAST_WORK = 2**26
"""Positions times parameters of a part, where there are several. The interpreter's share of a pass, a millisecond or
two for a small network, is there in every part, and is one lane's at a time: lanes with little each wait for it and for
each other, the more so beside a busy process."""
_ONE_BY_ONE = "%s: the model is computed by one core, one pass after the other: %s"
_LEAVES = "it draws random numbers, or a pass leaves something behind for the next"


def lanes_for(num_threads: int, num_parameters: int) -> int:
    """How many of them can train a model on a CPU, which have `num_threads` together."""
    return min(num_threads, 1 + _MAX_BYTES // (4 * max(num_parameters, 1)))


class Lanes:
    """`number` threads that compute passes of `model`, a module on the CPU that is whole in this process, each with
    `torch_threads` of torch's.

    Where a pass draws from torch's random numbers, changes buffers, was seen to leave anything else in the model that
    the next pass may read, or was another one in a copy of the model, parts are computed one after the other: who comes
    first would be chance. Other sources of chance, such as what a model keeps outside itself or draws inside
    `torch.random.fork_rng`, are its author's to avoid.
    """

    def __init__(self, model: nn.Module, number: int, torch_threads: int = 1) -> None:
        self.model, self.number = model, number
        self._positions: int | None = getattr(model, "positions_per_sample", None)
        self._num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._at_once: dict[str, int] = {}  # of each kind of pass, once one was seen
        # threads begin with as many of torch's as the machine has cores
        self._pool = ThreadPoolExecutor(max(number - 1, 1), "lane", torch.set_num_threads, (torch_threads,))

    def cut(self, part: np.ndarray, positions: int | None = None) -> list[np.ndarray]:
        """A micro-batch's indices [b] for the lanes: as many parts as there are lanes, or fewer where there is little
        to compute; of fewer indices, one each. `positions`: how many of each the model computes (tokens); None: as many
        as a policy says, or not known, so that there are two parts at least."""
        positions = self._positions if positions is None else positions
        least, positions = (2, 2) if positions is None else (1, positions)
        worth = max(least, len(part) * positions * self._num_parameters // _LEAST_WORK)
        return np.array_split(part, max(min(self.number, worth, len(part)), 1))

    def passes(self, kind: str, compute: Callable[[Any, B], R], micro_batches: Iterable[Sequence[B]]) -> Iterator[R]:
        """`compute(model, part)` of each part of each micro-batch, in order; those of a micro-batch, of which there are
        at most `number`, at the same time: each lane has a copy of the model that shares its tensors. Gradients of
        backward passes in `compute` add up in the model's parameters, bit for bit as if one part were computed after
        the other. To a micro-batch of one part, other threads are lent (`models/branches.py`).

        `kind`: a name; parts of the first micro-batch of each kind that has several are computed one after the other,
        and again in copies, to see what a pass leaves behind for the next, and whether copies compute the same.
        `compute` enters `no_grad` or `autocast` itself: they hold in one thread. Raises what it raises.
        """
        model: Any = self.model
        if self.number == 1:
            yield from (compute(model, part) for parts in micro_batches for part in parts)
            return
        parameters = list(model.parameters())
        twins: list[Any] = []
        state = _State(model)
        for parts in micro_batches:
            if kind not in self._at_once and len(parts) > 1:
                yield from self._look(kind, compute, parts)
                state = _State(model)
                continue
            others = min(len(parts), self._at_once.get(kind, 1)) - 1
            if len(twins) < others:
                twins = self._twins(kind, others)
            for first in range(0, len(parts), 1 + len(twins)):
                of_twins = list(zip(twins, parts[first + 1 :], strict=False))
                futures = [self._pool.submit(compute, twin, part) for twin, part in of_twins]
                try:
                    with spare_threads(self._pool) if len(parts) == 1 else nullcontext():
                        result = compute(model, parts[first])
                finally:
                    wait(futures)
                yield result
                for future, (twin, _) in zip(futures, of_twins, strict=True):
                    result = future.result()
                    add_gradients(parameters, take_gradients(list(twin.parameters())))
                    yield result
            before, state = state, _State(model)
            if self._at_once.get(kind, 1) > 1 and state != before:
                twins = self._one_by_one(kind, _LEAVES)

    def _look(self, kind: str, compute: Callable[[Any, B], R], parts: Sequence[B]) -> Iterator[R]:
        """The results of `parts`, one after the other. All but the first are computed once more, each by a copy of the
        model as it was before the first, and as in a lane: where results or gradients differ, copies are no good."""
        model: Any = self.model
        parameters, state, kept = list(model.parameters()), _State(model), list[_Kept]()
        self._at_once[kind] = self.number
        twins = self._twins(kind, len(parts) - 1)
        results, gradients = list[R](), list[list[Tensor | None]]()
        earlier = take_gradients(parameters)
        for i, part in enumerate(parts):
            results.append(compute(model, part))
            gradients.append(take_gradients(parameters))
            if i in (0, len(parts) - 1):
                kept.append(_Kept(model))
        if state != _State(model) or kept[0] != kept[1]:
            twins = self._one_by_one(kind, _LEAVES)
        for twin, part, result, found in zip(twins, parts[1:], results[1:], gradients[1:], strict=False):
            try:
                copied = self._pool.submit(compute, twin, part).result()
                is_same = _same([copied, take_gradients(list(twin.parameters()))], [result, found])
            except Exception as error:  # whatever a class of the model's author says to being copied
                log.info("%s, in a copy of the model: %s", kind, error)
                is_same = False
            if not is_same:
                self._one_by_one(kind, "a copy of the model, which is made as pickle does it, computes something else")
                break
        for found in (earlier, *gradients):
            add_gradients(parameters, found)
        yield from results

    def _twins(self, kind: str, number: int) -> list[Any]:
        """Copies of the model as it is; none where it refers by now to something that cannot be copied."""
        try:
            made_of = Parts(self.model)
            return [made_of.twin() for _ in range(number)]
        except CopyError as error:
            return self._one_by_one(kind, error)

    def _one_by_one(self, kind: str, why: object) -> list[Any]:
        """From now on; the copies that are needed for it."""
        self._at_once[kind] = 1
        log.warning(_ONE_BY_ONE, kind, why)
        return []


class _State:
    """What a pass may change that all lanes share, as far as one can see at no cost."""

    def __init__(self, model: nn.Module) -> None:
        self.random = torch.get_rng_state().numpy().tobytes()
        self.buffers = list(model.buffers())  # themselves: an id would be that of another one soon
        self.versions = [x.is_inference() or x._version for x in self.buffers]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _State) or (self.random, self.versions) != (other.random, other.versions):
            return False
        return all(a is b for a, b in zip(self.buffers, other.buffers, strict=True))


class _Kept:
    """All that the model refers to after a pass, for what that leaves to the next one."""

    def __init__(self, model: nn.Module) -> None:
        self.structure, self.whole = b"", list[Any]()
        with suppress(CopyError):  # equal to nothing
            parts = Parts(model)
            self.structure, self.whole = parts.structure, parts.whole
        self.contents = [_content(part) for part in self.whole]

    def __eq__(self, other: object) -> bool:
        """What a pass has made with a gradient is its own: no later one can go back through it."""
        if not isinstance(other, _Kept) or not self.structure or self.structure != other.structure:
            return False
        before, after = (zip(kept.whole, kept.contents, strict=True) for kept in (self, other))
        return all(
            (was is now and had == has) or (isinstance(now, Tensor) and now.grad_fn is not None)
            for (was, had), (now, has) in zip(before, after, strict=True)
        )


def _content(part: Any) -> tuple[int, bytes] | None:
    """Of a tensor that passes might write to, how often that was done, and what it has; None: of anything else."""
    if not isinstance(part, Tensor) or isinstance(part, nn.Parameter):
        return None
    if part.layout is not torch.strided or part.is_quantized or part.is_meta or part.is_nested:
        return None
    return 0 if part.is_inference() else part._version, _bytes(part)


def _bytes(tensor: Tensor) -> bytes:
    content: bytes = as_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous()).tobytes()
    return content


def take_gradients(parameters: list[nn.Parameter]) -> list[Tensor | None]:
    """Off the parameters."""
    taken = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return taken


def _same(one: Any, other: Any) -> bool:
    """Bit for bit; of objects, what they have as attributes."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return (one.shape, one.dtype) == (other.shape, other.dtype) and _bytes(one) == _bytes(other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    if isinstance(one, dict):
        return list(one) == list(other) and _same(list(one.values()), list(other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if hasattr(one, "__dict__"):
        return one is other or _same(vars(one), vars(other))
    return bool(one == other) or (one != one and other != other)


def add_gradients(parameters: list[nn.Parameter], gradients: list[Tensor | None]) -> None:
    """To those that the parameters have."""
    for own, grad in zip(parameters, gradients, strict=True):
        if grad is not None:
            own.grad = grad if own.grad is None else own.grad.add_(grad)
