"""Device memory that roles on one device give back between phases: `actor.offload`, `rollout.offload`.

What goes away lies in host memory, bit for bit, and comes back before it is needed. Parameters stay the same objects,
so that ties, optimizers and who else refers to them go on. On a CPU nothing moves.
"""

from __future__ import annotations

import mmap
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlinf_lite.weights.pages import lock_pages

HOST = "cpu"
_LOCKED_BYTES = 2**20
"""Tensors from this size on have page-locked memory in the host; smaller ones are copied as quickly without."""


class HostMemory:
    """Host memory for a module and its optimizer, kept from one time that they go there to the next.

    It is page-locked, so that a GPU copies to it and from it by itself; copies into fresh memory took ten times as
    long. A process that is forked does not have what is locked.
    """

    def __init__(self) -> None:
        self._rooms: dict[Hashable, Tensor] = {}
        self._locks = True  # until the first time that it cannot

    def hold(self, key: Hashable, tensor: Tensor) -> Tensor:
        """A copy of `tensor`, sharded or not, in the memory of what came under `key` before."""
        tensor = tensor.detach()
        if not hasattr(tensor, "__tensor_flatten__"):
            return self._filled(key, tensor)
        # a shard: its own memory here, all else as it is; who makes a DTensor of a mesh of GPUs moves it there
        names, context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}
        local = parts["_local_tensor"]
        # a parameter's shard that is smaller than others' lies in memory of their size, which FSDP2 makes again here
        is_padded = local.untyped_storage().nbytes() > local.nbytes
        parts["_local_tensor"] = local.to(HOST, copy=True) if is_padded else self._filled(key, local)
        kind: Any = type(tensor)
        shard: Tensor = kind.__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
        return shard

    def _filled(self, key: Hashable, tensor: Tensor) -> Tensor:
        room = self._rooms.get(key)
        if room is None or (room.shape, room.stride(), room.dtype) != (tensor.shape, tensor.stride(), tensor.dtype):
            room = self._rooms[key] = self._room_for(tensor)
        room.copy_(tensor)  # until it is there: FSDP2 may read it at once
        return room

    def _room_for(self, tensor: Tensor) -> Tensor:
        """Memory on the host for a tensor of the device, in the same layout."""
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes < _LOCKED_BYTES or not tensor.is_contiguous():
            return torch.empty_like(tensor, device=HOST)
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(memory, np.uint8)
        if self._locks and tensor.is_cuda:
            memory.madvise(mmap.MADV_DONTFORK)  # a fork would part this process's pages from those that the GPU knows
            self._locks = lock_pages(whole, "Host memory of what is offloaded")
        return torch.from_numpy(whole).view(tensor.dtype).view(tensor.shape)

    def release(self) -> None:
        """Give the memory of what has come back to its device to others; what is away keeps its own until then."""
        self._rooms.clear()


def is_there(tensor: Tensor, device: str) -> bool:
    """Whether it need not move."""
    return tensor.device.type == torch.device(device).type


def moved(tensor: Tensor, device: str, host: HostMemory | None = None, key: Hashable = None) -> Tensor:
    """`tensor` on `device`; itself where it is there. In `host` it has memory under `key`."""
    if is_there(tensor, device):
        return tensor
    return tensor.to(device, copy=True) if host is None else host.hold(key, tensor)


def move_module(module: nn.Module, device: str, host: HostMemory | None = None) -> None:
    """Parameters, gradients and buffers of a module, sharded or not; a move that failed is to be done again.
    `host`: where parameters go to."""

    def move(tensor: Tensor) -> Tensor:
        return moved(tensor, device, host if isinstance(tensor, nn.Parameter) else None, id(tensor))

    module._apply(move)  # as `Module.to` does; FSDP2 looks after its shards there


def move_state(optimizer: torch.optim.Optimizer, device: str, host: HostMemory | None = None) -> None:
    """The tensors that an optimizer has per parameter. `host`: where they go to."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = moved(value, device, host, (id(parameter), name))


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
