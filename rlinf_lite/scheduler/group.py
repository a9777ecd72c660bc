"""WorkerGroup: a group of worker processes, called as one object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rlinf_lite.registry import did_you_mean
from rlinf_lite.scheduler.cluster import Cluster
from rlinf_lite.scheduler.dispatch import CallRule, call_rule
from rlinf_lite.scheduler.errors import SchedulerError
from rlinf_lite.scheduler.handle import Handle, Member, RunningGroup
from rlinf_lite.scheduler.placement import ComponentPlacement, ProcessPlacement
from rlinf_lite.scheduler.processes import Processes


class WorkerGroup:
    """The workers of one class, called together: every public method of `cls` becomes a call that returns a Handle.

    `cls.create_group(...).launch(...)` returns one. It is a view: the workers belong to their processes, and the
    processes belong to the cluster.
    """

    def __init__(self, cls: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._cls, self._arguments = cls, (args, kwargs)
        public = [name for name in dir(cls) if not name.startswith("_") and name not in cls._not_callable]
        self._methods = {name: call_rule(getattr(cls, name)) for name in public if callable(getattr(cls, name))}
        self._running: RunningGroup | None = None
        self._processes: Processes | None = None
        self._cluster: Cluster | None = None
        self.name = cls.__name__
        taken = sorted(set(self._methods) & {name for name in dir(WorkerGroup) if not name.startswith("_")})
        if taken:
            raise TypeError(f"{cls.__name__}.{taken[0]}: every group has a {taken[0]!r} of its own; rename the method")

    def launch(
        self,
        cluster: Cluster,
        placement_strategy: ComponentPlacement | Sequence[ProcessPlacement] | str = "all",
        name: str | None = None,
        env_vars: Mapping[str, str] = MappingProxyType({}),
    ) -> WorkerGroup:
        """Start the workers and wait until all are constructed. `name` defaults to the component's name.
        Inside `with cluster.launching():` groups start in parallel, and the end of the block waits.

        `placement_strategy`: the `get_strategy` result of a `HybridComponentPlacement` or `ResourcePool`, a sequence of
        processes, or a spec such as `0-3:0-7`. Raises WorkerError if a constructor raises, PlacementError and
        CallTimeoutError.
        """
        placed = cluster.place(placement_strategy, name or self._cls.__name__)
        _launch({placed.component: self}, {placed.component: name or placed.component}, cluster, placed, env_vars)
        return self

    @property
    def members(self) -> list[Member]:
        """The workers by rank; empty if the group is not running."""
        return [] if self._running is None else self._running.members

    @property
    def world_size(self) -> int:
        return len(self.members)

    def __repr__(self) -> str:
        return f"WorkerGroup({self.name}, {self.world_size} workers)"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self._caller(name, None)

    def worker_method(self, name: str) -> Callable[..., Any]:
        """The function of the workers' class that a call by this name runs. Raises AttributeError."""
        methods = self.__dict__.get("_methods", {})
        if name not in methods:
            group = self.__dict__.get("name", "group")
            raise AttributeError(f"{group}: its workers have no public method {name!r}. {did_you_mean(name, methods)}")
        function: Callable[..., Any] = getattr(self._cls, name)
        return function

    def call(
        self,
        method: str,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] = MappingProxyType({}),
        *,
        ranks: Sequence[int] | None = None,
        rule: CallRule | None = None,
    ) -> Handle:
        """Call a method by name, on some ranks (None: all), as on a group of that size. `rule` replaces the rule that
        `@register` gave the method; this never waits, even if the rule is blocking. Raises AttributeError for an
        unknown method, SchedulerError if the group is not running."""
        self.worker_method(method)
        running = self._alive()
        members = running.members if ranks is None else [running.members[rank] for rank in ranks]
        return running.call(method, rule or self._methods[method], members, args, dict(kwargs))

    def execute_on(self, *ranks: int) -> GroupView:
        """A view of some workers: calls through it run on these ranks only, as on a group of that size."""
        bad = [rank for rank in ranks if not 0 <= rank < self.world_size]
        if bad or not ranks:
            raise ValueError(
                f"{self.name} has ranks 0..{self.world_size - 1}, not {', '.join(map(str, bad)) or 'none'}"
            )
        return GroupView(self, ranks)

    def feeds(self, other: WorkerGroup) -> None:
        """Declare that this group's workers send messages to `other`, before they have: a failure in one group then
        also affects the other under a supervisor."""
        self._alive().calls.data_flow.add((self.name, other.name))

    @staticmethod
    def launch_fused(
        roles: Mapping[str, WorkerGroup], cluster: Cluster, placement_strategy: ComponentPlacement
    ) -> None:
        """Launch groups that share processes, for `Cluster.launch`; see `fuse`."""
        fuse(**roles).launch(cluster, placement_strategy)

    def abort(self, reason: str) -> None:
        """Make pending and later receives of the workers raise AbortedError, until `clear_abort`. Takes effect at
        once."""
        self._alive().abort(reason)

    def clear_abort(self, timeout_s: float = 60.0) -> None:
        """Let the workers receive again. Waits until their running methods end; drops messages of aborted groups."""
        self._alive().clear_abort(timeout_s)

    def shutdown(self) -> None:
        """Kill the workers, and those fused with them, and wait until they are gone. A second call does nothing."""
        if self._cluster is not None and self._processes is not None:
            self._cluster.end(self._processes)

    def restart(self, *ranks: int, timeout_s: float | None = None) -> None:
        """Replace workers (all, if no ranks are given), and those fused with them, by new ones.

        Each new worker repeats the last `init` call of the worker that it replaces (limit: `timeout_s`). Other workers
        keep running: `abort` and `clear_abort` make them drop messages of the old ones.
        """
        self._alive()
        assert self._cluster is not None, "only launched groups run"
        self._cluster.restart({self.name: ranks}, timeout_s)

    def _alive(self) -> RunningGroup:
        if self._running is None or self._running.has_ended:
            raise SchedulerError(f"the group {self.name!r} is not running: launch it first")
        return self._running

    def _caller(self, name: str, ranks: Sequence[int] | None) -> Callable[..., Any]:
        self.worker_method(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            handle = self.call(name, args, kwargs, ranks=ranks)
            return handle.wait() if self._methods[name].blocking else handle

        call.__name__ = name
        return call


class GroupView:
    """Some workers of a group, called as a group. The group itself stays as it is."""

    def __init__(self, group: WorkerGroup, ranks: Sequence[int]) -> None:
        self._group, self._ranks = group, ranks

    @property
    def world_size(self) -> int:
        return len(self._ranks)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        group: WorkerGroup = self.__dict__["_group"]
        return group._caller(name, self.__dict__["_ranks"])


class FusedGroups(dict[str, WorkerGroup]):
    """Groups by role whose workers of equal rank share a process. Each is called like any group; they end together."""

    def launch(
        self, cluster: Cluster, placement_strategy: ComponentPlacement | Sequence[ProcessPlacement] | str = "all"
    ) -> FusedGroups:
        """Start the processes and wait until all workers are constructed, as `WorkerGroup.launch` does. Each group is
        named after its role."""
        _launch(self, {role: role for role in self}, cluster, cluster.place(placement_strategy, "+".join(self)))
        return self

    def shutdown(self) -> None:
        next(iter(self.values())).shutdown()

    def __getattr__(self, role: str) -> WorkerGroup:
        if role not in self:
            raise AttributeError(f"no role {role!r} was fused; there are {', '.join(self)}")
        return self[role]


def fuse(**roles: WorkerGroup) -> FusedGroups:
    """Groups that share processes: each process holds one worker of every role, constructed in the order given.

    `fuse(actor=Actor.create_group(cfg), rollout=Rollout.create_group(cfg)).launch(cluster, "0-1")` starts two
    processes. The workers of a process find each other in `self.fused`.
    """
    if not roles:
        raise ValueError("fuse() needs a group for at least one role")
    for role, group in roles.items():
        if hasattr(FusedGroups, role):  # `groups.<role>` would be a method of FusedGroups
            raise ValueError(f"fuse(): no role can be called {role!r}. Choose another name")
        if group.members:
            raise SchedulerError(f"{role}: the group {group.name!r} runs already; fuse groups before they are launched")
    return FusedGroups(roles)


def _launch(
    groups: Mapping[str, WorkerGroup],
    names: Mapping[str, str],
    cluster: Cluster,
    placed: ComponentPlacement,
    env_vars: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Start processes that hold one worker of every group. `groups` and `names` are by role."""
    for group in groups.values():
        if group.members:
            raise SchedulerError(f"the group {group.name!r} runs already")
    running = []
    for role, group in groups.items():
        group.name = names[role]
        running.append(RunningGroup(group.name, role, group._cls, group._arguments, group._methods, cluster.calls))
    processes = cluster.start(running, placed, env_vars)
    for group, its in zip(groups.values(), running, strict=True):
        group._cluster, group._processes, group._running = cluster, processes, its
