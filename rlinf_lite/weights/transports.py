"""Three ways to bring weights from a sender to receivers: a node's shared memory, a common GPU's tensors, messages."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from rlinf_lite.scheduler.context import get_context
from rlinf_lite.scheduler.errors import SchedulerError
from rlinf_lite.weights.segment import Entry, Segment, layout

if TYPE_CHECKING:
    from rlinf_lite.scheduler import Worker

IPC_HINT = "Set weight_sync.cuda_ipc=false: weights then go through host memory."
_segment_numbers = itertools.count()  # per process, as it may have several senders one after the other


@dataclass(frozen=True)
class Link:
    """Messages of one transfer, tagged so that they are not mixed up with those of another."""

    worker: Worker
    group: str
    timeout_s: float
    number: int

    def send(self, content: Any, ranks: int | Sequence[int]) -> None:
        self.worker.send(content, self.group, ranks, f"weights {self.number}")

    def recv(self, rank: int) -> Any:
        return self.worker.recv(self.group, rank, self.timeout_s, f"weights {self.number}")


@dataclass(frozen=True)
class Written:
    """A sender's message: the tensors `names` of the version are in the segment."""

    names: tuple[str, ...]
    new: tuple[str, list[Entry]] | None  # path and entries of a segment that must be mapped


@dataclass(frozen=True)
class Lent:
    """A bucket of the sender's tensors, by name: functions that open them in another process, and their arguments. The
    sender does not change them until the receiver has answered."""

    tensors: dict[str, tuple[Any, ...]]


class Transport:
    """Brings the weights of one transfer to the receivers `ranks`. Every step raises SchedulerError if it fails."""

    def __init__(self, link: Link, ranks: Sequence[int]) -> None:
        self.link, self.ranks = link, ranks

    def send(self, bucket: Mapping[str, Tensor]) -> None:
        """Send some tensors."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until the tensors may change again."""
        for rank in self.ranks:
            self.link.recv(rank)

    def end(self, names: tuple[str, ...]) -> None:
        """Tell the receivers that all tensors, `names`, were sent."""
        self.link.send(({}, True), self.ranks)


class Messages(Transport):
    """Receivers on other nodes get the buckets as messages, the same for all."""

    def send(self, bucket: Mapping[str, Tensor]) -> None:
        if self.ranks:
            self.link.send(({name: tensor.cpu() for name, tensor in bucket.items()}, False), self.ranks)


class CommonGPU(Transport):
    """Receivers on the sender's own GPU copy from its tensors."""

    def send(self, bucket: Mapping[str, Tensor]) -> None:
        for rank in self.ranks:
            self.link.send((_lend(bucket), False), rank)


class SharedMemory(Transport):
    """Receivers on the sender's node map a segment, which is written once for all of them."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads)
        self._segment: Segment | None = None

    def begin(self, link: Link, mapped: Mapping[int, str | None]) -> bool:
        """Begin a transfer. `mapped`: the segment that a receiver has, by rank. Returns whether a new segment is needed
        (`create`), into which all tensors must be written."""
        self.link, self.ranks = link, list(mapped)
        here = None if self._segment is None else self._segment.path
        self._is_new = any(path is None or path != here for path in mapped.values())
        return self._is_new

    def create(self, tensors: Sequence[tuple[str, Tensor]], dtypes: Mapping[str, torch.dtype]) -> None:
        """Make a new segment if one is needed."""
        if not self._is_new:
            return
        if self._segment is not None:
            with suppress(FileNotFoundError):  # the file is left only if its first transfer was interrupted
                os.unlink(self._segment.path)
        self._segment, worker = None, self.link.worker
        entries = layout((name, tensor.shape, wanted(name, tensor, dtypes)) for name, tensor in tensors)
        name = f"weights-{worker.name}-{worker.rank}-{os.getpid()}-{next(_segment_numbers)}"
        path = os.path.join(get_context().shm_dir, name)
        self._segment = Segment(path, entries, create=True, lock=worker.device != "cpu")

    def send(self, bucket: Mapping[str, Tensor]) -> None:
        if self.ranks and self._segment is not None:
            self._segment.write(bucket, self._threads.map)

    def wait(self) -> None:
        pass  # receivers read only at the end

    def end(self, names: tuple[str, ...]) -> None:
        if self._segment is not None:
            new = (self._segment.path, self._segment.entries) if self._is_new else None
            for rank in self.ranks:
                self.link.send((Written(names, new), True), rank)
            if self._is_new:
                for rank in self.ranks:  # wait until they have mapped it
                    self.link.recv(rank)
                os.unlink(self._segment.path)


def wanted(name: str, tensor: Tensor, dtypes: Mapping[str, torch.dtype]) -> torch.dtype:
    """The receivers' type of a tensor. `dtypes`: those of their floating tensors that are not float32."""
    return dtypes.get(name, torch.float32) if tensor.is_floating_point() else tensor.dtype


def _lend(bucket: Mapping[str, Tensor]) -> Lent:
    """Lend a bucket to one receiver; each needs its own, as torch counts the holders of lent memory."""
    try:
        return Lent({name: reduce_tensor(tensor) for name, tensor in bucket.items()})
    except RuntimeError as error:
        raise SchedulerError(f"weights on this GPU cannot be lent to another process ({error}). {IPC_HINT}") from error
