"""BaseTrainer, the base class of a job's trainer, and RoleGroup, through which it calls the workers of a role."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from rlinf_lite.jobs.spec import JobSpec, builder_call
from rlinf_lite.scheduler.dispatch import Arguments, CallRule, Dispatch, Execute, Scatter, get_dispatch_mode
from rlinf_lite.scheduler.errors import CallTimeoutError, SchedulerError, WorkerDiedError, WorkerError
from rlinf_lite.scheduler.group import WorkerGroup
from rlinf_lite.scheduler.handle import Handle, wait_alone
from rlinf_lite.scheduler.host import SHARED_BYTES, payload_bytes

if TYPE_CHECKING:
    from rlinf_lite.control.supervisor import Supervisor

Method = TypeVar("Method", bound=Callable[..., Any])
Recover = Callable[[SchedulerError], bool]

log = logging.getLogger(__name__)

_INVOCATION = "_rlinf_lite_invocation"
_ASYNC_S = 10.0  # the default `timeout` of an `is_async` call


class InvocationTimeoutError(CallTimeoutError):
    """Some ranks did not answer in time. `missing`: these ranks; `results`: the results of the others, by rank."""

    def __init__(self, message: str, results: dict[int, Any], missing: list[int]) -> None:
        super().__init__(message)
        self.results, self.missing = results, missing

    def __reduce__(self) -> Any:
        return InvocationTimeoutError, (str(self), self.results, self.missing)


class InvocationResult(list[Any]):
    """The result of an `is_async` call: a list of the results that came in time, in the order of ranks. `results` has
    the same by rank, `missing` the ranks that were late."""

    def __init__(self, results: dict[int, Any], missing: Sequence[int] = ()) -> None:
        super().__init__(results.values())
        self.results, self.missing = results, list(missing)


@dataclass(frozen=True)
class Invocation:
    """Decorator that sets how the trainer calls a workload's method. A method without it has these defaults.

    `blocking=False` returns a Handle per rank at once. Otherwise the call waits and returns the list of results by
    rank. `timeout` limits the wait, in seconds: if ranks are late it raises InvocationTimeoutError, which has the
    results of the others. `is_async` returns the results that are ready after `timeout` (by default 10 s; None: waits
    for all ranks) as an InvocationResult, which names late ranks. `target="RANK0"` calls only rank 0 and returns its
    result instead of a list. `auto_shard` gives each rank one element of every argument that is a list as long as the
    group (not with RANK0). Two functions run in the trainer: `pre_func(*args, **kwargs)` returns the argument to call
    with, or (args, kwargs); `post_func(result)` returns the result of the call.
    """

    blocking: bool = True
    is_async: bool = False
    timeout: float | EllipsisType | None = ...
    target: str = "ALL"
    auto_shard: bool = True
    pre_func: Callable[..., Any] | None = None
    post_func: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        limit, call = self.limit_s, "trainer_invocation"
        for option in ("blocking", "is_async", "auto_shard"):
            if not isinstance(value := getattr(self, option), bool):
                raise TypeError(f"{call}({option}={value!r}): must be True or False; write @{call}()")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float)):
            raise TypeError(f"{call}(timeout={limit!r}): must be seconds, or None for no limit")
        if limit is not None and not limit >= 0:
            raise ValueError(f"{call}(timeout={limit!r}): must be at least 0, or None for no limit")
        if self.target not in ("ALL", "RANK0"):
            raise ValueError(f"{call}(target={self.target!r}): must be 'ALL' or 'RANK0'")
        if not self.blocking and (self.is_async or self.post_func is not None):
            unused = "is_async=True" if self.is_async else "post_func"
            raise ValueError(f"{call}(blocking=False) returns before there are results for {unused}; drop one")

    @property
    def limit_s(self) -> float | None:
        """The time that a call may take, in seconds."""
        if isinstance(self.timeout, EllipsisType):
            return _ASYNC_S if self.is_async else None
        return self.timeout

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments of a call after `pre_func`. Raises TypeError if `pre_func` returns nothing."""
        if self.pre_func is None:
            return args, kwargs
        found = self.pre_func(*args, **kwargs)
        what = f"trainer_invocation(pre_func={getattr(self.pre_func, '__name__', self.pre_func)}): it returned"
        if found is None:
            raise TypeError(f"{what} None. Return the method's argument")
        if isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict):
            if isinstance(found[0], tuple):
                return found
            if isinstance(found[0], list):
                fix = "Return (tuple(arguments), keywords), or ((the pair,), {}) where it is one argument"
                raise TypeError(f"{what} a (list, dict). {fix}")
        return (found,), {}

    def __call__(self, method: Method) -> Method:
        setattr(method, _INVOCATION, self)
        return method


trainer_invocation = Invocation


class RoleGroup:
    """The workers of a role, called by the trainer: `RG_ACTOR.update(batch)`. `@register` has no effect here.

    `recover(error)` is called when a rank's call fails. It returns True if it has replaced the worker (or all workers
    of `error.missing`, if ranks were late), so that this rank's call is repeated, and False if the error should be
    raised.
    """

    def __init__(self, group: WorkerGroup, recover: Recover | None = None, ranks: Sequence[int] | None = None) -> None:
        self._group, self._recover = group, recover
        self._ranks: Sequence[int] = range(group.world_size) if ranks is None else ranks
        self.role, self.world_size = group.name, len(self._ranks)

    @property
    def workers(self) -> WorkerGroup:
        """The same workers as a WorkerGroup, as in a training run: `@register` applies, and failed calls are not
        repeated."""
        return self._group

    def __len__(self) -> int:
        return self.world_size

    def __getitem__(self, index: int) -> RoleGroup:
        """A view of one worker: a group of size 1."""
        return RoleGroup(self._group, self._recover, [self._ranks[index]])

    def __iter__(self) -> Iterator[RoleGroup]:
        return map(self.__getitem__, range(self.world_size))

    def __repr__(self) -> str:
        return f"RoleGroup({self._group.name}, ranks {', '.join(map(str, self._ranks))})"

    def __reduce__(self) -> Any:
        how = f"self.send(value, {self.role!r}, rank) and self.recv({self.role!r}, rank)"
        raise TypeError(f"{self!r} stays with the trainer: workers reach each other by name, with {how}")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):  # also while this object is being copied, before it has a group
            raise AttributeError(name)
        invocation: Invocation = getattr(self._group.worker_method(name), _INVOCATION, Invocation())

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._invoke(name, invocation, args, kwargs)

        def remote(*args: Any, **kwargs: Any) -> Any:
            """Call as in Ray: returns one reference, or a list of several, at once. The decorator has no effect."""
            refs = [ref for rank in self._ranks for ref in self._start(name, rank, (args, kwargs)).refs]
            return refs[0] if len(refs) == 1 else refs

        call.__name__ = name
        vars(call)["remote"] = remote
        return call

    def _invoke(self, method: str, how: Invocation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = how.arguments(args, kwargs)
        rank_zero = how.target == "RANK0"
        ranks = self._ranks[:1] if rank_zero else self._ranks
        if not ranks:
            self._group.call(method)  # raises: the group is not running
        shards = dict(zip(ranks, _shards(len(ranks), how.auto_shard and not rank_zero, args, kwargs), strict=True))
        handles = {rank: self._start(method, rank, arguments) for rank, arguments in shards.items()}
        if not how.blocking:
            return handles[ranks[0]] if rank_zero else list(handles.values())
        result: Any
        try:
            results = self._finish(method, how, handles, shards)
            result = InvocationResult(results) if how.is_async else list(results.values())
        except InvocationTimeoutError as error:
            if not how.is_async:
                raise
            log.warning("%s; their results are dropped (is_async takes what is ready)", error)
            result = InvocationResult(error.results, error.missing)
        result = result[0] if rank_zero and not how.is_async else result
        return result if how.post_func is None else how.post_func(result)

    def _start(self, method: str, rank: int, arguments: Arguments) -> Handle:
        rule = CallRule(execute_mode=Execute.RANK_ZERO)  # a group of one worker, whose result is not a list
        return self._group.call(method, *arguments, ranks=[rank], rule=rule)

    def _finish(
        self, method: str, how: Invocation, handles: dict[int, Handle], shards: dict[int, Arguments]
    ) -> dict[int, Any]:
        """The results by rank. A call that failed, or was late (unless it is async), is repeated as long as `recover`
        returns True and the worker does not raise at the same place again."""
        results: dict[int, Any] = {}
        raised: set[tuple[int, str]] = set()
        while True:
            try:
                _wait(handles, results, how.limit_s)
                return {rank: results[rank] for rank in handles}
            except SchedulerError as error:
                failed = [error.rank] if isinstance(error, WorkerError | WorkerDiedError) else []
                place = {(error.rank, error.origin)} if isinstance(error, WorkerError) else set()
                is_late = isinstance(error, InvocationTimeoutError) and not how.is_async
                again = (failed or is_late) and not place & raised
                if not again or self._recover is None or not self._recover(error):
                    raise
                raised |= place
                for rank in handles.keys() - results.keys():
                    try:
                        results[rank] = handles[rank].wait(0)
                    except SchedulerError:  # it still runs, or failed, or its worker was replaced with the other one
                        if rank in failed or handles[rank].members[0] is not self._group.members[rank]:
                            handles[rank] = self._start(method, rank, shards[rank])


def _wait(handles: dict[int, Handle], results: dict[int, Any], timeout: float | None) -> None:
    """Wait for the missing results, and add them to `results`, by rank."""
    waiting = {rank: handle for rank, handle in handles.items() if rank not in results}
    try:
        results.update(zip(waiting, wait_alone(list(waiting.values()), timeout), strict=True))
    except CallTimeoutError as error:
        missing = [rank for rank, handle in waiting.items() if not handle.done()]
        results.update((rank, handle.wait()) for rank, handle in waiting.items() if rank not in missing)
        if missing:
            raise InvocationTimeoutError(str(error), dict(sorted(results.items())), missing) from None


def _shards(num_ranks: int, split: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Arguments]:
    """The arguments of each rank; a large argument is put into Ray's store once."""

    def prepared(value: Any) -> Any:
        if split and isinstance(value, list) and len(value) == num_ranks:
            return Scatter(value)
        return ray.put(value) if num_ranks > 1 and payload_bytes(value) >= SHARED_BYTES else value

    named = {key: prepared(value) for key, value in kwargs.items()}
    return get_dispatch_mode(Dispatch.ALL_TO_ALL).dispatch(num_ranks, tuple(map(prepared, args)), named)


class BaseTrainer(ABC):
    """The program of a job. `init` and then `fit` are called; they call the workers through their role groups.

    `RG_<ROLE>` is the group of all workers of a role, for any role name; AttributeError if the job has no such role.
    """

    RG_ACTOR: RoleGroup
    RG_ROLLOUT: RoleGroup
    RG_REFERENCE: RoleGroup
    RG_REWARD: RoleGroup
    RG_CRITIC: RoleGroup

    supervisor: Supervisor | None = None
    """The job's supervisor. A Runner with this supervisor and with `group.workers` recovers as in a training run."""

    def __init__(
        self, groups: dict[str, RoleGroup], config: dict[str, Any], job: JobSpec, restart_count: int = 0
    ) -> None:
        self.groups, self.job, self.restart_count = groups, job, restart_count
        self.config = self._config = config  # DLRover's trainers read `_config`
        self.step = 0
        self.actor_handles = {role: list(group) for role, group in groups.items()}  # a group of one for each worker
        each = self.actor_handles.get
        self.actors, self.rollouts, self.references = each("actor", []), each("rollout", []), each("reference", [])
        self.rewards, self.critics = each("reward", []), each("critic", [])

    @abstractmethod
    def init(self) -> None:
        """Prepare the workers: models, simulators, process groups."""

    @abstractmethod
    def fit(self) -> None:
        """Train; the job ends when this returns."""

    def is_recoverable(self) -> bool:
        """Return True if `fit` can begin again after it raised: `init` and `fit` are then called on a new trainer,
        with `restart_count` one higher; the workers are kept."""
        return False

    def report_progress(self, step: int) -> None:
        """Report the number of completed steps to the job's supervisor."""
        self.step = step
        if self.supervisor is not None:
            self.supervisor.progress(step)

    def role_group(self, role: str) -> RoleGroup:
        """All workers of a role. Raises AttributeError if the job has no such role."""
        return self.groups[self._role(role)]

    def get_role_groups(self) -> list[str]:
        """The names of the attributes for the trainer's groups, such as `RG_ACTOR`."""
        return [f"RG_{role.upper()}" for role in self.groups]

    def get_actor_handles(self, role: str) -> list[RoleGroup]:
        """A group of one worker for each worker of a role; empty if the job has no such role."""
        return self.actor_handles.get(role.lower(), [])

    def get_workload_resource(self, role: str) -> dict[str, float]:
        """The resources of a role's worker: `{"accelerator": devices}`."""
        return {"accelerator": self.job.role(self._role(role)).share}

    def _role(self, role: str) -> str:
        """The exact name of a role in the job; case does not matter."""
        for name in (role, *(name for name in self.groups if name.upper() == role.upper())):
            if name in self.groups:
                return str(name)
        roles = ", ".join(self.groups) or "none"
        raise AttributeError(f"the job has no {role!r} (its roles: {roles}); add {builder_call(role)} to its builder")

    if not TYPE_CHECKING:  # a type checker would accept any attribute

        def __getattr__(self, name: str) -> RoleGroup:
            prefix, _, role = name.partition("_")
            if prefix != "RG" or not role:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return self.role_group(role.lower())
