"""Measurement of models on fake tensors, which have no numbers: their parameters, and the memory of their passes.

torch's fake tensors are tensors of the meta device that stand for tensors of another device: shapes, types and autograd
are real, but there are no numbers. The code of a run builds the model and runs it on them, so that nothing here depends
on the model. Operations that need numbers (`.item()`, `.numpy()`, reading a file's tensors) raise.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters of a model, and their bytes."""

    parameters: int
    trained: int
    parameter_bytes: Mapping[str, int]
    """Bytes of parameters by type."""
    buffer_bytes: int
    largest_unit: int
    """Number of parameters of the largest module that is sharded by itself."""
    root: int
    """Number of parameters outside these modules, which stay gathered during all of forward and backward."""

    @property
    def num_bytes(self) -> int:
        return sum(self.parameter_bytes.values())


def count(model: nn.Module, units: Sequence[nn.Module]) -> Counts:
    """Count a whole model; `units` are the modules that FSDP shards one by one (`fsdp_units`)."""
    parameters = list(model.parameters())
    by_type: Counter[str] = Counter()
    for parameter in parameters:
        by_type[str(parameter.dtype).removeprefix("torch.")] += parameter.nbytes
    total = sum(parameter.numel() for parameter in parameters)
    of_units = [sum(parameter.numel() for parameter in unit.parameters()) for unit in units]
    return Counts(
        parameters=total,
        trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        parameter_bytes=dict(by_type),
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        largest_unit=max(of_units, default=0),
        root=total - sum(of_units),
    )


class Meter(TorchDispatchMode):
    """Counts the bytes of the tensors that exist; views have none of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self._peak = 0
        """Bytes of the tensors that exist now."""
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = id(storage), storage.nbytes()  # the same object as long as the memory exists
        if key in self._storages:
            return

        def forget(_: object) -> None:
            del self._storages[key]
            self.live -= num_bytes

        self._storages[key] = weakref.ref(storage, forget)
        self.live += num_bytes
        self._peak = max(self._peak, self.live)

    def peak_of(self, function: Callable[[], T]) -> tuple[T, int]:
        """Call `function`. Returns its result, and the largest number of bytes during the call beyond those before."""
        before = self._peak = self.live
        result = function()
        return result, self._peak - before

    def activations(self, model: nn.Module, loss: Callable[[], Tensor]) -> int:
        """Peak bytes of a forward and backward pass, without the gradients of parameters."""

        def drop(parameter: Tensor) -> None:
            parameter.grad = None

        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        handles = [parameter.register_post_accumulate_grad_hook(drop) for parameter in trained]
        try:
            return self.peak_of(lambda: loss().backward())[1]
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def fake_tensors() -> Iterator[Meter]:
    """A context for building and running models: all tensors made inside are fake and counted.

    Real tensors, such as tables that a class made at import, are accepted; only their shapes and types are used.
    """
    meter, swap = Meter(), torch.utils.swap_tensors

    def swap_changed(old: Tensor, new: Tensor) -> None:
        """Swap only if something changes. peft calls `Module.to` without a change, and torch then refuses the swap."""
        if (old.dtype, old.device) != (new.dtype, new.device):
            swap(old, new)

    with (
        torch.compiler.set_stance("force_eager"),
        FakeTensorMode(allow_non_fake_inputs=True),
        meter,
        patch.object(torch.utils, "swap_tensors", swap_changed),
        # its loop draws values outside the bounds again, and reads numbers to find them
        patch.object(nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor),
    ):
        yield meter
