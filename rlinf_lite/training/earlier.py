"""Weights as they were when rollout workers got them, for the gap between acting and training in asynchronous runs.

What older weights did differs from what the present ones would do by more than rounding, so it is scored by those that
did it: kept when they are published, put into the model for one pass when what they did arrives.
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
    """What this rank has of the parameters that train and of persistent buffers, of one version, in host memory. All
    ranks call every method together. With `max_staleness` 0 nothing is ever kept."""

    def __init__(self, learner: Learner, max_staleness: int) -> None:
        self._learner, self._max_staleness = learner, max_staleness
        self.version: int | None = None
        """Version of the weights that are kept; None: nothing is."""
        self._tensors: list[Tensor] = []

    def published(self, version: int) -> None:
        """Rollout workers have the present weights, `version`: keep these, unless what others did may still come."""
        is_waiting = self.version is not None and version - self.version <= self._max_staleness
        if self._max_staleness and not is_waiting:
            self.version, self._tensors = version, [x.to(HOST, copy=True) for x in self._present()]

    def forget(self) -> None:
        self.version, self._tensors = None, []

    def arrived(self, versions: Tensor, now: int) -> bool:
        """Whether any rank has something that the kept weights did; `versions`: which did what this rank has. Not where
        some is of version `now`, which measures the gap itself: then what is kept is forgotten."""
        if self.version is None:
            return False
        counts = torch.tensor([int((versions == version).sum()) for version in (now, self.version)])
        of_now, of_kept = self._learner.over_ranks(counts).tolist()
        if of_now:
            self.forget()
        return not of_now and of_kept > 0

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """The model has them inside. After it, it has what it had, bit for bit, random numbers go on as if nothing had
        been computed, and nothing is kept."""
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
            model.reshard()  # what a pass without gradients has gathered of the root would stay
        tensors = (tensor.detach() for _, tensor in synced_tensors(model, trainable_only=True))
        return [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
