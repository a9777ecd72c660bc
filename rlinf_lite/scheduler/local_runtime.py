"""The local runtime: workers as threads of this process, messages in memory, no Ray. Debuggers and tracebacks work.

One worker computes at a time: it holds the turn while its method runs, and gives it away while it waits for a message.
The process has one random generator each of torch, numpy and random; their states are switched with the turn, so every
worker has its own. So a run gives the same results as with Ray, bit for bit.

Time limits count only while the driver waits and no worker holds the turn, so a breakpoint may last any time.
Arguments, results and messages are copies, as between processes; arrays in arguments and results are read-only, as
with Ray.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import pickle
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from rlinf_lite.scheduler.context import Address, ProcessContext, set_context
from rlinf_lite.scheduler.errors import SchedulerError, WorkerError
from rlinf_lite.scheduler.host import Host, host_class
from rlinf_lite.scheduler.mailbox import Abort
from rlinf_lite.scheduler.placement import ClusterShape, NodeGroup, detect_slots
from rlinf_lite.scheduler.runtime import CallFailed, Definition, Node, Remote
from rlinf_lite.scheduler.scratch import ScratchDirs
from rlinf_lite.scheduler.segments import Parcel, encode

log = logging.getLogger(__name__)

_NODE_ID = "local"
_END_S = 10.0
_LAST_EPOCH = 2**62  # the number of an abort that is never cleared


class Generators:
    """The states of the process-wide random generators (random, numpy, torch, CUDA)."""

    def __init__(self) -> None:
        """The states of a process that has just started."""
        self._random, self._numpy = random.Random().getstate(), np.random.RandomState().get_state()
        self._torch: Any = None
        self._cuda: list[Any] = []

    def keep(self) -> None:
        """Store the process's current states."""
        self._random, self._numpy = random.getstate(), np.random.get_state()
        if (torch := sys.modules.get("torch")) is not None:
            self._torch = torch.get_rng_state()
            self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def bring_back(self) -> None:
        """Set the process's generators to these states."""
        random.setstate(self._random)
        np.random.set_state(self._numpy)
        if (torch := sys.modules.get("torch")) is not None:
            if self._torch is None:
                fresh = torch.Generator()
                fresh.seed()
                self._torch = fresh.get_state()
            torch.set_rng_state(self._torch)
            for device, state in enumerate(self._cuda):
                torch.cuda.set_rng_state(state, device)


class Turns:
    """The turn to compute. One thread holds it at a time; threads get it in the order in which they ask."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._line: deque[tuple[Generators, threading.Condition]] = deque()
        self._holder: Generators | None = None
        self._of_driver = self._last = Generators()  # `_last`: the owner of the states that are set now
        self._of_thread = threading.local()
        self._num_waits, self._idle_s, self._idle_since = 0, 0.0, 0.0
        self._is_idle = False

    def clock(self) -> float:
        """Seconds during which the driver waited and no worker computed."""
        with self._lock:
            return self._idle_s + (time.monotonic() - self._idle_since if self._is_idle else 0.0)

    @contextmanager
    def taken(self, generators: Generators) -> Iterator[None]:
        """A context in which a worker holds the turn, with these generators."""
        self._take(generators)
        self._of_thread.generators = generators
        try:
            yield
        finally:
            self._of_thread.generators = None
            self._give()

    @contextmanager
    def given_away(self) -> Iterator[None]:
        """A context for a worker's wait, in which it gives the turn away. Does nothing in a thread without the turn."""
        generators: Generators | None = getattr(self._of_thread, "generators", None)
        if generators is None:
            yield
            return
        self._give()
        try:
            yield
        finally:
            self._take(generators)

    @contextmanager
    def driver_waits(self) -> Iterator[None]:
        """A context for a wait of the driver. Restores the driver's generators if no worker computes at its end."""
        with self._lock:
            self._num_waits += 1
            self._count()
        try:
            yield
        finally:
            with self._lock:
                self._num_waits -= 1
                self._count()
                if self._holder is None and not self._line:
                    self._change_to(self._of_driver)

    def _take(self, generators: Generators) -> None:
        with self._lock:
            place = (generators, threading.Condition(self._lock))
            self._line.append(place)
            while self._holder is not None or self._line[0] is not place:
                place[1].wait()
            self._line.popleft()
            self._holder = generators
            self._count()
            self._change_to(generators)

    def _give(self) -> None:
        with self._lock:
            self._holder = None
            self._count()
            if self._line:
                self._line[0][1].notify()

    def _change_to(self, generators: Generators) -> None:
        if self._last is not generators:
            self._last.keep()
            generators.bring_back()
            self._last = generators

    def _count(self) -> None:
        """Start or stop the idle clock, according to the present state."""
        now, is_idle = time.monotonic(), self._holder is None and not self._line and self._num_waits > 0
        if self._is_idle:
            self._idle_s += now - self._idle_since
        self._is_idle, self._idle_since = is_idle, now


class Ref:
    """A reference to the result of a call, which arrives later, or to a stored value."""

    def __init__(self, came: threading.Condition, name: str = "") -> None:
        """`came`: a condition shared by all refs, notified whenever a result arrives."""
        self.name, self._came = name, came
        self._packed: tuple[bytes, list[bytes]] | None = None
        self.failed: CallFailed | None = None

    @property
    def is_there(self) -> bool:
        return self._packed is not None or self.failed is not None

    def give(self, packed: tuple[bytes, list[bytes]]) -> None:
        with self._came:
            self._packed = packed
            self._came.notify_all()

    def fail(self, failed: CallFailed) -> None:
        with self._came:
            self.failed = failed
            self._came.notify_all()

    def wait(self) -> None:
        """Wait until the result has arrived."""
        with self._came:
            self._came.wait_for(lambda: self.is_there)

    def value(self) -> Any:
        """A copy of the result, which must have arrived. Raises CallFailed."""
        if self.failed is not None:
            raise self.failed
        assert self._packed is not None
        return _unpack(self._packed)


def _pack(obj: Any) -> tuple[bytes, list[bytes]]:
    head, buffers = encode(obj)
    return head, [bytes(buffer) for buffer in buffers]


def _unpack(packed: tuple[bytes, list[bytes]]) -> Any:
    """Unpickle. Arrays are read-only and tensors are writable, as with Ray."""
    head, buffers = packed
    return pickle.loads(head, buffers=buffers)


class MemoryInbox:
    """An inbox in this process's memory."""

    def __init__(self, network: LocalNetwork, label: str) -> None:
        self.address = Address(_NODE_ID, f"{label}-{next(network.numbers)}")
        self._network, self._turns = network, network.turns
        self._came = threading.Condition(network.lock)
        self._messages: deque[tuple[Any, Parcel]] = deque()

    def put(self, header: Any, parcel: Parcel) -> None:
        with self._came:
            self._messages.append((header, parcel))
            self._came.notify_all()

    def wait(self, timeout_s: float | None) -> bool:
        if self._messages:
            return True
        clock = self._turns.clock
        deadline = None if timeout_s is None else clock() + timeout_s
        with self._turns.given_away(), self._came:
            while not self._messages:
                left = None if deadline is None else deadline - clock()
                if left is not None and left <= 0:
                    return False
                self._came.wait(left)
        return True

    def take(self) -> tuple[Any, Parcel] | None:
        with self._came:
            return self._messages.popleft() if self._messages else None

    def close(self) -> None:
        self._network.remove_inbox(self.address)


class LocalNetwork:
    """The `Network` for workers that are threads of one process."""

    def __init__(self, lock: threading.RLock, turns: Turns) -> None:
        self.lock, self.turns, self.numbers = lock, turns, itertools.count()
        self._known: dict[tuple[str, str], Any] = {}
        self._inboxes: dict[str, MemoryInbox] = {}
        self._kept: dict[str, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None  # runs in its own thread, started by the first `keep`
        self._asked: dict[threading.Thread, Future[Any]] = {}  # the last call of each thread

    def publish(self, kind: str, name: str, value: Any) -> None:
        self._known[kind, name] = value

    def withdraw(self, kind: str, name: str) -> None:
        self._known.pop((kind, name), None)

    def find(self, kind: str, name: str) -> Any:
        return self._known.get((kind, name))

    def known_names(self, kind: str) -> list[str]:
        return sorted(name for known_kind, name in self._known if known_kind == kind)

    def inbox(self, label: str) -> MemoryInbox:
        inbox = MemoryInbox(self, label)
        self._inboxes[inbox.address.socket] = inbox
        return inbox

    def send(self, addresses: Sequence[Address], header: Any, obj: Any = None) -> None:
        head, buffers = encode(obj)
        for address in addresses:
            inbox = self._inboxes.get(address.socket)
            if inbox is not None:  # messages to a worker that has ended are lost
                inbox.put(header, Parcel(head, [bytes(buffer) for buffer in buffers], None, [None] * len(buffers)))

    def lives(self, address: Address) -> bool:
        return address.socket in self._inboxes

    def remove_inbox(self, address: Address) -> None:
        self._inboxes.pop(address.socket, None)

    def keep(self, name: str, kind: type[Any], *args: Any) -> bool:
        if name in self._kept:
            return False
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="channels", daemon=True).start()
        self._kept[name] = kind(*args)
        return True

    def is_kept(self, name: str) -> bool:
        return name in self._kept

    def drop(self, name: str) -> None:
        self._kept.pop(name, None)

    def ask(self, name: str, method: str, *args: Any) -> Future[Any]:
        if name in self._kept and self._loop is not None:
            future = asyncio.run_coroutine_threadsafe(getattr(self._kept[name], method)(*args), self._loop)
            self._asked[threading.current_thread()] = future
            return future
        kind, _, own = name.partition(" ")
        answer: Future[Any] = Future()
        answer.set_exception(SchedulerError(f"the {kind} {own!r} is gone: it was closed"))
        return answer

    def waiting(self) -> AbstractContextManager[None]:
        return self.turns.given_away()

    def give_up(self, thread: threading.Thread) -> None:
        """Cancel a thread's call of a kept object."""
        if (future := self._asked.pop(thread, None)) is not None:
            future.cancel()

    def clock(self) -> float:
        return self.turns.clock()

    def close(self) -> None:
        """End the kept objects."""
        self._kept.clear()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def run_on(self, node_id: str, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


class LocalRemote:
    """A host in a thread of this process, which runs calls in the order in which they are made."""

    def __init__(
        self, name: str, host: Host, results: threading.Condition, lock: threading.RLock, turns: Turns
    ) -> None:
        self.name, self.host = name, host
        self._results, self._turns, self._generators = results, turns, Generators()
        self._calls: deque[tuple[Ref, Callable[[], Any], Sequence[Ref]]] = deque()
        self._numbers, self._is_stopped = itertools.count(), False
        self._came = threading.Condition(lock)
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Ref:
        """Call a method of the host later, in its thread. The arguments are copied now."""
        refs = [*(x for x in args if isinstance(x, Ref)), *(x for x in kwargs.values() if isinstance(x, Ref))]
        places = tuple(_Place() if isinstance(x, Ref) else x for x in args)
        packed = _pack((places, {key: _Place() if isinstance(x, Ref) else x for key, x in kwargs.items()}))

        def work() -> Any:
            values = iter([given.value() for given in refs])
            places, named = _unpack(packed)
            args = [next(values) if isinstance(x, _Place) else x for x in places]
            kwargs = {key: next(values) if isinstance(x, _Place) else x for key, x in named.items()}
            return getattr(self.host, method)(*args, **kwargs)

        return self.submit(work, refs)

    def submit(self, work: Callable[[], Any], refs: Sequence[Ref] = ()) -> Ref:
        """Run `work` in the thread, once the values of `refs` have arrived."""
        ref = Ref(self._results, f"{self.name}-{next(self._numbers)}")
        with self._came:
            if self._is_stopped:
                ref.fail(self._gone())
            else:
                self._calls.append((ref, work, refs))
                self._came.notify()
        return ref

    @property
    def pid(self) -> int:
        return os.getpid()

    @property
    def log_paths(self) -> list[str]:
        return []

    def log_tail(self) -> str:
        return ""

    def stop(self) -> None:
        """End the thread after its running method. Calls that have not begun fail, and so do later ones."""
        with self._came:
            self._is_stopped = True
            for ref, _, _ in self._calls:
                ref.fail(self._gone())
            self._came.notify()

    def _gone(self) -> CallFailed:
        return CallFailed(f"{self.name} was shut down")

    def _serve(self) -> None:
        if (torch := sys.modules.get("torch")) is not None:
            torch.get_num_threads()  # the first call in a thread copies the count of the thread that last set its own
            torch.set_num_threads(1)
        while True:
            with self._came:
                while not self._calls and not self._is_stopped:
                    self._came.wait()
                if self._is_stopped:
                    break
                call = self._calls.popleft()
            self._answer(*call)
        with self._turns.taken(self._generators):
            self.host._forget()

    def _answer(self, ref: Ref, work: Callable[[], Any], refs: Sequence[Ref]) -> None:
        try:
            for given in refs:
                given.wait()
            with self._turns.taken(self._generators):
                _of_thread.call = ref.name
                found = _pack(work())
        except CallFailed as failed:  # of an argument that is another call's result
            ref.fail(failed)
        except WorkerError as error:
            ref.fail(CallFailed(str(error), error))
        except BaseException as error:  # a result that cannot be copied, or SystemExit, which ends no process here
            ref.fail(CallFailed(f"{type(error).__name__}: {error}"))
        else:
            ref.give(found)


class _Place:
    """A placeholder for the value of a reference among packed arguments."""


_of_thread = threading.local()  # `call`: the name of the running call


class LocalRuntime:
    """The `Runtime` whose hosts are threads of this process, on virtual slots or on its GPUs."""

    shape: ClusterShape
    nodes: list[Node]

    def __init__(self, num_gpus_per_node: int | None, accelerator: str, node_groups: Sequence[NodeGroup]) -> None:
        kind, slots = detect_slots(accelerator, num_gpus_per_node)
        self.shape = ClusterShape(1, slots, kind)
        self.nodes = [Node(0, _NODE_ID, "127.0.0.1", slots if kind == "cuda" else 0)]
        self._lock = threading.RLock()
        self._results = threading.Condition(self._lock)
        self.turns = Turns(self._lock)
        self.network = LocalNetwork(self._lock, self.turns)
        self._dirs = ScratchDirs()
        self._env_before: dict[str, str | None] = {}
        for group in node_groups:
            self._set_variables(group.env_vars)
        here = self._dirs.uid, _NODE_ID, self._dirs.temp, self._dirs.shm
        set_context(ProcessContext(*here, self.network, runtime="local"))

    def start(
        self,
        title: str,
        name: str,
        rank: int,
        node: Node,
        slots: Sequence[int],
        env_vars: Mapping[str, str],
        methods: Sequence[Iterable[str]],
    ) -> LocalRemote:
        """As in `Runtime`; `env_vars` are set in this process until the runtime is closed."""
        self._set_variables(env_vars)
        host = host_class(Host, title, methods, lambda: str(_of_thread.call))
        return LocalRemote(f"{name}[{rank}]", host(name, rank), self._results, self._lock, self.turns)

    def build(self, remote: Remote, identities: Sequence[dict[str, Any]], epoch: int, payload: Any) -> Ref:
        assert isinstance(remote, LocalRemote)
        construct = remote.host._construct
        return remote.submit(
            lambda: construct(identities, epoch, [(cls, *_unpack(arguments)) for cls, arguments in payload])
        )

    def pack(self, definitions: Sequence[Definition]) -> Any:
        return [(cls, _pack((args, kwargs))) for cls, args, kwargs in definitions]

    def get(self, refs: Sequence[Ref], timeout_s: float | None) -> list[Any]:
        def is_over() -> bool:
            return all(ref.is_there for ref in refs) or any(ref.failed for ref in refs)

        with self.turns.driver_waits(), self._results:
            if not self._results.wait_for(is_over, timeout_s):
                raise TimeoutError
        failed = next((ref for ref in refs if ref.failed is not None), None)
        return [ref.value() for ref in (refs if failed is None else [failed])]

    def ready(self, refs: Sequence[Ref]) -> list[Ref]:
        return [ref for ref in refs if ref.is_there]

    def put(self, value: Any) -> Ref:
        ref = Ref(self._results)
        ref.give(_pack(value))
        return ref

    def call_id(self, ref: Ref) -> str:
        return ref.name

    def drop(self, refs: Sequence[Ref]) -> None:
        pass

    def end(self, remotes: Sequence[tuple[str, Node, Remote]]) -> None:
        """End hosts. Threads cannot be killed: receives are aborted, and a method that still runs then stays, with a
        warning."""
        hosts = [remote for _, _, remote in remotes if isinstance(remote, LocalRemote)]
        for remote in hosts:
            for address in remote.host._addresses():
                self.network.send([address], Abort(_LAST_EPOCH, "the group is shut down"))
            self.network.give_up(remote.thread)
            remote.stop()
        deadline = time.monotonic() + _END_S
        for remote in hosts:
            remote.thread.join(max(0.0, deadline - time.monotonic()))
            if remote.thread.is_alive():
                log.warning("%s still runs a method, which goes on: a thread cannot be killed", remote.name)

    def has_ended(self) -> bool:
        return False

    def device(self, slots: Sequence[int]) -> str:
        return f"cuda:{slots[0]}" if self.shape.accelerator == "cuda" else "cpu"

    def replace_lost_nodes(self) -> None:
        pass

    def watch(self, monitor: str) -> None:
        pass

    def close(self) -> None:
        self.network.close()
        set_context(None)
        for name, value in self._env_before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
        self._dirs.remove()

    def _set_variables(self, variables: Mapping[str, str]) -> None:
        for name, value in variables.items():
            self._env_before.setdefault(name, os.environ.get(name))
            os.environ[name] = value
