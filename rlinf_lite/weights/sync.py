"""Versioned weight transfer.

Receivers on the sender's node map one shared-memory segment, into which the sender writes each version once, in the
types that receivers have. Parameters in host memory (of a policy on the CPU, or one whose GPU is lent to the actor
meanwhile) are views of it, and nothing is copied on their side; those on a GPU, and buffers, are copied from it. GPUs
read and write it directly: it is page-locked. With `weight_sync.cuda_ipc` a receiver on the sender's own GPU copies
from the sender's tensors instead, bucket by bucket.
Receivers on other nodes get buckets of at most `weight_sync.bucket_bytes`, one at a time and all receivers the same: to
a node without an actor each crosses the network once, and lies in its shared memory once for every receiver there.

The sender offers a version, the receivers come when they can (one that acts, between two decisions), and only then is
anything written: a segment is rewritten while every receiver waits in `receive`, so no one ever computes with half a
version. Receivers say what they have: where one is new, or has not mapped this sender's segment, everything is sent
again, in a new one.
"""

from __future__ import annotations

import errno
import itertools
import logging
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_tensor

from rlinf_lite.scheduler.context import get_context
from rlinf_lite.scheduler.errors import AbortedError, RecvTimeoutError, SchedulerError
from rlinf_lite.scheduler.segments import no_room
from rlinf_lite.scheduler.shared_memory import as_bytes
from rlinf_lite.weights.pages import lock_pages

if TYPE_CHECKING:
    from rlinf_lite.scheduler import Worker
    from rlinf_lite.weights.routes import WeightRoutes

log = logging.getLogger(__name__)

_ALIGNMENT = 64
_segment_numbers = itertools.count()  # of this process, in which one sender may follow another
_IPC_HINT = "Set weight_sync.cuda_ipc=false: weights then go through host memory."
_PIECE_BYTES = 4 * 2**20
"""What a copying thread takes at a time: with torch's threads, each tensor would wait for the slower half."""


class WeightVersionError(RuntimeError):
    """A receiver was sent another version than the one it was told to expect."""


@dataclass(frozen=True)
class _Entry:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Offer:
    """What a sender says first: it has weights of `version`, and transfer `number` (from 1) would bring them."""

    version: int
    number: int


@dataclass(frozen=True)
class _Ready:
    """What a receiver answers when it waits for them."""

    complete: bool  # it has had everything once: what may have changed is enough
    segment: str | None  # that it has mapped
    dtypes: dict[str, torch.dtype]  # of its floating tensors that are not float32
    gpu: str | None  # that its parameters are on


@dataclass(frozen=True)
class _Written:
    """What a sender says when a version is in the segment."""

    names: tuple[str, ...]
    new: tuple[str, list[_Entry]] | None  # where the segment is, for those that have to map it


@dataclass(frozen=True)
class _Lent:
    """A bucket of tensors of the sender's, by name: functions that open them in another process, and their arguments.
    The sender does not touch them until the receiver has answered."""

    tensors: dict[str, tuple[Any, ...]]


class _Segment:
    """Shared memory that holds one full set of tensors; unlinked as soon as every receiver has mapped it. `lock`: keep
    its pages where they are, for a GPU of this process."""

    def __init__(self, path: str, entries: list[_Entry], create: bool, lock: bool) -> None:
        self.path, self.entries = path, entries
        num_bytes = max(entries[-1].offset + entries[-1].num_bytes, 1)
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            if create:  # where shared memory is full, this fails, and no bus error comes later
                os.posix_fallocate(descriptor, 0, num_bytes)
            memory = mmap.mmap(descriptor, num_bytes)
        except OSError as error:
            if not create:
                raise
            os.unlink(path)
            if error.errno != errno.ENOSPC:
                raise
            raise no_room(path, "weights for the rollout workers of this node", num_bytes) from error
        finally:
            os.close(descriptor)
        whole = np.frombuffer(memory, np.uint8)
        if lock:
            lock_pages(whole, "Shared memory for weights")
        self.tensors: dict[str, Tensor] = {}
        for entry in entries:
            tensor = torch.empty(0, dtype=entry.dtype)
            if entry.num_bytes:
                raw = whole[entry.offset : entry.offset + entry.num_bytes]
                tensor = torch.from_numpy(raw).view(entry.dtype)
            self.tensors[entry.name] = tensor.view(entry.shape)


def _pieces(tensor: Tensor) -> list[np.ndarray]:
    """The bytes of a contiguous tensor in host memory."""
    raw = as_bytes(tensor)
    return [raw[start : start + _PIECE_BYTES] for start in range(0, len(raw), _PIECE_BYTES)]


def _whole(tensor: Tensor) -> Tensor:
    """All of what may be a DTensor, which is told by its method: importing it makes a rollout worker start later."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def synced_tensors(module: nn.Module, trainable_only: bool) -> list[tuple[str, Tensor]]:
    """Parameters (or only those that train) and persistent buffers, such as running statistics; tied ones once."""
    parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad or not trainable_only]
    buffers = list(module.named_buffers(remove_duplicate=False))
    persistent = module.state_dict().keys() if buffers else ()
    once = {id(b): (name, b) for name, b in reversed(buffers) if name in persistent}
    return [*parameters, *reversed(once.values())]


class WeightSender:
    """The actor's side. Every actor rank calls `send` (sharded tensors are gathered); ranks with receivers transfer.

    `WeightRoutes` says which rank serves whom. Into shared memory `num_threads` threads write: one core alone
    has half of two cores' memory bandwidth, and the receivers wait.
    """

    def __init__(
        self,
        worker: Worker,
        group: str,
        routes: WeightRoutes,
        bucket_bytes: int,
        timeout_s: float,
        num_threads: int = 1,
        cuda_ipc: bool = False,
    ) -> None:
        self._worker, self._group = worker, group
        self._bucket_bytes, self._timeout_s, self._cuda_ipc = bucket_bytes, timeout_s, cuda_ipc
        self._threads = ThreadPoolExecutor(num_threads)
        self._receivers = routes.receivers(worker.rank)
        own_node = routes.actor_nodes[worker.rank]
        self._on_this_node = {rank for rank in self._receivers if routes.rollout_nodes[rank] == own_node}
        self._segment: _Segment | None = None
        self._names: list[str] = []  # of what was trained when weights were last sent

    def send(self, version: int, module: nn.Module, number: int = 0) -> None:
        """Bring every receiver to `version`: everything the first time, then parameters that train and buffers.
        `number`: of this transfer, for receivers that take it while they act.

        Each sender's buffers are those of its own rank. Where a receiver fails, a sender still takes its part in
        gathering tensors before it raises: the other senders would wait for it.
        """
        ready: dict[int, _Ready] = {}
        tag = _tag(number)
        problem: SchedulerError | None = None
        try:
            self._worker.send(Offer(version, number), self._group, self._receivers)
            for rank in self._receivers:
                ready[rank] = self._worker.recv(self._group, rank, self._timeout_s, tag)
        except SchedulerError as error:
            problem = error
        dtypes = next((receiver.dtypes for receiver in ready.values()), {})
        if problem is None and any(receiver.dtypes != dtypes for receiver in ready.values()):
            problem = SchedulerError(f"workers of {self._group} have parameters of different types")
        own_gpu = _gpu(module) if self._cuda_ipc else None
        lent_to = [rank for rank in ready if rank in self._on_this_node and own_gpu and ready[rank].gpu == own_gpu]
        sharing = [rank for rank in ready if rank in self._on_this_node and rank not in lent_to]
        others = [rank for rank in ready if rank not in self._on_this_node]
        here = None if self._segment is None else self._segment.path
        first = any(here is None or ready[rank].segment != here for rank in sharing)
        trained = synced_tensors(module, trainable_only=True)
        names = [name for name, _ in trained]  # what is not among them any more may have changed before it was frozen
        everything = first or names != self._names or not all(receiver.complete for receiver in ready.values())

        # all senders go through the same tensors, or give up together
        if dist.is_initialized():
            flags = torch.tensor([float(everything), float(problem is not None)], device=self._worker.device)
            dist.all_reduce(flags, dist.ReduceOp.MAX)
            everything = bool(flags[0])
            if problem is None and bool(flags[1]):
                problem = AbortedError("another sender of weights gave up")
        if problem is not None:
            raise problem
        tensors = synced_tensors(module, trainable_only=False) if everything else trained
        self._names = names

        if first:
            if self._segment is not None:
                with suppress(FileNotFoundError):  # it is there where the sync that made it was interrupted
                    os.unlink(self._segment.path)
            self._segment = None
            try:
                self._segment = self._new_segment(tensors, dtypes)
            except SchedulerError as error:
                problem = error
        for bucket in self._buckets(tensors, dtypes, lends=bool(lent_to)):
            try:
                if problem is None:
                    self._worker.report_progress()
                    for rank in lent_to:
                        self._worker.send((_lend(bucket), False), self._group, rank, tag)
                    if sharing and self._segment is not None:
                        self._write(self._segment, bucket)
                    if others:
                        on_host = {name: tensor.cpu() for name, tensor in bucket.items()}
                        self._worker.send((on_host, False), self._group, others, tag)
                    for rank in (*lent_to, *others):
                        self._worker.recv(self._group, rank, self._timeout_s, tag)
            except SchedulerError as error:
                problem = error
        if problem is not None:
            raise problem

        self._worker.send(({}, True), self._group, [*lent_to, *others], tag)
        for rank in sharing:
            assert self._segment is not None
            new = (self._segment.path, self._segment.entries) if first else None
            self._worker.send((_Written(tuple(dict(tensors)), new), True), self._group, rank, tag)
        if first and self._segment is not None:
            for rank in sharing:  # until they have mapped it
                self._worker.recv(self._group, rank, self._timeout_s, tag)
            os.unlink(self._segment.path)

    def _write(self, segment: _Segment, bucket: dict[str, Tensor]) -> None:
        for name, tensor in bucket.items():
            room = segment.tensors[name]
            if (room.shape, room.dtype) != (tensor.shape, tensor.dtype):
                was, now = (f"{list(x.shape)} {x.dtype}" for x in (room, tensor))
                raise SchedulerError(f"{name} was {was} when the weights were first sent, and is {now} now")
        on_gpu = [name for name, tensor in bucket.items() if not _in_host_memory(tensor)]
        for name in on_gpu:
            segment.tensors[name].copy_(bucket[name], non_blocking=True)
        here = [name for name in bucket if name not in on_gpu]
        targets = [piece for name in here for piece in _pieces(segment.tensors[name])]
        sources = [piece for name in here for piece in _pieces(bucket[name])]
        is_small = sum(source.nbytes for source in sources) <= _PIECE_BYTES
        for _ in map(np.copyto, targets, sources) if is_small else self._threads.map(np.copyto, targets, sources):
            pass
        if on_gpu:
            torch.cuda.synchronize()

    def _new_segment(self, tensors: list[tuple[str, Tensor]], dtypes: Mapping[str, torch.dtype]) -> _Segment:
        entries, offset = [], 0
        for name, tensor in tensors:
            entry = _Entry(name, tuple(tensor.shape), _wanted(name, tensor, dtypes), offset)
            entries.append(entry)
            offset += -(-entry.num_bytes // _ALIGNMENT) * _ALIGNMENT
        name = f"weights-{self._worker.name}-{self._worker.rank}-{os.getpid()}-{next(_segment_numbers)}"
        return _Segment(
            os.path.join(get_context().shm_dir, name), entries, create=True, lock=self._worker.device != "cpu"
        )

    def _buckets(
        self, tensors: Iterable[tuple[str, Tensor]], dtypes: Mapping[str, torch.dtype], lends: bool
    ) -> Iterator[dict[str, Tensor]]:
        """Whole tensors in the types that receivers have, at most `bucket_bytes` at a time (a larger tensor travels
        alone), where they are. `lends`: copies, since what is lent itself stays lent in torch's books until it is
        freed, which parameters never are."""
        bucket: dict[str, Tensor] = {}
        num_bytes = 0
        for name, tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            if bucket and num_bytes + size > self._bucket_bytes:
                yield bucket
                bucket, num_bytes = {}, 0
            full = _whole(tensor.detach())
            if self._receivers:
                bucket[name] = full.to(_wanted(name, full, dtypes), copy=lends).contiguous()
                num_bytes += size
        if bucket:
            yield bucket


def _wanted(name: str, tensor: Tensor, dtypes: Mapping[str, torch.dtype]) -> torch.dtype:
    """The type that receivers have, who say those of theirs that are not float32."""
    return dtypes.get(name, torch.float32) if tensor.is_floating_point() else tensor.dtype


def _in_host_memory(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _gpu(module: nn.Module) -> str | None:
    """The GPU that parameters are on, and which of its process's it is; None: host memory."""
    device = next(module.parameters()).device  # a process has one GPU
    return f"{torch.cuda.get_device_properties(device).uuid} {device}" if device.type == "cuda" else None


def _lend(bucket: Mapping[str, Tensor]) -> _Lent:
    """For one receiver: torch counts who has what is lent."""
    try:
        return _Lent({name: reduce_tensor(tensor) for name, tensor in bucket.items()})
    except RuntimeError as error:
        raise SchedulerError(f"weights on this GPU cannot be lent to another process ({error}). {_IPC_HINT}") from error


def _tag(number: int) -> str:
    """Of what belongs to one transfer, which is not to be taken for what belongs to another, or to a step."""
    return f"weights {number}"


class WeightReceiver:
    """The rollout worker's side, for one module."""

    version: int
    """Of the weights that the module has; -1 before the first transfer."""

    def __init__(self, worker: Worker, group: str, sender_rank: int, module: nn.Module, timeout_s: float) -> None:
        self._worker, self._group, self._sender = worker, group, sender_rank
        self._module, self._timeout_s = module, timeout_s
        tensors = synced_tensors(module, trainable_only=False)
        floating = {name: tensor.dtype for name, tensor in tensors if tensor.is_floating_point()}
        self._dtypes = {name: dtype for name, dtype in floating.items() if dtype != torch.float32}
        self._complete = False
        self._segment: str | None = None
        self._written: dict[str, Tensor] = {}  # in the segment
        self.version, self._number = -1, 0

    def receive(self, version: int | None = None, number: int = 0) -> int:
        """Wait for transfer `number`, which must be of `version` (None: of whichever comes), unless `take` has had it
        or a later one already; returns the version that is there then.

        Raises:
            WeightVersionError: if another version is offered.
        """
        if number and number <= self._number:
            return self.version
        offer: Offer = self._worker.recv(self._group, self._sender, self._timeout_s)
        if version not in (None, offer.version):
            raise WeightVersionError(
                f"{self._worker.name} expects weights {version}, {self._group} sent {offer.version}"
            )
        self.take(offer)
        return self.version

    def offered(self) -> Offer | None:
        """What is offered by now, which then is to be taken; does not wait."""
        with suppress(RecvTimeoutError):
            offer: Offer = self._worker.recv(self._group, self._sender, 0.0)
            return offer
        return None

    def take(self, offer: Offer) -> None:
        """Put what is offered into the module."""
        tag = _tag(offer.number)
        ready = _Ready(self._complete, self._segment, self._dtypes, _gpu(self._module))
        self._worker.send(ready, self._group, self._sender, tag)
        last = False
        while not last:
            content, last = self._worker.recv(self._group, self._sender, self._timeout_s, tag)
            if isinstance(content, _Written):
                if content.new is not None:
                    self._map(*content.new)
                    self._worker.send("mapped", self._group, self._sender, tag)
                self._copy({name: self._written[name] for name in content.names})
            elif isinstance(content, _Lent):
                self._copy_lent(content)
            else:
                self._copy(content)
            if not last:
                self._worker.send("copied", self._group, self._sender, tag)
        self._complete, self.version, self._number = True, offer.version, offer.number

    def _map(self, path: str, entries: list[_Entry]) -> None:
        """Make parameters in host memory views of the segment. A view of a parameter that the module keeps elsewhere
        would still see its old memory, as after `nn.Module.to`. Buffers are copied: a pass may change them."""
        segment = _Segment(path, entries, create=False, lock=self._worker.device != "cpu")
        self._segment, self._written = path, segment.tensors
        for name, parameter in self._module.named_parameters():
            if name in self._written and _in_host_memory(parameter):
                parameter.data = self._written[name]

    def _own(self) -> dict[str, Tensor]:
        """The module's tensors, which a pass, or who loads weights, may have made anew."""
        buffers = self._module.named_buffers(remove_duplicate=False)
        return dict(itertools.chain(self._module.named_parameters(), buffers))

    def _copy_lent(self, lent: _Lent) -> None:
        try:
            self._copy({name: rebuild(*args) for name, (rebuild, args) in lent.tensors.items()})
        except RuntimeError as error:
            raise SchedulerError(
                f"{self._worker.name} cannot open the memory of {self._group}[{self._sender}] on their GPU ({error}). "
                + _IPC_HINT
            ) from error

    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Into the module's own, but for those that are the same memory. The sender changes them once it knows that
        they have been read."""
        own = self._own() if tensors else {}
        with torch.no_grad():
            for name, tensor in tensors.items():
                if own[name].data_ptr() != tensor.data_ptr():
                    _overwrite(name, own[name], tensor)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()


def _overwrite(name: str, own: Tensor, sent: Tensor) -> None:
    """`copy_`, which would repeat what is smaller."""
    if own.shape != sent.shape:
        raise SchedulerError(f"{name} was {list(own.shape)} when the model was built, and is {list(sent.shape)} now")
    own.copy_(sent, non_blocking=own.is_cuda)


def is_whole(model: nn.Module) -> bool:
    """Whether every parameter is on this rank in full."""
    return not any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """From a module, sharded or not, into a whole one of the same process; all ranks of a sharded one call."""
    into = dict(synced_tensors(target, trainable_only=False))
    with torch.no_grad():
        for name, tensor in synced_tensors(source, trainable_only=False):
            _overwrite(name, into[name], _whole(tensor))
