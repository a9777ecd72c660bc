"""Bytes that one process of a run holds: weights, gradients, optimizer state, and the peaks of acting and training.

Models are built and run on fake tensors (`preview.fake`) at the run's own sizes, which gives the bytes of weights,
activations, acting and generating. Gradients, AdamW's two moments and shards are computed from the counts.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlinf_lite.config.names import compared_staleness, fused_roles, recomputed_logprobs, rollout_dtype
from rlinf_lite.config.plan import Plan, ReasoningPlan, slots
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.resources import policy_directory
from rlinf_lite.config.schema import Config
from rlinf_lite.envs.base import EnvSpec
from rlinf_lite.generation.cache import StaticCache
from rlinf_lite.generation.protocol import SamplingParams
from rlinf_lite.generation.sampling import sample
from rlinf_lite.models.check import random_obs
from rlinf_lite.models.graphs import Calls
from rlinf_lite.models.lora import ADAPTER
from rlinf_lite.models.text.presets import preset
from rlinf_lite.preview.fake import Counts, Meter, count
from rlinf_lite.training.precision import autocast, cast_parameters
from rlinf_lite.workers.layout import padded

if TYPE_CHECKING:
    from rlinf_lite.models import Policy
    from rlinf_lite.models.text.causal_lm import CausalLM, LanguageModel

_MIB = 2**20
FP32, BF16 = 4, 2  # bytes of an element
INTERPRETER_BYTES = {"env": 135 * _MIB, "reward": 300 * _MIB, "rollout": 330 * _MIB, "actor": 410 * _MIB}
"""Resident memory of a worker, by its kind, that is not counted otherwise: Python, Ray, torch and its kernels (an env
worker has no torch). Measured with torch 2.13+cpu on Linux, as peaks of the workers of real runs."""
TRANSFORMERS_BYTES = 170 * _MIB
"""Memory of an imported transformers, for models with modules of it."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one process of a component, by their purpose."""

    held: dict[str, int]
    """Bytes on its slot all the time: GPU memory, or host memory on a CPU cluster."""
    working: dict[str, int]
    """Further bytes on its slot at the peak of its work."""
    host: dict[str, int]
    """Bytes in host memory on every kind of cluster."""
    gives_back: bool = False
    """Whether `working` is on its slot only while it works, so that other roles can use the memory at other times
    (`actor.offload`, `rollout.offload`). False: the process keeps the memory of its peak."""
    start: int = 0
    """Bytes on its slot before it works: the whole model, if ranks divide it and each then keeps a part."""

    @property
    def device_bytes(self) -> int:
        return max(sum(self.held.values()) + sum(self.working.values()), self.start)

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


# measured on fake tensors: a policy in a simulator


def evaluated_at_once(plan: Plan) -> int:
    """Number of environments that an evaluation plays at the same time."""
    return padded(plan.config.env.eval.num_envs, (plan.size("env") or 1) * plan.config.rollout.pipeline_stage_num)


def policy_passes(plan: Plan, policy: Policy, spec: EnvSpec, meter: Meter) -> tuple[int, int, int, int]:
    """Have the policy act as in a rollout worker, and train on a micro-batch as in an actor.

    Returns:
        Bytes of one decision in a trajectory, bytes per decision of inputs that are computed once for all epochs, the
        peak of acting, and the peak of training.
    """
    config, ranks = plan.config, plan.size("actor") or 1
    precision, on_gpu = config.actor.precision, slots(config.cluster)[0] == "cuda"
    trains = config.runner.task_type != "eval"
    most = max(config.env.train.num_envs if trains else 0, evaluated_at_once(plan))
    rows = -(-most // config.rollout.pipeline_stage_num // (plan.size("rollout") or 1))
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    policy.eval().requires_grad_(False)
    obs = random_obs(spec, rows=rows)
    acts_in = "bf16" if rollout_dtype(config, slots(config.cluster)[0]) == "bf16" else precision
    with torch.no_grad(), autocast("cpu", acts_in, on_gpu):
        acted, acting = meter.peak_of(lambda: policy.predict_action_batch(obs, "train"))
        if on_gpu and config.rollout.cuda_graphs and isinstance(getattr(policy, "calls", None), Calls):
            acting *= 2  # recorded graphs have their own memory
        passes = config.algorithm.update_epochs + recomputed_logprobs(config)[0]
        kept = policy.fixed_inputs(acted.forward_inputs) if passes > 1 else {}
    scores = FP32 * (acted.logprobs.numel() + acted.values.numel())
    of_env = config.model.num_action_chunks * (FP32 + 1 + 1) + FP32 + 8  # rewards, dones, mask; next value, version
    sample_bytes = (sum(x.nbytes for x in acted.forward_inputs.values()) + scores) // rows + of_env

    if not trains:
        return sample_bytes, 0, acting, 0
    policy.train()
    for parameter in trained:
        parameter.requires_grad_()
    if _shards(plan, "actor") > 1 and precision == "bf16":
        cast_parameters(policy, torch.bfloat16)  # gathered layers are in bf16, so that autocast makes no copies
    elif config.actor.frozen_dtype == "bf16":
        cast_parameters(policy, torch.bfloat16, frozen_only=True)
    batch = min(config.actor.micro_batch_size, config.actor.global_batch_size // ranks)

    def loss() -> Tensor:
        if config.runner.task_type == "sft":
            inputs = policy.sft_inputs(random_obs(spec, rows=batch))
            inputs["actions"] = torch.zeros(batch, policy.num_action_chunks, policy.action_dim)
            inputs["mask"] = torch.ones(batch, policy.num_action_chunks, dtype=torch.bool)
            with autocast("cpu", precision, on_gpu):
                return policy.sft_loss(inputs)
        inputs = {name: x.new_empty(batch, *x.shape[1:]) for name, x in {**acted.forward_inputs, **kept}.items()}
        with autocast("cpu", precision, on_gpu):
            output = policy(inputs)
        total: Tensor = output.logprobs.sum() + output.entropy.sum() + output.values.sum()
        return total

    kept_bytes = sum(x.nbytes for x in kept.values()) // rows
    return sample_bytes, kept_bytes, acting, meter.activations(policy, loss)


# measured on fake tensors: language models


def language_model(
    kind: type[LanguageModel], directory: str | Path | None, config: ReasoningConfig, adapts: bool
) -> LanguageModel:
    """Build the model as the run does, but only from `config.json`, without weights. `adapts`: it gets adapters by
    `model.lora`."""
    from rlinf_lite.models.text.causal_lm import CausalLM, saved_adapters  # loads transformers

    settings = preset(config.model.size)
    if directory is not None:
        settings = json.loads((policy_directory(directory) / "config.json").read_text())
    # sdpa needs as much memory as flash attention, which may not be installed here
    attention = "eager" if config.model.attn_implementation == "eager" else "sdpa"
    model = kind.from_config(settings, attn_implementation=attention)
    if kind is CausalLM:
        if directory is not None and (policy_directory(directory) / ADAPTER).is_dir():
            model.add_adapters(saved_adapters(policy_directory(directory) / ADAPTER))
        if adapts:
            model.add_adapters(config.model.lora.model_dump())
    model.prepare(config.model)
    return model


def reward_model(config: ReasoningConfig, models: dict[str, Counts], meter: Meter, peaks: Counter[str]) -> None:
    """Add the reward model's counts to `models`, and the peak of its largest pass to `peaks`."""
    from transformers import AutoConfig, AutoModelForSequenceClassification  # not installed for all policies

    settings = json.loads((policy_directory(str(config.reward.model)) / "config.json").read_text())
    dtype = torch.bfloat16 if config.reward.precision == "bf16" else torch.float32
    built = AutoConfig.for_model(settings.pop("model_type"), **settings | {"pad_token_id": 0, "dtype": dtype})
    model = AutoModelForSequenceClassification.from_config(built).eval().requires_grad_(False)
    models["reward model"] = count(model, [])
    columns = config.data.max_prompt_length + config.rollout.max_response_length
    columns = min(columns, config.reward.max_length or columns)
    ids = torch.zeros(max(config.actor.max_tokens_per_micro_batch // columns, 1), columns, dtype=torch.int64)
    with torch.no_grad():
        peaks["reward"] = meter.peak_of(lambda: model(input_ids=ids, attention_mask=torch.ones_like(ids)))[1]


def language_passes(plan: ReasoningPlan, model: LanguageModel, meter: Meter, peaks: Counter[str]) -> None:
    """Add to `peaks` the peak of training on a micro-batch. For a policy, also add those of scoring a micro-batch and
    of generating a rollout worker's share."""
    from rlinf_lite.models.text.causal_lm import CausalLM  # loads transformers

    config, response = plan.config, plan.config.rollout.max_response_length
    precision, columns = config.actor.precision, config.data.max_prompt_length + response
    on_gpu = slots(config.cluster)[0] == "cuda"
    rows = max(config.actor.max_tokens_per_micro_batch // columns, 1)

    def loss() -> Tensor:
        ids = torch.zeros(rows, columns, dtype=torch.int64)
        mask = torch.ones(rows, columns, dtype=torch.bool)
        with autocast("cpu", precision, on_gpu):
            if not isinstance(model, CausalLM):
                values: Tensor = model(ids, mask, response)
                return values.sum()
            output = model(ids, mask, response, config.rollout.temperature)
            return output.logprobs.sum() + output.entropy.sum()

    if not _is_whole(plan, "actor") and precision == "bf16":
        cast_parameters(model, torch.bfloat16)  # as in `policy_passes`
    peaks["model" if isinstance(model, CausalLM) else "critic"] = meter.activations(model, loss)
    if isinstance(model, CausalLM):  # without gradients, so that autocast keeps no copies
        model.requires_grad_(False)
        with torch.no_grad(), autocast("cpu", precision, on_gpu):
            peaks["scoring"] = meter.peak_of(loss)[1]
            acts_in_bf16 = rollout_dtype(config, slots(config.cluster)[0]) == "bf16"
            cast_parameters(model, torch.bfloat16 if acts_in_bf16 else torch.float32)
            peaks["keys and values"], peaks["generating"] = _generating(plan, model, meter)


def _generating(plan: ReasoningPlan, model: CausalLM, meter: Meter) -> tuple[int, int]:
    """Bytes of keys and values, and the further peak of generation: the larger one of a pass over the prompts and a
    pass for one token of each response. CUDA graphs add the second once more."""
    config, workers = plan.config, plan.size("rollout") or 1
    prompt, response = config.data.max_prompt_length, config.rollout.max_response_length
    prompts = -(-config.data.num_prompts // workers)
    rows = prompts * (config.algorithm.group_size + (config.algorithm.adv_type == "remax"))
    if config.runner.val_check_interval > 0:  # the number of prompts in files is not known yet
        known = (None if config.data.val_files else config.data.arithmetic.num_val, config.data.max_val_prompts)
        most = min((number for number in known if number is not None), default=workers * config.rollout.max_batch_size)
        rows = max(rows, -(-most // workers))
    rows = min(rows, config.rollout.max_batch_size)
    num_prompts = min(rows, max(config.rollout.max_prefill_tokens // prompt, 1))
    cache = StaticCache(model.language_model.config.get_text_config().num_hidden_layers, rows, prompt + response)
    params = SamplingParams(response, config.rollout.temperature, config.rollout.top_k, config.rollout.top_p)

    def step(ids: Tensor, mask: Tensor, positions: Tensor) -> None:
        states = model.language_model.base_model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        ).last_hidden_state
        sample(model.logits(states[torch.zeros(rows, dtype=torch.int64), -1]), params, torch.zeros(rows), None)

    before = meter.live
    cache.start_prefill(0, torch.zeros(rows, dtype=torch.int64))
    causal = torch.ones(prompt, prompt, dtype=torch.bool)[None, None]
    ids = torch.zeros(num_prompts, prompt, dtype=torch.int64)
    _, peak = meter.peak_of(lambda: step(ids, causal, torch.arange(prompt)[None]))
    held = meter.live - before
    cache.start_decode(torch.zeros(rows, dtype=torch.int64), prompt + response)
    one = torch.zeros(rows, 1, dtype=torch.int64)
    seen = torch.ones(rows, 1, 1, prompt + response, dtype=torch.bool)
    _, later = meter.peak_of(lambda: step(one, seen, one))
    recorded = config.rollout.cuda_graphs and slots(config.cluster)[0] == "cuda"
    return held, max(peak - held, later) + (later if recorded else 0)


# what a process holds


def _shards(plan: Plan | ReasoningPlan, role: str) -> int:
    """Number of ranks over which FSDP2 divides the model."""
    ranks, actor = plan.size(role) or 1, plan.config.actor
    return min(ranks, actor.fsdp_size or ranks) if actor.strategy == "fsdp" else 1


def _is_whole(plan: Plan | ReasoningPlan, role: str) -> bool:
    """Whether each rank has all parameters of the trained model."""
    return (plan.size(role) or 1) == 1 or plan.config.actor.strategy not in ("fsdp", "tensor_parallel")


def _part(plan: Plan | ReasoningPlan, role: str, counts: Counts, number: int) -> int:
    """A rank's share of `number`, a sum over all parameters of the model."""
    if isinstance(plan, ReasoningPlan) and plan.config.actor.strategy == "tensor_parallel":
        whole = number * counts.root // counts.parameters  # parameters that are in no layer
        return whole + (number - whole) // plan.config.actor.tensor_model_parallel_size
    return number // _shards(plan, role)


def _gathered(precision: str, counts: Counts) -> int:
    """Bytes of the parameters that FSDP2 has gathered at a time: the root, one layer, and the next."""
    return (BF16 if precision == "bf16" else FP32) * (counts.root + 2 * counts.largest_unit)


def _whole_at_start(plan: Plan | ReasoningPlan, role: str, counts: Counts) -> int:
    """Bytes of the whole model, which each rank has before it is divided; 0 if it is not divided."""
    return 0 if _is_whole(plan, role) else counts.num_bytes + counts.buffer_bytes


def acting_rank(
    plan: Plan | ReasoningPlan, counts: Counts, working: dict[str, int], host: dict[str, int]
) -> RankMemory:
    """The memory of a rollout worker. It has its own parameters, unless an actor in its process has all of them."""
    config, device = plan.config, slots(plan.config.cluster)[0]
    if {"actor", "rollout"} <= set(fused_roles(config)) and _is_whole(plan, "actor"):
        return RankMemory({}, working, host)
    parameters = acting_bytes(config, counts)
    if device == "cpu" or not config.rollout.offload:
        return RankMemory({"weights": parameters + counts.buffer_bytes}, working, host)
    # between its phases the weights are in a segment of host memory, which is counted for the node
    held = {"buffers": counts.buffer_bytes}
    return RankMemory(held, {"weights": parameters, **working}, host, gives_back=True)


def acting_bytes(config: Config | ReasoningConfig, counts: Counts) -> int:
    """Bytes of a rollout worker's parameters."""
    low = rollout_dtype(config, slots(config.cluster)[0]) == "bf16"
    return BF16 * counts.parameters if low else counts.num_bytes


def training_rank(
    plan: Plan | ReasoningPlan, role: str, counts: Counts, activations: int, host: dict[str, int]
) -> RankMemory:
    """The memory of a process that trains a model or a shard of it: fp32 weights, gradients, AdamW's moments."""
    config, shards = plan.config, _shards(plan, role)
    precision = config.actor.precision
    gradients = _part(plan, role, counts, FP32 * counts.trained)
    working = {"gradients": gradients, "activations": activations}
    together = config.actor.tensor_model_parallel_size if isinstance(config, ReasoningConfig) else 1
    if (plan.size(role) or 1) > max(shards, together):
        working["averaged gradients"] = max(gradients - activations, 0)  # a copy, made after activations are freed
    if shards > 1:
        # with the gradients of one layer before they are reduced
        element, share_trained = BF16 if precision == "bf16" else FP32, counts.trained / counts.parameters
        unreduced = int((element + FP32) * max(counts.root, counts.largest_unit) * share_trained)
        working["gathered layers"] = _gathered(precision, counts) + unreduced
    elif precision == "bf16" and not _is_whole(plan, role):
        working["copies in bf16"] = _part(plan, role, counts, BF16 * counts.parameters)  # autocast makes them
    weights = counts.num_bytes
    if isinstance(config, Config) and config.actor.frozen_dtype == "bf16":
        weights -= (FP32 - BF16) * (counts.parameters - counts.trained)
    held = {"weights": _part(plan, role, counts, weights) + counts.buffer_bytes}
    if config.runner.task_type == "eval":
        working = {}
    else:
        held["AdamW"] = _part(plan, role, counts, 2 * FP32 * counts.trained)
    if role == "actor" and compared_staleness(config):  # `training.earlier` keeps them
        host = {**host, "earlier weights": _part(plan, role, counts, FP32 * counts.trained)}
    start = _whole_at_start(plan, role, counts)
    if role != "actor" or not config.actor.offload or slots(config.cluster)[0] == "cpu":
        return RankMemory(held, working, host, start=start)
    # weights stay if rollout workers act with them, or if the actor scores responses while the next are generated
    stays = {"actor", "rollout"} <= set(fused_roles(config)) and _is_whole(plan, role)
    if isinstance(config, ReasoningConfig):
        stays = stays or config.rollout.pipeline_stage_num > 1 or config.algorithm.filter_groups
    away = {name: held.pop(name) for name in list(held) if name == "AdamW" or not stays}
    return RankMemory(
        held, {**away, **working}, {**host, "offloaded": sum(away.values())}, gives_back=True, start=start
    )


def scoring_rank(plan: ReasoningPlan, role: str, counts: Counts, scoring: int, host: dict[str, int]) -> RankMemory:
    """The memory of a process that scores with a model that is not trained; `scoring` is the peak of a micro-batch."""
    held, working = {"weights": _part(plan, role, counts, counts.num_bytes)}, {"scoring": scoring}
    if _shards(plan, role) > 1:
        working["gathered layers"] = _gathered(plan.config.actor.precision, counts)
    return RankMemory(held, working, host, start=_whole_at_start(plan, role, counts))


def synced_bytes(config: Config | ReasoningConfig, counts: Counts) -> int:
    """Bytes of an actor's host memory for sending weights: on a CPU the whole segment, on a GPU the buckets that are
    copied into it."""
    sent = acting_bytes(config, counts)
    return sent if slots(config.cluster)[0] == "cpu" else min(sent, config.weight_sync.bucket_bytes)
