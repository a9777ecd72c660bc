"""Dispatch modes that spread the rows of batches over workers, and put the rows of their outputs together again.

A batch is anything with `len`, slices, `chunk(n)` and a class method `concat(parts)`: a `DataProto`. Ranks get
contiguous rows whose numbers differ by at most 1. Where an argument is a Handle, workers fetch the outputs behind it
and take their rows; the driver never has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol, Self, runtime_checkable

from rlinf_lite.scheduler.dispatch import Arguments, Deferred, Dispatch, DispatchMode, _map_arguments, _modes


@runtime_checkable
class Batch(Protocol):
    """Rows that can be cut and put together."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: slice) -> Self: ...
    def chunk(self, chunks: int) -> Sequence[Self]: ...
    @classmethod
    def concat(cls, data: Sequence[Self]) -> Self: ...


@dataclass(frozen=True)
class MeshPlace:
    """Where a worker stands in a device mesh of several dimensions, as far as data are concerned."""

    dp_rank: int
    """Which shard it gets."""
    dp_size: int
    collects: bool
    """Whether its output is that of its data-parallel rank."""


def nd_compute(mesh: str) -> str:
    """The dispatch mode of workers that form a device mesh: each gets the shard of its data-parallel rank.

    Workers say where they stand by `join_mesh(mesh, ...)`. A shard is stored once, however many workers get it; outputs
    of the collecting ranks are put together in the order of data-parallel ranks.
    """
    name = f"ND_COMPUTE({mesh})"
    _modes.setdefault(name, DispatchMode(_by_rows, ConcatRows(), mesh))
    return name


def mesh_mode(mesh: str, places: Sequence[MeshPlace | None]) -> DispatchMode:
    """`nd_compute`'s mode for workers at these places, by rank. Raises ValueError where they form no mesh."""
    known = [place for place in places if place is not None]
    if len(known) < len(places):
        missing = ", ".join(str(rank) for rank, place in enumerate(places) if place is None)
        raise ValueError(f"ranks {missing} have not joined the mesh {mesh!r}: call self.join_mesh in init")
    size = known[0].dp_size
    collecting = {place.dp_rank: rank for rank, place in enumerate(known) if place.collects}
    if (
        any(place.dp_size != size for place in known)
        or sorted(collecting) != list(range(size))
        or sum(place.collects for place in known) != size
    ):
        raise ValueError(f"mesh {mesh!r}: not one collecting worker for each of {size} data-parallel ranks: {known}")

    def dispatch(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Arguments]:
        by_shard = _by_rows(size, args, kwargs)
        return [by_shard[place.dp_rank] for place in known]

    return DispatchMode(dispatch, ConcatRows(tuple(collecting[dp_rank] for dp_rank in range(size))), mesh)


@dataclass(frozen=True)
class ConcatRows:
    """Collects one batch of the outputs; None where all are None. Raises TypeError for anything else."""

    ranks: tuple[int, ...] | None = None
    """Whose outputs, in this order; None: all."""

    def __call__(self, outputs: list[Any]) -> Any:
        return _put_together(self.chosen(outputs))

    def chosen(self, by_rank: Sequence[Any]) -> list[Any]:
        return list(by_rank) if self.ranks is None else [by_rank[rank] for rank in self.ranks]


def _put_together(parts: list[Any]) -> Any:
    if all(isinstance(part, Batch) for part in parts):
        return type(parts[0]).concat(parts)
    if all(part is None for part in parts):
        return None
    kinds = ", ".join(type(part).__name__ for part in parts)
    raise TypeError(f"a DP_COMPUTE_PROTO method must return a DataProto on every rank; these returned {kinds}")


def take_rows(parts: list[Any], rank: int, world_size: int) -> Any:
    """Chunk `rank` of `world_size` of the parts put together; rows of other chunks are not touched."""
    if not all(isinstance(part, Batch) for part in parts):
        return _put_together(parts)
    bounds = list(accumulate((len(part) for part in parts), initial=0))
    size, larger = divmod(bounds[-1], world_size)
    start = rank * size + min(rank, larger)
    stop = start + size + (rank < larger)
    pieces = [
        part[max(start - first, 0) : stop - first]
        for part, (first, end) in zip(parts, pairwise(bounds), strict=True)
        if first < stop and start < end
    ]
    return type(parts[0]).concat(pieces) if pieces else parts[0][:0]


def _by_rows(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Arguments]:
    from rlinf_lite.scheduler.handle import Handle

    cut: dict[int, Sequence[Any]] = {}  # a batch that is given twice is cut once

    def element(where: str, value: Any, rank: int) -> Any:
        if isinstance(value, Handle | Deferred):
            return value.rows(rank, world_size)
        if not isinstance(value, Batch) or isinstance(value, type):
            return value
        if id(value) not in cut:
            cut[id(value)] = value.chunk(world_size)
        return cut[id(value)][rank]

    return _map_arguments(element, world_size, args, kwargs)


def _with_function(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Arguments]:
    if not args or not callable(args[0]):
        got = type(args[0]).__name__ if args else "nothing"
        raise TypeError(f"the first argument of a DP_COMPUTE_PROTO_WITH_FUNC call is a function, not {got}")
    return _by_rows(world_size, args, kwargs)


_modes[Dispatch.DP_COMPUTE_PROTO] = DispatchMode(_by_rows, ConcatRows())
_modes[Dispatch.DP_COMPUTE_PROTO_WITH_FUNC] = DispatchMode(_with_function, ConcatRows())
_modes[Dispatch.DP_COMPUTE_METRIC] = DispatchMode(_by_rows)
