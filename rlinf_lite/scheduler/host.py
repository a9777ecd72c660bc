"""The Ray actor around a process's workers: builds them, calls them, and makes WorkerErrors of what they raise.
Also how the arguments of a call travel there."""

from __future__ import annotations

import faulthandler
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
from rlinf_lite.registry import take_of_main
from rlinf_lite.scheduler.context import RAY_NAMESPACE, Address, ProcessContext, set_context
from rlinf_lite.scheduler.dispatch import Arguments, Deferred, MeshPlace, Pending
from rlinf_lite.scheduler.errors import WorkerError
from rlinf_lite.scheduler.forked import THREADS
from rlinf_lite.scheduler.heartbeat import Activity, Beat, Heartbeat
from rlinf_lite.scheduler.setup_worker import PLAIN

SHARED_BYTES = 100_000
"""Arguments from this size on that several workers get are stored once; below it Ray sends them inside the call."""
Carried = tuple[list[Any], dict[str, Any]]  # arguments as Ray carries them
_KEPT_DURATIONS = 4096
_KEPT_FAILURES = 64
_MAX_CAUSES = 8
DUMP_SIGNAL = signal.SIGUSR1
"""Makes a worker's process write the stacks of its Python threads to its log."""


class Host:
    """What Ray runs: one Worker, or one of each group that was fused. Their methods run one after the other, in this
    process's main thread.

    Methods of its own start with an underscore, as no method does that a group calls.
    """

    def __init__(self, name: str, rank: int) -> None:
        self._name, self._rank = name, rank
        self._why_plain = os.environ.pop(PLAIN, "")
        self._workers: list[Any] = []
        self._groups: list[str] = []
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
        """Construct the workers from what is pickled: the driver's `registry.of_main`, [(class, args, kwargs)].
        Returns where to send messages for each."""
        os.environ.update(THREADS | env_vars)
        set_context(context)
        # SIGTERM is for the driver, which saves what the workers hold and ends them; SLURM sends it to all of a job. By
        # a handler, and unblocked, which programs started from here do not inherit; forks get the default back
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, DUMP_SIGNAL})
        faulthandler.register(DUMP_SIGNAL, file=2)  # by no Python code: C that holds Python's lock does not stop it
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
        name = self._name
        try:
            with imports_without_gc():
                of_main, definitions = cloudpickle.loads(payload)
            take_of_main(of_main)
            from rlinf_lite.scheduler.post import Mailbox  # only now: numpy reads the variables set above

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
                self._groups.append(name)
        except Exception as error:  # whatever a user's constructor raises
            raise self._failure(name, "__init__", error) from None
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(1)
            torch.backends.cudnn.allow_tf32 = False  # on a card, fp32 convolutions would round to 10 bits
        monitor = context.monitor
        if monitor is not None:

            def tell(beats: list[Beat]) -> None:  # a master that is being started again hears nothing meanwhile
                with suppress(Exception):  # it is gone, and with it whoever watched
                    ray.get_actor(monitor, namespace=RAY_NAMESPACE).beat.remote(beats)

            activities = zip(self._groups, self._workers, strict=True)
            Heartbeat([(group, self._rank, worker._activity) for group, worker in activities], tell)
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
            raise self._failure(self._groups[index], method, error) from None
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

        # types and lines of the exception and of those that it arose from
        origin: list[str] = []
        current: BaseException | None = error
        while current is not None and len(origin) < _MAX_CAUSES:
            walked = list(traceback.walk_tb(current.__traceback__))
            place = f" at {walked[-1][0].f_code.co_filename}:{walked[-1][1]}" if walked else ""
            origin.append(f"{type(current).__name__}{place}")
            current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)

        pickled: bytes | None = None
        with suppress(Exception):  # many exceptions cannot be pickled, or cannot be loaded again
            dumped = cloudpickle.dumps(error)
            cloudpickle.loads(dumped)
            pickled = dumped
        return WorkerError(name, self._rank, method, summary, text, pickled, ", from ".join(origin))


def process_and_logs() -> tuple[int, list[str]]:
    """Id of this process, and the files that its stdout and stderr go to."""
    paths = []
    for stream in ("/proc/self/fd/1", "/proc/self/fd/2"):
        with suppress(OSError):
            paths.append(os.readlink(stream))
    return os.getpid(), list(dict.fromkeys(paths))


def host_class(name: str, methods: Sequence[Iterable[str]]) -> type[Host]:
    """A Host with a Ray method for each of every worker's: a call without arguments then has nothing to carry."""

    def forwarder(index: int, method: str) -> Callable[..., Any]:
        def forward(self: Host, *args: Any, **kwargs: Any) -> Any:
            return self._call(index, method, args, kwargs)

        forward.__name__ = ray_method(index, method)
        return forward

    forwarders = [forwarder(index, method) for index, names in enumerate(methods) for method in names]
    return type(name, (Host,), {forward.__name__: forward for forward in forwarders})


def ray_method(index: int, method: str) -> str:
    """What a method of the process's worker `index` is called in Ray."""
    return f"{method}_of_{index}" if index else method


def carry(arguments: Arguments, stored: dict[int, Any], share: bool) -> Carried:
    """The arguments as Ray carries them: references lie at the top, where it fetches what they refer to."""
    refs: list[Any] = []

    def carried(value: Any) -> Any:
        if isinstance(value, Pending):
            deferred = value.deferred()
            refs.extend(deferred.refs)
            return Deferred((None,) * len(deferred.refs), deferred.resolve)
        if share and payload_bytes(value) >= SHARED_BYTES:
            if id(value) not in stored:
                stored[id(value)] = ray.put(value)
            return stored[id(value)]
        return value

    args, kwargs = arguments
    positional, named = [carried(value) for value in args], {key: carried(value) for key, value in kwargs.items()}
    return positional + refs, named


def payload_bytes(value: Any) -> int:
    """Bytes of bulk data in nested containers of arrays, tensors and bytes; other things count as nothing."""
    if isinstance(value, dict):
        return sum(payload_bytes(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(payload_bytes(item) for item in value)
    if isinstance(value, bytes | bytearray | str):
        return len(value)
    size = getattr(value, "nbytes", 0)
    return size if isinstance(size, int) else 0


def _resolved(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`carry` undone, in the worker; what the references stood for lies behind the other arguments."""
    num_given = len(args) - sum(len(value.refs) for value in (*args, *kwargs.values()) if isinstance(value, Deferred))
    values = iter(args[num_given:])

    def resolve(value: Any) -> Any:
        return value.resolve([next(values) for _ in value.refs]) if isinstance(value, Deferred) else value

    return tuple(resolve(value) for value in args[:num_given]), {key: resolve(value) for key, value in kwargs.items()}
