"""The rollout worker of language runs: it generates responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from rlinf_lite.config.names import rollout_dtype
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.data import DataProto
from rlinf_lite.data.sequences import join_responses
from rlinf_lite.data.tokenizers import load_tokenizer, stop_token_ids
from rlinf_lite.generation import Generation, GenerationEngine, SamplingParams, sequence_keys
from rlinf_lite.models import graphs
from rlinf_lite.models.text.causal_lm import CausalLM
from rlinf_lite.registry import ENGINES, estimator_needs
from rlinf_lite.scheduler import Dispatch, Worker, register
from rlinf_lite.scheduler.dispatch import split_rows
from rlinf_lite.threads import torch_threads
from rlinf_lite.training.offload import ActingWeights, free_cache
from rlinf_lite.training.precision import autocast, be_deterministic, cast_parameters, shapes_vary
from rlinf_lite.weights import Offer, WeightReceiver, WeightRoutes, WeightVersionError, is_whole
from rlinf_lite.workers.reasoning.base import build_model, max_length


class LanguageRollout(Worker):
    """Generates responses to prompts: DataProtos with `prompt_ids`, `prompt_mask` [B, P] and `group` int64 [B], the
    number of the prompt. This number and `seed` in meta_info determine the sampling noise."""

    failover = "worker"

    cfg: ReasoningConfig
    model: CausalLM
    precision: str
    version: int

    def __init__(self, cfg: ReasoningConfig) -> None:
        self.cfg = cfg

    def init(self, directory: str | None, routes: WeightRoutes) -> None:
        """Build the engine. The weights arrive with the first sync, unless the actor in this process shares its
        model."""
        cfg = self.cfg
        be_deterministic(self.device, cfg.runner.deterministic)
        actor: Any = self.fused.get("actor")
        shares = actor is not None and is_whole(actor.learner.model)
        if shares:
            self.model = actor.learner.model
        else:
            self.model = build_model(cfg, directory, "sdpa").to(self.device).eval().requires_grad_(False)
        batch_size, prefill_tokens = cfg.rollout.max_batch_size, cfg.rollout.max_prefill_tokens
        graphs.enabled = cfg.rollout.cuda_graphs
        with torch_threads(cfg.rollout.num_threads):
            self.engine: GenerationEngine = ENGINES.get(cfg.rollout.engine)(
                self.model, batch_size, max_length(cfg), prefill_tokens, lambda: self.check_abort("generating")
            )
        self.precision = cfg.actor.precision
        if not shares and rollout_dtype(cfg, self.device) == "bf16":
            cast_parameters(self.model, torch.bfloat16)  # after the engine has compared it with its own forward
            free_cache(self.device)  # the fp32 weights took twice the memory
            self.precision = "bf16"
        self.weights = ActingWeights(self.model, self.device, cfg.rollout.offload)
        if actor is None:
            sender, timeout_s = routes.sender(self.rank), cfg.runner.phase_timeout_s
            self.receiver = WeightReceiver(self, "actor", sender, self.model, timeout_s)
            if cfg.runner.mode == "async":
                self.engine.weights, self.engine.within_responses = self, cfg.rollout.partial_rollouts
        self.stops = stop_token_ids(load_tokenizer(cfg), self.model.language_model)
        self.version = -1

    def sync_model_from_actor(self, version: int | None = None, number: int = 0) -> None:
        """Receive transfer `number` of the actor's weights, which must be of `version` (None: any), unless they were
        taken during generation."""
        self.weights.unload()  # an interrupted generation may have left them loaded
        with self.timer("sync weights"):
            actor: Any = self.fused.get("actor")
            if actor is None:
                self.version = self.receiver.receive(version, number)
            elif version in (None, actor.version):
                self.version = actor.version
            else:
                raise WeightVersionError(f"{self.name} expects weights {version}, the actor's are {actor.version}")
            self.engine.weights_changed()

    def offered(self) -> Offer | None:
        """The weights that the actor offers during generation, or None."""
        return self.receiver.offered()

    def take(self, offer: Offer) -> None:
        """Put offered weights into the model."""
        with self.timer("sync weights"):
            self.receiver.take(offer)
            self.engine.weights_changed()
            self.version = offer.version

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate responses to all prompts, in order, those of a prompt one after the other. Returns the columns of
        `data.sequences`, `rollout_logprobs` float32 and `acted_versions` int32 [B, R], `sample` int64 and `stopped`
        bool [B], and the columns of the prompts.

        With `greedy` in meta_info there is one response per prompt, by greedy decoding; else `algorithm.group_size`
        sampled ones, and for remax a greedy one after them.
        """
        with self.timer("generate"):
            return self._gather(prompts, list(self._stream(prompts)))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def start_generation(self, prompts: DataProto) -> None:
        """Start generating. `next_sequences` returns the responses, in `rollout.pipeline_stage_num` parts."""
        stages = split_rows(self.cfg.rollout.pipeline_stage_num, len(prompts))
        self._started = (prompts, self._stream(prompts), [len(stage) for stage in stages])
        self._unfinished: dict[int, list[Generation]] = {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def next_sequences(self) -> DataProto:
        """The next part of the responses: the prompts whose responses are complete first. As `generate_sequences`
        otherwise."""
        prompts, stream, sizes = self._started
        wanted, num_sequences = sizes.pop(0), self._params(prompts).num_sequences
        finished: list[Generation] = []
        with self.timer("generate"):
            while len(finished) < wanted * num_sequences:
                done = next(stream)
                group = self._unfinished.setdefault(done.index, [])
                group.append(done)
                if len(group) == num_sequences:
                    finished += self._unfinished.pop(done.index)
            if not sizes:
                next(stream, None)  # lets the engine finish
        return self._gather(prompts, finished)

    def _params(self, prompts: DataProto) -> SamplingParams:
        rollout, algorithm = self.cfg.rollout, self.cfg.algorithm
        max_tokens, stops = rollout.max_response_length, self.stops
        if prompts.meta_info.get("greedy"):
            return SamplingParams(max_tokens, greedy=True, stop_token_ids=stops, temperature=rollout.temperature)
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            n=algorithm.group_size,
            stop_token_ids=stops,
            add_greedy=estimator_needs(algorithm.adv_type).greedy,
        )

    def _stream(self, prompts: DataProto) -> Iterator[Generation]:
        params = self._params(prompts)
        ids, mask = prompts.batch["prompt_ids"], prompts.batch["prompt_mask"]
        tokens = [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)]
        keys = sequence_keys(prompts.meta_info["seed"], prompts.batch["group"].numpy(), params.n)
        stream = self.engine.stream(tokens, params, keys)
        with self.weights.loaded():
            while True:
                # these settings do not apply while the caller has the response
                threads = torch_threads(self.cfg.rollout.num_threads)
                with threads, shapes_vary(), autocast(self.device, self.precision):
                    done = next(stream, None)
                if done is None:
                    return
                yield done

    def _gather(self, prompts: DataProto, generations: list[Generation]) -> DataProto:
        generations = sorted(generations, key=lambda done: (done.index, done.sample))
        rows = prompts[np.array([done.index for done in generations], np.int64)]
        max_prompt, max_response = self.cfg.data.max_prompt_length, self.cfg.rollout.max_response_length
        tensors = join_responses(rows, [done.token_ids for done in generations], max_prompt, max_response)
        mask = tensors["response_mask"]
        tensors["rollout_logprobs"] = torch.zeros(mask.shape)
        tensors["rollout_logprobs"][mask] = torch.tensor([x for done in generations for x in done.logprobs])
        tensors["acted_versions"] = torch.full(mask.shape, self.version, dtype=torch.int32)
        if self.engine.weights is not None:
            versions = torch.tensor([version for done in generations for version in done.versions], dtype=torch.int32)
            tensors["acted_versions"][mask] = versions
        tensors["sample"] = torch.tensor([done.sample for done in generations], dtype=torch.int64)
        tensors["stopped"] = torch.tensor([done.finish_reason == "stop" for done in generations], dtype=torch.bool)
        metrics: list[dict[str, Any]] = [{"spans": self.pop_spans()}]
        rows.pop(["prompt_ids", "prompt_mask"])
        return DataProto(rows.batch | tensors, rows.non_tensor_batch, {"metrics": metrics})
