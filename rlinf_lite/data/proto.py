"""`DataProto`: a batch that is sent between worker groups. Its rows have tensors and Python objects.

Methods return a new DataProto and leave the old one unchanged, except `pop`. The new one may share memory with the old
one, as in torch: slices are views, gathered rows are copies.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlinf_lite.file_modes import follow_umask
from rlinf_lite.scheduler.dispatch import split_rows
from rlinf_lite.scheduler.segments import writable
from rlinf_lite.scheduler.shared_memory import as_bytes

Index = int | slice | Sequence[int] | np.ndarray | Tensor
_TENSORS, _REST = "batch.safetensors", "batch.json"
_JSON_TYPES = (dict, list, int, float, str)


class DataProtoError(ValueError):
    """Rows do not fit together, keys are missing or in conflict, or values cannot be saved."""


class DataProto:
    """A batch of B rows. `batch`: tensors [B, ...]; `non_tensor_batch`: arrays [B, ...], often of objects such as
    strings or dicts; `meta_info`: values that belong to the whole batch. Raises DataProtoError if columns differ in
    length.

    A batch that a worker receives may be in memory that others read too. It is copied when `batch` or
    `non_tensor_batch` is first used, and not if the batch is only split, concatenated or passed on.
    """

    def __init__(
        self,
        batch: dict[str, Tensor] | None = None,
        non_tensor_batch: dict[str, np.ndarray] | None = None,
        meta_info: dict[str, Any] | None = None,
        *,
        borrowed: bool = False,
    ) -> None:
        """`borrowed`: tensors and arrays are in memory that must not be written to."""
        self._tensors, self._arrays, self._borrowed = batch or {}, non_tensor_batch or {}, borrowed
        self.meta_info = meta_info or {}
        rows = {name: len(value) for name, value in self._columns()}
        if len(set(rows.values())) > 1:
            counts = ", ".join(f"{name} {count}" for name, count in rows.items())
            raise DataProtoError(f"columns have different numbers of rows: {counts}")

    @property
    def batch(self) -> dict[str, Tensor]:
        return self._owned()._tensors

    @batch.setter
    def batch(self, tensors: dict[str, Tensor]) -> None:
        self._owned()._tensors = tensors

    @property
    def non_tensor_batch(self) -> dict[str, np.ndarray]:
        return self._owned()._arrays

    @non_tensor_batch.setter
    def non_tensor_batch(self, arrays: dict[str, np.ndarray]) -> None:
        self._owned()._arrays = arrays

    def __repr__(self) -> str:
        columns = ", ".join(f"{name} {list(value.shape)}" for name, value in self._columns())
        return f"DataProto({len(self)} rows: {columns or 'no columns'}; meta_info: {_listed(self.meta_info)})"

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> Self:
        """A DataProto from tensors, and from arrays or lists of any objects."""
        return cls(
            dict(tensors or {}),
            {name: _as_array(name, value) for name, value in (non_tensors or {}).items()},
            dict(meta_info or {}),
        )

    def __len__(self) -> int:
        return next((len(value) for _, value in self._columns()), 0)

    @property
    def nbytes(self) -> int:
        """The bytes of tensors and arrays."""
        return sum(value.nbytes for _, value in self._columns())

    def __getitem__(self, index: Index) -> Self:
        """Some rows: by a slice (views), by integers or a mask (copies), or by one integer (a batch of one row)."""
        if not isinstance(index, slice | bool) and np.ndim(index) == 0:
            index = operator.index(index)  # type: ignore[arg-type]  # any integer type
            if not -len(self) <= index < len(self):
                raise IndexError(f"row {index} of a batch of {len(self)}")
            index = slice(index, index + 1 or None)
        if isinstance(index, slice):
            return self._rows(index, index)
        chosen = np.asarray(index.cpu() if isinstance(index, Tensor) else index)
        if chosen.dtype == np.bool_:
            if chosen.shape != (len(self),):
                raise DataProtoError(f"a mask of shape {list(chosen.shape)} over {len(self)} rows")
            chosen = np.flatnonzero(chosen)
        chosen = chosen.astype(np.int64)
        return self._rows(torch.from_numpy(chosen), chosen)

    # columns

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> Self:
        """The batch with only these columns; None: all columns of that kind."""
        chosen = self._like(_chosen(self._tensors, batch_keys), _chosen(self._arrays, non_tensor_batch_keys))
        chosen.meta_info = _chosen(self.meta_info, meta_info_keys)
        return chosen

    def pop(
        self,
        batch_keys: Iterable[str] = (),
        non_tensor_batch_keys: Iterable[str] = (),
        meta_info_keys: Iterable[str] = (),
    ) -> Self:
        """Remove these columns from this batch, and return them as another."""
        taken = self.select(batch_keys, non_tensor_batch_keys, meta_info_keys)
        for ours, theirs in zip(self._parts(), taken._parts(), strict=True):
            for key in theirs:
                del ours[key]
        return taken

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """The batch with tensor columns under other names, in the same order."""
        old, new = ([keys] if isinstance(keys, str) else list(keys) for keys in (old_keys, new_keys))
        if len(old) != len(new):
            raise DataProtoError(f"{len(old)} old names and {len(new)} new ones")
        _chosen(self._tensors, old)
        names = dict(zip(old, new, strict=True))
        renamed = [names.get(key, key) for key in self._tensors]
        twice = {key for key in renamed if renamed.count(key) > 1}
        if twice:
            raise DataProtoError(f"two columns would be called {_listed(twice)}")
        return self._like(dict(zip(renamed, self._tensors.values(), strict=True)), dict(self._arrays))

    def union(self, other: DataProto) -> Self:
        """The columns of both batches, which have the same rows. Raises DataProtoError if a common column differs."""
        return type(self)(
            _united(self.batch, other.batch),
            _united(self.non_tensor_batch, other.non_tensor_batch),
            _united(self.meta_info, other.meta_info),
        )

    # rows

    def chunk(self, chunks: int) -> list[Self]:
        """Contiguous parts whose sizes differ by at most 1, larger ones first; views."""
        if chunks < 1:
            raise DataProtoError(f"{chunks} chunks: at least 1 is needed")
        return [self[part.start : part.stop] for part in split_rows(chunks, len(self))]

    def split(self, split_size: int) -> list[Self]:
        """Contiguous parts of `split_size` rows, the last one with the rest; views."""
        if split_size < 1:
            raise DataProtoError(f"parts of {split_size} rows: at least 1 is needed")
        return [self[start : start + split_size] for start in range(0, len(self), split_size)]

    @classmethod
    def concat(cls, data: Sequence[DataProto]) -> Self:
        """The rows of all parts, in order. Columns must be the same, and `meta_info` must not differ.

        `meta_info["metrics"]` becomes the list of the parts' metrics, in order, so that none are lost.
        """
        if not data:
            raise DataProtoError("nothing to put together")
        first = data[0]
        for part in data[1:]:
            for ours, theirs in zip(first._parts()[:2], part._parts()[:2], strict=True):
                if ours.keys() != theirs.keys():
                    raise DataProtoError(f"parts have different columns: {_listed(set(ours) ^ set(theirs))}")
        meta: dict[str, Any] = {}
        for part in data:
            meta = _united(meta, {key: value for key, value in part.meta_info.items() if key != "metrics"})
        metrics = [part.meta_info["metrics"] for part in data if "metrics" in part.meta_info]
        if metrics:
            flat = [item for one in metrics for item in (one if isinstance(one, list) else [one])]
            meta["metrics"] = metrics[0] if len(data) == 1 else flat
        if len(data) == 1:
            return cls(dict(first._tensors), dict(first._arrays), meta, borrowed=first._borrowed)
        return cls(
            {key: _joined([part._tensors[key] for part in data]) for key in first._tensors},
            {key: np.concatenate([part._arrays[key] for part in data]) for key in first._arrays},
            meta,
        )

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Every row `repeat_times` times: row by row (a a b b), or the whole batch again and again (a b a b)."""
        if repeat_times < 1:
            raise DataProtoError(f"{repeat_times} times: at least 1 is needed")
        rows = np.arange(len(self))
        return self[np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times)]

    def reorder(self, indices: Index) -> Self:
        """The rows in another order; `indices` is a permutation."""
        order = np.asarray(indices.cpu() if isinstance(indices, Tensor) else indices)
        if not np.array_equal(np.sort(order), np.arange(len(self))):
            raise DataProtoError(f"no permutation of {len(self)} rows: {order.tolist()[:8]}")
        return self[order]

    def pad_to_divisor(self, size_divisor: int) -> tuple[Self, int]:
        """Repeat the first rows at the end until `size_divisor` divides the length. Returns the batch and the number of
        added rows."""
        added = -len(self) % size_divisor
        if not added:
            return self[:], 0
        return self[np.arange(len(self) + added) % len(self)], added

    def unpad(self, pad_size: int) -> Self:
        """The batch without the rows that `pad_to_divisor` added."""
        if not 0 <= pad_size <= len(self):
            raise DataProtoError(f"{pad_size} rows of padding in a batch of {len(self)}")
        return self[: len(self) - pad_size]

    # devices and files

    def to(self, device: torch.device | str) -> Self:
        """The batch with its tensors on this device."""
        tensors = {key: value.to(device) for key, value in self.batch.items()}
        return type(self)(tensors, dict(self.non_tensor_batch), dict(self.meta_info))

    def save(self, directory: str | Path) -> None:
        """Write safetensors and JSON into `directory`. Raises DataProtoError for arrays of other types than numbers,
        strings and objects, and for values that JSON cannot hold or would change, such as tuples and dict keys that are
        not strings."""
        directory = Path(directory)
        numeric = {key: array for key, array in self.non_tensor_batch.items() if _is_numeric(array.dtype)}
        others = {key: array for key, array in self.non_tensor_batch.items() if key not in numeric}
        for key, array in others.items():
            if array.dtype.kind not in "OU":
                raise DataProtoError(
                    f"{key} is an array of {array.dtype}. Make it one of plain numbers, strings or objects"
                )
            if array.ndim > 1:
                raise DataProtoError(f"{key} is an array {list(array.shape)} of {array.dtype}. Make its rows lists")
        objects = {key: array.tolist() for key, array in others.items()}
        tensors = {f"batch.{key}": value.detach().cpu().contiguous().clone() for key, value in self.batch.items()}
        tensors |= {f"array.{key}": torch.from_numpy(np.array(array)) for key, array in numeric.items()}
        for name, value in [*objects.items(), ("meta_info", self.meta_info)]:
            if changed := _changed_by_json(value, name):
                raise DataProtoError(f"besides tensors and numbers only what JSON can hold is saved, and {changed}")
        dtypes = {key: array.dtype.str for key, array in others.items()}
        rest = json.dumps({"objects": objects, "dtypes": dtypes, "meta_info": self.meta_info, "num_rows": len(self)})
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, directory / _TENSORS)
        follow_umask([directory / _TENSORS])
        (directory / _REST).write_text(rest)

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        """Read a batch that `save` wrote. Raises FileNotFoundError."""
        directory = Path(directory)
        rest = json.loads((directory / _REST).read_text())
        batch, arrays = {}, {}
        for name, tensor in load_file(directory / _TENSORS).items():
            kind, _, key = name.partition(".")
            if kind == "batch":
                batch[key] = tensor
            else:
                arrays[key] = tensor.numpy()
        arrays |= {
            key: _objects(values).astype(rest["dtypes"].get(key, "O")) for key, values in rest["objects"].items()
        }
        return cls(batch, arrays, rest["meta_info"])

    def __reduce__(self) -> Any:
        """Pickle tensors as arrays of their bytes, which pickle can pass on without a copy."""
        packed = {}
        for key, tensor in self._tensors.items():
            raw = as_bytes(tensor.detach().cpu().contiguous())
            packed[key] = raw, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        return _unpacked, (type(self), packed, self._arrays, self.meta_info)

    def _columns(self) -> Iterator[tuple[str, Any]]:
        yield from self._tensors.items()
        yield from self._arrays.items()

    def _parts(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        return self._tensors, self._arrays, self.meta_info

    def _rows(self, of_tensors: Any, of_arrays: Any) -> Self:
        tensors = {key: value[of_tensors] for key, value in self._tensors.items()}
        return self._like(tensors, {key: value[of_arrays] for key, value in self._arrays.items()})

    def _like(self, tensors: dict[str, Tensor], arrays: dict[str, np.ndarray]) -> Self:
        return type(self)(tensors, arrays, dict(self.meta_info), borrowed=self._borrowed)

    def _owned(self) -> Self:
        if self._borrowed:
            self._tensors = {key: value.clone() for key, value in self._tensors.items()}
            self._arrays = {key: value.copy() for key, value in self._arrays.items()}
            self._borrowed = False
        return self


def _joined(parts: list[Tensor]) -> Tensor:
    """torch.cat; on the CPU by numpy, which puts large arrays into huge pages and uses one thread: several threads
    would wait for each other on a busy machine."""
    first = parts[0]
    alike = all(part.dtype == first.dtype and part.shape[1:] == first.shape[1:] for part in parts)
    plain = all(part.device.type == "cpu" and not part.requires_grad and part.is_contiguous() for part in parts)
    if not (alike and plain and first.numel()):
        return torch.cat(parts)
    rows = [as_bytes(part).reshape(len(part), first[0].nbytes) for part in parts]
    return torch.from_numpy(np.concatenate(rows)).view(first.dtype).view(-1, *first.shape[1:])


def _unpacked(
    cls: type[DataProto], packed: dict[str, Any], arrays: dict[str, np.ndarray], meta_info: dict[str, Any]
) -> DataProto:
    """A DataProto from its packed parts. Arrays from Ray's object store are read-only, and the batch borrows them."""
    borrowed = any(not raw.flags.writeable for raw, _, _ in packed.values())
    borrowed |= any(not array.flags.writeable for array in arrays.values())
    tensors = {}
    for key, (raw, name, shape) in packed.items():
        dtype = getattr(torch, name)
        if 0 in shape:
            tensors[key] = torch.empty(shape, dtype=dtype)
        else:
            tensors[key] = torch.from_numpy(writable(raw)).view(dtype).reshape(shape)
    return cls(tensors, arrays, meta_info, borrowed=borrowed)


def _chosen(columns: dict[str, Any], keys: Iterable[str] | None) -> dict[str, Any]:
    if keys is None:
        return dict(columns)
    keys = list(keys)
    missing = [key for key in keys if key not in columns]
    if missing:
        raise DataProtoError(f"there is no {_listed(missing)}; there are {_listed(columns)}")
    return {key: columns[key] for key in keys}


def _united(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    different = [key for key in ours.keys() & theirs.keys() if not _equal(ours[key], theirs[key])]
    if different:
        raise DataProtoError(f"both have {_listed(different)}, with different values")
    return {**ours, **theirs}


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        both = isinstance(a, Tensor) and isinstance(b, Tensor)
        if not (both and a.dtype == b.dtype and a.shape == b.shape):
            return False
        b = b.to(a.device)
        return torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        a, b = np.asarray(a), np.asarray(b)
        return a.dtype == b.dtype and a.shape == b.shape and all(map(_equal, a.ravel().tolist(), b.ravel().tolist()))
    if isinstance(a, float) and isinstance(b, float) and a != a and b != b:
        return True  # nan
    return bool(a == b)


def _as_array(name: str, value: Any) -> np.ndarray:
    """Arrays stay as they are; a list becomes an array of numbers or of objects, one per row."""
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise DataProtoError(f"{name}: a {type(value).__name__} has no rows; give an array or a list")
    if all(isinstance(item, bool | int | float | np.number) for item in value) and value:
        return np.asarray(value)
    return _objects(value)


def _objects(rows: Sequence[Any]) -> np.ndarray:
    array = np.empty(len(rows), dtype=object)
    for row, item in enumerate(rows):
        array[row] = item
    return array


def _is_numeric(dtype: np.dtype[Any]) -> bool:
    """Whether a column of this type can be saved as a tensor."""
    return dtype.kind in "biuf" and dtype.isnative and dtype.itemsize <= 8


def _changed_by_json(value: Any, where: str) -> str | None:
    """A description of the part of a value that JSON would not return unchanged; None if there is none."""
    kind = type(value)  # a value of a derived class comes back as the base class
    if kind is dict:
        if wrong := [key for key in value if type(key) is not str]:
            return f"{where} has the key {wrong[0]!r}. Make it a string"
        inner = [_changed_by_json(item, f"{where}[{key!r}]") for key, item in value.items()]
    elif kind is list:
        inner = [_changed_by_json(item, f"{where}[{row}]") for row, item in enumerate(value)]
    elif value is None or kind in (bool, int, float, str):
        return None
    else:
        plain = list if isinstance(value, tuple) else next((x for x in _JSON_TYPES if isinstance(value, x)), None)
        return f"{where} is a {kind.__name__}" + (f". Save {plain.__name__}(...) of it" if plain else "")
    return next(filter(None, inner), None)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
