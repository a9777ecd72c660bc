"""Times of group calls, launches, channels and messages, compared with bare Ray in the same run.

    python benchmarks/scheduler_bench.py

The latency of a channel or message is the time from before `put` or `send` in one worker to after `get` or `recv` in
another, which waits for it and reads a byte of each page; both read one clock. The large items are nested observations:
images of two cameras, state, instructions. 77 MB is the size for 256 environments at 224 x 224 pixels.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import ray
import torch
from common import Comparison, Report, interleaved, median, say, timed

from rlinf_lite.scheduler import Channel, Cluster, Worker, WorkerDiedError

IMAGE_BYTES = 256 * 256 * 3
LARGE = {"16 MB": 16 * 2**20, "77 MB": 256 * 2 * 224 * 224 * 3}
GAP_S = 0.02  # between items, so that the receiver waits when the next one is sent
LAUNCH_TIMEOUT_S = 120.0


def observation(size_bytes: int, convert: Callable[[Any], Any]) -> dict[str, Any]:
    """A nested observation with about `size_bytes` of images, its arrays converted."""
    num_rows = size_bytes // (2 * IMAGE_BYTES)
    images = np.random.default_rng(0).integers(0, 255, (max(num_rows, 1), 256, 256, 3), dtype=np.uint8)
    arrays = {"base": convert(images), "wrist": convert(images[::-1].copy())} if num_rows else {}
    return {"images": arrays, "state": convert(np.zeros((16, 42), np.float32)), "instruction": ["push the cube"] * 16}


def look_at(item: dict[str, Any]) -> float:
    """Read a byte of each page of the images, so that all pages are mapped; returns the time."""
    for images in item["images"].values():
        images.reshape(-1)[::4096].max()
    return time.perf_counter()


class Echo(Worker):
    """The worker that is measured."""

    def __init__(self) -> None:
        super().__init__()
        torch.get_num_threads()  # makes sure that torch is imported

    def noop(self) -> None:
        pass

    def prepare(self, size_bytes: int) -> None:
        self.item = observation(size_bytes, torch.from_numpy)

    def send_all(self, count: int, channel: Channel | None) -> None:
        for _ in range(count):
            time.sleep(GAP_S)
            item = {"sent": time.perf_counter(), **self.item}
            channel.put(item) if channel else self.send(item, "receiver", 0)

    def recv_all(self, count: int, channel: Channel | None) -> list[float]:
        latencies = []
        for _ in range(count):
            item = channel.get() if channel else self.recv("sender", 0)
            latencies.append(look_at(item) - item["sent"])
            del item
        return latencies


class Bare:
    """The opponent: a plain Ray actor."""

    def __init__(self) -> None:
        torch.get_num_threads()

    def noop(self) -> None:
        pass

    def prepare(self, size_bytes: int) -> None:
        self.item = observation(size_bytes, np.asarray)

    def produce(self) -> dict[str, Any]:
        return {"sent": time.perf_counter(), **self.item}

    def latency(self, item: dict[str, Any]) -> float:
        return look_at(item) - item["sent"]


class Contest:
    """Two workers and two bare actors, on the same Ray."""

    def __init__(self, cluster: Cluster, calls: int, items: int) -> None:
        self.cluster, self.calls, self.items = cluster, calls, items
        self.bare: Any = ray.remote(num_cpus=0)(Bare)
        self.num_launches = 0

    def open(self) -> None:
        """Launch the workers and actors that all measurements except launches share."""
        self.sender, self.receiver = self.launch("sender", 1), self.launch("receiver", 1)
        self.pair = self.launch("pair", 2)
        self.actors = [self.bare.remote() for _ in range(2)]
        self.channel = Channel.create("bench")
        self.pair.noop().wait()
        ray.get([actor.noop.remote() for actor in self.actors])

    def prepare(self, size_bytes: int) -> None:
        self.sender.prepare(size_bytes).wait()
        ray.get(self.actors[0].prepare.remote(size_bytes))

    def launch(self, name: str, world_size: int) -> Any:
        return Echo.create_group().launch(self.cluster, f"0:0-{world_size - 1}", name=name)

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
        group.shutdown()
        settle()
        return took

    def group_restart(self) -> float:
        """Seconds from the kill of a worker, which a waiting call notices, to the first call of its replacement."""
        self.num_launches += 1
        group = self.launch(f"launch{self.num_launches}", 2)
        start = time.perf_counter()
        os.kill(group.members[0].pid, signal.SIGKILL)
        with suppress(WorkerDiedError):
            group.noop().wait()
        group.restart(0)
        group.noop().wait()
        took = time.perf_counter() - start
        group.shutdown()
        settle()
        return took

    def bare_launch(self, count: int = 2) -> float:
        start = time.perf_counter()
        actors = [self.bare.remote() for _ in range(count)]
        ray.get([actor.noop.remote() for actor in actors], timeout=LAUNCH_TIMEOUT_S)
        took = time.perf_counter() - start
        for actor in actors:
            ray.kill(actor)
        settle()
        return took

    def through(self, channel: Channel | None) -> float:
        """Latency in ms of an item through a channel, or by `send` and `recv` if that is None."""
        receiving = self.receiver.recv_all(self.items, channel)
        self.sender.send_all(self.items, channel).wait()
        return median(receiving.wait()[0]) * 1e3

    def through_ray_ref(self) -> float:
        latencies = []
        for _ in range(self.items):
            time.sleep(GAP_S)
            latencies.append(ray.get(self.actors[1].latency.remote(self.actors[0].produce.remote())))
        return median(latencies) * 1e3


def settle() -> None:
    time.sleep(0.5)  # until Ray has replaced the processes of its pool that actors used


def measure(contest: Contest, report: Report, repeats: int) -> None:
    add, keep = report.comparisons.append, report.measurements.update

    say("launch of 2 workers that import torch, to the first call done")
    took = interleaved({"launch/group": contest.group_launch, "launch/bare": contest.bare_launch}, repeats, unit="s")
    keep(took)
    add(compare("launch, 2 workers, s", took, "two bare actors", 0.3, lambda ours, other: ours / other, "s"))

    say("a killed worker that imports torch, to the first call of the one in its place done")
    contestants = {"restart/group": contest.group_restart, "restart/bare": partial(contest.bare_launch, 1)}
    took = interleaved(contestants, repeats, unit="s")
    keep(took)
    add(compare("a killed worker, s", took, "a bare actor", 1.5, lambda ours, _: ours, "s"))

    contest.open()
    say("group call, 2 workers, no payload")
    took = interleaved({"call/group": contest.group_call, "call/bare": contest.bare_call}, 5 * repeats, unit="ms")
    keep(took)
    add(compare("group call: added ms", took, "bare Ray", 0.2, lambda ours, other: ours - other, "ms"))

    for label, size_bytes in {"small": 0, **LARGE}.items():
        contest.prepare(size_bytes)
        say(f"worker to worker, {label} observation")
        contestants = {
            f"channel {label}": partial(contest.through, contest.channel),
            f"send {label}": partial(contest.through, None),
            f"ray ref {label}": contest.through_ray_ref,
        }
        took = interleaved(contestants, repeats, unit="ms")
        keep(took)
        *ours, ref = contestants
        for what, name in zip(("channel", "send/recv"), ours, strict=True):
            both = {name: took[name], ref: took[ref]}
            add(compare(f"{what}, {label}", both, "plain Ray ref", 1.2, lambda o, r: o / r, "ms"))


def compare(
    what: str,
    took: dict[str, list[float]],
    against: str,
    target: float,
    ratio: Callable[[float, float], float],
    unit: str,
) -> Comparison:
    ours, opponent = (median(values) for values in took.values())
    return Comparison(what, ours, against, opponent, unit, ratio(ours, opponent), target, at_least=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--calls", type=int, default=40, help="group calls at a time, five times per repeat")
    parser.add_argument("--items", type=int, default=20, help="channel items and messages per repeat")
    args = parser.parse_args()
    report = Report("scheduler", vars(args))
    with Cluster(num_gpus_per_node=1, accelerator="cpu") as cluster:
        measure(Contest(cluster, args.calls, args.items), report, args.repeats)
        report.write()


if __name__ == "__main__":
    main()
