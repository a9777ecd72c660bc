"""The Ray actor around one worker: builds it, calls it, and turns what it raises into a record for the driver."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlinf_lite.scheduler.context import PeerAddress, ProcessContext, set_context
from rlinf_lite.scheduler.errors import FailureRecord, RemoteFailure
from rlinf_lite.scheduler.worker import Worker, WorkerIdentity

_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GOMP_SPINCOUNT": "30000"}
"""Threads that spin for long cost a factor of 20 on a busy machine, ones that never spin half again on an idle one."""
_KEPT_DURATIONS = 4096


@dataclass(frozen=True)
class BuildSpec:
    """All that a worker process has to know before the worker is constructed."""

    identity: WorkerIdentity
    context: ProcessContext
    env_vars: dict[str, str]
    epoch: int


@dataclass(frozen=True)
class ProcessInfo:
    """A worker's process, for messages and logs."""

    pid: int
    hostname: str
    log_paths: tuple[str, ...]


@dataclass(frozen=True)
class Argument:
    """How to rebuild one argument from the flat list that Ray carries."""

    keyword: str | None
    num_values: int
    resolve: Callable[[list[Any]], Any] | None
    """None: the value itself."""


class CallHeader(NamedTuple):
    """What a call says besides its arguments."""

    call_id: int
    method: str
    plan: list[Argument] | None
    """None: all arguments are positional, and there."""

    def pickled(self) -> bytes:
        from ray import cloudpickle

        # only a plan can hold functions that have no importable name
        return pickle.dumps(tuple(self)) if self.plan is None else cloudpickle.dumps(tuple(self))


class Host:
    """What Ray runs. The worker's methods run one after the other, in this process's main thread."""

    def __init__(self, name: str, rank: int) -> None:
        self._name, self._rank = name, rank
        self._worker: Worker | None = None
        self._durations: OrderedDict[int, float] = OrderedDict()

    def __repr__(self) -> str:  # Ray puts it in front of the worker's log lines
        return f"{self._name}[{self._rank}]"

    def process_info(self) -> ProcessInfo:
        return ProcessInfo(os.getpid(), socket.gethostname(), _log_paths())

    def build(self, spec: BuildSpec, payload: bytes) -> PeerAddress:
        """Construct the worker from its pickled (class, args, kwargs); returns where to send messages for it."""
        try:
            return self._build(spec, payload)
        except Exception as error:
            raise self._failure("__init__", error) from None

    def call(self, header: bytes, *values: Any) -> Any:
        """Run a method. `header` is a pickled `CallHeader`: Ray sends bytes faster than anything else."""
        start = time.perf_counter()
        call_id, method, plan = pickle.loads(header)
        try:
            args, kwargs = (values, {}) if plan is None else _rebuild(plan, values)
            return getattr(self._worker, method)(*args, **kwargs)
        except Exception as error:
            raise self._failure(method, error) from None
        finally:
            self._durations[call_id] = time.perf_counter() - start
            if len(self._durations) > _KEPT_DURATIONS:
                self._durations.popitem(last=False)

    def duration(self, call_id: int) -> float:
        return self._durations[call_id]

    def ping(self) -> None:
        """Answers once the calls before it are done; fails when the process is gone."""

    def clear_abort(self, epoch: int, oldest_epochs: dict[str, int]) -> None:
        assert self._worker is not None and self._worker._mailbox is not None
        self._worker._mailbox.clear_abort(epoch, oldest_epochs)

    def _build(self, spec: BuildSpec, payload: bytes) -> PeerAddress:
        from ray import cloudpickle

        os.environ.update(_THREADS | spec.env_vars)
        set_context(spec.context)
        cls, args, kwargs = cloudpickle.loads(payload)
        from rlinf_lite.scheduler.mailbox import Mailbox

        mailbox = Mailbox(spec.context, self._name, self._rank)
        mailbox.epoch = spec.epoch
        worker: Worker = cls.__new__(cls)
        for key, value in vars(spec.identity).items():
            setattr(worker, key, value)
        worker._mailbox = mailbox
        worker.__init__(*args, **kwargs)  # type: ignore[misc]
        self._worker = worker
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(1)
        return PeerAddress(spec.context.node_id, mailbox.path)

    def _failure(self, method: str, error: Exception) -> RemoteFailure:
        text = "".join(traceback.format_exception(type(error), error, _without_host_frames(error)))
        summary = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return RemoteFailure(FailureRecord(self._name, self._rank, method, summary, text, _pickled(error)))


def _rebuild(plan: list[Argument], values: tuple[Any, ...]) -> tuple[Sequence[Any], dict[str, Any]]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    start = 0
    for argument in plan:
        taken = list(values[start : start + argument.num_values])
        start += argument.num_values
        value = argument.resolve(taken) if argument.resolve else taken[0]
        if argument.keyword is None:
            args.append(value)
        else:
            kwargs[argument.keyword] = value
    return args, kwargs


def _pickled(error: Exception) -> bytes | None:
    from ray import cloudpickle

    with suppress(Exception):  # many exceptions cannot be pickled, or cannot be loaded again
        pickled: bytes = cloudpickle.dumps(error)
        cloudpickle.loads(pickled)
        return pickled
    return None


def _without_host_frames(error: Exception) -> Any:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__ and frames.tb_next is not None:
        frames = frames.tb_next
    return frames


def _log_paths() -> tuple[str, ...]:
    paths = []
    for stream in ("/proc/self/fd/1", "/proc/self/fd/2"):
        with suppress(OSError):
            paths.append(os.readlink(stream))
    return tuple(dict.fromkeys(paths))
