"""The Ray actor around one worker: builds it, calls it, and makes WorkerErrors of what it raises."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import ray
from ray import cloudpickle

from rlinf_lite.scheduler.context import Address, ProcessContext, set_context
from rlinf_lite.scheduler.dispatch import Deferred
from rlinf_lite.scheduler.errors import WorkerError
from rlinf_lite.scheduler.rows import MeshPlace
from rlinf_lite.scheduler.worker import Worker

_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GOMP_SPINCOUNT": "30000"}
"""Threads that spin for long cost a factor of 20 on a busy machine, ones that never spin half again on an idle one."""
_KEPT_DURATIONS = 4096


class Host:
    """What Ray runs. The worker's methods run one after the other, in this process's main thread.

    Methods of its own start with an underscore, as no method does that a group calls.
    """

    def __init__(self, name: str, rank: int) -> None:
        self._name, self._rank = name, rank
        self._worker: Worker | None = None
        self._durations: OrderedDict[str, float] = OrderedDict()

    def __repr__(self) -> str:  # Ray puts it in front of the worker's log lines
        return f"{self._name}[{self._rank}]"

    def _process(self) -> tuple[int, list[str]]:
        """Process id, and the files that stdout and stderr go to."""
        paths = []
        for stream in ("/proc/self/fd/1", "/proc/self/fd/2"):
            with suppress(OSError):
                paths.append(os.readlink(stream))
        return os.getpid(), list(dict.fromkeys(paths))

    def _build(
        self, identity: dict[str, Any], context: ProcessContext, env_vars: dict[str, str], epoch: int, payload: bytes
    ) -> Address:
        """Construct the worker from its pickled (class, args, kwargs); returns where to send messages for it."""
        os.environ.update(_THREADS | env_vars)
        set_context(context)
        try:
            cls, args, kwargs = cloudpickle.loads(payload)
            from rlinf_lite.scheduler.mailbox import Mailbox  # only now: numpy reads the variables set above

            worker: Worker = cls.__new__(cls)
            vars(worker).update(identity)
            worker._mailbox = Mailbox(self._name, self._rank, epoch)
            worker.__init__(*args, **kwargs)  # type: ignore[misc]
        except Exception as error:
            raise self._failure("__init__", error) from None
        self._worker = worker
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(1)
        return worker._mailbox.inbox.address

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        start = time.perf_counter()
        try:
            args, kwargs = _resolved(args, kwargs)
            return getattr(self._worker, method)(*args, **kwargs)
        except Exception as error:
            raise self._failure(method, error) from None
        finally:
            self._durations[ray.get_runtime_context().get_task_id() or ""] = time.perf_counter() - start
            if len(self._durations) > _KEPT_DURATIONS:
                self._durations.popitem(last=False)

    def _duration(self, task_id: str) -> float:
        return self._durations[task_id]

    def _mesh_place(self, mesh: str) -> MeshPlace | None:
        assert self._worker is not None
        return self._worker._mesh_places.get(mesh)

    def _ping(self) -> None:
        """Answers once the calls before it are done; fails when the process is gone."""

    def _clear_abort(self, epoch: int, oldest_epochs: dict[str, int]) -> None:
        assert self._worker is not None and self._worker._mailbox is not None
        self._worker._mailbox.clear_abort(epoch, oldest_epochs)

    def _failure(self, method: str, error: Exception) -> WorkerError:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__ and frames.tb_next is not None:
            frames = frames.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames))
        summary = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return WorkerError(self._name, self._rank, method, summary, text, _pickled(error))


def host_class(name: str, methods: Iterable[str]) -> type[Host]:
    """A Host with a Ray method for each of the worker's: a call without arguments then has nothing to carry."""
    return type(name, (Host,), {method: _forwarder(method) for method in methods})


def _forwarder(method: str) -> Callable[..., Any]:
    def forward(self: Host, *args: Any, **kwargs: Any) -> Any:
        return self._call(method, args, kwargs)

    forward.__name__ = method
    return forward


def _resolved(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put deferred arguments together; what their references stood for lies behind the other arguments."""
    num_given = len(args) - sum(len(value.refs) for value in (*args, *kwargs.values()) if isinstance(value, Deferred))
    values = iter(args[num_given:])

    def resolve(value: Any) -> Any:
        return value.resolve([next(values) for _ in value.refs]) if isinstance(value, Deferred) else value

    return tuple(resolve(value) for value in args[:num_given]), {key: resolve(value) for key, value in kwargs.items()}


def _pickled(error: Exception) -> bytes | None:
    with suppress(Exception):  # many exceptions cannot be pickled, or cannot be loaded again
        pickled: bytes = cloudpickle.dumps(error)
        cloudpickle.loads(pickled)
        return pickled
    return None
