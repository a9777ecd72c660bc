"""The trainer of a job, and how it calls the workers of a role."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from rlinf_lite.jobs.ported import PortedTrainer
from rlinf_lite.jobs.spec import builder_call
from rlinf_lite.jobs.workload import JobInfo
from rlinf_lite.scheduler.dispatch import Arguments, CallRule, Execute
from rlinf_lite.scheduler.errors import CallTimeoutError, SchedulerError, WorkerDiedError, WorkerError
from rlinf_lite.scheduler.group import WorkerGroup
from rlinf_lite.scheduler.handle import Handle, wait_alone
from rlinf_lite.scheduler.host import SHARED_BYTES, payload_bytes

if TYPE_CHECKING:
    from rlinf_lite.control.supervisor import Supervisor

Method = TypeVar("Method", bound=Callable[..., Any])
PreFunc = Callable[..., Any]
PostFunc = Callable[[Any], Any]
Recover = Callable[[SchedulerError], bool]

log = logging.getLogger(__name__)

_INVOCATION = "_rlinf_lite_invocation"
_ASYNC_S = 10.0  # an `is_async` call's `timeout` where none is given


class InvocationTimeoutError(CallTimeoutError):
    """Some ranks did not answer in time: `missing`. `results` holds what the others returned, by rank."""

    def __init__(self, message: str, results: dict[int, Any], missing: list[int]) -> None:
        super().__init__(message)
        self.results, self.missing = results, missing

    def __reduce__(self) -> Any:
        return InvocationTimeoutError, (str(self), self.results, self.missing)


class InvocationResult(list[Any]):
    """What an `is_async` call returns: the list of results that were there in time, in the order of ranks. `results`
    has them by rank, `missing` the ranks that were late."""

    def __init__(self, results: dict[int, Any], missing: Sequence[int] = ()) -> None:
        super().__init__(results.values())
        self.results, self.missing = results, list(missing)


@dataclass(frozen=True)
class Invocation:
    """Say how the trainer calls a workload's method. A method without it has these defaults.

    `blocking=False` returns a Handle per rank at once. Otherwise the call waits and returns the list of results by
    rank. `timeout`, in seconds, limits that where it is given: late ranks raise InvocationTimeoutError, which has the
    results of the others. `is_async` takes what is ready after `timeout` (by default 10 s; None: what all ranks return)
    as an InvocationResult, which names late ranks. `target="RANK0"` calls rank 0 alone and returns its result, no list.
    `auto_shard` gives each rank one element of every argument that is a list as long as the group (with RANK0 nothing
    is split). Both in the trainer: `pre_func(*args, **kwargs)` returns the argument to call with, or (args, kwargs),
    `post_func(result)` what the call returns.
    """

    blocking: bool = True
    is_async: bool = False
    timeout: float | EllipsisType | None = ...
    target: str = "ALL"
    auto_shard: bool = True
    pre_func: PreFunc | None = None
    post_func: PostFunc | None = None

    def __post_init__(self) -> None:
        timeout = self.limit_s
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

    @property
    def limit_s(self) -> float | None:
        """How long a call may take, in seconds."""
        if isinstance(self.timeout, EllipsisType):
            return _ASYNC_S if self.is_async else None
        return self.timeout

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """What `pre_func` makes of a call's arguments. Raises TypeError where it returns nothing."""
        if self.pre_func is None:
            return args, kwargs
        found = self.pre_func(*args, **kwargs)
        name = getattr(self.pre_func, "__name__", self.pre_func)
        if found is None:
            raise TypeError(f"trainer_invocation(pre_func={name}): it returned None. Return the method's argument")
        if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], tuple) and isinstance(found[1], dict):
            return found
        if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list) and isinstance(found[1], dict):
            raise TypeError(
                f"trainer_invocation(pre_func={name}): it returned a (list, dict). Return (tuple(arguments), keywords) "
                "or ((the pair,), {}) where it is one argument"
            )
        return (found,), {}

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
    def workers(self) -> WorkerGroup:
        """The same workers as a training run's runner calls them: by `@register`, and nothing is made again here."""
        return self._group

    @property
    def role(self) -> str:
        return self._group.name

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

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} stays with the trainer: workers reach each other by name, with self.send(value, {self.role!r}, "
            f"rank) and self.recv({self.role!r}, rank)"
        )

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):  # also while this object is being copied, before it has a group
            raise AttributeError(name)
        invocation: Invocation = getattr(self._group.worker_method(name), _INVOCATION, Invocation())

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._invoke(name, invocation, args, kwargs)

        def remote(*args: Any, **kwargs: Any) -> Any:
            """Ray's way: a reference at once, of several workers a list; the decorator plays no part."""
            refs = [ref for rank in self._ranks() for ref in self._start(name, rank, (args, kwargs)).refs]
            return refs[0] if len(refs) == 1 else refs

        call.__name__ = name
        vars(call)["remote"] = remote
        return call

    def _ranks(self) -> Sequence[int]:
        return range(self._group.world_size) if self._only is None else self._only

    def _invoke(self, method: str, how: Invocation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = how.arguments(args, kwargs)
        rank_zero = how.target == "RANK0"
        ranks = self._ranks()[:1] if rank_zero else self._ranks()
        if not ranks:
            self._group.call(method)  # raises: the group is not running
        shards = dict(zip(ranks, _shards(len(ranks), how.auto_shard and not rank_zero, args, kwargs), strict=True))
        handles = {rank: self._start(method, rank, arguments) for rank, arguments in shards.items()}
        if not how.blocking:
            return handles[ranks[0]] if rank_zero else list(handles.values())
        result: Any
        if how.is_async:
            result = self._take_ready(method, handles, shards, how.limit_s)
        else:
            results = self._finish(method, handles, shards, how.limit_s)
            result = results[ranks[0]] if rank_zero else list(results.values())
        return result if how.post_func is None else how.post_func(result)

    def _start(self, method: str, rank: int, arguments: Arguments) -> Handle:
        rule = CallRule(execute_mode=Execute.RANK_ZERO)  # a group of one, whose result is not a list
        return self._group.call(method, *arguments, ranks=[rank], rule=rule)

    def _take_ready(
        self, method: str, handles: dict[int, Handle], shards: dict[int, Arguments], timeout: float | None
    ) -> InvocationResult:
        """What there is after `timeout`. Ranks that are late go on, and what they return is dropped."""
        try:
            return InvocationResult(self._finish(method, handles, shards, timeout, late_too=False))
        except InvocationTimeoutError as error:
            log.warning("%s; their results are dropped (is_async takes what is ready)", error)
            return InvocationResult(error.results, error.missing)

    def _finish(
        self,
        method: str,
        handles: dict[int, Handle],
        shards: dict[int, Arguments],
        timeout: float | None,
        late_too: bool = True,
    ) -> dict[int, Any]:
        """The results by rank; calls that failed (and, with `late_too`, late ones) are made again for as long as
        `recover` says so, and raise nothing that they have raised before at the same place."""
        results: dict[int, Any] = {}
        raised: set[tuple[int, str]] = set()
        while True:
            try:
                _wait(handles, results, timeout)
                return {rank: results[rank] for rank in handles}
            except SchedulerError as error:
                again = [error.rank] if isinstance(error, WorkerError | WorkerDiedError) else []
                this = {(error.rank, error.origin)} if isinstance(error, WorkerError) else set()
                is_late = late_too and isinstance(error, InvocationTimeoutError)  # who is late still works
                can_recover = again or is_late
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


class _Each:
    """A group of one for each worker of a role; none where the job has no such role."""

    def __init__(self, role: str) -> None:
        self._role = role

    def __get__(self, trainer: BaseTrainer, _: Any = None) -> list[RoleGroup]:
        return list(trainer.groups.get(self._role, ()))


class BaseTrainer(PortedTrainer, ABC):
    """The program of a job: `init`, then `fit`, which call the workers through their role groups.

    `RG_<ROLE>` is all workers of a role, whatever its name. Raises AttributeError where the job has none.
    """

    RG_ACTOR: RoleGroup
    RG_ROLLOUT: RoleGroup
    RG_REFERENCE: RoleGroup
    RG_REWARD: RoleGroup
    RG_CRITIC: RoleGroup

    supervisor: Supervisor | None = None
    """The job's: a Runner that is given it, with `group.workers`, recovers as in a training run."""

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
        return self.groups[self._role(role)]

    def get_workload_resource(self, role: str) -> dict[str, float]:
        """What a worker of a role has: `{"accelerator": devices}`."""
        return {"accelerator": self.job.shares[self._role(role)]}

    def _role(self, role: str) -> str:
        """As the job calls it, of a name in large or small letters."""
        for name in (role, *(name for name in self.groups if name.upper() == role.upper())):
            if name in self.groups:
                return str(name)
        roles = ", ".join(self.groups) or "none"
        raise AttributeError(f"the job has no {role!r} (its roles: {roles}); add {builder_call(role)} to its builder")

    if not TYPE_CHECKING:  # which would take any attribute for granted

        def __getattr__(self, name: str) -> RoleGroup:
            prefix, _, role = name.partition("_")
            if prefix != "RG" or not role:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return self.role_group(role.lower())
