"""Group calls, launch, channels and messages, against bare Ray in the same run.

    python benchmarks/scheduler_bench.py
    python benchmarks/scheduler_bench.py --module rlinf.scheduler     # the same script, another implementation

Latencies of channels and messages are from before `put` or `send` in one worker to after `get` or `recv` in another
that waits for it and has looked at every page, on one clock. The large items are nested observations: images of two
cameras, state, instructions; 77 MB are those of 256 environments at 224 x 224 pixels.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import ray
from common import Comparison, Report, interleaved, median, say, timed

IMAGE_BYTES = 256 * 256 * 3
LARGE = {"16 MB": 16 * 2**20, "77 MB": 256 * 2 * 224 * 224 * 3}
NUM_SLOTS = 2
GAP_S = 0.02  # between items, so that the receiver waits when the next one is sent
LAUNCH_TIMEOUT_S = 120.0
Round = Callable[[], float]


def observation(size_bytes: int, library: str) -> dict[str, Any]:
    """A nested observation with about `size_bytes` of images, as torch tensors or numpy arrays."""
    import numpy as np

    num_rows = size_bytes // (2 * IMAGE_BYTES)
    images = np.random.default_rng(0).integers(0, 255, (max(num_rows, 1), 256, 256, 3), dtype=np.uint8)
    arrays: dict[str, Any] = {"base": images, "wrist": images[::-1].copy()} if num_rows else {}
    state: Any = np.zeros((16, 42), np.float32)
    if library == "torch":
        import torch

        arrays, state = {name: torch.from_numpy(array) for name, array in arrays.items()}, torch.from_numpy(state)
    return {"images": arrays, "state": state, "instruction": ["push the cube to the goal"] * 16}


def look_at(item: dict[str, Any]) -> float:
    """Read a byte of each page of the images, so that those not mapped yet are; returns the time."""
    for images in item["images"].values():
        images.reshape(-1)[::4096].max()
    return time.perf_counter()


def worker_class(base: Any) -> Any:
    """The worker that is measured, on either implementation's base class."""

    class Echo(base):
        def __init__(self) -> None:
            super().__init__()
            import torch

            self.torch = torch

        def noop(self) -> None:
            pass

        def prepare(self, size_bytes: int) -> None:
            self.item = observation(size_bytes, "torch")

        def put_all(self, channel: Any, count: int) -> None:
            for _ in range(count):
                time.sleep(GAP_S)
                channel.put({"sent": time.perf_counter(), **self.item})

        def get_all(self, channel: Any, count: int) -> list[float]:
            latencies = []
            for _ in range(count):
                item = channel.get()
                latencies.append(look_at(item) - item["sent"])
                del item
            return latencies

        def send_all(self, group: str, rank: int, count: int) -> None:
            for _ in range(count):
                time.sleep(GAP_S)
                self.send({"sent": time.perf_counter(), **self.item}, group, rank)

        def recv_all(self, group: str, rank: int, count: int) -> list[float]:
            latencies = []
            for _ in range(count):
                item = self.recv(group, rank)
                latencies.append(look_at(item) - item["sent"])
                del item
            return latencies

    return Echo


class Bare:
    """The opponent: a Ray actor and nothing else."""

    def __init__(self) -> None:
        import torch

        self.torch = torch

    def noop(self) -> None:
        pass

    def prepare(self, size_bytes: int) -> None:
        self.item = observation(size_bytes, "numpy")

    def produce(self) -> dict[str, Any]:
        return {"sent": time.perf_counter(), **self.item}

    def latency(self, item: dict[str, Any]) -> float:
        return look_at(item) - item["sent"]


class Contest:
    """Two workers of the implementation under test beside two bare actors, on the same Ray."""

    def __init__(self, module: ModuleType, calls: int, items: int) -> None:
        self.module, self.calls, self.items = module, calls, items
        self.cluster = start_cluster(module)
        self.worker = worker_class(module.Worker)
        self.bare: Any = ray.remote(num_cpus=0)(Bare)
        self.num_launches = 0

    def open(self) -> None:
        """Launch what the rows other than `launch` share."""
        self.sender, self.receiver = self.launch("sender", 1), self.launch("receiver", 1)
        self.pair = self.launch("pair", 2)
        self.actors = [self.bare.remote() for _ in range(2)]
        self.channel = self.module.Channel.create("bench")
        self.pair.noop().wait()
        ray.get([actor.noop.remote() for actor in self.actors])

    def prepare(self, size_bytes: int) -> None:
        self.sender.prepare(size_bytes).wait()
        ray.get(self.actors[0].prepare.remote(size_bytes))

    def launch(self, name: str, world_size: int) -> Any:
        strategy = placement(self.module, world_size)
        return self.worker.create_group().launch(self.cluster, placement_strategy=strategy, name=name)

    def group_call(self) -> float:
        return median([timed(lambda: self.pair.noop().wait()) for _ in range(self.calls)]) * 1e3

    def bare_call(self) -> float:
        return median([timed(self._call_actors) for _ in range(self.calls)]) * 1e3

    def _call_actors(self) -> None:
        ray.get([actor.noop.remote() for actor in self.actors])

    def group_launch(self) -> float:
        self.num_launches += 1
        start = time.perf_counter()
        group = self.launch(f"launch{self.num_launches}", 2)
        group.noop().wait()
        took = time.perf_counter() - start
        stop_group(group)
        return took

    def group_restart(self) -> float:
        """From the kill on, which a call that waits notices."""
        self.num_launches += 1
        group = self.launch(f"launch{self.num_launches}", 2)
        start = time.perf_counter()
        os.kill(group.members[0].pid, signal.SIGKILL)
        with suppress(self.module.WorkerDiedError):
            group.noop().wait()
        group.restart(0)
        group.noop().wait()
        took = time.perf_counter() - start
        stop_group(group)
        return took

    def bare_restart(self) -> float:
        return self.bare_launch(1)

    def bare_launch(self, count: int = 2) -> float:
        start = time.perf_counter()
        actors = [self.bare.remote() for _ in range(count)]
        ray.get([actor.noop.remote() for actor in actors], timeout=LAUNCH_TIMEOUT_S)
        took = time.perf_counter() - start
        for actor in actors:
            ray.kill(actor)
        settle()
        return took

    def through_channel(self) -> float:
        getting = self.receiver.get_all(self.channel, self.items)
        self.sender.put_all(self.channel, self.items).wait()
        return median(getting.wait()[0]) * 1e3

    def through_messages(self) -> float:
        receiving = self.receiver.recv_all("sender", 0, self.items)
        self.sender.send_all("receiver", 0, self.items).wait()
        return median(receiving.wait()[0]) * 1e3

    def through_ray_ref(self) -> float:
        latencies = []
        for _ in range(self.items):
            time.sleep(GAP_S)
            latencies.append(ray.get(self.actors[1].latency.remote(self.actors[0].produce.remote())))
        return median(latencies) * 1e3


def start_cluster(module: ModuleType) -> Any:
    if module.__name__.startswith("rlinf_lite"):
        return module.Cluster(num_gpus_per_node=NUM_SLOTS, accelerator="cpu")
    return module.Cluster(num_nodes=1)


def placement(module: ModuleType, world_size: int) -> Any:
    """`world_size` processes on the first slot, in the words of either implementation."""
    if hasattr(module, "NodePlacementStrategy"):
        return module.NodePlacementStrategy([0] * world_size)
    return f"0:0-{world_size - 1}"


def stop_group(group: Any) -> None:
    if hasattr(group, "shutdown"):
        group.shutdown()
    else:
        for info in group.worker_info_list:
            ray.kill(info.worker)
    settle()


def settle() -> None:
    time.sleep(0.5)  # Ray replaces the processes that actors took


def measure(contest: Contest, report: Report, repeats: int) -> None:
    rows = SimpleNamespace(add=report.comparisons.append, keep=report.measurements.update)

    say("launch of 2 workers that import torch, to the first call done")
    took = interleaved({"launch/group": contest.group_launch, "launch/bare": contest.bare_launch}, repeats, unit="s")
    rows.keep(took)
    rows.add(compare("launch, 2 workers, s", took, "two bare actors", 0.3, lambda ours, other: ours / other, "s"))

    say("a killed worker that imports torch, to the first call of the one in its place done")
    took = interleaved(
        {"restart/group": contest.group_restart, "restart/bare": contest.bare_restart}, repeats, unit="s"
    )
    rows.keep(took)
    rows.add(compare("a killed worker, s", took, "a bare actor", 1.5, lambda ours, _: ours, "s"))

    contest.open()
    say("group call, 2 workers, no payload")
    took = interleaved({"call/group": contest.group_call, "call/bare": contest.bare_call}, 5 * repeats, unit="ms")
    rows.keep(took)
    rows.add(compare("group call: added ms", took, "bare Ray", 0.2, lambda ours, other: ours - other, "ms"))

    for label, size_bytes in {"small": 0, **LARGE}.items():
        contest.prepare(size_bytes)
        say(f"worker to worker, {label} observation")
        contestants: dict[str, Round] = {
            f"channel {label}": contest.through_channel,
            f"send {label}": contest.through_messages,
            f"ray ref {label}": contest.through_ray_ref,
        }
        took = interleaved(contestants, repeats, unit="ms")
        rows.keep(took)
        channel, message, ref = (took[name] for name in contestants)
        for what, ours in (("channel", channel), ("send/recv", message)):
            rows.add(compare(f"{what}, {label}", [ours, ref], "plain Ray ref", 1.2, lambda o, r: o / r, "ms"))


def compare(
    what: str,
    took: dict[str, list[float]] | Sequence[list[float]],
    against: str,
    target: float,
    ratio: Callable[[float, float], float],
    unit: str,
) -> Comparison:
    ours, opponent = (median(values) for values in (took.values() if isinstance(took, dict) else took))
    return Comparison(what, ours, against, opponent, unit, ratio(ours, opponent), target, at_least=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", default="rlinf_lite.scheduler", help="where Cluster, Worker and Channel come from")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--calls", type=int, default=40, help="group calls at a time, five times per repeat")
    parser.add_argument("--items", type=int, default=20, help="channel items and messages per repeat")
    args = parser.parse_args()
    module = importlib.import_module(args.module)
    report = Report("scheduler" if args.module == "rlinf_lite.scheduler" else f"scheduler_{args.module}", vars(args))
    contest = Contest(module, args.calls, args.items)
    try:
        measure(contest, report, args.repeats)
        report.write()
    finally:
        if hasattr(contest.cluster, "shutdown"):
            contest.cluster.shutdown()


if __name__ == "__main__":
    main()
