"""Wire format between openpi's client and server: msgpack, with numpy arrays and scalars as maps with bytes as keys.

An array is `{b"__ndarray__": True, b"data": bytes, b"dtype": dtype.str, b"shape": [...]}`, a scalar
`{b"__npgeneric__": True, b"data": number, b"dtype": dtype.str}` (openpi_client/msgpack_numpy.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np


class WireError(ValueError):
    """A message that is not msgpack, or has incomplete arrays."""


def pack(message: Mapping[str, Any]) -> bytes:
    """A message as bytes. Raises ValueError for arrays of objects, structures or complex numbers."""
    packed: bytes = msgpack.packb(message, default=_packed)
    return packed


def unpack(message: bytes) -> Any:
    """The message that `pack` got. Its arrays are copies that the caller may write to. Raises WireError."""
    try:
        return msgpack.unpackb(message, object_hook=_unpacked)
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise WireError(f"this is not msgpack as openpi-client packs it: {error or type(error).__name__}") from error


def _packed(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        _check(value.dtype)
    if isinstance(value, np.ndarray):
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise ValueError(f"a {type(value).__name__} cannot be sent")


def _unpacked(value: dict[Any, Any]) -> Any:
    if b"__ndarray__" in value:
        array = np.frombuffer(value[b"data"], dtype=_check(np.dtype(value[b"dtype"])))
        return array.reshape(value[b"shape"]).copy()
    if b"__npgeneric__" in value:
        return _check(np.dtype(value[b"dtype"])).type(value[b"data"])
    return value


def _check(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.kind in "VOc":
        raise ValueError(f"arrays of {dtype} cannot be sent")
    return dtype
