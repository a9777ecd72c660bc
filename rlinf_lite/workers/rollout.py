"""The rollout worker: it acts with the policy for each stage of environments that is ready, and builds trajectories.

Truncated episodes are bootstrapped here: the value after an episode that a time limit ended is the policy's value of
its final observation; after a termination it is 0 (`algorithm.bootstrap_type`). `_serve` requests these values,
`TrajectoryBuilder` puts them into `next_values`, and `algorithms.gae` reads them. Only estimators with a critic need
them (`algorithms.needs_values`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from rlinf_lite.algorithms import needs_values
from rlinf_lite.config import Config
from rlinf_lite.config.names import rollout_dtype
from rlinf_lite.data.lerobot.statistics import Statistics
from rlinf_lite.envs import EnvSpec
from rlinf_lite.envs.observations import concat_rows, num_rows, take_rows
from rlinf_lite.models import NOISE_KEY, ActionOutput, Mode, Policy, build_policy, graphs
from rlinf_lite.models.base import PolicyInputs
from rlinf_lite.models.sampling import noise_keys
from rlinf_lite.scheduler import Worker
from rlinf_lite.threads import torch_threads
from rlinf_lite.training.offload import ActingWeights
from rlinf_lite.training.precision import autocast, be_deterministic, cast_parameters, shapes_vary
from rlinf_lite.weights import WeightReceiver, WeightVersionError, is_whole
from rlinf_lite.workers.layout import Layout
from rlinf_lite.workers.messages import ActionMessage, ObsMessage
from rlinf_lite.workers.trajectory import TrajectoryBuilder


class MultiStepRolloutWorker(Worker):
    """Answers observations with action chunks, in order of arrival, one message at a time.

    Messages are never merged into larger batches. So the placement alone, and not timing, decides which rows are
    computed together, and a run can be repeated bit for bit.
    """

    failover = "worker"

    cfg: Config
    layout: Layout
    policy: Policy
    precision: str
    """The precision of forward passes."""
    num_chunks: int

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg

    def init(self, layout: Layout, spec: EnvSpec) -> PolicyInputs | None:
        """Build the policy; its weights arrive with the first `sync_model_from_actor`. If the actor in this process has
        a complete policy, that one is used instead. Returns the policy's inputs (`Policy.reads`)."""
        graphs.enabled = self.cfg.rollout.cuda_graphs
        self.layout, self.version = layout, -1
        be_deterministic(self.device, self.cfg.runner.deterministic)
        self.actor = actor = cast(Any, self.fused.get("actor"))
        self.shares = actor is not None and is_whole(actor.policy)
        self.precision = self.cfg.actor.precision
        if self.shares:
            self.policy = actor.policy
        else:  # the seed disturbs no actor in this process: it has seeded and built the same policy just before
            torch.manual_seed(self.cfg.runner.seed)
            self.policy = build_policy(self.cfg, spec).eval().requires_grad_(False)
            if rollout_dtype(self.cfg, self.device) == "bf16":
                cast_parameters(self.policy, torch.bfloat16)
                self.precision = "bf16"
            self.policy.to(self.device)
        self.weights = ActingWeights(self.policy, self.device, self.cfg.rollout.offload)
        self.num_chunks = self.cfg.rollout.num_chunks or -(-spec.max_episode_steps // self.cfg.model.num_action_chunks)
        if self.actor is None:
            sender, timeout_s = layout.weight_routes.sender(self.rank), self.cfg.runner.phase_timeout_s
            self.receiver = WeightReceiver(self, "actor", sender, self.policy, timeout_s)
        return self.policy.reads()

    def sync_model_from_actor(self, version: int | None = None, number: int = 0) -> None:
        """Receive transfer `number` of the actor's weights, which must be of `version` (None: any), unless `generate`
        has taken it already."""
        with self.timer("sync weights"), torch_threads(self.cfg.rollout.num_threads):
            if self.actor is None:
                self.version = self.receiver.receive(version, number)
            elif version in (None, self.actor.version):
                self.version = self.actor.version
            else:
                raise WeightVersionError(f"{self.name} expects weights {version}, the actor's are {self.actor.version}")

    def generate(self, step: int | None = None) -> dict[str, Any]:
        """Act for `num_chunks` decisions in every environment of this worker, then send the trajectories to the actors.
        Weights that the actor sends meanwhile are taken between two decisions. `step`: the step to serve, if env
        workers may play several; None: any.
        """
        tag = ... if step is None else step
        builders = {key: self._builder(env_ids) for key, env_ids in self._pieces(self.layout).items()}
        unfinished = set(builders)
        with self.weights.loaded(), self._gives_back():
            while unfinished:
                sender, rank, message = self.recv_first({"actor": None, "env": tag}, self.cfg.runner.phase_timeout_s)
                if sender == "actor":
                    with self.timer("sync weights"), torch_threads(self.cfg.rollout.num_threads):
                        self.receiver.take(message)
                        self.version = self.receiver.version
                    continue
                key = (rank, message.stage, message.start)
                with self.timer(f"act env {rank} stage {message.stage}"):
                    self._serve(rank, builders[key], message)
                if message.last:
                    unfinished.remove(key)
        return {"spans": self.pop_spans()}

    @contextmanager
    def _gives_back(self) -> Iterator[None]:
        """A context for acting. At its end the memory that acting keeps is released, if the actor needs it."""
        try:
            yield
        finally:
            if self.actor is not None or self.cfg.rollout.offload:
                self.policy.release()

    def evaluate(self) -> dict[str, Any]:
        """Act for the evaluation's episodes, without building trajectories. Returns the policy's values of the options
        that the config leaves open (null), such as a checkpoint's number of denoising steps."""
        cfg = self.cfg.env.eval
        unfinished = set(self._pieces(self.layout.of_evaluation(cfg.num_envs)))
        with self.weights.loaded(), self._gives_back():
            while unfinished:
                env_rank, message = self.recv_any("env", self.cfg.runner.phase_timeout_s)
                if message.last:
                    unfinished.remove((env_rank, message.stage, message.start))
                else:
                    self._answer(env_rank, message, cfg.seed, cfg.mode)
        self.pop_spans()
        left_open = [name for name, value in dict(self.cfg.model.options).items() if value is None]
        has = self.policy.config_dict()
        return {name: has[name] for name in left_open if name in has}

    def take_statistics(self, statistics: dict[str, Statistics]) -> None:
        """Normalise by the statistics that the actor's policy took from the demonstrations."""
        self.policy.take_statistics(statistics)

    def _builder(self, env_ids: np.ndarray) -> Any:
        """What collects the decisions of rows that are served together, for `_serve`."""
        return TrajectoryBuilder(env_ids, self.num_chunks)

    def _pieces(self, layout: Layout) -> dict[tuple[int, int, int], np.ndarray]:
        """The ids of the environments that this worker serves, by (env rank, stage, first row)."""
        own = [piece for piece in layout.pieces() if piece.rollout_rank == self.rank]
        return {(p.env_rank, p.stage, p.start): layout.env_ids(p.env_rank, p.stage)[p.start : p.stop] for p in own}

    def _serve(self, env_rank: int, builder: Any, message: ObsMessage) -> None:
        """Take the result of the last decision; then decide again, or send the trajectories to the actors. `builder`:
        what `_builder` made."""
        result, with_values = message.result, needs_values(self.cfg.algorithm.adv_type)
        if result is not None:
            builder.add_result(result)
            kind = self.cfg.algorithm.bootstrap_type
            if with_values and result.final_obs is not None and kind != "never":
                # bootstrap: truncated episodes from their final observation, terminated ones with 0 (unless always)
                ended = np.arange(len(result.final_rows))
                if kind == "standard":
                    ended = np.flatnonzero(~result.terminated[result.final_rows].any(axis=1))
                builder.need_values(result.final_rows[ended], take_rows(result.final_obs, ended))
        if not message.last:
            output = self._answer(env_rank, message, self.cfg.runner.seed, "train")
            inputs = {name: x.cpu() for name, x in output.forward_inputs.items()}
            logprobs, values = output.logprobs.float().cpu(), output.values.float().cpu()
            builder.add_decision(logprobs, values, inputs, self.version)
            return
        if with_values:  # bootstrap: episodes that go on, from their present observation
            running = builder.running_rows()
            builder.need_values(running, take_rows(message.obs, running))
        trajectories = builder.finish(self._values(builder.pending_observations()))
        step = (message.decision - message.t) // self.num_chunks
        for actor_rank, rows in self.layout.actor_slices(builder.env_ids):
            self.send(trajectories.rows(rows), "actor", actor_rank, tag=step)

    def _answer(self, env_rank: int, message: ObsMessage, seed: int, mode: Mode) -> ActionOutput:
        keys = noise_keys(seed, message.noise_ids, message.decision)
        with self._acting():
            output = self.policy.predict_action_batch({**message.obs, NOISE_KEY: keys}, mode)
        actions = output.actions.float().cpu().numpy()
        self.send(ActionMessage(message.stage, message.start, actions), "env", env_rank)
        return output

    def _values(self, observations: list[dict[str, Any]]) -> Tensor | None:
        """The first value of every row of `observations`, computed in batches no larger than a stage."""
        if not observations:
            return None
        obs = concat_rows(observations)
        size, parts = self.layout.stage_size, []
        with self._acting():
            for first in range(0, num_rows(obs), size):
                self.report_progress()
                parts.append(self.policy.predict_values(take_rows(obs, slice(first, first + size)))[:, 0].float().cpu())
        return torch.cat(parts)

    @contextmanager
    def _acting(self) -> Iterator[None]:
        threads = torch_threads(self.cfg.rollout.num_threads)
        if not self.shares:
            with threads, shapes_vary(), torch.inference_mode(), autocast(self.device, self.precision):
                yield
            return
        self.policy.eval()  # no inference mode: training may use tensors that the policy caches here
        try:
            with threads, shapes_vary(), torch.no_grad(), autocast(self.device, self.precision):
                yield
        finally:
            self.policy.train()
