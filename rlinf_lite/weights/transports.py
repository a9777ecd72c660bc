"""Three ways for weights from a sender to receivers: shared memory of a node, tensors of a common GPU, and messages."""

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
_segment_numbers = itertools.count()  # of this process, in which one sender may follow another


@dataclass(frozen=True)
class Link:
    """Messages of one transfer, which are not taken for those of another transfer, or of a step."""

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
    """What a sender says when a version is in the segment."""

    names: tuple[str, ...]
    new: tuple[str, list[Entry]] | None  # where the segment is, for those that have to map it


@dataclass(frozen=True)
class Lent:
    """A bucket of tensors of the sender's, by name: functions that open them in another process, and their arguments.
    The sender does not touch them until the receiver has answered."""

    tensors: dict[str, tuple[Any, ...]]


class Transport:
    """Brings the weights of one transfer to the receivers `ranks`. Every step raises SchedulerError if it fails."""

    def __init__(self, link: Link, ranks: Sequence[int]) -> None:
        self.link, self.ranks = link, ranks

    def send(self, bucket: Mapping[str, Tensor]) -> None:
        """Send some tensors."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until they may change again."""
        for rank in self.ranks:
            self.link.recv(rank)

    def end(self, names: tuple[str, ...]) -> None:
        """Say that these were all."""
        self.link.send(({}, True), self.ranks)


class Messages(Transport):
    """Buckets to other nodes, to all receivers the same."""

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
        """Begin a transfer. `mapped`: by rank, the segment that a receiver has. Returns whether there has to be a new
        one (`create`), which takes everything."""
        self.link, self.ranks = link, list(mapped)
        here = None if self._segment is None else self._segment.path
        self._is_new = any(path is None or path != here for path in mapped.values())
        return self._is_new

    def create(self, tensors: Sequence[tuple[str, Tensor]], dtypes: Mapping[str, torch.dtype]) -> None:
        """Make a new segment if there has to be one."""
        if not self._is_new:
            return
        if self._segment is not None:
            with suppress(FileNotFoundError):  # it is there if the transfer that made it was interrupted
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
        pass  # receivers read it at the end

    def end(self, names: tuple[str, ...]) -> None:
        if self._segment is not None:
            new = (self._segment.path, self._segment.entries) if self._is_new else None
            for rank in self.ranks:
                self.link.send((Written(names, new), True), rank)
            if self._is_new:
                for rank in self.ranks:  # until they have mapped it
                    self.link.recv(rank)
                os.unlink(self._segment.path)


def wanted(name: str, tensor: Tensor, dtypes: Mapping[str, torch.dtype]) -> torch.dtype:
    """The type that receivers have, who say which of theirs are not float32."""
    return dtypes.get(name, torch.float32) if tensor.is_floating_point() else tensor.dtype


def _lend(bucket: Mapping[str, Tensor]) -> Lent:
    """For one receiver: torch counts who has what is lent."""
    try:
        return Lent({name: reduce_tensor(tensor) for name, tensor in bucket.items()})
    except RuntimeError as error:
        raise SchedulerError(f"weights on this GPU cannot be lent to another process ({error}). {IPC_HINT}") from error
