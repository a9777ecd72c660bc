"""Versioned weight transfer.

Receivers on the sender's node map one shared-memory segment, into which the sender writes each version once, in the
receivers' types. A receiver's parameters in host memory (of a policy on the CPU, or one whose GPU the actor uses
meanwhile) are views of the segment and need no copy; parameters on a GPU, and buffers, are copied from it. The segment
is page-locked, so GPUs read and write it directly. With `weight_sync.cuda_ipc`, a receiver on the sender's own GPU
copies from the sender's tensors instead, bucket by bucket.
Receivers on other nodes get buckets of at most `weight_sync.bucket_bytes`, one at a time, the same for all receivers: a
bucket crosses the network once to each node without an actor, and all receivers there share it in shared memory.

The sender offers a version, and each receiver answers when it is ready (while acting, between two decisions). Weights
are written only while all receivers wait, so no receiver computes with a mixture of versions. The answers say what
receivers have: if one is new, or has not mapped this sender's segment, all tensors are sent again, in a new segment.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlinf_lite.scheduler.errors import AbortedError, RecvTimeoutError, SchedulerError
from rlinf_lite.weights import transports
from rlinf_lite.weights.segment import Entry, Segment, in_host_memory
from rlinf_lite.weights.transports import IPC_HINT, Lent, Link, SharedMemory, Transport, Written

if TYPE_CHECKING:
    from rlinf_lite.scheduler import Worker
    from rlinf_lite.weights.routes import WeightRoutes


class WeightVersionError(RuntimeError):
    """A receiver was offered another version than it expects."""


@dataclass(frozen=True)
class Offer:
    """A sender's first message: it has weights of `version`, which transfer `number` (from 1) would bring."""

    version: int
    number: int


@dataclass(frozen=True)
class Ready:
    """A receiver's answer to an offer: it now waits for the weights."""

    complete: bool  # it has received all tensors before, so those that may have changed are enough
    segment: str | None  # the segment that it has mapped
    dtypes: dict[str, torch.dtype]  # types of its floating tensors that are not float32
    gpu: str | None  # the GPU of its parameters


def _whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be a DTensor. That class is not imported, as rollout workers start faster so."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def synced_tensors(module: nn.Module, trainable_only: bool) -> list[tuple[str, Tensor]]:
    """Parameters (or only trainable ones) and persistent buffers, such as running statistics; tied tensors once."""
    parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad or not trainable_only]
    buffers = list(module.named_buffers(remove_duplicate=False))
    persistent = module.state_dict().keys() if buffers else ()
    once = {id(b): (name, b) for name, b in reversed(buffers) if name in persistent}
    return [*parameters, *reversed(once.values())]


class WeightSender:
    """The actor's side. All actor ranks must call `send`, as sharded tensors are gathered; ranks with receivers
    (`WeightRoutes`) also transfer.

    `num_threads` threads write to shared memory while receivers wait: two cores have twice the memory bandwidth of one.
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
        self._shared_memory = SharedMemory(num_threads)
        self._receivers = routes.receivers(worker.rank)
        own_node = routes.actor_nodes[worker.rank]
        self._on_this_node = {rank for rank in self._receivers if routes.rollout_nodes[rank] == own_node}
        self._names: list[str] = []  # tensors that were trainable at the last transfer

    def send(self, version: int, module: nn.Module, number: int = 0) -> None:
        """Bring every receiver to `version`: all tensors the first time, then trainable parameters and buffers.
        `number`: the transfer's number, for receivers that take it while they act.

        Buffers are those of the sending rank. If a receiver fails, the sender still takes part in gathering tensors,
        for which the other senders wait, before it raises SchedulerError.
        """
        link, ready = Link(self._worker, self._group, self._timeout_s, number), dict[int, Ready]()
        problem: SchedulerError | None = None
        try:
            self._worker.send(Offer(version, number), self._group, self._receivers)
            for rank in self._receivers:
                ready[rank] = link.recv(rank)
        except SchedulerError as error:
            problem = error
        dtypes = next((receiver.dtypes for receiver in ready.values()), {})
        if problem is None and any(receiver.dtypes != dtypes for receiver in ready.values()):
            problem = SchedulerError(f"workers of {self._group} have parameters of different types")

        own_gpu = _gpu(module) if self._cuda_ipc else None
        here = [rank for rank in ready if rank in self._on_this_node]
        lent_to = [rank for rank in here if own_gpu and ready[rank].gpu == own_gpu]
        mapped = {rank: ready[rank].segment for rank in here if rank not in lent_to}
        is_new = self._shared_memory.begin(link, mapped)
        elsewhere = transports.Messages(link, [rank for rank in ready if rank not in here])
        ways: list[Transport] = [transports.CommonGPU(link, lent_to), self._shared_memory, elsewhere]

        trained = synced_tensors(module, trainable_only=True)
        names = [name for name, _ in trained]  # a parameter that was frozen since may have changed before
        everything = is_new or names != self._names or not all(receiver.complete for receiver in ready.values())
        everything = self._agree(everything, problem)
        tensors = synced_tensors(module, trainable_only=False) if everything else trained
        self._names = names
        try:
            self._shared_memory.create(tensors, dtypes)
        except SchedulerError as error:
            problem = error
        for bucket in self._buckets(tensors, dtypes, lends=bool(lent_to)):
            try:
                if problem is None:
                    self._worker.report_progress()
                    for way in ways:
                        way.send(bucket)
                    for way in ways:
                        way.wait()
            except SchedulerError as error:
                problem = error
        if problem is not None:
            raise problem
        for way in ways:
            way.end(tuple(dict(tensors)))

    def _agree(self, everything: bool, problem: SchedulerError | None) -> bool:
        """Whether any sender has to send all tensors; all must go through the same ones. If any sender has a problem,
        all raise SchedulerError."""
        if dist.is_initialized():
            flags = torch.tensor([float(everything), float(problem is not None)], device=self._worker.device)
            dist.all_reduce(flags, dist.ReduceOp.MAX)
            everything = bool(flags[0])
            if problem is None and bool(flags[1]):
                problem = AbortedError("another sender of weights gave up")
        if problem is not None:
            raise problem
        return everything

    def _buckets(
        self, tensors: Iterable[tuple[str, Tensor]], dtypes: Mapping[str, torch.dtype], lends: bool
    ) -> Iterator[dict[str, Tensor]]:
        """Whole tensors in the receivers' types, on their own devices, in buckets of at most `bucket_bytes` (a larger
        tensor is alone). `lends`: copies, as torch keeps count of lent tensors until they are freed, and parameters
        never are."""
        bucket: dict[str, Tensor] = {}
        num_bytes = 0
        for name, tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            if bucket and num_bytes + size > self._bucket_bytes:
                yield bucket
                bucket, num_bytes = {}, 0
            full = _whole(tensor.detach())
            if self._receivers:
                bucket[name] = full.to(transports.wanted(name, full, dtypes), copy=lends).contiguous()
                num_bytes += size
        if bucket:
            yield bucket


def _gpu(module: nn.Module) -> str | None:
    """The parameters' GPU: its id, and its device name in this process; None: they are in host memory."""
    device = next(module.parameters()).device  # a process has one GPU
    return f"{torch.cuda.get_device_properties(device).uuid} {device}" if device.type == "cuda" else None


class WeightReceiver:
    """The rollout worker's side, for one module."""

    version: int
    """Version of the module's weights; -1 before the first transfer."""

    def __init__(self, worker: Worker, group: str, sender_rank: int, module: nn.Module, timeout_s: float) -> None:
        self._worker, self._group, self._sender = worker, group, sender_rank
        self._module, self._timeout_s = module, timeout_s
        tensors = synced_tensors(module, trainable_only=False)
        floating = {name: tensor.dtype for name, tensor in tensors if tensor.is_floating_point()}
        self._dtypes = {name: dtype for name, dtype in floating.items() if dtype != torch.float32}
        self._complete = False
        self._segment: str | None = None
        self._written: dict[str, Tensor] = {}  # the segment's tensors
        self.version, self._number = -1, 0

    def receive(self, version: int | None = None, number: int = 0) -> int:
        """Wait for transfer `number`, which must be of `version` (None: of any). Does not wait if `take` has already
        received it or a later one. Returns the version that the module has then.

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
        """The offer that has arrived, which must then be taken, or None; does not wait."""
        with suppress(RecvTimeoutError):
            offer: Offer = self._worker.recv(self._group, self._sender, 0.0)
            return offer
        return None

    def take(self, offer: Offer) -> None:
        """Receive the offered weights into the module."""
        link = Link(self._worker, self._group, self._timeout_s, offer.number)
        link.send(Ready(self._complete, self._segment, self._dtypes, _gpu(self._module)), self._sender)
        last = False
        while not last:
            content, last = link.recv(self._sender)
            if isinstance(content, Written):
                if content.new is not None:
                    self._map(*content.new)
                    link.send("mapped", self._sender)
                self._copy({name: self._written[name] for name in content.names})
            elif isinstance(content, Lent):
                self._copy_lent(content)
            else:
                self._copy(content)
            if not last:
                link.send("copied", self._sender)
        self._complete, self.version, self._number = True, offer.version, offer.number

    def _map(self, path: str, entries: list[Entry]) -> None:
        """Make parameters in host memory views of the segment. Other views of a parameter keep its old memory, as after
        `nn.Module.to`. Buffers are not views, as a pass may change them."""
        segment = Segment(path, entries, create=False, lock=self._worker.device != "cpu")
        self._segment, self._written = path, segment.tensors
        for name, parameter in self._module.named_parameters():
            if name in self._written and in_host_memory(parameter):
                parameter.data = self._written[name]

    def _own(self) -> dict[str, Tensor]:
        """The module's current tensors by name; a pass, or loading weights, may have replaced earlier ones."""
        buffers = self._module.named_buffers(remove_duplicate=False)
        return dict(itertools.chain(self._module.named_parameters(), buffers))

    def _copy_lent(self, lent: Lent) -> None:
        try:
            self._copy({name: rebuild(*args) for name, (rebuild, args) in lent.tensors.items()})
        except RuntimeError as error:
            raise SchedulerError(
                f"{self._worker.name} cannot open the memory of {self._group}[{self._sender}] on their GPU ({error}). "
                + IPC_HINT
            ) from error

    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy into the module's own tensors, except those in the same memory. Waits for the GPU, since the sender may
        change `tensors` as soon as this is done."""
        own = self._own() if tensors else {}
        with torch.no_grad():
            for name, tensor in tensors.items():
                if own[name].data_ptr() != tensor.data_ptr():
                    _overwrite(name, own[name], tensor)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()


def _overwrite(name: str, own: Tensor, sent: Tensor) -> None:
    """`own.copy_(sent)`, but raises SchedulerError for other shapes, which `copy_` might broadcast."""
    if own.shape != sent.shape:
        raise SchedulerError(f"{name} was {list(own.shape)} when the model was built, and is {list(sent.shape)} now")
    own.copy_(sent, non_blocking=own.is_cuda)


def is_whole(model: nn.Module) -> bool:
    """Whether this rank has every parameter in full."""
    return not any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy from a module, sharded or not, into an unsharded one; all ranks of a sharded module must call this."""
    into = dict(synced_tensors(target, trainable_only=False))
    with torch.no_grad():
        for name, tensor in synced_tensors(source, trainable_only=False):
            _overwrite(name, into[name], _whole(tensor))
