"""Objects to bytes and back without copying bulk data.

Pickle protocol 5 with out-of-band buffers. Dense torch tensors travel as their bytes (so bfloat16 works); a CUDA tensor
goes through host memory and arrives on the receiver's GPU, or on its CPU where it has none. Gradients do not travel.
What is rebuilt lies in the buffers that `decode` is given, and is writable where they are.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ray import cloudpickle

Buffer = bytes | bytearray | memoryview


def encode(obj: Any) -> tuple[bytes, list[memoryview]]:
    """A pickle, and the buffers that it refers to (views of the object's own memory)."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(obj)
    return stream.getvalue(), [buffer.raw() for buffer in buffers]


def decode(head: Buffer, buffers: Sequence[Buffer]) -> Any:
    return pickle.loads(head, buffers=buffers)


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is np.ndarray:
            if obj.dtype.hasobject or (obj.flags.forc and obj.flags.writeable):
                return NotImplemented
            return writable(obj if obj.flags.forc else np.ascontiguousarray(obj)).__reduce_ex__(5)
        torch = sys.modules.get("torch")
        if torch is not None and kind is torch.Tensor and obj.layout is torch.strided and not obj.is_quantized:
            return _reduce_tensor(obj, torch)
        return super().reducer_override(obj)


class _WritableInterface:
    """Says of an array that it is writable, so that pickle does not mark its copy on the other side read-only."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__ | {"data": (array.__array_interface__["data"][0], False)}


def writable(array: np.ndarray) -> np.ndarray:
    """The same memory, said to be writable; whoever writes to it must know what they do."""
    return array if array.flags.writeable else np.asarray(_WritableInterface(array))


def _reduce_tensor(tensor: Any, torch: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    raw = host.reshape(-1).view(torch.uint8).numpy()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _rebuild_tensor, (pickle.PickleBuffer(raw), dtype, tuple(tensor.shape), tensor.is_cuda)


def _rebuild_tensor(raw: Buffer, dtype: str, shape: tuple[int, ...], was_cuda: bool) -> Any:
    import torch

    kind = getattr(torch, dtype)
    tensor = torch.empty(shape, dtype=kind) if 0 in shape else torch.frombuffer(raw, dtype=kind).reshape(shape)
    return tensor.cuda() if was_cuda and torch.cuda.is_available() else tensor
