"""Earlier weights, to measure the gap between acting and training in asynchronous runs.

Actions of older weights must be scored by the same weights, as other weights differ by more than rounding. So weights
are kept when they are published, and put into the model for one pass when their actions arrive.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rlinf_lite.training.learner import Learner
from rlinf_lite.training.offload import HOST
from rlinf_lite.weights.sync import synced_tensors


class EarlierWeights:
    """One earlier version of the trainable parameters and persistent buffers, as far as this rank has them, in host
    memory. All ranks must call every method together. With `max_staleness` 0 nothing is kept."""

    def __init__(self, learner: Learner, max_staleness: int) -> None:
        self._learner, self._max_staleness = learner, max_staleness
        self.version: int | None = None
        """Version of the kept weights; None: none are kept."""
        self._tensors: list[Tensor] = []

    def published(self, version: int) -> None:
        """Keep the present weights, which rollout workers got as `version`, unless actions of those that are already
        kept may still arrive."""
        is_waiting = self.version is not None and version - self.version <= self._max_staleness
        if self._max_staleness and not is_waiting:
            self.version, self._tensors = version, [x.to(HOST, copy=True) for x in self._present()]

    def forget(self) -> None:
        self.version, self._tensors = None, []

    def arrived(self, versions: Tensor, now: int) -> bool:
        """Whether any rank has actions of the kept weights. `versions`: those of this rank's actions. False if any rank
        has actions of version `now`, with which the gap is measured directly; then the kept weights are dropped."""
        if self.version is None:
            return False
        counts = torch.tensor([int((versions == version).sum()) for version in (now, self.version)])
        of_now, of_kept = self._learner.over_ranks(counts).tolist()
        if of_now:
            self.forget()
        return not of_now and of_kept > 0

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """A context in which the model has the kept weights. Afterwards it has its own again, bit for bit; the state of
        random numbers is restored too, and the kept weights are dropped."""
        on_gpu = self._learner.worker.device.startswith("cuda")
        with torch.random.fork_rng([torch.cuda.current_device()] if on_gpu else []):
            self._swap()
            try:
                yield
            finally:
                self._swap()
                self.forget()

    @torch.no_grad()
    def _swap(self) -> None:
        for own, kept in zip(self._present(), self._tensors, strict=True):
            had = own.to(HOST, copy=True)
            own.copy_(kept)
            kept.copy_(had)

    @torch.no_grad()
    def _present(self) -> list[Tensor]:
        model = self._learner.model
        if isinstance(model, FSDPModule):
            model.reshard()  # a pass without gradients leaves the root's parameters gathered
        tensors = (tensor.detach() for _, tensor in synced_tensors(model, trainable_only=True))
        return [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
