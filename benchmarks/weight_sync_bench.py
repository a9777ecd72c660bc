"""Time of a weight sync from one actor to two rollout workers of the same node, compared with a memcpy of the same
bytes.

    python benchmarks/weight_sync_bench.py --mib 64 256

The driver measures it, as in a training step: the two group calls, the transfer, and both answers. The memcpy runs in
the actor's process, on one thread, into allocated memory. The transfer uses all cores, because the other workers wait.
The first transfer, which also maps the memory, is reported separately.
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np
import torch
from common import Comparison, Report, interleaved, median, say, timed
from torch import nn

from rlinf_lite.scheduler import Cluster, Worker, WorkerGroup, wait_all
from rlinf_lite.weights import WeightReceiver, WeightRoutes, WeightSender

TARGET = 1.5
LAYERS = 16
BUCKET_BYTES = 256 * 2**20
TIMEOUT_S = 60.0
ROUTES = WeightRoutes(rollout_nodes=(0, 0), actor_nodes=(0,))


class Model(nn.Module):
    """A model with `mib` MiB of fp32 parameters in `LAYERS` tensors."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        size = mib * 2**20 // 4 // LAYERS
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(size)) for _ in range(LAYERS))


class Actor(Worker):
    def init(self, mib: int, cuda_ipc: bool = False) -> None:
        self.model, num_threads = Model(mib).to(self.device), os.cpu_count() or 1
        self.sender = WeightSender(self, "rollout", ROUTES, BUCKET_BYTES, TIMEOUT_S, num_threads, cuda_ipc)
        self.source = np.ones(mib * 2**20, np.uint8)
        self.target = np.zeros(mib * 2**20, np.uint8)

    def change(self, version: int) -> None:
        with torch.no_grad():
            for layer in self.model.layers:
                layer.fill_(version)

    def send_weights(self, version: int) -> None:
        self.sender.send(version, self.model)

    def memcpy(self) -> float:
        self.source += 1  # written just before, like weights after an update
        return timed(lambda: np.copyto(self.target, self.source))

    def device_copy(self) -> float:
        """Seconds of a copy of the weights on their own device."""

        def copy() -> None:
            for layer in self.model.layers:
                layer.detach().clone()
            if self.device != "cpu":
                torch.cuda.synchronize()

        copy()
        return timed(copy)


class Rollout(Worker):
    def init(self, mib: int) -> None:
        self.model = Model(mib).to(self.device)
        self.receiver = WeightReceiver(self, "actor", 0, self.model, TIMEOUT_S)

    def receive_weights(self, version: int) -> None:
        self.receiver.receive(version)

    def values(self) -> list[float]:
        """First and last value of each tensor."""
        return [float(layer.detach()[i]) for layer in self.model.layers for i in (0, -1)]


class Sync:
    """Each call sends the next version to the receivers, checks it, and returns the seconds."""

    def __init__(self, actor: WorkerGroup, rollout: WorkerGroup) -> None:
        self.actor, self.rollout, self.version = actor, rollout, -1

    def __call__(self) -> float:
        self.version += 1
        self.actor.change(self.version).wait()
        start = time.perf_counter()
        sending = self.actor.send_weights(self.version)
        wait_all(self.rollout.receive_weights(self.version), sending)
        taken = time.perf_counter() - start
        for rank, values in enumerate(self.rollout.values().wait()):
            if any(value != self.version for value in values):
                raise RuntimeError(f"rollout {rank} does not have version {self.version} after the sync: {values}")
        return taken


def measure(cluster: Cluster, mib: int, repeats: int, report: Report) -> None:
    actor = Actor.create_group().launch(cluster, "0", name="actor")
    rollout = Rollout.create_group().launch(cluster, "0:0-1", name="rollout")
    try:
        wait_all(actor.init(mib), rollout.init(mib))
        say(f"{mib} MiB to 2 workers")
        sync = Sync(actor, rollout)
        first = sync() * 1e3
        found = interleaved(
            {"sync": lambda: sync() * 1e3, "memcpy": lambda: actor.memcpy().wait()[0] * 1e3},
            repeats,
            warmup=2,
            unit="ms",
        )
    finally:
        rollout.shutdown()
        actor.shutdown()
    ours, memcpy = median(found["sync"]), median(found["memcpy"])
    what = f"weight sync, {mib} MiB to 2 workers"
    note = f"the first transfer of a run took {first:.3g} ms"
    report.comparisons.append(
        Comparison(what, ours, "one memcpy", memcpy, "ms", ours / memcpy, TARGET, at_least=False, note=note)
    )
    report.measurements |= {f"{name} {mib} MiB, ms": values for name, values in found.items()}
    report.measurements[f"first sync {mib} MiB, ms"] = [first]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    report = Report("weight_sync", vars(args))
    with Cluster(num_nodes=1, num_gpus_per_node=1, accelerator="cpu") as cluster:
        for mib in args.mib:
            measure(cluster, mib, args.repeats, report)
    report.write()


if __name__ == "__main__":
    main()
