"""Write the tables of docs/memory.md: the memory of a 7B policy on 1 to 8 GPUs, computed by rlinf_lite.preview.

python tools/make_memory_tables.py
"""

from __future__ import annotations

import functools
from pathlib import Path

from rlinf_lite.config import Config, load_config
from rlinf_lite.config.plan import plan_of
from rlinf_lite.preview.dry_run import describe
from rlinf_lite.preview.memory import Estimate, estimate

OUT = Path(__file__).resolve().parents[1] / "docs" / "memory.md"
CONFIG = "tabletop_ppo_vla"
SETTINGS = [
    "rollout.model_dir=null",
    "model.options.size=7b",
    "model.num_action_chunks=8",
    "model.options.max_prompt_length=null",
    "env.id=maniskill",
    "env.task=PickCube-v1",
    "env.options.sim_backend=physx_cpu",
    "env.options.obs_mode=rgb",
    "env.options.camera_size=[224,224]",
    "env.options.control_mode=pd_ee_delta_pose",
    "env.train.num_envs=128",
    "env.eval.num_envs=16",
    "rollout.num_chunks=4",
    "rollout.pipeline_stage_num=2",
    "actor.global_batch_size=128",
    "actor.precision=bf16",
    "model.options.gradient_checkpointing=full",
    "cluster.accelerator=cuda",
]
NUM_GPUS = (1, 2, 4, 8)
METHODS = {"all weights": [], "LoRA, rank 32": ["model.options.lora.rank=32"]}
MICRO_BATCH = 8
CARD_BYTES = 80e9
RESERVED_BYTES = 4 * 2**30  # CUDA contexts, NCCL, the allocator's gaps
BEGIN, END = "<!-- begin: computed by tools/make_memory_tables.py -->", "<!-- end -->"
ABOUT = """OpenVLA-OFT's architecture, {parameters:.2f} B parameters: one camera of 224 x 224, chunks of 8 actions of 7
dimensions, `actor.precision: bf16`, `model.options.gradient_checkpointing: full`, micro-batches of {micro}. GiB per
GPU; a card of 80 GB has {card:.1f} GiB, of which {reserved:.0f} are left to CUDA, NCCL and the allocator's gaps."""


@functools.cache
def computed(method: str, num_gpus: int, *overrides: str) -> Estimate:
    """The estimate with an actor and a rollout worker on each GPU. Takes about 10 s."""
    found = estimate(plan_of(config_of(method, num_gpus, *overrides)))
    assert not found.unknown, found.unknown
    return found


def config_of(method: str, num_gpus: int, *overrides: str) -> Config:
    slots = f"0-{num_gpus - 1}"
    settings = [
        *SETTINGS,
        *METHODS[method],
        f"actor.micro_batch_size={MICRO_BATCH}",
        f"cluster.num_gpus_per_node={num_gpus}",
        f"cluster.component_placement={{env: '0', rollout: '{slots}', actor: '{slots}'}}",
        *overrides,
    ]
    return load_config(CONFIG, settings)


def page() -> str:
    """The text of docs/memory.md with current tables."""
    before, rest = OUT.read_text().split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


def tables() -> str:
    about = ABOUT.format(
        parameters=computed("all weights", 1).models["policy"].parameters / 1e9,
        micro=MICRO_BATCH,
        card=CARD_BYTES / 2**30,
        reserved=RESERVED_BYTES / 2**30,
    )
    return "\n\n".join([about, _ranks(), _dry_run(), _activations(), _samples()])


def _ranks() -> str:
    lines = [
        "| trains | GPUs | weights | gradients | AdamW | gathered layers | activations | actor | rollout | both on one "
        "card | in turn |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [row(method, num_gpus) for method in METHODS for num_gpus in NUM_GPUS]
    about = (
        "**Bold** fits; in turn: with `actor.offload` and `rollout.offload`. On one GPU activations include autocast's"
    )
    return "\n".join([*lines, "", about, "bf16 copies of weights."])


def _dry_run() -> str:
    """The output of `--dry-run` about memory, for all weights on two GPUs, with roles that work in turn."""
    text = describe(config_of("all weights", 2, "actor.offload=true", "rollout.offload=true"))
    memory = text.split("memory per rank, estimated\n")[1].split("\n\n")[0]
    lines = "\n".join(line.removeprefix("  ") for line in memory.splitlines())
    return (
        f"`--dry-run` of all weights on two GPUs, with `actor.offload` and `rollout.offload`:\n\n```text\n{lines}\n```"
    )


def row(method: str, num_gpus: int) -> str:
    """A line of the first table. Figures for more than 2 GPUs are scaled from 2: shards, and a rollout worker's
    rows."""
    found, share = computed(method, min(num_gpus, 2)), min(num_gpus, 2) / num_gpus
    actor, rollout = found.ranks["actor"], found.ranks["rollout"]
    parts = {name: actor.held[name] * share for name in ("weights", "AdamW")}
    parts["gradients"] = actor.working["gradients"] * share
    parts |= {name: actor.working.get(name, 0) for name in ("gathered layers", "activations")}
    acting = rollout.held["weights"] + rollout.working["acting"] * share
    training = sum(parts.values())
    both = training, acting, training + acting, max(training, acting)
    names = ("weights", "gradients", "AdamW", "gathered layers", "activations")
    cells = [method, str(num_gpus), *(_gib(parts[name]) for name in names), *map(_verdict, both)]
    return "| " + " | ".join(cells) + " |"


def _activations() -> str:
    """The table of activations per sample, for one of several ranks: weights are gathered in bf16 and not copied."""
    title = "`model.options.gradient_checkpointing`: GiB per sample, 7B, bf16"
    lines = [f"| {title} | {' | '.join(METHODS)} |", "|---|---|---|"]
    for way in ("none", "selective", "full"):
        overrides = () if way == "full" else (f"model.options.gradient_checkpointing={way}",)
        peaks = [computed(method, 2, *overrides).ranks["actor"].working["activations"] for method in METHODS]
        lines.append(f"| {way} | {' | '.join(f'{peak / MICRO_BATCH / 2**30:.2f}' for peak in peaks)} |")
    return "\n".join(lines)


def _samples() -> str:
    sample_bytes = computed("all weights", 1).sample_bytes
    return (
        f"A sample in a trajectory takes {sample_bytes / 1e3:.0f} kB of host memory, 150 kB of them pixels: 128\n"
        f"environments x 16 decisions are {128 * 16 * sample_bytes / 2**30:.2f} GiB."
    )


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f}"


def _verdict(count: float) -> str:
    return f"**{_gib(count)}**" if count + RESERVED_BYTES <= CARD_BYTES else _gib(count)


def main() -> None:
    OUT.write_text(page())
    print(f"written to {OUT}")


if __name__ == "__main__":
    main()
