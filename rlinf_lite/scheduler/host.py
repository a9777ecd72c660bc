"""The host of the workers in one process, for both runtimes: it constructs the workers, calls them, and turns their
exceptions into WorkerErrors. Also the transport of call arguments to the host."""

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

from rlinf_lite.scheduler.context import Address
from rlinf_lite.scheduler.dispatch import Arguments, Deferred, MeshPlace, Pending
from rlinf_lite.scheduler.errors import WorkerError
from rlinf_lite.scheduler.heartbeat import Activity

SHARED_BYTES = 100_000
"""Arguments of at least this size that several workers get are stored once; smaller ones are sent inside the call."""
Carried = tuple[list[Any], dict[str, Any]]  # arguments in the form that a runtime transports
_KEPT_DURATIONS = 4096
_KEPT_FAILURES = 64
_MAX_CAUSES = 8
DUMP_SIGNAL = signal.SIGUSR1
"""Signal on which a worker's process writes the stacks of its Python threads to its log."""


class Host:
    """The workers of one process: one Worker, or one of each fused group. Their methods run one at a time, in one
    thread.

    The host's own methods begin with an underscore, so that they cannot clash with the workers' methods.
    """

    def __init__(self, name: str, rank: int) -> None:
        self._name, self._rank = name, rank
        self._workers: list[Any] = []
        self._groups: list[str] = []
        self._durations: OrderedDict[str, float] = OrderedDict()
        self._failed: deque[str] = deque(maxlen=_KEPT_FAILURES)

    def __repr__(self) -> str:  # Ray writes it before each of the worker's log lines
        return f"{self._name}[{self._rank}]"

    def _construct(
        self, identities: Sequence[dict[str, Any]], epoch: int, definitions: Sequence[tuple[type[Any], Any, Any]]
    ) -> list[Address]:
        """Construct the workers from (class, args, kwargs). Returns the address of each worker's inbox."""
        name = self._name
        try:
            from rlinf_lite.scheduler.mailbox import Mailbox  # late: loads numpy, which reads environment variables

            fused: dict[str, Any] = {}
            for identity, (cls, args, kwargs) in zip(identities, definitions, strict=True):
                name = identity["name"]
                worker: Any = object.__new__(cls)
                vars(worker).update(identity, fused=fused)
                worker._activity = Activity()
                worker._mailbox = Mailbox(name, self._rank, epoch, worker._activity)
                worker.__init__(*args, **kwargs)
                fused[worker.role] = worker
                self._workers.append(worker)
                self._groups.append(name)
        except Exception as error:  # anything that a user's constructor raises
            raise self._failure(name, "__init__", error) from None
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(1)  # of this thread
            torch.backends.cudnn.allow_tf32 = False  # on a card, fp32 convolutions would round to 10 bits
        return self._addresses()

    def _addresses(self) -> list[Address]:
        """The address of each worker's inbox."""
        return [worker._connected().inbox.address for worker in self._workers]

    def _forget(self) -> None:
        """Drop the workers."""
        self._workers.clear()

    def _call(self, index: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], call_id: str) -> Any:
        worker, start = self._workers[index], time.perf_counter()
        try:
            args, kwargs = _resolved(args, kwargs)
            with worker._activity.method(method):
                return getattr(worker, method)(*args, **kwargs)
        except Exception as error:  # anything that a user's method raises
            self._failed.append(call_id)
            raise self._failure(self._groups[index], method, error) from None
        finally:
            self._durations[call_id] = time.perf_counter() - start
            if len(self._durations) > _KEPT_DURATIONS:
                self._durations.popitem(last=False)

    def _duration(self, call_id: str) -> float:
        return self._durations[call_id]

    def _mesh_place(self, index: int, mesh: str) -> MeshPlace | None:
        return self._workers[index]._mesh_places.get(mesh)

    def _ping(self) -> list[str]:
        """Ids of the last calls that failed. Runs after the calls before it; fails if the process is gone."""
        return list(self._failed)

    def _clear_abort(self, index: int, epoch: int, oldest_epochs: dict[str, int]) -> None:
        self._workers[index]._connected().clear_abort(epoch, oldest_epochs)

    def _failure(self, name: str, method: str, error: Exception) -> WorkerError:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__ and frames.tb_next is not None:
            frames = frames.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames))
        summary = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

        # types and lines of the exception and of the exceptions that caused it
        origin: list[str] = []
        current: BaseException | None = error
        while current is not None and len(origin) < _MAX_CAUSES:
            walked = list(traceback.walk_tb(current.__traceback__))
            place = f" at {walked[-1][0].f_code.co_filename}:{walked[-1][1]}" if walked else ""
            origin.append(f"{type(current).__name__}{place}")
            current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)

        from rlinf_lite.scheduler.segments import cloudpickle

        pickled: bytes | None = None
        with suppress(Exception):  # many exceptions cannot be pickled, or cannot be loaded again
            dumped = cloudpickle().dumps(error)
            cloudpickle().loads(dumped)
            pickled = dumped
        failure = WorkerError(name, self._rank, method, summary, text, pickled, ", from ".join(origin))
        failure.original = error
        return failure


def process_and_logs() -> tuple[int, list[str]]:
    """The id of this process, and the files that its stdout and stderr go to."""
    paths = []
    for stream in ("/proc/self/fd/1", "/proc/self/fd/2"):
        with suppress(OSError):
            paths.append(os.readlink(stream))
    return os.getpid(), list(dict.fromkeys(paths))


def host_class(base: type[Host], name: str, methods: Sequence[Iterable[str]], call_id: Callable[[], str]) -> type[Host]:
    """A Host class with one method per worker method, so that the method's name need not be sent as an argument.
    `call_id` returns the id of the running call."""

    def forwarder(index: int, method: str) -> Callable[..., Any]:
        def forward(self: Host, *args: Any, **kwargs: Any) -> Any:
            return self._call(index, method, args, kwargs, call_id())

        forward.__name__ = host_method(index, method)
        return forward

    forwarders = [forwarder(index, method) for index, names in enumerate(methods) for method in names]
    return type(name, (base,), {forward.__name__: forward for forward in forwarders})


def host_method(index: int, method: str) -> str:
    """The name of the host's method that calls `method` of worker `index`."""
    return f"{method}_of_{index}" if index else method


def carry(arguments: Arguments, stored: dict[int, Any], put: Callable[[Any], Any] | None) -> Carried:
    """The arguments in the form that a runtime transports: references are moved to the top level, where the runtime
    fetches their values. `put` stores a large argument once, for several readers; None: there is one reader."""
    refs: list[Any] = []

    def carried(value: Any) -> Any:
        if isinstance(value, Pending):
            deferred = value.deferred()
            refs.extend(deferred.refs)
            return Deferred((None,) * len(deferred.refs), deferred.resolve)
        if put is not None and payload_bytes(value) >= SHARED_BYTES:
            if id(value) not in stored:
                stored[id(value)] = put(value)
            return stored[id(value)]
        return value

    args, kwargs = arguments
    positional, named = [carried(value) for value in args], {key: carried(value) for key, value in kwargs.items()}
    return positional + refs, named


def payload_bytes(value: Any) -> int:
    """Bytes of arrays, tensors, bytes and strings in nested containers; other objects count as 0."""
    if isinstance(value, dict):
        return sum(payload_bytes(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(payload_bytes(item) for item in value)
    if isinstance(value, bytes | bytearray | str):
        return len(value)
    size = getattr(value, "nbytes", 0)
    return size if isinstance(size, int) else 0


def _resolved(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Undo `carry`, in the worker; the values of the references come after the other arguments."""
    num_given = len(args) - sum(len(value.refs) for value in (*args, *kwargs.values()) if isinstance(value, Deferred))
    values = iter(args[num_given:])

    def resolve(value: Any) -> Any:
        return value.resolve([next(values) for _ in value.refs]) if isinstance(value, Deferred) else value

    return tuple(resolve(value) for value in args[:num_given]), {key: resolve(value) for key, value in kwargs.items()}
