"""Bytes per rank of a run, estimated from its config alone; needs no torch.

What is counted follows the workers: an actor keeps fp32 weights, gradients and AdamW's two moments of what trains, all
sharded over the ranks; a rollout worker keeps the whole policy in fp32. Activations are those of one micro-batch.
What torch, CUDA and Ray take for themselves comes on top: about 0.4 GiB of host memory per process, and on a GPU 0.5
to 1 GiB per process.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rlinf_lite.config.plan import Plan, observed, slots
from rlinf_lite.preview.footprint import Sizes, policy_sizes

_FP32, _BF16 = 4, 2


@dataclass(frozen=True)
class RankMemory:
    """One process of a component: bytes by what they are for."""

    device: dict[str, int]
    """On its slot: GPU memory, or on a CPU cluster host memory."""
    host: dict[str, int]

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def total_bytes(self) -> int:
        return self.device_bytes + sum(self.host.values())


@dataclass(frozen=True)
class Estimate:
    """A run's memory, as far as its config says."""

    sizes: Sizes
    ranks: dict[str, RankMemory]
    """By component; the env's is that of its observations alone, the simulator's own is not known."""
    slot_bytes: dict[int, int]
    """Device memory of all processes that share a slot."""
    node_host_bytes: int
    """Host memory of all processes, on the fullest node."""
    shared_bytes: int
    """Of it in /dev/shm, at the most: weights, a step's trajectories and observations on their way."""


def estimate(plan: Plan) -> Estimate | None:
    """None where sizes are known only once environment and policy are built."""
    seen = observed(plan.config)
    sizes = policy_sizes(plan.config, seen) if seen is not None else None
    if seen is None or sizes is None or plan.num_samples is None:
        return None
    obs_bytes = 4 * seen.state_dim + sum(3 * height * width for height, width in seen.cameras.values())
    ranks = {"actor": _actor(plan, sizes), "rollout": _rollout(plan, sizes), "env": _env(plan, obs_bytes)}
    on_cpu = slots(plan.config.cluster)[0] == "cpu"
    traffic = plan.num_samples * sizes.sample_bytes + 2 * plan.config.env.train.num_envs * obs_bytes
    return Estimate(
        sizes=sizes,
        ranks=ranks,
        slot_bytes=_per_slot(plan, ranks),
        node_host_bytes=_fullest_node(plan, ranks, on_cpu),
        shared_bytes=traffic + on_cpu * _FP32 * sizes.parameters,
    )


def _actor(plan: Plan, sizes: Sizes) -> RankMemory:
    config, ranks = plan.config, plan.size("actor") or 1
    assert plan.num_samples is not None
    rows = min(config.actor.micro_batch_size, config.actor.global_batch_size // ranks)
    device = {
        "weights": _FP32 * sizes.parameters // ranks,
        "gradients": _FP32 * sizes.trained // ranks,
        "AdamW": 2 * _FP32 * sizes.trained // ranks,
    }
    bf16 = config.actor.precision == "bf16"
    if ranks > 1:
        device["gathered layers"] = _gathered(sizes, _BF16 if bf16 else _FP32)
    elif bf16:  # autocast keeps copies of what trains during a forward pass, and of what its backward pass reads
        options = config.model.options
        lora = getattr(options, "lora", None)  # of policies that have such a thing
        frozen = lora is not None and lora.rank > 0 and options.gradient_checkpointing
        device["bf16 copies"] = _BF16 * (sizes.largest_unit + sizes.root if frozen else sizes.parameters)
    device["activations"] = rows * (sizes.activation_bytes + sizes.working_bytes)
    return RankMemory(
        device,
        {
            "trajectories": plan.num_samples // ranks * sizes.sample_bytes,
            "weight sync": min(_FP32 * sizes.parameters, config.weight_sync.bucket_bytes),
        },
    )


def _gathered(sizes: Sizes, element: int) -> int:
    """What FSDP2 holds whole: the root, a layer, the next one, and gradients of one of them before they are reduced."""
    whole = element * (sizes.root + 2 * sizes.largest_unit)
    share_trained = sizes.trained / sizes.parameters
    return whole + int((element + _FP32) * max(sizes.root, sizes.largest_unit) * share_trained)


def _rollout(plan: Plan, sizes: Sizes) -> RankMemory:
    config, ranks = plan.config, plan.size("rollout") or 1
    assert plan.num_samples is not None
    rows = -(-config.env.train.num_envs // config.rollout.pipeline_stage_num // ranks)
    return RankMemory(
        {"weights": _FP32 * sizes.parameters, "acting": rows * sizes.acting_bytes},
        {"trajectories": -(-plan.num_samples // ranks) * sizes.sample_bytes},
    )


def _env(plan: Plan, obs_bytes: int) -> RankMemory:
    envs = plan.config.env.train.num_envs + plan.config.env.eval.num_envs
    return RankMemory({}, {"observations": 2 * envs // (plan.size("env") or 1) * obs_bytes})


def _per_slot(plan: Plan, ranks: dict[str, RankMemory]) -> dict[int, int]:
    """A process that owns several slots uses the first."""
    used: Counter[int] = Counter()
    for name, processes in plan.placements.items():
        for process in processes:
            used[process.slots[0]] += ranks[name].device_bytes
    return dict(sorted(used.items()))


def _fullest_node(plan: Plan, ranks: dict[str, RankMemory], on_cpu: bool) -> int:
    per_node = slots(plan.config.cluster)[1]
    used: Counter[int] = Counter()
    for name, processes in plan.placements.items():
        for process in processes:
            memory = ranks[name]
            used[process.slots[0] // per_node] += memory.total_bytes if on_cpu else sum(memory.host.values())
    return max(used.values())
