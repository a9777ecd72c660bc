"""The Ray actor around a process's workers: builds them, calls them, and makes WorkerErrors of what they raise."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray import cloudpickle

from rlinf_lite.lazy import imports_without_gc
from rlinf_lite.scheduler.context import RAY_NAMESPACE, Address, ProcessContext, set_context
from rlinf_lite.scheduler.dispatch import Deferred, MeshPlace
from rlinf_lite.scheduler.errors import WorkerError
from rlinf_lite.scheduler.forked import THREADS
from rlinf_lite.scheduler.heartbeat import Activity, Beat, Heartbeat
from rlinf_lite.scheduler.setup_worker import PLAIN

_KEPT_DURATIONS = 4096
_KEPT_FAILURES = 64
_MAX_CAUSES = 8


class Host:
    """What Ray runs: one Worker, or one of each group that was fused. Their methods run one after the other, in this
    process's main thread.

    Methods of its own start with an underscore, as no method does that a group calls.
    """

    def __init__(self, name: str, rank: int) -> None:
        self._name, self._rank = name, rank
        self._why_plain = os.environ.pop(PLAIN, "")
        self._workers: list[Any] = []
        self._durations: OrderedDict[str, float] = OrderedDict()
        self._failed: deque[str] = deque(maxlen=_KEPT_FAILURES)

    def __repr__(self) -> str:  # Ray puts it in front of the worker's log lines
        return f"{self._name}[{self._rank}]"

    def _process(self) -> tuple[int, list[str], str]:
        """Its id, its logs, and why it is none that was forked where it should be."""
        return *process_and_logs(), self._why_plain

    def _build(
        self,
        identities: list[dict[str, Any]],
        context: ProcessContext,
        env_vars: dict[str, str],
        epoch: int,
        payload: bytes,
    ) -> list[Address]:
        """Construct the workers from their pickled [(class, args, kwargs)]; returns where to send messages for each."""
        os.environ.update(THREADS | env_vars)
        set_context(context)
        _ignore_sigterm()
        name = self._name
        try:
            with imports_without_gc():
                definitions = cloudpickle.loads(payload)
            from rlinf_lite.scheduler.mailbox import Mailbox  # only now: numpy reads the variables set above

            fused: dict[str, Any] = {}
            for identity, (cls, args, kwargs) in zip(identities, definitions, strict=True):
                name = identity["name"]
                worker = cls.__new__(cls)
                vars(worker).update(identity, fused=fused)
                worker._activity = Activity()
                worker._mailbox = Mailbox(name, self._rank, epoch, worker._activity)
                worker.__init__(*args, **kwargs)
                fused[worker.role] = worker
                self._workers.append(worker)
        except Exception as error:  # whatever a user's constructor raises
            raise self._failure(name, "__init__", error) from None
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(1)
        if context.monitor is not None:
            Heartbeat([(w.name, w.rank, w._activity) for w in self._workers], _teller(context.monitor))
        return [worker._connected().inbox.address for worker in self._workers]

    def _call(self, index: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        worker = self._workers[index]
        start, task = time.perf_counter(), ray.get_runtime_context().get_task_id() or ""
        try:
            args, kwargs = _resolved(args, kwargs)
            with worker._activity.method(method):
                return getattr(worker, method)(*args, **kwargs)
        except Exception as error:  # whatever a user's method raises
            self._failed.append(task)
            raise self._failure(worker.name, method, error) from None
        finally:
            self._durations[task] = time.perf_counter() - start
            if len(self._durations) > _KEPT_DURATIONS:
                self._durations.popitem(last=False)

    def _duration(self, task_id: str) -> float:
        return self._durations[task_id]

    def _mesh_place(self, index: int, mesh: str) -> MeshPlace | None:
        return self._workers[index]._mesh_places.get(mesh)

    def _ping(self) -> list[str]:
        """The last calls that failed, by id. Answers once those before it are done; fails when the process is gone."""
        return list(self._failed)

    def _clear_abort(self, index: int, epoch: int, oldest_epochs: dict[str, int]) -> None:
        self._workers[index]._connected().clear_abort(epoch, oldest_epochs)

    def _failure(self, name: str, method: str, error: Exception) -> WorkerError:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__ and frames.tb_next is not None:
            frames = frames.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames))
        summary = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return WorkerError(name, self._rank, method, summary, text, _pickled(error), _origin(error))


def _ignore_sigterm() -> None:
    """SIGTERM is for the driver, which saves what the workers hold and ends them; SLURM sends it to all of a job.

    By a handler, and unblocked, which programs started from here do not inherit; forks get the default back.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def process_and_logs() -> tuple[int, list[str]]:
    """Id of this process, and the files that its stdout and stderr go to."""
    paths = []
    for stream in ("/proc/self/fd/1", "/proc/self/fd/2"):
        with suppress(OSError):
            paths.append(os.readlink(stream))
    return os.getpid(), list(dict.fromkeys(paths))


def _teller(monitor: str) -> Callable[[list[Beat]], None]:
    """Tells a Ray actor; one that is being started again hears nothing meanwhile."""

    def tell(beats: list[Beat]) -> None:
        with suppress(Exception):  # the actor is gone, and with it whoever watched
            ray.get_actor(monitor, namespace=RAY_NAMESPACE).beat.remote(beats)

    return tell


def host_class(name: str, methods: Sequence[Iterable[str]]) -> type[Host]:
    """A Host with a Ray method for each of every worker's: a call without arguments then has nothing to carry."""
    forwarders = {ray_method(i, method): _forwarder(i, method) for i, names in enumerate(methods) for method in names}
    return type(name, (Host,), forwarders)


def ray_method(index: int, method: str) -> str:
    """What a method of the process's worker `index` is called in Ray."""
    return f"{method}_of_{index}" if index else method


def _forwarder(index: int, method: str) -> Callable[..., Any]:
    def forward(self: Host, *args: Any, **kwargs: Any) -> Any:
        return self._call(index, method, args, kwargs)

    forward.__name__ = ray_method(index, method)
    return forward


def _resolved(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put deferred arguments together; what their references stood for lies behind the other arguments."""
    num_given = len(args) - sum(len(value.refs) for value in (*args, *kwargs.values()) if isinstance(value, Deferred))
    values = iter(args[num_given:])

    def resolve(value: Any) -> Any:
        return value.resolve([next(values) for _ in value.refs]) if isinstance(value, Deferred) else value

    return tuple(resolve(value) for value in args[:num_given]), {key: resolve(value) for key, value in kwargs.items()}


def _origin(error: BaseException) -> str:
    """Types and lines of an exception and of those that it arose from."""
    found: list[str] = []
    current: BaseException | None = error
    while current is not None and len(found) < _MAX_CAUSES:
        frames = list(traceback.walk_tb(current.__traceback__))
        place = f" at {frames[-1][0].f_code.co_filename}:{frames[-1][1]}" if frames else ""
        found.append(f"{type(current).__name__}{place}")
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return ", from ".join(found)


def _pickled(error: Exception) -> bytes | None:
    with suppress(Exception):  # many exceptions cannot be pickled, or cannot be loaded again
        pickled: bytes = cloudpickle.dumps(error)
        cloudpickle.loads(pickled)
        return pickled
    return None
