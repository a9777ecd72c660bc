"""Bytes of every process of a run, before it starts.

Models are built and run on fake tensors (`preview.fake`) at the run's own sizes, whatever they are: their weights,
activations, and what acting and generating take are measured there. What is around them follows the workers: gradients,
AdamW's two moments, shards, batches, what is sent. An interpreter with its libraries is a constant, measured on a CPU.

Sums are what the kernel calls resident (VmHWM): pages that processes share count in each of them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from rlinf_lite.cards import Observed
from rlinf_lite.config.names import fused_roles, max_staleness, recomputed_logprobs, roles_of, rollout_dtype
from rlinf_lite.config.plan import Plan, ReasoningPlan, observed, slots
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.resources import policy_directory, start_dir
from rlinf_lite.config.schema import Config
from rlinf_lite.envs.base import EnvSpec
from rlinf_lite.generation.cache import StaticCache
from rlinf_lite.generation.protocol import SamplingParams
from rlinf_lite.generation.sampling import sample
from rlinf_lite.lazy import imports_without_gc
from rlinf_lite.models.graphs import Calls
from rlinf_lite.models.text.presets import preset
from rlinf_lite.preview.fake import Counts, Meter, count, fake_tensors
from rlinf_lite.registry import env_card
from rlinf_lite.training.precision import autocast, cast_parameters
from rlinf_lite.workers.layout import padded

if TYPE_CHECKING:
    from rlinf_lite.models import Policy
    from rlinf_lite.models.text.causal_lm import CausalLM, LanguageModel

T = TypeVar("T")
_MIB = 2**20
_FP32, _BF16 = 4, 2
INTERPRETER_BYTES = {"env": 135 * _MIB, "reward": 300 * _MIB, "rollout": 330 * _MIB, "actor": 410 * _MIB}
"""Resident in a worker of that kind besides what is counted here: Python, Ray, torch and its kernels, without torch in
an env worker. Measured with torch 2.13+cpu on Linux, as peaks of the workers of real runs."""
TRANSFORMERS_BYTES = 170 * _MIB
"""What importing transformers adds, where a model has modules of it."""


@dataclass(frozen=True)
class RankMemory:
    """One process of a component: bytes by what they are for."""

    held: dict[str, int]
    """On its slot (GPU memory, or on a CPU cluster host memory), all the time."""
    working: dict[str, int]
    """On its slot, at the peak of its work."""
    host: dict[str, int]
    """In host memory, wherever it computes."""
    gives_back: bool = False
    """What is `working` is on its slot then alone: other roles have the memory meanwhile (`actor.offload`,
    `rollout.offload`). Else a process keeps what it had at its peak."""
    start: int = 0
    """On its slot before it works: the whole model, of which a rank keeps its part where it is spread over them all."""

    @property
    def device_bytes(self) -> int:
        return max(sum(self.held.values()) + sum(self.working.values()), self.start)

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


@dataclass
class Estimate:
    """A run's memory, as far as it can be known before it starts."""

    unknown: list[str] = field(default_factory=list)
    """What is not known and left out, and why; a sentence each."""
    models: dict[str, Counts] = field(default_factory=dict)
    sample_bytes: int = 0
    """One decision, or one response, in a batch."""
    ranks: dict[str, RankMemory] = field(default_factory=dict)
    """By component; empty where the model could not be counted."""
    processes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Bytes on the slot and in host memory of a process, by its component, or by the roles that share it, `a+b`."""
    slot_bytes: dict[int, int] = field(default_factory=dict)
    """Device memory of all processes that share a slot."""
    node_host_bytes: int = 0
    """Host memory of all processes, on the fullest node."""
    node_start_bytes: int = 0
    """Where models go to GPUs: host memory on the fullest node while its processes build theirs."""
    segment_bytes: int = 0
    """Of it the weights that rollout workers on GPUs take theirs from, once per node."""
    shared_bytes: int = 0
    """Of it in /dev/shm, at the most: weights, a step's batches and observations on their way."""

    def attempt(self, sentence: str, function: Callable[[], T]) -> T | None:
        """What `function` returns; None and a sentence in `unknown` where it raises."""
        try:
            return function()
        except Exception as error:  # a user's class may raise anything, and what else is known is still worth reading
            reason = (str(error).strip().splitlines() or [""])[0]
            self.unknown.append(f"{sentence}: {type(error).__name__}: {reason}")
            return None


def estimate(plan: Plan | ReasoningPlan) -> Estimate:
    """Of a config that has passed its checks. A model that cannot be counted is no error, but `unknown`."""
    found = _reasoning(plan) if isinstance(plan, ReasoningPlan) else _embodied(plan)
    accelerator, per_node = slots(plan.config.cluster)
    on_slots: Counter[int] = Counter()
    lent: dict[str, Counter[int]] = {}  # what roles have on slots in turn
    on_nodes: Counter[int] = Counter()
    starts = _starts(plan, found)
    for names, (device, host) in found.processes.items():
        rank = found.ranks.get(names)  # of roles that share a process none, which has the memory in turn as it is
        in_turn = sum(rank.working.values()) if rank is not None and rank.gives_back else 0
        for process in plan.placements[names.partition("+")[0]]:
            slot = process.slots[0]  # a process that owns several uses the first
            on_slots[slot] += device - in_turn
            lent.setdefault(names, Counter())[slot] += in_turn
            begun = max(device, 0 if rank is None else rank.start)
            on_nodes[slot // per_node] += host + begun * (accelerator == "cpu")
    for slot in on_slots:
        on_slots[slot] = max(on_slots[slot] + max(of_role[slot] for of_role in lent.values()), starts[slot])
    found.slot_bytes = dict(sorted(on_slots.items()))
    found.node_start_bytes = _host_at_start(plan, found) if accelerator == "cuda" else 0
    found.node_host_bytes = max(max(on_nodes.values(), default=0) + found.segment_bytes, found.node_start_bytes)
    return found


def _starts(plan: Plan | ReasoningPlan, found: Estimate) -> Counter[int]:
    """Of every slot, what it has when the largest model on it is still whole: of the others their weights, for nothing
    works yet."""
    weights: Counter[int] = Counter()
    whole: Counter[int] = Counter()
    for role, rank in found.ranks.items():
        own = rank.held.get("weights", 0)
        for slot in {process.slots[0] for process in plan.placements.get(role, ())}:
            weights[slot] += own
            whole[slot] = max(whole[slot], rank.start - own)
    return weights + whole


def _host_at_start(plan: Plan | ReasoningPlan, found: Estimate) -> int:
    """Of the fullest node, while models are built that go to GPUs then: every process builds its own at the same time,
    those of several roles in turn, and a reference's and a critic's once the others are there. Of what transformers
    reads from files in fp32 it is less: the pages of the files, which processes share."""
    _, per_node = slots(plan.config.cluster)
    at_first, later = Counter[int](), Counter[int]()
    for names, (_, host) in found.processes.items():
        roles = names.split("+")
        began = host if names == "env" else max(found.ranks[role].host["interpreter"] for role in roles)
        late = {"reference", "critic"} & {*roles}
        for nodes, own in ((at_first, {*roles} - late), (later, late)):
            models = (found.models.get(_model_of(role, found)) for role in own)
            built = max((counts.num_bytes + counts.buffer_bytes for counts in models if counts is not None), default=0)
            for process in plan.placements[roles[0]]:
                nodes[process.slots[0] // per_node] += began + built
    return max([*at_first.values(), *later.values()], default=0)


def _model_of(role: str, found: Estimate) -> str:
    """Its name in `found.models`."""
    if role in ("env", "critic"):
        return role
    return "reward model" if role == "reward" else "policy" if "policy" in found.models else "model"


# policies


def spec_of(seen: Observed) -> EnvSpec:
    """What a policy is built for; bounds and time limits are not known yet, and change no size."""
    bounds = [-1.0] * seen.action_dim, [1.0] * seen.action_dim
    names = (None if x is None else list(x) for x in (seen.state_names, seen.action_names))
    return EnvSpec(seen.action_dim, seen.state_dim or None, seen.cameras, *bounds, 1, seen.has_instruction, *names)


def _embodied(plan: Plan) -> Estimate:
    config, seen, found = plan.config, observed(plan.config), Estimate()
    if seen is None or plan.num_samples is None:
        found.unknown.append(f"known once {config.env.task} and {config.model.id} are built")
        return found
    spec = spec_of(seen)
    name = config.model.id
    with imports_without_gc():
        from rlinf_lite.models import build_policy
    with fake_tensors() as meter:
        policy = found.attempt(
            f"parameters of {name} could not be counted without building it",
            lambda: build_policy(config, spec, read_weights=False),
        )
        if policy is None:
            return found
        counts = count(policy, policy.fsdp_units())
        passes = found.attempt(
            f"activations and trajectories of {name} are left out: it could not be run without building it",
            lambda: _passes(plan, policy, spec, meter),
        )
    of_simulator = env_card(config.env.id).simulator_memory(config.env.options, slots(config.cluster)[0])
    if of_simulator is None:
        found.unknown.append(f"the simulator's own, {config.env.id}, is left out")
    obs_bytes = _FP32 * seen.state_dim + sum(3 * height * width for height, width in seen.cameras.values())
    uses_transformers = any(type(module).__module__.startswith("transformers.") for module in policy.modules())
    found.sample_bytes, kept, acting, activations = passes or (0, 0, 0, 0)
    found.models = {"policy": counts}

    env, ranks = config.env, {name: plan.size(name) or 1 for name in ("env", "rollout", "actor")}
    trained_in = 0 if config.runner.task_type == "eval" else env.train.num_envs
    own_envs = -(-(trained_in + _evaluated_at_once(plan)) // ranks["env"])
    simulator, each_env = of_simulator or (0, 0)
    hosts = {
        "env": {"simulator": simulator + own_envs * each_env, "observations": 2 * own_envs * obs_bytes},
        "rollout": {},
        "actor": {"weight sync": _synced(config, counts)},
    }
    if config.runner.task_type == "embodied":  # as parts, and joined; of steps that were played ahead, as parts
        for name, ahead in (("rollout", 0), ("actor", max_staleness(config))):
            hosts[name]["trajectories"] = (2 + ahead) * -(-plan.num_samples // ranks[name]) * found.sample_bytes
    if kept:
        hosts["actor"]["fixed inputs"] = -(-plan.num_samples // ranks["actor"]) * kept
    for name, host in hosts.items():
        host["interpreter"] = INTERPRETER_BYTES[name] + TRANSFORMERS_BYTES * (uses_transformers and name != "env")
    fused = fused_roles(config)
    if fused:
        hosts["actor"].pop("weight sync")
    found.ranks = {
        "env": RankMemory({}, {}, hosts["env"]),
        "rollout": _acting(plan, counts, {"acting": acting}, hosts["rollout"]),
        "actor": _training(plan, "actor", counts, activations, hosts["actor"]),
    }
    _add_processes(found, fused)
    batch = 0 if config.runner.task_type == "eval" else plan.num_samples * found.sample_bytes
    traffic = batch + 2 * (trained_in or _evaluated_at_once(plan)) * obs_bytes
    _add_shared(found, traffic, _acting_bytes(config, counts), config)
    return found


def _add_processes(found: Estimate, fused: list[str]) -> None:
    """Roles of one process have one interpreter, and work in turn."""
    for group in [fused] * bool(fused) + [[role] for role in found.ranks if role not in fused]:
        ranks = [found.ranks[role] for role in group]
        device = sum(sum(rank.held.values()) for rank in ranks) + max(sum(rank.working.values()) for rank in ranks)
        own = sum(rank.host_bytes - rank.host["interpreter"] for rank in ranks)
        found.processes["+".join(group)] = (device, max(rank.host["interpreter"] for rank in ranks) + own)


def _add_shared(found: Estimate, traffic: int, weights: int, config: Config | ReasoningConfig) -> None:
    """What is on its way, and weights, which a CPU's rollout workers have as their own (and are counted with)."""
    sent = 0 if {"actor", "rollout"} <= set(fused_roles(config)) else weights
    found.shared_bytes = traffic + sent
    found.segment_bytes = sent if slots(config.cluster)[0] == "cuda" else 0


def _evaluated_at_once(plan: Plan) -> int:
    """Environments of an evaluation."""
    return padded(plan.config.env.eval.num_envs, (plan.size("env") or 1) * plan.config.rollout.pipeline_stage_num)


def _passes(plan: Plan, policy: Policy, spec: EnvSpec, meter: Meter) -> tuple[int, int, int, int]:
    """Let the policy act as a rollout worker does, and train on a micro-batch as an actor does. Bytes of one decision
    in a trajectory, of what is computed of it once for all epochs, and the peaks of both."""
    from rlinf_lite.models.check import random_obs

    config, ranks = plan.config, plan.size("actor") or 1
    precision, on_gpu = config.actor.precision, slots(config.cluster)[0] == "cuda"
    trains = config.runner.task_type != "eval"
    most = max(config.env.train.num_envs * trains, _evaluated_at_once(plan))
    rows = -(-most // config.rollout.pipeline_stage_num // (plan.size("rollout") or 1))
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    policy.eval().requires_grad_(False)
    obs = random_obs(spec, rows=rows)
    acts_in = "bf16" if rollout_dtype(config, slots(config.cluster)[0]) == "bf16" else precision
    with torch.no_grad(), autocast("cpu", acts_in, on_gpu):
        acted, acting = meter.peak_of(lambda: policy.predict_action_batch(obs, "train"))
        if on_gpu and config.rollout.cuda_graphs and isinstance(getattr(policy, "calls", None), Calls):
            acting *= 2  # what is recorded has memory that nothing else gets
        passes = config.algorithm.update_epochs + recomputed_logprobs(config)[0]
        kept = policy.fixed_inputs(acted.forward_inputs) if passes > 1 else {}
    scores = _FP32 * (acted.logprobs.numel() + acted.values.numel())
    of_env = config.model.num_action_chunks * (_FP32 + 1 + 1) + _FP32 + 8  # rewards, dones, mask; next value, version
    sample_bytes = (sum(x.nbytes for x in acted.forward_inputs.values()) + scores) // rows + of_env

    if not trains:
        return sample_bytes, 0, acting, 0
    policy.train()
    for parameter in trained:
        parameter.requires_grad_()
    if _shards(plan, "actor") > 1 and precision == "bf16":
        cast_parameters(policy, torch.bfloat16)  # as gathered for computing, where autocast copies them no more
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


# language models


def _reasoning(plan: ReasoningPlan) -> Estimate:
    from rlinf_lite.models.text.causal_lm import CausalLM, CausalValueModel

    config, roles, found = plan.config, roles_of(plan.config), Estimate()
    start = start_dir(config)
    models: dict[str, tuple[type[LanguageModel], str | Path | None]] = {"model": (CausalLM, start)}
    if "critic" in roles:
        models["critic"] = (CausalValueModel, config.critic.model_dir or start)
    peaks: Counter[str] = Counter()
    with fake_tensors() as meter:
        for name, (kind, directory) in models.items():
            model = found.attempt(
                f"parameters of the {name} could not be counted without building it",
                partial(_language_model, kind, directory, config),
            )
            if model is None:
                return found
            found.models[name] = count(model, model.fsdp_units())
            found.attempt(
                f"activations of the {name} are left out: it could not be run without building it",
                partial(_language_passes, plan, model, meter, peaks),
            )
        if config.reward.model is not None:
            found.attempt(
                "the reward model is left out: it could not be built and run",
                partial(_reward_model, config, found, meter, peaks),
            )
    # ids and mask; numbers per token of the response, and its mask
    columns = config.data.max_prompt_length + config.rollout.max_response_length
    found.sample_bytes = 9 * columns + (6 * _FP32 + 1) * config.rollout.max_response_length
    found.ranks = {role: _role(plan, role, found, peaks) for role in roles}
    _add_processes(found, fused_roles(config))
    traffic = plan.num_samples * found.sample_bytes
    _add_shared(found, traffic, _acting_bytes(config, found.models["model"]), config)
    return found


def _language_model(kind: type[LanguageModel], directory: str | Path | None, config: ReasoningConfig) -> LanguageModel:
    """As the run builds it, from `config.json` alone."""
    from rlinf_lite.models.lora import ADAPTER
    from rlinf_lite.models.text.causal_lm import CausalLM, saved_adapters

    settings = preset(config.model.size)
    if directory is not None:
        settings = json.loads((policy_directory(directory) / "config.json").read_text())
    # flash attention keeps what sdpa keeps, and need not be installed here
    attention = "eager" if config.model.attn_implementation == "eager" else "sdpa"
    model = kind.from_config(settings, attn_implementation=attention)
    if kind is CausalLM:
        if directory is not None and (policy_directory(directory) / ADAPTER).is_dir():
            model.add_adapters(saved_adapters(policy_directory(directory) / ADAPTER))
        model.add_adapters(config.model.lora.model_dump())
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def _reward_model(config: ReasoningConfig, found: Estimate, meter: Meter, peaks: Counter[str]) -> None:
    """Count the classifier and the peak of its largest pass."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    settings = json.loads((policy_directory(str(config.reward.model)) / "config.json").read_text())
    dtype = torch.bfloat16 if config.reward.precision == "bf16" else torch.float32
    built = AutoConfig.for_model(settings.pop("model_type"), **settings | {"pad_token_id": 0, "dtype": dtype})
    model = AutoModelForSequenceClassification.from_config(built).eval().requires_grad_(False)
    found.models["reward model"] = count(model, [])
    columns = config.data.max_prompt_length + config.rollout.max_response_length
    columns = min(columns, config.reward.max_length or columns)
    ids = torch.zeros(max(config.actor.max_tokens_per_micro_batch // columns, 1), columns, dtype=torch.int64)
    with torch.no_grad():
        peaks["reward"] = meter.peak_of(lambda: model(input_ids=ids, attention_mask=torch.ones_like(ids)))[1]


def _language_passes(plan: ReasoningPlan, model: LanguageModel, meter: Meter, peaks: Counter[str]) -> None:
    """Peaks of training on a micro-batch and of scoring it, and for a policy of a worker's share of generating."""
    from rlinf_lite.models.text.causal_lm import CausalLM

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
        cast_parameters(model, torch.bfloat16)  # as in `_passes`
    peaks["model" if isinstance(model, CausalLM) else "critic"] = meter.activations(model, loss)
    if isinstance(model, CausalLM):  # nothing trains there, of which autocast would keep copies
        model.requires_grad_(False)
        with torch.no_grad(), autocast("cpu", precision, on_gpu):
            peaks["scoring"] = meter.peak_of(loss)[1]
            acts_in_bf16 = rollout_dtype(config, slots(config.cluster)[0]) == "bf16"
            cast_parameters(model, torch.bfloat16 if acts_in_bf16 else torch.float32)
            peaks["keys and values"], peaks["generating"] = _generating(plan, model, meter)


def _generating(plan: ReasoningPlan, model: CausalLM, meter: Meter) -> tuple[int, int]:
    """Bytes of keys and values, and besides them the peak of the prompts' pass and of one for a token each, which
    recordings have once more, in memory that they share."""
    config, workers = plan.config, plan.size("rollout") or 1
    prompt, response = config.data.max_prompt_length, config.rollout.max_response_length
    prompts = -(-config.data.num_prompts // workers)
    rows = prompts * (config.algorithm.group_size + (config.algorithm.adv_type == "remax"))
    if config.runner.val_check_interval > 0:  # how many prompts files hold is not known yet
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
    return held, max(peak - held, later) + recorded * later


def _role(plan: ReasoningPlan, role: str, found: Estimate, peaks: Counter[str]) -> RankMemory:
    config, size = plan.config, plan.size(role) or 1
    counts, fused = found.models["critic" if role == "critic" else "model"], fused_roles(config)
    kind = "actor" if role in ("critic", "reference") else role
    host = {"interpreter": INTERPRETER_BYTES[kind] + TRANSFORMERS_BYTES}
    host["batch"] = 2 * -(-plan.num_samples // size) * found.sample_bytes  # as sent, and joined
    if role in ("actor", "critic"):
        if role == "actor" and "rollout" not in fused:
            host["weight sync"] = _synced(config, counts)
        activations = peaks["critic" if role == "critic" else "model"]
        return _training(plan, role, counts, activations, host)
    if role == "reference":
        held, working = {"weights": _part(plan, role, counts, counts.num_bytes)}, {"scoring": peaks["scoring"]}
        if _shards(plan, role) > 1:
            working["gathered layers"] = _gathered(config.actor.precision, counts)
        return RankMemory(held, working, host, start=_start(plan, role, counts))
    if role == "rollout":
        return _acting(plan, counts, {name: peaks[name] for name in ("keys and values", "generating")}, host)
    if "reward model" not in found.models:
        return RankMemory({}, {}, host)
    counts = found.models["reward model"]
    return RankMemory({"weights": counts.num_bytes + counts.buffer_bytes}, {"scoring": peaks["reward"]}, host)


# both


def _shards(plan: Plan | ReasoningPlan, role: str) -> int:
    return (plan.size(role) or 1) if plan.config.actor.strategy == "fsdp" else 1


def _is_whole(plan: Plan | ReasoningPlan, role: str) -> bool:
    """Whether a rank has all of a model that trains."""
    return (plan.size(role) or 1) == 1 or plan.config.actor.strategy not in ("fsdp", "tensor_parallel")


def _part(plan: Plan | ReasoningPlan, role: str, counts: Counts, number: int) -> int:
    """Of a number that all parameters have a part in, that of the parameters which a rank has."""
    if isinstance(plan, ReasoningPlan) and plan.config.actor.strategy == "tensor_parallel":
        whole = number * counts.root // counts.parameters  # what is in no layer
        return whole + (number - whole) // plan.config.actor.tensor_model_parallel_size
    return number // _shards(plan, role)


def _gathered(precision: str, counts: Counts) -> int:
    """What FSDP2 holds whole: the root, a layer, and the next one."""
    return (_BF16 if precision == "bf16" else _FP32) * (counts.root + 2 * counts.largest_unit)


def _start(plan: Plan | ReasoningPlan, role: str, counts: Counts) -> int:
    return 0 if _is_whole(plan, role) else counts.num_bytes + counts.buffer_bytes


def _acting(plan: Plan | ReasoningPlan, counts: Counts, working: dict[str, int], host: dict[str, int]) -> RankMemory:
    """A rollout worker: parameters of its own, unless the actor of its process has all of them."""
    config, device = plan.config, slots(plan.config.cluster)[0]
    if {"actor", "rollout"} <= set(fused_roles(config)) and _is_whole(plan, "actor"):
        return RankMemory({}, working, host)
    parameters = _acting_bytes(config, counts)
    if device == "cpu" or not config.rollout.offload:
        return RankMemory({"weights": parameters + counts.buffer_bytes}, working, host)
    # in host memory they are in the segment, which is counted for the node
    held = {"buffers": counts.buffer_bytes}
    return RankMemory(held, {"weights": parameters, **working}, host, gives_back=True)


def _acting_bytes(config: Config | ReasoningConfig, counts: Counts) -> int:
    """Of a rollout worker's parameters."""
    low = rollout_dtype(config, slots(config.cluster)[0]) == "bf16"
    return _BF16 * counts.parameters if low else counts.num_bytes


def _training(
    plan: Plan | ReasoningPlan, role: str, counts: Counts, activations: int, host: dict[str, int]
) -> RankMemory:
    """A process that trains a model, alone or as one of several that have shards of it: fp32 weights, AdamW."""
    config, shards = plan.config, _shards(plan, role)
    precision = config.actor.precision
    gradients = _part(plan, role, counts, _FP32 * counts.trained)
    working = {"gradients": gradients, "activations": activations}
    together = config.actor.tensor_model_parallel_size if isinstance(config, ReasoningConfig) else 1
    if config.actor.strategy != "fsdp" and (plan.size(role) or 1) > together:
        working["averaged gradients"] = max(gradients - activations, 0)  # a copy, when activations are gone
    if shards > 1:
        # and gradients of one of them before they are reduced
        element, share_trained = _BF16 if precision == "bf16" else _FP32, counts.trained / counts.parameters
        unreduced = int((element + _FP32) * max(counts.root, counts.largest_unit) * share_trained)
        working["gathered layers"] = _gathered(precision, counts) + unreduced
    elif precision == "bf16" and not _is_whole(plan, role):
        working["copies in bf16"] = _part(plan, role, counts, _BF16 * counts.parameters)  # autocast's, of its part
    weights = counts.num_bytes
    if isinstance(config, Config) and config.actor.frozen_dtype == "bf16":
        weights -= (_FP32 - _BF16) * (counts.parameters - counts.trained)
    held = {"weights": _part(plan, role, counts, weights) + counts.buffer_bytes}
    if config.runner.task_type == "eval":
        working = {}
    else:
        held["AdamW"] = _part(plan, role, counts, 2 * _FP32 * counts.trained)
    if role == "actor" and max_staleness(config):  # what `training.earlier` keeps
        host = {**host, "earlier weights": _part(plan, role, counts, _FP32 * counts.trained)}
    start = _start(plan, role, counts)
    if role != "actor" or not config.actor.offload or slots(config.cluster)[0] == "cpu":
        return RankMemory(held, working, host, start=start)
    # rollout workers act with the actor's own, or it scores some responses while they make the next ones
    stays = {"actor", "rollout"} <= set(fused_roles(config)) and _is_whole(plan, role)
    if isinstance(config, ReasoningConfig):
        stays = stays or config.rollout.pipeline_stage_num > 1 or config.algorithm.filter_groups
    away = {name: held.pop(name) for name in list(held) if name == "AdamW" or not stays}
    return RankMemory(
        held, {**away, **working}, {**host, "offloaded": sum(away.values())}, gives_back=True, start=start
    )


def _synced(config: Config | ReasoningConfig, counts: Counts) -> int:
    """What an actor sends weights through: on a CPU the segment, from a GPU buckets on their way into it."""
    sent = _acting_bytes(config, counts)
    return sent if slots(config.cluster)[0] == "cpu" else min(sent, config.weight_sync.bucket_bytes)
