"""Speed of VLA policies outside a run: acting and an actor's update, by size.

    python benchmarks/policy_bench.py                                       # tiny and small on one CPU thread
    python benchmarks/policy_bench.py --policies pi0 pi05 smolvla           # flows
    python benchmarks/policy_bench.py --device cuda --sizes 7b --precision bf16 --camera 224 --chunk 8 --repeats 10
    python benchmarks/policy_bench.py --device cuda --sizes 7b --precision bf16 --camera 224 --chunk 8 --lora-rank 32

Acting is `predict_action_batch` on observations in host memory, with resizing and tokenising; its rate counts env
steps, batch * chunk per call. An update is forward, PPO loss, backward and AdamW on one micro-batch. torch's
FlopCounterMode counts operations; those of an update are counted on one row, without the recomputation of
--checkpointing. The share of a chip's peak refers to its dense bf16 rate, if it is in PEAK.
The only target: tiny acts at 2,000 env steps/s, with batch 8, chunk 4, one thread. Weights are random.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import Comparison, Report, interleaved, median, print_table, say
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from rlinf_lite.algorithms import LossInputs, actor_critic_loss
from rlinf_lite.config import AlgorithmConfig
from rlinf_lite.config.schema import ModelConfig
from rlinf_lite.envs import EnvSpec
from rlinf_lite.models.base import NOISE_KEY, Policy
from rlinf_lite.models.flow.policy import Pi0Policy, Pi05Policy, SmolVLAPolicy
from rlinf_lite.models.layers import prepare_layers
from rlinf_lite.models.training_options import Recompute, TrainingOptions
from rlinf_lite.models.vla.policy import OpenVLAPolicy
from rlinf_lite.training.precision import autocast

TARGET, TARGET_BATCH, TARGET_CHUNK = 2_000, 8, 4
FLOW_STEPS = 4
POLICIES: dict[str, type[Policy]] = {
    policy.policy_id: policy for policy in (OpenVLAPolicy, Pi0Policy, Pi05Policy, SmolVLAPolicy)
}
PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}
"""Dense bf16 operations per second, by a part of the GPU's name (from NVIDIA's data sheets)."""


class Contestant:
    """One policy, and one batch for acting and updates."""

    def __init__(self, name: str, size: str, batch: int, args: argparse.Namespace, **options: Any) -> None:
        self.batch, self.device, self.precision = batch, torch.device(args.device), args.precision
        cameras = {"camera": (args.camera, args.camera)}
        bounds = [-1.0] * args.action_dim, [1.0] * args.action_dim
        state_dim = 4 if name != "openvla" else None
        spec = EnvSpec(args.action_dim, state_dim, cameras, *bounds, max_episode_steps=100, has_instruction=True)
        given = {
            "size": size,
            "lora": {"rank": args.lora_rank},
            **options,
        }
        if name != "pi05":  # its prompt contains the state, and is longer
            given["max_prompt_length"] = 8 if size in ("tiny", "small") else 32
        if name != "openvla":
            given["num_steps"] = FLOW_STEPS
        model = ModelConfig(id=name, num_action_chunks=args.chunk, options=given)
        with self.device:
            self.policy: Policy = POLICIES[name].from_config(model, spec)
        trained = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        self.num_parameters = sum(parameter.numel() for parameter in self.policy.parameters())
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
        rng = np.random.default_rng(0)
        self.obs: dict[str, Any] = {
            "images": {"camera": rng.integers(0, 256, (batch, args.camera, args.camera, 3), dtype=np.uint8)},
            "instruction": ["pick up the red block"] * batch,
            NOISE_KEY: np.arange(batch, dtype=np.uint64),
        }
        if state_dim:
            self.obs["state"] = rng.uniform(-1, 1, (batch, state_dim)).astype(np.float32)
        self.acted = self._act()
        with torch.no_grad(), autocast(self.device, self.precision):  # as an actor computes them once for all epochs
            self.inputs = self.acted.forward_inputs | self.policy.fixed_inputs(self.acted.forward_inputs)
        with FlopCounterMode(display=False) as counter:
            self._update(rows=1)
        self.update_flops = batch * counter.get_total_flops()
        with FlopCounterMode(display=False) as counter:
            self.acted = self._act()  # with the weights after the update
        self.act_flops = counter.get_total_flops()
        self.train_by("full" if args.checkpointing else "none", compiled=False)

    def train_by(self, recompute: Recompute, compiled: bool) -> None:
        """Have the layers train so from now on (`model.options.gradient_checkpointing`, `model.options.compile`)."""
        for layer in self.policy.fsdp_units():
            vars(layer).pop("forward", None)
        prepare_layers(self.policy, TrainingOptions(gradient_checkpointing=recompute, compile=compiled))

    def logprobs(self) -> Tensor:
        """Log-probabilities of the batch, as the layers compute them in training."""
        self.policy.train()
        with torch.set_grad_enabled(self.policy.compiles_layers), autocast(self.device, self.precision):
            return self.policy(self.inputs).logprobs.detach().float()

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

    def _update(self, rows: int | None = None) -> None:
        """Update with the first `rows` of the batch, or with all."""
        self.policy.train()
        with autocast(self.device, self.precision):
            output = self.policy({name: x[:rows] for name, x in self.inputs.items()})
        old = self.acted.logprobs[:rows].flatten(1)
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
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=["openvla"])
    parser.add_argument("--sizes", nargs="+", choices=["tiny", "small", "7b", "published"], help="default: tiny, small")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--threads", type=int, default=1, help="torch threads on a CPU")
    parser.add_argument("--camera", type=int, default=64, help="height and width of pictures")
    parser.add_argument("--chunk", type=int, default=TARGET_CHUNK)
    parser.add_argument("--action-dim", type=int, default=3)
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--seconds", type=float, default=0.5, help="approximate duration of each measurement")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    suffix = "" if args.device == "cpu" else f"_{args.device}" + ("_lora" if args.lora_rank else "")
    flows = args.policies != ["openvla"]
    sizes = args.sizes or (["tiny"] if flows else ["tiny", "small"])
    report = Report(f"policy{'_flow' if flows else ''}{suffix}", vars(args))
    rows: list[list[str]] = []
    for name in args.policies:
        for size in sizes:
            for batch in args.batches:
                rows += measure(name, size, batch, args, report)
    print_table(
        f"on {device_name(args.device)}, {args.precision}",
        ["what", "ms", "env steps/s", "action tokens/s", "samples/s", "TFLOP/s", "of peak"],
        rows,
    )
    report.write()


def measure(name: str, size: str, batch: int, args: argparse.Namespace, report: Report) -> list[list[str]]:
    """Measure one policy with one batch size. Adds the figures to the report; returns rows of the table."""
    contestant = Contestant(name, size, batch, args)
    if name != "openvla":
        size = f"{name} {size}"
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
    """Texts of TFLOP/s and of their share of the GPU's dense bf16 rate; "-" if that rate is not known."""
    peak = peak_of(device_name(device))
    return f"{rate / 1e12:.3g}", f"{rate / peak:.0%}" if peak else "-"


def peak_of(name: str) -> float | None:
    """Dense bf16 operations per second of the GPU with this name; None if not known."""
    return next((peak for part, peak in PEAK.items() if part in name), None)


if __name__ == "__main__":
    main()
