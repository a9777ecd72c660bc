"""Offloading of tensors to host memory, with which roles on one device free memory between phases (`actor.offload`,
`rollout.offload`).

Tensors are copied to host memory bit for bit, and back before they are needed. Parameters stay the same objects, so
that ties, optimizers and other references stay valid. On a CPU nothing moves.
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
"""Tensors of at least this size get page-locked host memory; smaller ones are copied as fast without."""


class HostMemory:
    """Host memory for the tensors of a module and its optimizer, which is reused each time they are offloaded.

    It is page-locked, so that a GPU accesses it directly; copies into new memory took ten times as long. Forked
    processes do not get the locked pages.
    """

    def __init__(self) -> None:
        self._rooms: dict[Hashable, Tensor] = {}
        self._locks = True  # until locking fails once

    def hold(self, key: Hashable, tensor: Tensor) -> Tensor:
        """A copy of `tensor`, sharded or not, in the memory that belongs to `key`."""
        tensor = tensor.detach()
        if not hasattr(tensor, "__tensor_flatten__"):
            return self._filled(key, tensor)
        # a shard: only its local tensor goes to the host; DTensor.from_local would move it back to the mesh's GPU
        names, context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}
        local = parts["_local_tensor"]
        # a shard that is smaller than the others is padded to their size, and FSDP2 pads it again on the host
        is_padded = local.untyped_storage().nbytes() > local.nbytes
        parts["_local_tensor"] = local.to(HOST, copy=True) if is_padded else self._filled(key, local)
        kind: Any = type(tensor)
        shard: Tensor = kind.__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
        return shard

    def _filled(self, key: Hashable, tensor: Tensor) -> Tensor:
        room = self._rooms.get(key)
        if room is None or (room.shape, room.stride(), room.dtype) != (tensor.shape, tensor.stride(), tensor.dtype):
            room = self._rooms[key] = self._room_for(tensor)
        room.copy_(tensor)  # blocking: FSDP2 may read it immediately
        return room

    def _room_for(self, tensor: Tensor) -> Tensor:
        """New host memory for a tensor, in the same layout; page-locked for large tensors of a GPU."""
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes < _LOCKED_BYTES or not tensor.is_contiguous():
            return torch.empty_like(tensor, device=HOST)
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(memory, np.uint8)
        if self._locks and tensor.is_cuda:
            memory.madvise(mmap.MADV_DONTFORK)  # after a fork, copy-on-write would move pages away from the GPU's
            self._locks = lock_pages(whole, "Host memory for offloading")
        return torch.from_numpy(whole).view(tensor.dtype).view(tensor.shape)

    def release(self) -> None:
        """Free the memory of tensors that are back on the device; others keep theirs until they are."""
        self._rooms.clear()


def is_on(tensor: Tensor, device: str) -> bool:
    """Whether the tensor is on a device of this type."""
    return tensor.device.type == torch.device(device).type


def moved(tensor: Tensor, device: str, host: HostMemory | None = None, key: Hashable = None) -> Tensor:
    """`tensor` on `device`; the same object if it is there already. `host`: memory to copy into, under `key`."""
    if is_on(tensor, device):
        return tensor
    return tensor.to(device, copy=True) if host is None else host.hold(key, tensor)


def move_module(module: nn.Module, device: str, host: HostMemory | None = None) -> None:
    """Move parameters, gradients and buffers of a module, sharded or not. If it fails, call it again. `host`: memory
    for the parameters."""

    def move(tensor: Tensor) -> Tensor:
        return moved(tensor, device, host if isinstance(tensor, nn.Parameter) else None, id(tensor))

    module._apply(move)  # as `Module.to` does; FSDP2 updates its shards in it


def move_state(optimizer: torch.optim.Optimizer, device: str, host: HostMemory | None = None) -> None:
    """Move the tensors that an optimizer has for its parameters. `host`: memory for them."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = moved(value, device, host, (id(parameter), name))


def free_cache(device: str) -> None:
    """Return unused GPU memory of this process, so that other processes can use it."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


class ActingWeights:
    """Parameters of an unsharded module, on `device` only while the module acts, else in host memory.

    They must not change on the device, as they are not copied back: their host memory stays, and may be shared with
    other processes. Buffers stay on the device.
    """

    def __init__(self, module: nn.Module, device: str, enabled: bool) -> None:
        """`module` must be on `device`. Not `enabled`: parameters stay there."""
        self._module, self._device, self._enabled = module, device, enabled
        self._host: list[tuple[nn.Parameter, Tensor]] = []  # host memory of parameters that are on the device
        if enabled:
            for parameter in module.parameters():
                parameter.data = moved(parameter.data, HOST)
            free_cache(device)

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """A context in which the parameters are on the device."""
        try:
            if self._enabled and not self._host:
                self._host = [(parameter, parameter.data) for parameter in self._module.parameters()]
                for parameter, host in self._host:
                    parameter.data = moved(host, self._device)
            yield
        finally:
            self.unload()

    def unload(self) -> None:
        """Point the parameters to their host memory again."""
        if self._host:
            for parameter, host in self._host:
                parameter.data = host
            self._host = []
            free_cache(self._device)
