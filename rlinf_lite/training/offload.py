"""Device memory that roles on one device give back between phases: `actor.offload`, `rollout.offload`.

What goes away lies in host memory, bit for bit, and comes back before it is needed. Parameters stay the same objects,
so that ties, optimizers and who else refers to them go on. On a CPU nothing moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

HOST = "cpu"


def moved(tensor: Tensor, device: str) -> Tensor:
    """`tensor` on `device`; itself where it is there."""
    return tensor.to(device)


def move_module(module: nn.Module, device: str) -> None:
    """Parameters, gradients and buffers of a module, sharded or not; a move that failed is to be done again."""
    module._apply(partial(moved, device=device))  # as `Module.to` does; FSDP2 looks after its shards there


def move_state(optimizer: torch.optim.Optimizer, device: str) -> None:
    """The tensors that an optimizer has per parameter."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = moved(value, device)


def free_cache(device: str) -> None:
    """Give memory that nothing uses any more to other processes."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


class ActingWeights:
    """Parameters of a whole module that nothing changes while it acts: on `device` then, else in host memory.

    Their host memory stays, and so nothing is copied when they go: it may be what other processes share. Buffers stay
    on the device.
    """

    def __init__(self, module: nn.Module, device: str, enabled: bool) -> None:
        """`module` is on `device`."""
        self._module, self._device, self._enabled = module, device, enabled
        self._host: list[tuple[nn.Parameter, Tensor]] = []  # where they are on the device
        if enabled:
            for parameter in module.parameters():
                parameter.data = moved(parameter.data, HOST)
            free_cache(device)

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """On the device inside."""
        try:
            if self._enabled and not self._host:
                self._host = [(parameter, parameter.data) for parameter in self._module.parameters()]
                for parameter, host in self._host:
                    parameter.data = moved(host, self._device)
            yield
        finally:
            self.unload()

    def unload(self) -> None:
        """Back to host memory, where they are not."""
        if self._host:
            for parameter, host in self._host:
                parameter.data = host
            self._host = []
            free_cache(self._device)
