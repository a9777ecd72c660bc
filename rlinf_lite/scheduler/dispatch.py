"""Dispatch modes: how the arguments of a group call are spread over workers, and how their outputs are collected.

Some modes spread the rows of batches. A batch is anything with `len`, slices, `chunk(n)` and a class method
`concat(parts)`, such as a `DataProto`. Ranks get contiguous rows; their row counts differ by at most 1. If an argument
is a Handle, workers fetch its outputs and take their rows; the driver never holds them. `route` is for groups that
send rows to each other directly. Needs neither ray nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
DispatchFn = Callable[[int, tuple[Any, ...], dict[str, Any]], list[Arguments]]
CollectFn = Callable[[list[Any]], Any]
Method = TypeVar("Method", bound=Callable[..., Any])

_CALL_RULE = "_rlinf_lite_call_rule"


class Dispatch:
    """Names of the dispatch modes; `register_dispatch_mode` adds to them."""

    ONE_TO_ALL = "ONE_TO_ALL"
    ALL_TO_ALL = "ALL_TO_ALL"
    DP_COMPUTE = "DP_COMPUTE"
    DP_COMPUTE_PROTO = "DP_COMPUTE_PROTO"
    DP_COMPUTE_PROTO_WITH_FUNC = "DP_COMPUTE_PROTO_WITH_FUNC"
    DP_COMPUTE_METRIC = "DP_COMPUTE_METRIC"


class Execute:
    """Which workers of a group run a call."""

    ALL = "ALL"
    RANK_ZERO = "RANK_ZERO"


@dataclass(frozen=True)
class Scatter:
    """A list whose element i goes to rank i in an ALL_TO_ALL call."""

    values: Sequence[Any]


@runtime_checkable
class Batch(Protocol):
    """Rows that can be split and concatenated."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: slice) -> Self: ...
    def chunk(self, chunks: int) -> Sequence[Self]: ...
    @classmethod
    def concat(cls, data: Sequence[Self]) -> Self: ...


class Pending:
    """An argument whose value is still in the workers: a Handle, or a part of its result."""

    def deferred(self) -> Deferred:
        """The argument of a rank that gets the whole value."""
        raise NotImplementedError

    def element(self, rank: int, world_size: int) -> Deferred:
        """The argument of one rank in a DP_COMPUTE call: element `rank` if the value is a list, else the value."""
        raise NotImplementedError

    def rows(self, rank: int, world_size: int) -> Deferred:
        """The argument of one rank in a DP_COMPUTE_PROTO call: its rows if the value is a batch, else the value."""
        raise NotImplementedError


@dataclass(frozen=True)
class Deferred(Pending):
    """A value that workers compute: they fetch `refs` and apply `resolve` to the fetched values."""

    refs: tuple[Any, ...]
    resolve: Callable[[list[Any]], Any]

    def deferred(self) -> Deferred:
        return self

    def element(self, rank: int, world_size: int) -> Deferred:
        resolve = self.resolve

        def pick(values: list[Any]) -> Any:
            value = resolve(values)
            return _checked("a deferred argument", value, world_size)[rank] if isinstance(value, list) else value

        return Deferred(self.refs, pick)

    def rows(self, rank: int, world_size: int) -> Deferred:
        resolve = self.resolve

        def cut(values: list[Any]) -> Any:
            value = resolve(values)
            return value.chunk(world_size)[rank] if isinstance(value, Batch) else value

        return Deferred(self.refs, cut)


@dataclass(frozen=True)
class CallRule:
    """Decorator that sets how a worker's method is called through its group. `timeout_s` limits the call, counted from
    its start."""

    dispatch_mode: str = Dispatch.ONE_TO_ALL
    execute_mode: str = Execute.ALL
    blocking: bool = False
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        get_dispatch_mode(self.dispatch_mode)
        if self.execute_mode not in (Execute.ALL, Execute.RANK_ZERO):
            raise ValueError(f"execute_mode {self.execute_mode!r} is neither Execute.ALL nor Execute.RANK_ZERO")

    def __call__(self, method: Method) -> Method:
        setattr(method, _CALL_RULE, self)
        return method


register = CallRule


@dataclass(frozen=True)
class DispatchMode:
    dispatch: DispatchFn
    collect: CollectFn = list  # `list` returns the outputs by rank
    mesh: str | None = None  # the device mesh whose ranks decide which shard a worker gets (`nd_compute`)


def call_rule(method: Callable[..., Any]) -> CallRule:
    rule: CallRule = getattr(method, _CALL_RULE, CallRule())
    return rule


def register_dispatch_mode(name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> None:
    """Add a mode to `Dispatch`.

    `dispatch_fn(world_size, args, kwargs)` returns (args, kwargs) for each rank and must not change its inputs;
    `collect_fn(outputs)` makes one result from the outputs by rank. `dispatch_fn` may replace a Handle among the
    arguments by `handle.map(fn)` or `handle.element(rank, world_size)`, which the workers resolve.
    """
    if name in _modes:
        raise ValueError(f"the dispatch mode {name!r} exists already")
    _modes[name] = DispatchMode(dispatch_fn, collect_fn)
    setattr(Dispatch, name, name)


def get_dispatch_mode(name: str) -> DispatchMode:
    if name not in _modes:
        raise ValueError(
            f"unknown dispatch mode {name!r} (known: {', '.join(_modes)}); add it with register_dispatch_mode"
        )
    return _modes[name]


def _all_to_all(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Arguments]:
    def element(where: str, value: Any, rank: int) -> Any:
        return _checked(where, value.values, world_size)[rank] if isinstance(value, Scatter) else value

    return _map_arguments(element, world_size, args, kwargs)


def _dp_compute(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Arguments]:
    def element(where: str, value: Any, rank: int) -> Any:
        if isinstance(value, Pending):
            return value.element(rank, world_size)
        return _checked(where, value, world_size)[rank] if isinstance(value, list) else value

    return _map_arguments(element, world_size, args, kwargs)


def _map_arguments(
    element: Callable[[str, Any, int], Any], world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Arguments]:
    return [
        (
            tuple(element(f"argument {i}", value, rank) for i, value in enumerate(args)),
            {key: element(f"argument {key!r}", value, rank) for key, value in kwargs.items()},
        )
        for rank in range(world_size)
    ]


def _checked(where: str, values: Sequence[Any], world_size: int) -> Sequence[Any]:
    if len(values) != world_size:
        raise ValueError(f"{where} has {len(values)} elements for {world_size} ranks; give one per rank")
    return values


@dataclass(frozen=True)
class MeshPlace:
    """The data-parallel position of a worker in a device mesh of several dimensions."""

    dp_rank: int  # which shard it gets
    dp_size: int
    collects: bool  # whether its output counts as the output of its data-parallel rank


def nd_compute(mesh: str) -> str:
    """The name of the dispatch mode for workers in a device mesh: each gets the shard of its data-parallel rank.

    Workers give their position with `join_mesh(mesh, ...)`. A shard is stored once, however many workers get it. The
    outputs of the collecting ranks are concatenated in the order of data-parallel ranks.
    """
    name = f"ND_COMPUTE({mesh})"
    _modes.setdefault(name, DispatchMode(_by_rows, ConcatRows(), mesh))
    return name


def nd_compute_metric(mesh: str) -> str:
    """As `nd_compute`, for methods that return no rows: the result is a list of all ranks' outputs."""
    name = f"ND_COMPUTE_METRIC({mesh})"
    _modes.setdefault(name, DispatchMode(_by_rows, list, mesh))
    return name


def mesh_mode(mesh: str, places: Sequence[MeshPlace | None], lists: bool = False) -> DispatchMode:
    """The mode of `nd_compute` (with `lists`: of `nd_compute_metric`) for workers at these places, by rank. Raises
    ValueError if the places form no mesh."""
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

    rows = ConcatRows(tuple(collecting[dp_rank] for dp_rank in range(size)))
    return DispatchMode(dispatch, list if lists else rows, mesh)


@dataclass(frozen=True)
class ConcatRows:
    """Concatenates the outputs into one batch; None if all outputs are None. Raises TypeError for anything else."""

    ranks: tuple[int, ...] | None = None  # the ranks whose outputs are used, in this order; None: all

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
    """Chunk `rank` of `world_size` of the concatenated parts; rows of other chunks are not copied."""
    if not all(isinstance(part, Batch) for part in parts):
        return _put_together(parts)
    bounds = list(accumulate((len(part) for part in parts), initial=0))
    rows = split_rows(world_size, bounds[-1])[rank]
    pieces = [
        part[max(rows.start - first, 0) : rows.stop - first]
        for part, (first, end) in zip(parts, pairwise(bounds), strict=True)
        if first < rows.stop and rows.start < end
    ]
    return type(parts[0]).concat(pieces) if pieces else parts[0][:0]


def _by_rows(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Arguments]:
    cut: dict[int, Sequence[Any]] = {}  # a batch that is passed twice is split once

    def element(where: str, value: Any, rank: int) -> Any:
        if isinstance(value, Pending):
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


_modes = {
    Dispatch.ONE_TO_ALL: DispatchMode(lambda world_size, args, kwargs: [(args, kwargs)] * world_size),
    Dispatch.ALL_TO_ALL: DispatchMode(_all_to_all),
    Dispatch.DP_COMPUTE: DispatchMode(_dp_compute),
    Dispatch.DP_COMPUTE_PROTO: DispatchMode(_by_rows, ConcatRows()),
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: DispatchMode(_with_function, ConcatRows()),
    Dispatch.DP_COMPUTE_METRIC: DispatchMode(_by_rows),
}


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) of a source rank's block that go to `dst_rank`."""

    dst_rank: int
    start: int
    stop: int


def split_rows(world: int, batch: int) -> list[range]:
    """The contiguous block of rows of each rank; sizes differ by at most 1, larger blocks first."""
    if world < 1 or batch < 0:
        raise ValueError(f"cannot split {batch} rows over {world} ranks")
    small, extra = divmod(batch, world)
    starts = [rank * small + min(rank, extra) for rank in range(world + 1)]
    return [range(starts[rank], starts[rank + 1]) for rank in range(world)]


def route(src_world: int, dst_world: int, batch: int) -> list[list[Piece]]:
    """The pieces that each source rank sends, in row order; every row goes to exactly one destination."""
    destinations = split_rows(dst_world, batch)
    return [
        [
            Piece(rank, start - rows.start, stop - rows.start)
            for rank, block in enumerate(destinations)
            if (start := max(rows.start, block.start)) < (stop := min(rows.stop, block.stop))
        ]
        for rows in split_rows(src_world, batch)
    ]
