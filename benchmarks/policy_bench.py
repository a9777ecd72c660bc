"""The VLA policy alone: acting and an actor's update, by size.

    python benchmarks/policy_bench.py                                       # tiny and small on one CPU thread
    python benchmarks/policy_bench.py --device cuda --sizes 7b --precision bf16 --camera 224 --chunk 8 --repeats 10
    python benchmarks/policy_bench.py --device cuda --sizes 7b --precision bf16 --camera 224 --chunk 8 --lora-rank 32

Acting is `predict_action_batch` on observations in host memory, resizing and tokenising included; its rate is of env
steps, batch * chunk per call. An update is forward, PPO loss, backward and AdamW on one micro-batch. Operations are
counted by torch's FlopCounterMode; the share of a chip's peak is that of its dense bf16 rate, where it is in PEAK.
The target is one number: tiny acts at 2,000 env steps/s, batch 8, chunk 4, one thread. Weights are random.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import Comparison, Report, interleaved, median, print_table, say
from torch.utils.flop_counter import FlopCounterMode

from rlinf_lite.algorithms import LossInputs, actor_critic_loss
from rlinf_lite.config import AlgorithmConfig
from rlinf_lite.config.schema import ModelConfig
from rlinf_lite.envs import EnvSpec
from rlinf_lite.models.base import NOISE_KEY, Policy
from rlinf_lite.models.vla.policy import OpenVLAPolicy
from rlinf_lite.training.precision import autocast

TARGET, TARGET_BATCH, TARGET_CHUNK = 2_000, 8, 4
PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}
"""Dense bf16 operations per second, by a part of the GPU's name (NVIDIA's data sheets)."""


class Contestant:
    """One policy, and one batch that it acts on and is updated with."""

    def __init__(self, size: str, batch: int, args: argparse.Namespace) -> None:
        self.batch, self.device, self.precision = batch, torch.device(args.device), args.precision
        cameras = {"camera": (args.camera, args.camera)}
        bounds = [-1.0] * args.action_dim, [1.0] * args.action_dim
        spec = EnvSpec(args.action_dim, None, cameras, *bounds, max_episode_steps=100, has_instruction=True)
        model = ModelConfig(
            id="openvla",
            num_action_chunks=args.chunk,
            options={
                "size": size,
                "max_prompt_length": 8 if size != "7b" else 32,
                "lora": {"rank": args.lora_rank},
                "gradient_checkpointing": args.checkpointing,
            },
        )
        with self.device:
            self.policy: Policy = OpenVLAPolicy.from_config(model, spec)
        trained = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        self.num_parameters = sum(parameter.numel() for parameter in self.policy.parameters())
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
        rng = np.random.default_rng(0)
        self.obs: dict[str, Any] = {
            "images": {"camera": rng.integers(0, 256, (batch, args.camera, args.camera, 3), dtype=np.uint8)},
            "instruction": ["pick up the red block"] * batch,
            NOISE_KEY: np.arange(batch, dtype=np.uint64),
        }
        self.acted = self._act()
        with FlopCounterMode(display=False) as counter:
            self._act()
        self.act_flops = counter.get_total_flops()
        with FlopCounterMode(display=False) as counter:
            self._update()
        self.update_flops = counter.get_total_flops()

    def act_seconds(self, calls: int) -> float:
        return self._seconds(self._act, calls)

    def update_seconds(self, calls: int) -> float:
        return self._seconds(self._update, calls)

    def _seconds(self, work: Callable[[], Any], calls: int) -> float:
        self._synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        self._synchronize()
        return (time.perf_counter() - start) / calls

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _act(self) -> Any:
        self.policy.eval()
        with torch.no_grad(), autocast(self.device, self.precision):
            return self.policy.predict_action_batch(self.obs, "train")

    def _update(self) -> None:
        self.policy.train()
        with autocast(self.device, self.precision):
            output = self.policy(self.acted.forward_inputs)
        old = self.acted.logprobs.flatten(1)
        ones = torch.ones_like(old)
        inputs = LossInputs(
            logprobs=output.logprobs.flatten(1),
            old_logprobs=old,
            advantages=ones,
            mask=ones.bool(),
            values=output.values.expand_as(old),
            returns=ones,
        )
        actor_critic_loss("ppo", inputs, AlgorithmConfig()).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=["tiny", "small", "7b"], default=["tiny", "small"])
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on a CPU")
    parser.add_argument("--camera", type=int, default=64, help="pixels of a side")
    parser.add_argument("--chunk", type=int, default=TARGET_CHUNK)
    parser.add_argument("--action-dim", type=int, default=3)
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement, about")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    suffix = "" if args.device == "cpu" else f"_{args.device}" + ("_lora" if args.lora_rank else "")
    report = Report(f"policy{suffix}", vars(args))
    rows = [row for size in args.sizes for batch in args.batches for row in measure(size, batch, args, report)]
    print_table(
        f"on {device_name(args.device)}, {args.precision}",
        ["what", "ms", "env steps/s", "action tokens/s", "samples/s", "TFLOP/s", "of peak"],
        rows,
    )
    report.write()


def measure(size: str, batch: int, args: argparse.Namespace, report: Report) -> list[list[str]]:
    """Rows of the table for one size and batch; figures go to the report."""
    contestant = Contestant(size, batch, args)
    say(f"{size}: {contestant.num_parameters:,} parameters, batch {batch}")
    act_calls = max(int(args.seconds / contestant.act_seconds(2)), 1)
    update_calls = max(int(args.seconds / contestant.update_seconds(2)), 1)
    found = interleaved(
        {
            "acting": lambda: 1e3 * contestant.act_seconds(act_calls),
            "update": lambda: 1e3 * contestant.update_seconds(update_calls),
        },
        args.repeats,
        unit="ms",
    )
    for what, figures in found.items():
        report.measurements[f"{size}, batch {batch}: {what}, ms"] = figures
    act_ms, update_ms = median(found["acting"]), median(found["update"])
    steps_per_s = 1e3 * batch * args.chunk / act_ms
    if (size, batch, args.chunk, args.device) == ("tiny", TARGET_BATCH, TARGET_CHUNK, "cpu"):
        what = f"{size} acts, batch {batch}, chunk {args.chunk}, {args.threads} thread"
        report.comparisons.append(
            Comparison(what, steps_per_s, "needed", TARGET, "env steps/s", steps_per_s / TARGET, 1.0, at_least=True)
        )
    acting_only = [f"{steps_per_s:,.0f}", f"{steps_per_s * args.action_dim:,.0f}", "-"]
    update_only = ["-", "-", f"{1e3 * batch / update_ms:,.0f}"]
    act_rate, update_rate = contestant.act_flops / act_ms * 1e3, contestant.update_flops / update_ms * 1e3
    return [
        [f"{size}, batch {batch}: acting", f"{act_ms:.3g}", *acting_only, *speed(act_rate, args.device)],
        [f"{size}, batch {batch}: update", f"{update_ms:.3g}", *update_only, *speed(update_rate, args.device)],
    ]


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def speed(rate: float, device: str) -> tuple[str, str]:
    """TFLOP/s, and their share of the GPU's dense bf16 rate; - where that is not known."""
    name = device_name(device)
    return f"{rate / 1e12:.3g}", next((f"{rate / peak:.0%}" for part, peak in PEAK.items() if part in name), "-")


if __name__ == "__main__":
    main()
