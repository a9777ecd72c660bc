"""The training engine of all models: embodied policies by reinforcement or imitation, language models, critics.

A step of every role:

    learner.set_learning_rate(step)
    learner.update(micro_batches, loss_fn, ...)  # forward and backward passes, one optimizer step; any number of times
    learner.result(sums)                         # metrics over all ranks

Each role divides its batch into micro-batches and defines their loss: `workers/actor.py` (samples of trajectories,
chunks of demonstrations) and `workers/reasoning/` (rows of tokens, divided in its `base.py`).
"""

from __future__ import annotations

import logging
import math
import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlinf_lite.config.schema import BaseConfig, OptimConfig
from rlinf_lite.dimensions import write_names
from rlinf_lite.registry import STRATEGIES, strategy_needs
from rlinf_lite.scheduler.context import is_local
from rlinf_lite.scheduler.errors import SchedulerError
from rlinf_lite.threads import torch_threads, training_threads
from rlinf_lite.training import sharding
from rlinf_lite.training.metrics import MetricSums
from rlinf_lite.training.offload import HOST, HostMemory, free_cache, move_module, move_state
from rlinf_lite.training.precision import autocast
from rlinf_lite.training.strategies import Strategy, init_process_group

if TYPE_CHECKING:
    from rlinf_lite.models import Policy
    from rlinf_lite.models.critics import Critics
    from rlinf_lite.models.text.causal_lm import LanguageModel
    from rlinf_lite.scheduler import Worker

log = logging.getLogger(__name__)

_SHARDS = "shards"

B = TypeVar("B")  # a micro-batch
R = TypeVar("R")
LossFn = Callable[[Any, B, MetricSums], Tensor]
"""A function of model, micro-batch and sums: the micro-batch's part of the loss over all ranks' micro-batches, times
`dp_size`, as gradients are averaged over that many ranks. It adds metrics to the sums."""


class NonFiniteUpdateError(RuntimeError):
    """`control.max_bad_updates` updates in a row had a loss or gradient that is not finite."""


class Learner:
    """Trains a model on the ranks of `worker`'s group, by `actor.strategy`. All ranks must call every method together.

    Ranks with the same `dp_rank` (of `dp_size`) train the same rows; others have their own. Training uses `num_threads`
    threads of torch. `optimizer` exists after `start_training`.

    With `actor.offload`, an actor's parameters and optimizer state come to the device when they are needed, and leave
    it when its weights have been sent (`sending`). Gradients exist only during an update.
    """

    model: Policy | LanguageModel | Critics
    optimizer: torch.optim.Optimizer

    _optim: OptimConfig
    _total_steps: int
    _value_steps: int
    _bad_updates_in_a_row: int
    _away: set[str]
    """Which of "model" and "optimizer" are in host memory, perhaps only in part after an interrupted move."""

    def __init__(
        self,
        worker: Worker,
        model: Policy | LanguageModel | Critics,
        cfg: BaseConfig,
        name: str,
        ranks_per_model: int = 1,
    ) -> None:
        """`model` must have the same weights on every rank. `name` (actor, critic) is used in metrics.
        `ranks_per_model`: ranks that share one model, for strategies that need it."""
        self.worker, self.cfg, self.name = worker, cfg, name
        self.model = model.to(worker.device)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.num_threads = training_threads(cfg.actor.num_threads, worker.local_world_size)
        strategy = STRATEGIES.get(cfg.actor.strategy)
        needs = strategy_needs(cfg.actor.strategy)
        sizes = [ranks_per_model] * needs.ranks_per_model + [cfg.actor.fsdp_size] * needs.fsdp_size
        self.strategy: Strategy = strategy(*sizes)
        self.dp_rank, self.dp_size = worker.rank // ranks_per_model, worker.world_size // ranks_per_model
        self.is_first_of_model = worker.rank % ranks_per_model == 0
        if worker.world_size > 1:
            if is_local():
                raise SchedulerError(
                    f"{worker.name} has {worker.world_size} ranks, which exchange gradients between processes, and "
                    "cluster.runtime: local has one process. Give it one rank, or set cluster.runtime to ray"
                )
            if not dist.is_initialized():  # roles in one process share its group
                address, timeout_s = (worker.master_addr, worker.master_port), cfg.runner.phase_timeout_s
                init_process_group(worker.rank, worker.world_size, *address, worker.device, timeout_s)
            self.strategy.prepare(self.model, worker.world_size, worker.device, cfg.actor.precision)
        self._offloads, self._away = cfg.actor.offload and name == "actor", set()
        self._host = HostMemory()

    def start_training(self, optim: OptimConfig, total_steps: int, value_steps: int = 0) -> None:
        """Make a new optimizer, whose learning rates follow a schedule up to step `total_steps`. In the first
        `value_steps` steps only the value trains; the schedule of all other parameters begins after them."""
        self.optimizer = sharding.build_optimizer(self.model, optim)
        self._optim, self._total_steps, self._value_steps = optim, total_steps, value_steps
        self._bad_updates_in_a_row = 0

    def to_device(self, with_optimizer: bool) -> None:
        """Move the model, and with `with_optimizer` the optimizer's state, back from host memory if they are there."""
        if "model" in self._away:
            move_module(self.model, self.worker.device)
            self._away.remove("model")
        if with_optimizer and "optimizer" in self._away:
            move_state(self.optimizer, self.worker.device)
            self._away.remove("optimizer")

    @contextmanager
    def sending(self, keeps_parameters: bool) -> Iterator[None]:
        """A context for sending weights, after which other roles use the device. With `actor.offload`, the optimizer's
        state goes to host memory before. Parameters are needed on the device for sending and go after it, unless other
        roles act with them (`keeps_parameters`)."""
        if self._offloads:
            self._away.add("optimizer")
            move_state(self.optimizer, HOST, self._host)
            free_cache(self.worker.device)
            self.to_device(with_optimizer=False)
        yield
        if self._offloads and not keeps_parameters:
            self._away.add("model")
            move_module(self.model, HOST, self._host)
            free_cache(self.worker.device)

    def autocast(self) -> AbstractContextManager[object]:
        """The autocast context of forward passes, by `actor.precision`."""
        return autocast(self.worker.device, self.cfg.actor.precision)

    def scoring(self) -> AbstractContextManager[object]:
        """The context of passes whose results compare with those of training: without gradients, unless that would run
        other kernels."""
        return torch.set_grad_enabled(getattr(self.model, "compiles_layers", False))

    def set_learning_rate(self, step: int) -> None:
        """Set the learning rates of all parameter groups for runner step `step`: linear warm-up, then by
        `lr_scheduler`."""
        optim = self._optim
        for group in self.optimizer.param_groups:
            begin = 0 if group["is_value"] else self._value_steps
            own_step, warm = max(step, begin), begin + optim.warmup_steps
            done = (own_step - warm) / max(self._total_steps - warm, 1)
            if own_step < warm:
                factor = (own_step - begin + 1) / (optim.warmup_steps + 1)
            elif optim.lr_scheduler == "constant":
                factor = 1.0
            else:  # decay up to the last step
                remaining = 1.0 - done if optim.lr_scheduler == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
                factor = optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * remaining
            group["lr"] = group["base_lr"] * factor

    def passes(self, compute: Callable[[Any, B], R], micro_batches: Iterable[B]) -> Iterator[R]:
        """Results of `compute(model, micro_batch)` for each micro-batch, in order."""
        self.to_device(with_optimizer=False)
        with torch_threads(self.num_threads):
            for micro_batch in micro_batches:
                result = compute(self.model, micro_batch)
                self.worker.report_progress()
                yield result

    def update(
        self,
        micro_batches: Iterable[B],
        loss_fn: LossFn[B],
        sums: MetricSums,
        where: str,
        samples: Callable[[], str],
        only: Sequence[nn.Parameter] | None = None,
    ) -> tuple[bool, MetricSums]:
        """One optimizer step on the micro-batches of all ranks, of which each rank has equally many. Metrics are added
        to `sums`.

        If loss or gradient is not finite, the step is skipped and counted, and `where` and `samples()` are logged.
        `only`: the parameters that train in this update (None: all). Returns whether there was a step, and the metrics
        of this update alone. Raises NonFiniteUpdateError.
        """

        def compute(model: Any, micro_batch: B) -> MetricSums:
            measured = MetricSums()
            loss_fn(model, micro_batch, measured).backward()
            return measured

        self.to_device(with_optimizer=True)
        every = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.optimizer.zero_grad()  # an earlier update that raised may have left gradients
        found = MetricSums()
        for measured in self.passes(compute, micro_batches):
            found.merge(measured)
        with torch_threads(self.num_threads):
            # the mean of all ranks' gradients, clipped
            parameters = every
            if only is not None:
                trained = {id(parameter) for parameter in only}
                for parameter in parameters:
                    if id(parameter) not in trained:
                        parameter.grad = None
                parameters = [parameter for parameter in parameters if id(parameter) in trained]
            if self.worker.world_size > 1:
                self.strategy.reduce_gradients(parameters)
            total = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            total = total.full_tensor() if isinstance(total, DTensor) else total
            norm = float(total)  # before clipping, the same on every rank
            finite = math.isfinite(norm)
            if finite:
                nn.utils.clip_grads_with_norm_(parameters, self._optim.clip_grad, total)
                self.optimizer.step()
                sums.merge(found)
                sums.add_scalar(f"train/{self.name}/grad_norm", norm)
            self.optimizer.zero_grad()
        sums.add_scalar(f"train/{self.name}/skipped_updates", float(not finite), how="sum")

        self._bad_updates_in_a_row = 0 if finite else self._bad_updates_in_a_row + 1
        if not finite:
            limit = self.cfg.control.max_bad_updates
            message = f"{where}: loss or gradient is not finite ({samples()}); the update is skipped"
            log.warning("%s, %d in a row", message, self._bad_updates_in_a_row)
            if self._bad_updates_in_a_row >= limit:
                raise NonFiniteUpdateError(
                    f"{message}. control.max_bad_updates: {limit} in a row were reached. Lower the {self.name}'s "
                    "optim.lr, or check rewards and observations"
                )
        return finite, found

    def result(self, sums: MetricSums) -> dict[str, Any]:
        """Metrics over all ranks, this rank's spans and memory."""
        metrics = sums.result(self.over_ranks)
        metrics[f"train/{self.name}/lr"] = self.optimizer.param_groups[0]["lr"]
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # the process's; on a GPU, its tensors'
        if self.worker.device.startswith("cuda"):
            memory = torch.cuda.max_memory_allocated()
        return {"metrics": metrics, "spans": self.worker.pop_spans(), "peak_memory_bytes": memory}

    def save_model(self, directory: Path) -> None:
        """Write the model as a directory that `from_pretrained` reads; rank 0 writes."""
        self.to_device(with_optimizer=False)
        self._host.release()  # rank 0 gathers all of it in host memory
        state = sharding.full_policy_state(self.model)
        if self.worker.rank == 0:
            self.model.save_pretrained(directory, state)
            write_names(directory, getattr(self.model, "dimension_names", {}))  # a language model has none

    def save(self, model_dir: Path, training_dir: Path) -> None:
        """Write the model as `save_model` does, and in shards the optimizer's state and the ranks' random states."""
        self.to_device(with_optimizer=True)
        self._host.release()  # each rank copies its moments to host memory, and rank 0 gathers the model there
        others, directory = self._random_states(), training_dir / _SHARDS
        sharding.save_training(self.model, self.optimizer, others, directory, self.worker.world_size)
        self.save_model(model_dir)  # last: if writing fails on rank 0, no other rank waits for it

    def load(self, model_dir: Path, training_dir: Path) -> None:
        """Load what `save` wrote, to continue bit for bit. The number of ranks may differ; random states are then those
        of the ranks that exist in both."""
        self.to_device(with_optimizer=True)
        self._host.release()  # every rank reads the whole model
        sharding.load_policy_state(self.model, self.model.read_state(model_dir))
        random, directory = self._random_states(), training_dir / _SHARDS
        sharding.load_training(self.model, self.optimizer, random, directory, self.worker.world_size)
        for name, state in random.items():
            if name.endswith("/cuda"):
                torch.cuda.set_rng_state(state, self.worker.device)
            else:
                torch.set_rng_state(state)

    def _random_states(self) -> dict[str, Tensor]:
        """Random states of this rank, under names that contain the rank."""
        states = {"torch": torch.get_rng_state()}
        if self.worker.device.startswith("cuda"):
            states["cuda"] = torch.cuda.get_rng_state(self.worker.device)
        return {f"random/{self.worker.rank}/{name}": state for name, state in states.items()}

    def over_ranks(self, values: Tensor, how: Any = dist.ReduceOp.SUM) -> Tensor:
        """All ranks' values reduced by `how`, on the CPU of every rank."""
        if self.worker.world_size > 1:
            values = values.to(self.worker.device)
            dist.all_reduce(values, how)
        return values.cpu()
