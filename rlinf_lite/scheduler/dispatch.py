"""How a group call's arguments are spread over its workers, and how their outputs are collected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

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
    """Wraps a list of which an ALL_TO_ALL call gives rank i element i."""

    values: Sequence[Any]


@dataclass(frozen=True)
class Deferred:
    """An argument that is not in the driver's hands: workers fetch `refs` and apply `resolve` to the values."""

    refs: tuple[Any, ...]
    resolve: Callable[[list[Any]], Any]

    def element(self, rank: int, world_size: int) -> Deferred:
        """What rank i of a DP_COMPUTE call gets: element i where the value turns out to be a list."""
        resolve = self.resolve

        def pick(values: list[Any]) -> Any:
            value = resolve(values)
            return _checked("a deferred argument", value, world_size)[rank] if isinstance(value, list) else value

        return Deferred(self.refs, pick)

    def rows(self, rank: int, world_size: int) -> Deferred:
        """What rank i of a DP_COMPUTE_PROTO call gets: its rows where the value turns out to be a batch."""
        from rlinf_lite.scheduler.rows import Batch

        resolve = self.resolve

        def cut(values: list[Any]) -> Any:
            value = resolve(values)
            return value.chunk(world_size)[rank] if isinstance(value, Batch) else value

        return Deferred(self.refs, cut)


@dataclass(frozen=True)
class CallRule:
    """What `@register` says about a method."""

    dispatch_mode: str = Dispatch.ONE_TO_ALL
    execute_mode: str = Execute.ALL
    blocking: bool = False
    timeout_s: float | None = None


@dataclass(frozen=True)
class DispatchMode:
    dispatch: DispatchFn
    collect: CollectFn = list
    """`list`: the outputs by rank."""
    mesh: str | None = None
    """The device mesh whose places replace both functions, call by call (`nd_compute`)."""


def register(
    dispatch_mode: str = Dispatch.ONE_TO_ALL,
    execute_mode: str = Execute.ALL,
    blocking: bool = False,
    timeout_s: float | None = None,
) -> Callable[[Method], Method]:
    """Say how a worker's method is called through its group. `timeout_s` bounds the call from its start."""
    get_dispatch_mode(dispatch_mode)
    if execute_mode not in (Execute.ALL, Execute.RANK_ZERO):
        raise ValueError(f"execute_mode {execute_mode!r} is neither Execute.ALL nor Execute.RANK_ZERO")
    rule = CallRule(dispatch_mode, execute_mode, blocking, timeout_s)

    def mark(method: Method) -> Method:
        setattr(method, _CALL_RULE, rule)
        return method

    return mark


def call_rule(method: Callable[..., Any]) -> CallRule:
    rule: CallRule = getattr(method, _CALL_RULE, CallRule())
    return rule


def register_dispatch_mode(name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> None:
    """Add a mode to `Dispatch`.

    `dispatch_fn(world_size, args, kwargs)` returns (args, kwargs) for each rank and must not change what it is given;
    `collect_fn(outputs)` makes one result of the outputs by rank. A Handle among the arguments may be replaced by
    `handle.map(fn)` or `handle.element(rank, world_size)`, which the workers resolve.
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


def _one_to_all(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Arguments]:
    return [(args, kwargs)] * world_size


def _all_to_all(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Arguments]:
    def element(where: str, value: Any, rank: int) -> Any:
        return _checked(where, value.values, world_size)[rank] if isinstance(value, Scatter) else value

    return _map_arguments(element, world_size, args, kwargs)


def _dp_compute(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Arguments]:
    from rlinf_lite.scheduler.handle import Handle

    def element(where: str, value: Any, rank: int) -> Any:
        if isinstance(value, Handle | Deferred):
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


_modes = {
    Dispatch.ONE_TO_ALL: DispatchMode(_one_to_all),
    Dispatch.ALL_TO_ALL: DispatchMode(_all_to_all),
    Dispatch.DP_COMPUTE: DispatchMode(_dp_compute),
}
