"""The classes that the tests of the control plane name by module and class."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_lite.jobs import BaseTrainer, BaseWorkload, trainer_invocation
from rlinf_lite.scheduler import register

THRESHOLD = 3


def doubled(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(2 * value for value in args), kwargs


def at_least_zero(value: Any) -> Any:
    return [max(0, one) for one in value] if isinstance(value, list) else max(0, value)


def same(value: Any) -> Any:
    return value


def nothing(value: Any) -> None: ...


def list_and_dict(value: Any) -> Any:
    return [value], {}


class Actor(BaseWorkload):
    @trainer_invocation(pre_func=at_least_zero)
    def at_least_zero(self, value: int) -> Any:
        return self.rank, value

    @trainer_invocation(pre_func=same)
    def passed_on(self, value: Any) -> Any:
        return value

    @trainer_invocation(pre_func=list_and_dict)
    def ambiguous(self, value: Any) -> Any:
        return value

    @trainer_invocation(pre_func=nothing)
    def without_argument(self, value: Any) -> None: ...

    def echo(self, value: Any, plus: Any = 0) -> Any:
        return self.rank, value, plus

    def identity(self) -> tuple[Any, ...]:
        roles = [self.is_actor_role(), self.is_rollout_role(), self.is_reference_role(), self.is_reward_role()]
        roles.append(self.is_critic_role())
        devices = self.device_collocation, self.is_collocated_with("rollout"), self.is_collocated_with("critic")
        return self.name, self.rank, self.config, roles, devices, self.torch_master_addr, self.torch_master_port > 0

    def is_shared(self, value: np.ndarray) -> bool:
        return not value.flags.owndata

    def ask_master(self) -> Any:
        import ray

        return ray.get(self.master_handle.answer.remote())

    @trainer_invocation(auto_shard=False)
    def whole(self, value: Any) -> Any:
        return value

    @trainer_invocation(target="RANK0")
    def first(self, value: Any) -> Any:
        return self.rank, value

    @trainer_invocation(blocking=False)
    def start(self, value: Any) -> Any:
        return self.rank, value

    @trainer_invocation(blocking=False, target="RANK0")
    def start_first(self) -> int:
        return self.rank

    @trainer_invocation(is_async=True, timeout=1)
    def nap(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    @trainer_invocation(timeout=0.5)
    def short(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    @trainer_invocation(pre_func=doubled, post_func=sum)
    def summed(self, value: int, plus: int = 0) -> int:
        return value + plus

    @trainer_invocation(target="RANK0", post_func=str)
    def text(self) -> int:
        return self.rank

    @trainer_invocation(timeout=None)
    @register(blocking=True)
    def registered(self) -> int:
        return self.rank

    def init(self, settings: Any) -> None:
        self.settings = settings

    def die(self, rank: int) -> int:
        if rank == self.rank:
            os._exit(3)
        return self.rank

    def die_once(self, path: str, *ranks: int) -> tuple[int, Any, int]:
        """Rank, what `init` was told, and how often this process was called; some ranks die the first time."""
        log = Path(path) / f"died{self.rank}"
        if self.rank in ranks and not log.exists():
            log.touch()
            os._exit(3)
        self.calls = getattr(self, "calls", 0) + 1
        return self.rank, self.settings, self.calls

    def flaky(self, path: str, rank: int) -> int:
        """Fails the first time in one rank; each call leaves a line in `path`."""
        log = Path(path) / str(self.rank)
        calls = len(log.read_text()) if log.exists() else 0
        log.write_text("." * (calls + 1))
        if rank == self.rank and calls == 0:
            raise ValueError("the first time")
        return self.rank * 10 + calls

    @trainer_invocation(timeout=1)
    def slow_once(self, path: str, rank: int) -> int:
        log = Path(path) / f"slow{self.rank}"
        if rank == self.rank and not log.exists():
            log.touch()
            time.sleep(1.5)
            return -1
        return self.rank


class Rollout(Actor): ...


class Trainer(BaseTrainer):
    def init(self) -> None: ...

    def fit(self) -> None:
        self.report_progress(3)


class HalfTrainer(BaseTrainer):
    def init(self) -> None: ...


class NotAWorker: ...
