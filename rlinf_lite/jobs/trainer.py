"""The trainer of a job, and how it calls the workers of a role."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray

from rlinf_lite.jobs.spec import builder_call
from rlinf_lite.jobs.workload import JobInfo
from rlinf_lite.scheduler.dispatch import Arguments, CallRule, Execute
from rlinf_lite.scheduler.errors import CallTimeoutError, SchedulerError, WorkerDiedError, WorkerError
from rlinf_lite.scheduler.group import WorkerGroup
from rlinf_lite.scheduler.handle import Handle, wait_alone
from rlinf_lite.scheduler.host import SHARED_BYTES, payload_bytes

Method = TypeVar("Method", bound=Callable[..., Any])
PreFunc = Callable[..., Arguments]
PostFunc = Callable[[Any], Any]
Recover = Callable[[SchedulerError], bool]

_INVOCATION = "_rlinf_lite_invocation"


class InvocationTimeoutError(CallTimeoutError):
    """Some ranks did not answer in time: `missing`. `results` holds what the others returned, by rank."""

    def __init__(self, message: str, results: dict[int, Any], missing: list[int]) -> None:
        super().__init__(message)
        self.results, self.missing = results, missing

    def __reduce__(self) -> Any:
        return InvocationTimeoutError, (str(self), self.results, self.missing)


@dataclass(frozen=True)
class InvocationResult:
    """What an `is_async` call returns: the results by rank."""

    results: dict[int, Any]


@dataclass(frozen=True)
class Invocation:
    """Say how the trainer calls a workload's method. A method without it has these defaults, and no `timeout`.

    `blocking=False` returns a Handle per rank at once. Otherwise the call waits up to `timeout` seconds (None: without
    limit) and returns the list of results by rank, or with `is_async` an InvocationResult; late ranks raise
    InvocationTimeoutError, which has the results of the others. `target="RANK0"` calls rank 0 alone and returns its
    result, no list. `auto_shard` gives each rank one element of every argument that is a list as long as the group
    (with RANK0 nothing is split). Both in the trainer: `pre_func(*args, **kwargs)` returns the (args, kwargs) to call
    with, `post_func(result)` what the call returns.
    """

    blocking: bool = True
    is_async: bool = False
    timeout: float | None = 10
    target: str = "ALL"
    auto_shard: bool = True
    pre_func: PreFunc | None = None
    post_func: PostFunc | None = None

    def __post_init__(self) -> None:
        timeout = self.timeout
        for option in ("blocking", "is_async", "auto_shard"):
            if not isinstance(value := getattr(self, option), bool):
                raise TypeError(
                    f"trainer_invocation({option}={value!r}): must be True or False; write @trainer_invocation()"
                )
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float)):
            raise TypeError(f"trainer_invocation(timeout={timeout!r}): must be seconds, or None for no limit")
        if timeout is not None and (timeout < 0 or math.isnan(timeout)):
            raise ValueError(f"trainer_invocation(timeout={timeout!r}): must be at least 0, or None for no limit")
        if self.target not in ("ALL", "RANK0"):
            raise ValueError(f"trainer_invocation(target={self.target!r}): must be 'ALL' or 'RANK0'")
        if not self.blocking and (self.is_async or self.post_func is not None):
            unused = "is_async=True" if self.is_async else "post_func"
            raise ValueError(
                f"trainer_invocation(blocking=False) returns before there are results for {unused}; drop one"
            )

    def __call__(self, method: Method) -> Method:
        setattr(method, _INVOCATION, self)
        return method


trainer_invocation = Invocation


class RoleGroup:
    """The workers of a role as the trainer calls them: `RG_ACTOR.update(batch)`. `@register` plays no part here.

    `recover(error)` is asked when a rank's call fails: True means that the worker was replaced (all of `error.missing`,
    where ranks were late), so that its call alone is made again; False raises the error.
    """

    def __init__(self, group: WorkerGroup, recover: Recover | None = None, ranks: Sequence[int] | None = None) -> None:
        self._group, self._recover, self._only = group, recover, ranks

    @property
    def world_size(self) -> int:
        return len(self)

    def __len__(self) -> int:
        return len(self._ranks())

    def __getitem__(self, index: int) -> RoleGroup:
        """A view of one worker: a group of size 1."""
        return RoleGroup(self._group, self._recover, [self._ranks()[index]])

    def __iter__(self) -> Iterator[RoleGroup]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"RoleGroup({self._group.name}, ranks {', '.join(map(str, self._ranks()))})"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):  # also while this object is being copied, before it has a group
            raise AttributeError(name)
        invocation: Invocation = getattr(self._group.worker_method(name), _INVOCATION, Invocation(timeout=None))

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._invoke(name, invocation, args, kwargs)

        call.__name__ = name
        return call

    def _ranks(self) -> Sequence[int]:
        return range(self._group.world_size) if self._only is None else self._only

    def _invoke(self, method: str, how: Invocation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if how.pre_func is not None:
            args, kwargs = how.pre_func(*args, **kwargs)
        rank_zero = how.target == "RANK0"
        ranks = self._ranks()[:1] if rank_zero else self._ranks()
        if not ranks:
            self._group.call(method)  # raises: the group is not running
        shards = dict(zip(ranks, _shards(len(ranks), how.auto_shard and not rank_zero, args, kwargs), strict=True))
        handles = {rank: self._start(method, rank, arguments) for rank, arguments in shards.items()}
        if not how.blocking:
            return handles[ranks[0]] if rank_zero else list(handles.values())
        results = self._finish(method, handles, shards, how.timeout)
        result: Any = results[ranks[0]] if rank_zero else list(results.values())
        result = InvocationResult(results) if how.is_async else result
        return result if how.post_func is None else how.post_func(result)

    def _start(self, method: str, rank: int, arguments: Arguments) -> Handle:
        rule = CallRule(execute_mode=Execute.RANK_ZERO)  # a group of one, whose result is not a list
        return self._group.call(method, *arguments, ranks=[rank], rule=rule)

    def _finish(
        self, method: str, handles: dict[int, Handle], shards: dict[int, Arguments], timeout: float | None
    ) -> dict[int, Any]:
        """The results by rank; calls that failed are made again for as long as `recover` says so, and raise nothing
        that they have raised before at the same place."""
        results: dict[int, Any] = {}
        raised: set[tuple[int, str]] = set()
        while True:
            try:
                _wait(handles, results, timeout)
                return {rank: results[rank] for rank in handles}
            except SchedulerError as error:
                again = [error.rank] if isinstance(error, WorkerError | WorkerDiedError) else []
                this = {(error.rank, error.origin)} if isinstance(error, WorkerError) else set()
                can_recover = again or isinstance(error, InvocationTimeoutError)  # who is late still works
                if not can_recover or this & raised or self._recover is None or not self._recover(error):
                    raise
                raised |= this
                for rank in handles.keys() - results.keys():
                    try:
                        results[rank] = handles[rank].wait(0)
                    except SchedulerError:  # it runs, or failed; or its worker was replaced with the one that did
                        if rank in again or handles[rank].members[0] is not self._group.members[rank]:
                            handles[rank] = self._start(method, rank, shards[rank])


def _wait(handles: dict[int, Handle], results: dict[int, Any], timeout: float | None) -> None:
    """Add to `results` what is not there."""
    waiting = {rank: handle for rank, handle in handles.items() if rank not in results}
    try:
        results.update(zip(waiting, wait_alone(list(waiting.values()), timeout), strict=True))
    except CallTimeoutError as error:
        missing = [rank for rank, handle in waiting.items() if not handle.done()]
        results.update((rank, handle.wait()) for rank, handle in waiting.items() if rank not in missing)
        if missing:
            raise InvocationTimeoutError(str(error), dict(sorted(results.items())), missing) from None


def _shards(num_ranks: int, split: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Arguments]:
    """The arguments of each rank."""

    def spread(value: Any) -> Sequence[Any]:
        if split and isinstance(value, list) and len(value) == num_ranks:
            return value
        if num_ranks > 1 and payload_bytes(value) >= SHARED_BYTES:
            value = ray.put(value)
        return [value] * num_ranks

    positional = [spread(value) for value in args]
    named = {key: spread(value) for key, value in kwargs.items()}
    return [
        (tuple(values[i] for values in positional), {key: values[i] for key, values in named.items()})
        for i in range(num_ranks)
    ]


class _All:
    """The workers of a role, as one group. AttributeError where the job has no such role."""

    def __init__(self, role: str) -> None:
        self._role = role

    def __get__(self, trainer: BaseTrainer, _: Any = None) -> RoleGroup:
        return trainer.role_group(self._role)


class _Each:
    """A group of one for each worker of a role; none where the job has no such role."""

    def __init__(self, role: str) -> None:
        self._role = role

    def __get__(self, trainer: BaseTrainer, _: Any = None) -> list[RoleGroup]:
        return list(trainer.groups.get(self._role, ()))


class BaseTrainer(ABC):
    """The program of a job: `init`, then `fit`, which call the workers through their role groups."""

    RG_ACTOR = _All("actor")
    RG_ROLLOUT = _All("rollout")
    RG_REFERENCE = _All("reference")
    RG_REWARD = _All("reward")
    RG_CRITIC = _All("critic")

    actors = _Each("actor")
    rollouts = _Each("rollout")
    references = _Each("reference")
    rewards = _Each("reward")
    critics = _Each("critic")

    def __init__(
        self, groups: dict[str, RoleGroup], config: dict[str, Any], job: JobInfo, restart_count: int = 0
    ) -> None:
        self.groups, self.config, self.job, self.restart_count = groups, config, job, restart_count
        self.step = 0

    @abstractmethod
    def init(self) -> None:
        """Prepare the workers: models, simulators, process groups."""

    @abstractmethod
    def fit(self) -> None:
        """Train; the job ends when it returns."""

    def is_recoverable(self) -> bool:
        """Return True when `fit` can begin again after it raised: `init` and `fit` are then called on a new trainer,
        with `restart_count` one higher; the workers are left as they are."""
        return False

    def report_progress(self, step: int) -> None:
        """Tell the job's supervisor which step is done."""
        self.step = step

    def role_group(self, role: str) -> RoleGroup:
        """All workers of a role. Raises AttributeError where the job has no such role."""
        if role not in self.groups:
            roles = ", ".join(self.groups) or "none"
            raise AttributeError(
                f"the job has no {role!r} (its roles: {roles}); add {builder_call(role)} to its builder"
            )
        return self.groups[role]

    def get_workload_resource(self, role: str) -> float:
        """Devices per worker of a role."""
        self.role_group(role)
        return self.job.shares[role]
