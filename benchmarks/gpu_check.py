"""Check of a GPU in 8 minutes: whether everything runs, whether results are right, and how fast it is.

    python benchmarks/gpu_check.py                                   # every row, the most important ones first
    python benchmarks/gpu_check.py --rows pushcube openvla_lora
    python benchmarks/gpu_check.py --rehearse                        # tiny sizes on a CPU, to test the script itself

Each row runs in a separate process with a time limit, and is written to results/gpu_check.jsonl when it ends, so that a
row that fails or is cut off does not affect others. It replaces the earlier result of the same row; other rows stay. A
row that failed has an `error`. Results of --rehearse go to gpu_check_rehearsal.jsonl in the temporary directory.
Weights are random: nothing is fetched. `update_of_peak` (MFU) does not count the recomputation of checkpointing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, machine_record, print_table, rounded, say
from policy_bench import Contestant, peak_of
from weight_sync_bench import Actor, Rollout, Sync

from rlinf_lite.config import load_config
from rlinf_lite.config.explain import yaml_text
from rlinf_lite.config.plan import plan_of
from rlinf_lite.models.text.causal_lm import CausalLM
from rlinf_lite.models.text.presets import preset
from rlinf_lite.models.training_options import Recompute, TrainingOptions
from rlinf_lite.preview.memory import estimate
from rlinf_lite.scheduler import Cluster, wait_all
from rlinf_lite.training.precision import autocast

TOTAL_S = 480
WARM_UP = 3  # calls; the last one records acting as a CUDA graph
GIB = 2**30
Row = Callable[[bool], dict[str, Any]]
_ONE_CARD = ["cluster.accelerator=cuda", "cluster.num_gpus_per_node=1"]
_ONE_CARD += [f"cluster.component_placement.{role}=0" for role in ("env", "rollout", "actor")]
ROWS: dict[str, tuple[int, Row]] = {}
"""Time limit in seconds and function of each row, by name, the most important ones first."""


def row(limit_s: int) -> Callable[[Row], Row]:
    def add(function: Row) -> Row:
        ROWS[function.__name__] = (limit_s, function)
        return function

    return add


@row(40)
def device(rehearse: bool) -> dict[str, Any]:
    """The GPU's name and memory, and its speed for copies and bf16 matrices, for comparison with all other figures."""
    where, n = _device(rehearse), 256 if rehearse else 8192
    a = torch.randn(n, n, device=where, dtype=torch.bfloat16)
    source = torch.empty(n * n, dtype=torch.float32, device=where)
    host = torch.empty(n * n, dtype=torch.float32, pin_memory=not rehearse)
    size = 4 * n * n
    found: dict[str, Any] = {
        "matmul_bf16_tflops": 2 * n**3 / _seconds(lambda: a @ a, where) / 1e12,
        "device_copy_gb_s": 2 * size / _seconds(lambda: source.clone(), where) / 1e9,
        "to_host_gb_s": size / _seconds(lambda: host.copy_(source), where) / 1e9,
        "from_host_gb_s": size / _seconds(lambda: source.copy_(host), where) / 1e9,
    }
    if not rehearse:
        found |= {"name": torch.cuda.get_device_name(), "memory_gib": torch.cuda.mem_get_info()[1] / GIB}
        found["peak_bf16_tflops"] = (peak := peak_of(found["name"])) and peak / 1e12
    return found


@row(100)
def tabletop(rehearse: bool) -> dict[str, Any]:
    """Ten steps of the tiny VLA's PPO with all roles on the card, and its memory compared with the --dry-run."""
    return _train("embodiment/tabletop_ppo_vla", 2 if rehearse else 10, rehearse)


@row(180)
def pushcube(rehearse: bool) -> dict[str, Any]:
    """PPO on PushCube, simulated on the card: env steps/s, and greedy success at the end."""
    sizes = ["env.train.num_envs=1024", "env.eval.num_envs=128", "env.eval.num_episodes=128"]
    sizes += ["actor.global_batch_size=4096", "actor.micro_batch_size=4096", "env.options.sim_backend=physx_cuda"]
    return _train(
        "embodiment/maniskill_pushcube_ppo_mlp", 2 if rehearse else 25, rehearse, *([] if rehearse else sizes)
    )


@row(90)
def openvla_lora(rehearse: bool) -> dict[str, Any]:
    """OpenVLA-7B with LoRA of rank 32, bf16: acting and an update, and their memory, measured and predicted."""
    return _policy("openvla", rehearse, size="7b", lora_rank=32, checkpointing=True)


@row(80)
def pi0(rehearse: bool) -> dict[str, Any]:
    """pi0 at its published size, bf16, with updates of only the expert."""
    return _policy("pi0", rehearse, size="published", trainable="expert", keep_prefix=True)


@row(300)
def updates(rehearse: bool) -> dict[str, Any]:
    """Updates of OpenVLA-7B with LoRA of rank 32 and of pi0's expert with its prefix kept, bf16, by what the backward
    pass computes again, compiled or not: milliseconds, GiB, seconds of the first two, and the mean distance of
    log-probabilities from those of layers that are neither."""
    found: dict[str, Any] = {}
    lora: tuple[str, str, dict[str, Any]] = ("openvla", "7b", {})
    pi0_expert: tuple[str, str, dict[str, Any]] = ("pi0", "published", {"trainable": "expert", "keep_prefix": True})
    ways: list[tuple[Recompute, bool]] = [("none", False), ("none", True), ("full", True), ("selective", True)]
    ways += [("selective", False), ("full", False)]
    for (name, size, options), tried in ((lora, ways), (pi0_expert, ways[:2])):
        args = _args(rehearse, 32 if name == "openvla" else 0)
        contestant = Contestant(name, "tiny" if rehearse else size, 2 if rehearse else 16, args, **options)
        exact = contestant.logprobs()
        for recompute, compiled in tried[: 2 if rehearse else None]:
            label = f"{name}_{recompute}{'_compiled' if compiled else ''}"
            contestant.train_by(recompute, compiled)
            if not rehearse:
                torch.cuda.reset_peak_memory_stats()
            try:
                found[f"{label}_distance"] = float((contestant.logprobs() - exact).abs().mean())
                found[f"{label}_first_s"] = 2 * contestant.update_seconds(2)
                found[f"{label}_ms"] = 1e3 * contestant.update_seconds(1 if rehearse else 5)
                if not rehearse:
                    found[f"{label}_gib"] = torch.cuda.max_memory_allocated() / GIB
            except torch.OutOfMemoryError:
                found[f"{label}_error"] = "out of memory"
            contestant.train_by("none", compiled=False)
            exact = contestant.logprobs()  # of the weights after these updates
        del contestant
    return found


@row(60)
def weight_sync(rehearse: bool) -> dict[str, Any]:
    """Weights from an actor to two rollout workers on the same card, through host memory and by CUDA IPC, compared with
    a copy on the card."""
    accelerator = "cpu" if rehearse else "cuda"
    with Cluster(num_gpus_per_node=1, accelerator=accelerator, log_to_driver=False) as cluster:
        return _weight_sync(cluster, 4 if rehearse else 1024)


@row(40)
def precision(rehearse: bool) -> dict[str, Any]:
    """Differences of log-probabilities of the same actions: acting and training in bf16 from fp32 and from each
    other."""
    found: dict[str, Any] = {}
    tried: list[tuple[str, str, str, dict[str, Any]]] = [
        ("openvla", "openvla", "small", {}),
        ("openvla_one_by_one", "openvla", "small", {"parallel_decoding": False}),
        ("pi0", "pi0", "tiny", {}),
    ]
    for key, name, size, options in tried:
        contestant = Contestant(name, "tiny" if rehearse else size, 32, _args(rehearse), **options)
        policy, inputs, acted = contestant.policy, contestant.acted.forward_inputs, contestant.acted.logprobs.float()
        with torch.no_grad(), autocast(contestant.device, contestant.precision):
            trained = policy(inputs).logprobs.float()
        with torch.no_grad():
            exact = policy(inputs).logprobs.float()
        found[f"{key}_acting_to_fp32"] = float((acted - exact).abs().mean())
        found[f"{key}_training_to_fp32"] = float((trained - exact).abs().mean())
        found[f"{key}_acting_to_training"] = float((trained - acted).abs().mean())
    return found


@row(60)
def attention(rehearse: bool) -> dict[str, Any]:
    """Times in ms of torch's attention kernels, forward and backward, and of flash-attn if it is installed."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    where, length = _device(rehearse), 64 if rehearse else 2048
    q = torch.randn(4, 16, length, 128, device=where, dtype=torch.bfloat16, requires_grad=True)
    found: dict[str, Any] = {}
    for backend in (SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION):

        def both(backend: SDPBackend = backend) -> None:
            with sdpa_kernel(backend):
                torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()

        try:
            found[f"{backend.name.lower()}_ms"] = 1e3 * _seconds(both, where)
        except RuntimeError as error:
            found[f"{backend.name.lower()}_error"] = str(error).splitlines()[0]
    try:
        from flash_attn import flash_attn_func

        x = q.detach().transpose(1, 2).contiguous().requires_grad_()
        found["flash_attn_ms"] = 1e3 * _seconds(lambda: flash_attn_func(x, x, x, causal=True).sum().backward(), where)
    except ImportError:
        found["flash_attn_ms"] = None
    return found


@row(60)
def generation(rehearse: bool) -> dict[str, Any]:
    """Generation by a language model of the size of Qwen2.5-0.5B, bf16: 64 responses of 128 tokens with recorded steps,
    and of 64 tokens with launched ones. `agree`: the share of greedy tokens that are the same in both ways."""
    from rlinf_lite.generation import SamplingParams
    from rlinf_lite.generation.engine import TransformersEngine
    from rlinf_lite.models import graphs

    tokens = 8 if rehearse else 128
    model = _language_model(rehearse).to(torch.bfloat16)
    engine, prompts = TransformersEngine(model.eval(), 64, 32 + tokens), np.full((64, 32), 7).tolist()
    different = np.random.default_rng(0).integers(4, model.language_model.config.vocab_size, (64, 32)).tolist()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())

    def tokens_per_s(number: int, repeats: int) -> float:
        seconds = _seconds(lambda: list(engine.stream(prompts, SamplingParams(number))), _device(rehearse), repeats)
        return 64 * number / seconds

    def greedy() -> np.ndarray:
        return np.array([done.token_ids for done in engine.generate(different, SamplingParams(8, greedy=True))])

    found = {"num_parameters": num_parameters, "tokens_per_s": tokens_per_s(tokens, 2)}
    recorded = greedy()
    graphs.enabled = False  # only in this row's process
    return found | {
        "launched_tokens_per_s": tokens_per_s(tokens // 2, 1),
        "agree": float((recorded == greedy()).mean()),
    }


@row(120)
def language_update(rehearse: bool) -> dict[str, Any]:
    """Updates of that language model, all weights, bf16, on 64 rows of 32 + 128 tokens: milliseconds, by layers that
    are compiled and that are not."""
    rows, length = (4, 8) if rehearse else (64, 128)
    found: dict[str, Any] = {}
    for compiled in (False, True):
        model = _language_model(rehearse).train()
        model.prepare(TrainingOptions(compile=compiled))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
        ids = torch.full((rows, 32 + length), 7, device=_device(rehearse))
        mask = torch.ones_like(ids, dtype=torch.bool)

        def update(model: Any = model, optimizer: Any = optimizer, ids: Any = ids, mask: Any = mask) -> None:
            with autocast(ids.device, "bf16"):
                loss = -model(ids, mask, length).logprobs.mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        label = "compiled_ms" if compiled else "ms"
        found[label] = 1e3 * _seconds(update, _device(rehearse), 1 if rehearse else 5)
        del model, optimizer
    return found


def _language_model(rehearse: bool) -> CausalLM:
    """Of the size of Qwen2.5-0.5B, in fp32."""
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 151_936}
    return CausalLM.from_config(preset("tiny") | ({} if rehearse else sizes)).to(_device(rehearse))


@row(60)
def simulation(rehearse: bool) -> dict[str, Any]:
    """Frames/s of PushCube with 1,024 environments: in bare ManiSkill, and as a run steps it."""
    import gymnasium as gym

    from rlinf_lite.envs.maniskill.setup import import_maniskill
    from rlinf_lite.envs.registry import make_env

    count, steps, backend = (4, 5, "physx_cpu") if rehearse else (1024, 50, "physx_cuda")
    sizes = [f"env.train.num_envs={count}", f"env.options.sim_backend={backend}"]
    cfg = load_config("embodiment/maniskill_pushcube_ppo_mlp", [*sizes, *([] if rehearse else _ONE_CARD)])
    ours: Any = make_env(cfg.env, "train", count)
    ours.reset(list(range(count)))
    action = np.zeros((count, 1, ours.action_dim), np.float32)
    frames = count / _seconds(lambda: ours.chunk_step(action), "cpu", repeats=steps)
    ours.close()
    import_maniskill()
    bare_count = 1 if rehearse else count
    settings = {"obs_mode": "state", "control_mode": cfg.env.options.control_mode, "render_backend": "none"}
    bare: Any = gym.make("PushCube-v1", num_envs=bare_count, sim_backend=backend, **settings)
    bare.reset(seed=0)
    sample = bare.action_space.sample()
    bare_frames = bare_count / _seconds(lambda: bare.step(sample), "cpu", repeats=steps)
    return {"frames_per_s": frames, "bare_frames_per_s": bare_frames}


@row(90)
def openvla_full(rehearse: bool) -> dict[str, Any]:
    """Updates of all weights of OpenVLA-7B, if the card has memory for weights, gradients and moments: 16 bytes per
    parameter."""
    if not rehearse and torch.cuda.mem_get_info()[1] < 132 * GIB:
        return {"skipped": "needs 132 GiB"}
    return _policy("openvla", rehearse, size="7b", checkpointing=True)


@row(60)
def recorded(rehearse: bool) -> dict[str, Any]:
    """Times in ms of acting as one recorded CUDA graph, and launched operation by operation, with 32 rows and chunks of
    8 actions. `agree`: whether both chose the same actions."""
    from rlinf_lite.models import graphs

    found: dict[str, Any] = {}
    one_by_one = {"parallel_decoding": False}
    for name, size, options in (("openvla", "small", {}), ("openvla", "small", one_by_one), ("pi0", "tiny", {})):
        contestant = Contestant(name, "tiny" if rehearse else size, 4 if rehearse else 32, _args(rehearse), **options)
        contestant.policy.requires_grad_(False)
        label, acted = f"{name}_one_by_one" if options else name, []
        for graphs.enabled, way in ((True, "recorded"), (False, "launched")):  # only in this row's process
            contestant.act_seconds(WARM_UP)
            acted.append(contestant._act().actions)
            found[f"{label}_{way}_ms"] = 1e3 * contestant.act_seconds(5)
        found[f"{label}_agree"] = float(torch.equal(*acted))
    return found


@row(150)
def same_bits(rehearse: bool) -> dict[str, Any]:
    """Three steps of the tiny VLA's PPO with `runner.deterministic`, run in several ways at the same time: 1 for each
    way whose weights and optimizer are, bit for bit, those of roles in separate processes. `by_chance`: without
    `runner.deterministic`."""
    ways: dict[str, list[str]] = {
        "apart": [],
        "fused": ["cluster.fuse='actor,rollout'"],
        "offload": ["actor.offload=true", "rollout.offload=true"],
        "through_host": ["weight_sync.cuda_ipc=false"],
        "launched": ["rollout.cuda_graphs=false"],
        "by_chance": ["runner.deterministic=false"],
        "resumed": [],
    }
    return _same(ways, rehearse)


@row(150)
def shards(rehearse: bool) -> dict[str, Any]:
    """The same with two ranks on two cards: 1 for each way whose weights and optimizer are those of shards."""
    if not rehearse and torch.cuda.device_count() < 2:
        return {"skipped": "needs two GPUs"}
    two = ["cluster.num_gpus_per_node=2", "cluster.component_placement={env: '0', rollout: '0-1', actor: '0-1'}"]
    ways: dict[str, list[str]] = {
        "shards": ["actor.strategy=fsdp"],
        "replicated": ["actor.strategy=replicated"],
        "offload": ["actor.strategy=fsdp", "actor.offload=true", "rollout.offload=true"],
        "resumed": ["actor.strategy=fsdp"],
    }
    return _same({way: [*two, *overrides] for way, overrides in ways.items()}, rehearse)


def _same(ways: dict[str, list[str]], rehearse: bool) -> dict[str, float]:
    """Run all ways at the same time: 1 for each way whose result is that of the first, else 0."""
    ways = dict(list(ways.items())[: 2 if rehearse else None])
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(1 if rehearse else len(ways)) as threads:
        hashes = list(threads.map(partial(_hash_of, Path(scratch), rehearse), ways, ways.values()))
    return {way: float(found == hashes[0]) for way, found in zip(ways, hashes, strict=True)}


def _hash_of(scratch: Path, rehearse: bool, way: str, overrides: list[str]) -> str:
    """Hash of the checkpoint after three steps of the tiny VLA's PPO with `runner.deterministic`."""
    settings = [*_ONE_CARD, *(["cluster.accelerator=cpu"] if rehearse else []), "runner.deterministic=true", *overrides]
    settings += [f"runner.logger.log_path={scratch / way}", "runner.val_check_interval=-1", "runner.save_interval=1"]
    for steps in (2, 3) if way == "resumed" else (3,):
        resume = "auto" if way == "resumed" and steps == 3 else "never"
        _run("embodiment/tabletop_ppo_vla", *settings, f"runner.max_steps={steps}", f"runner.resume={resume}")
    found = sha256()
    for path in sorted((scratch / way).glob("*/checkpoints/step_000003/**/*.safetensors")):
        found.update(path.read_bytes())
    return found.hexdigest()


def _device(rehearse: bool) -> str:
    torch.backends.cudnn.allow_tf32 = False  # as in workers: exact fp32 is the reference
    return "cpu" if rehearse else "cuda"


def _seconds(work: Callable[[], Any], where: str, repeats: int = 5) -> float:
    """Mean seconds of a call, after two calls that do not count."""
    for _ in range(2):
        work()
    if where == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    if where == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def _args(rehearse: bool, lora_rank: int = 0, checkpointing: bool = False) -> argparse.Namespace:
    pixels = 32 if rehearse else 224
    sizes = {"camera": pixels, "chunk": 8, "action_dim": 7, "lora_rank": lora_rank, "checkpointing": checkpointing}
    return argparse.Namespace(device=_device(rehearse), precision="bf16", **sizes)


def _policy(
    name: str, rehearse: bool, size: str, lora_rank: int = 0, checkpointing: bool = False, **options: Any
) -> Any:
    """Speed of acting and of an update with one batch, their share of the card's peak, and their memory."""
    batch = 2 if rehearse else 16
    predicted = _predicted(name, rehearse, "tiny" if rehearse else size, batch, lora_rank, checkpointing, options)
    args = _args(rehearse, lora_rank, checkpointing)
    contestant = Contestant(name, "tiny" if rehearse else size, batch, args, **options)
    if not rehearse:
        torch.cuda.reset_peak_memory_stats()
    contestant.act_seconds(WARM_UP)
    act_s = contestant.act_seconds(1 if rehearse else 20)
    contestant.update_seconds(1 if rehearse else 2)
    update_s = contestant.update_seconds(1 if rehearse else 5)
    found = {
        "num_parameters": contestant.num_parameters,
        "act_ms": 1e3 * act_s,
        "act_env_steps_per_s": batch * args.chunk / act_s,
        # an autoregressive policy's tokens are the numbers of its actions; a flow has none
        "act_tokens_per_s": batch * args.chunk * args.action_dim / act_s if name == "openvla" else None,
        "update_ms": 1e3 * update_s,
        "update_samples_per_s": batch / update_s,
        "act_tflops": contestant.act_flops / act_s / 1e12,
        "update_tflops": contestant.update_flops / update_s / 1e12,
        "predicted_gib": predicted,
    }
    if not rehearse:
        peak = peak_of(torch.cuda.get_device_name())
        found["update_of_peak"] = contestant.update_flops / update_s / peak if peak else None
        found["memory_gib"] = torch.cuda.max_memory_allocated() / GIB
    return found


def _predicted(
    name: str, rehearse: bool, size: str, batch: int, lora_rank: int, checkpointing: bool, options: dict[str, Any]
) -> float:
    """GiB that the preview predicts for one process that acts and trains, with these sizes."""
    pixels = 32 if rehearse else 224
    given: dict[str, Any] = {"size": size, "gradient_checkpointing": checkpointing, "lora": {"rank": lora_rank}}
    given |= {"max_prompt_length": 8 if rehearse else 32, **options}
    env: dict[str, Any] = {"id": "maniskill", "task": "PickCube-v1"}
    env["options"] = {"obs_mode": "rgb" if name == "openvla" else "rgb+state", "camera_size": [pixels, pixels]}
    env["options"]["control_mode"] = "pd_ee_delta_pose"
    model = {"id": name, "num_action_chunks": 8, "options": given}
    settings = [f"model={yaml_text(model)}", f"env={yaml_text(env)}"]
    settings += ["rollout={num_chunks: 1}", "actor={precision: bf16}", f"env.train.num_envs={batch}"]
    settings += [f"env.eval.num_envs={batch}", "algorithm.update_epochs=1", "rollout.pipeline_stage_num=1"]
    settings += [f"actor.{key}={batch}" for key in ("global_batch_size", "micro_batch_size")]
    settings += [*_ONE_CARD[1:], f"cluster.accelerator={'cpu' if rehearse else 'cuda'}"]
    found = estimate(plan_of(load_config("embodiment/tabletop_ppo_vla", settings, elsewhere=True)))
    actor, rollout = found.ranks["actor"], found.ranks["rollout"]
    peak = max(sum(actor.working.values()), sum(rollout.working.values()))
    return (sum(actor.held.values()) + peak) / GIB


def _weight_sync(cluster: Cluster, mib: int) -> dict[str, float]:
    actor = Actor.create_group().launch(cluster, "0", name="actor")
    rollout = Rollout.create_group().launch(cluster, "0:0-1", name="rollout")
    size, found = mib * 2**20, {}
    try:
        for way, cuda_ipc in (("", False), ("ipc_", True)):
            wait_all(actor.init(mib, cuda_ipc), rollout.init(mib))
            sync = Sync(actor, rollout)
            found[f"{way}first_s"] = sync()
            found[f"{way}sync_gb_s"] = size / min(sync() for _ in range(5)) / 1e9
        found["device_copy_gb_s"] = size / min(actor.device_copy().wait()[0] for _ in range(5)) / 1e9
    finally:
        rollout.shutdown()
        actor.shutdown()
    return found


def _train(config: str, steps: int, rehearse: bool, *overrides: str) -> dict[str, Any]:
    """A run, started as a user starts it, with all roles on one card."""
    with tempfile.TemporaryDirectory() as scratch:
        settings = [f"runner.logger.log_path={scratch}", *overrides]
        settings += [f"runner.{key}={steps}" for key in ("max_steps", "val_check_interval")]
        settings += ["runner.save_interval=-1", "runner.report=false"]
        settings += ["env.eval.num_envs=8", "env.eval.num_episodes=8"] if rehearse else _ONE_CARD
        predicted = estimate(plan_of(load_config(config, settings)))
        _run(config, *settings)
        (metrics,) = Path(scratch).glob("*/metrics.jsonl")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    trained = [line for line in lines if "time/step" in line][1:]
    keys = ("perf/env_steps_per_s", "time/step", "time/generate_rollouts", "time/training", "time/sync_weights")
    found: dict[str, Any] = {key: float(np.median([line[key] for line in trained])) for key in keys}
    found["success"] = next(line["eval/success_once"] for line in reversed(lines) if "eval/success_once" in line)
    found["rollout/logprob_drift"] = max(line["rollout/logprob_drift"] for line in trained)
    found["actor_peak_gib"] = max(line["perf/peak_memory_bytes"] for line in trained) / GIB
    found["predicted_gib"] = {
        name: (device + host if rehearse else device) / GIB for name, (device, host) in predicted.processes.items()
    }
    return found


def _run(config: str, *settings: str) -> None:
    words = [sys.executable, "-m", "rlinf_lite.cli", "train", "--config-name", config, *settings]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}\n{(done.stdout + done.stderr)[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--total-s", type=float, default=TOTAL_S, help="no row begins after this time")
    parser.add_argument("--out", type=Path, help="file to write (default: results/gpu_check.jsonl; see --rehearse)")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--alone", choices=list(ROWS), help="measure one row in this process and print it")
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(rounded(ROWS[args.alone][1](args.rehearse))), flush=True)
        return
    if not args.rehearse and not torch.cuda.is_available():
        sys.exit(
            f"torch {torch.__version__} sees no GPU. Check nvidia-smi, and install the CUDA build of torch. --rehearse "
            "needs no GPU."
        )
    elsewhere = Path(tempfile.gettempdir()) / "gpu_check_rehearsal.jsonl"
    out: Path = args.out or (elsewhere if args.rehearse else RESULTS / "gpu_check.jsonl")
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = out.read_text().splitlines() if out.exists() else []
    records = {record["row"]: record for record in map(json.loads, lines)}
    began, table = time.time(), []
    for name in args.rows:
        left = args.total_s - (time.time() - began)
        found = {"skipped": "no time left"} if left < 10 else _measured(name, min(ROWS[name][0], left), args.rehearse)
        if "skipped" not in found or name not in records:
            records[name] = rounded({"row": name, **found, "machine": machine_record()})
            unfinished = out.with_name(f"{out.name}.new")
            unfinished.write_text("".join(f"{json.dumps(record)}\n" for record in records.values()))
            unfinished.replace(out)
        text = ", ".join(f"{key} {value:.4g}" for key, value in found.items() if isinstance(value, float))
        table.append([name, str(found.get("error", found.get("skipped", text))).splitlines()[-1]])
        say(f"{name}: {table[-1][1]}")
    print_table("GPU check", ["row", "found"], table)
    say(f"written: {os.path.relpath(out)}")


def _measured(name: str, limit_s: float, rehearse: bool) -> dict[str, Any]:
    """The result that a row's process printed last, or its error."""
    words = [sys.executable, __file__, "--alone", name, *(["--rehearse"] if rehearse else [])]
    start = time.time()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        return {"error": f"not done after {limit_s:.0f} s", "took_s": time.time() - start}
    if process.returncode:
        return {"error": err[-3000:] or f"exit code {process.returncode}", "took_s": time.time() - start}
    return json.loads(out.splitlines()[-1]) | {"took_s": time.time() - start}


if __name__ == "__main__":
    main()
