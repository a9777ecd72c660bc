"""What a network of 1 Gbit/s and 10 ms each way costs: messages, and weights to receivers on another node.

    sudo .venv/bin/python benchmarks/nodes_bench.py

Three nodes of `netns_cluster.py`; the actor is on the first. Bytes are those that the interface of the first node has
sent and received, headers and Ray's own traffic included, per transfer.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Report, say
from netns_cluster import DELAY_S, RATE_BITS_PER_S, NetnsCluster
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from torch import nn

from rlinf_lite.scheduler import Cluster, Worker, WorkerGroup, wait_all
from rlinf_lite.scheduler.group import GroupView
from rlinf_lite.weights import WeightReceiver, WeightRoutes, WeightSender

MIB = 2**20
LAYERS = 8
BUCKET_BYTES = 16 * MIB
TIMEOUT_S = 60.0
NODES = (1, 1, 1, 1, 2, 2)  # of the rollout workers; the actor is on node 0, each node has a slot
RECEIVERS = {"1 on another node": 1, "2 there": 2, "4 there": 4, "4 there, 2 on a third": 6}
NUM_MESSAGES = 50


class Model(nn.Module):
    def __init__(self, mib: int) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(mib * MIB // 4 // LAYERS)) for _ in range(LAYERS))


class Sending(Worker):
    def init(self, mib: int) -> None:
        self.model = Model(mib)

    def serve(self, count: int) -> None:
        """Send to the first rollout workers from now on."""
        routes = WeightRoutes(rollout_nodes=NODES[:count], actor_nodes=(0,))
        self.sender = WeightSender(self, "rollout", routes, BUCKET_BYTES, TIMEOUT_S)

    def send_weights(self, version: int) -> None:
        with torch.no_grad():
            for layer in self.model.layers:
                layer.fill_(version)
        self.sender.send(version, self.model)

    def ask(self, count: int, num_bytes: int) -> float:
        """Seconds of a message to rank 0 and its answer."""
        started = time.perf_counter()
        for _ in range(count):
            self.send(np.zeros(num_bytes, np.uint8), "rollout", 0)
            self.recv("rollout", 0, TIMEOUT_S)
        return (time.perf_counter() - started) / count


class Receiving(Worker):
    def init(self, mib: int) -> None:
        self.model = Model(mib).requires_grad_(False)
        self.receiver = WeightReceiver(self, "actor", 0, self.model, TIMEOUT_S)

    def receive(self, version: int) -> list[float]:
        self.receiver.receive(version)
        return [float(layer.mean()) for layer in self.model.layers]

    def answer(self, count: int) -> None:
        for _ in range(count):
            self.recv("actor", 0, TIMEOUT_S)
            self.send(None, "actor", 0)


def interface_bytes() -> tuple[int, int]:
    """Sent and received by this node's interface so far."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if "eth0:" in line)
    counts = line.split(":")[1].split()
    return int(counts[8]), int(counts[0])


def counted(function: Callable[..., Any], *args: Any) -> tuple[Any, float, int, int]:
    """What it returns, its seconds, and bytes sent and received meanwhile."""
    (sent, received), started = interface_bytes(), time.perf_counter()
    result = function(*args)
    took_s, (sent_now, received_now) = time.perf_counter() - started, interface_bytes()
    return result, took_s, sent_now - sent, received_now - received


def stored_bytes(limit_s: float = 10.0) -> int:
    """What lies in the object stores of all nodes; references that are given up are freed a moment later, for which
    `limit_s` is waited."""
    deadline = time.monotonic() + limit_s
    while True:
        stats = get_memory_info_reply(get_state_from_address(None)).store_stats
        if not stats.object_store_bytes_used or time.monotonic() >= deadline:
            return int(stats.object_store_bytes_used)
        time.sleep(0.2)


def measure_sync(actor: WorkerGroup, rollout: WorkerGroup, mib: int, repeats: int) -> dict[str, Any]:
    wait_all(actor.init(mib), rollout.init(mib), timeout_s=TIMEOUT_S)
    rows = {}
    for name, count in RECEIVERS.items():
        actor.serve(count).wait()
        receivers = rollout.execute_on(*range(count))

        def sync(version: int, receivers: GroupView = receivers) -> Any:
            return wait_all(receivers.receive(version), actor.send_weights(version), timeout_s=TIMEOUT_S)[0]

        found = []
        for version in range(repeats + 1):
            got, *costs = counted(sync, version)
            assert got == [[float(version)] * LAYERS] * count, got
            found.append(costs)
        took_s, sent, received = (sorted(column)[repeats // 2] for column in zip(*found[1:], strict=True))
        rows[name] = {"s": took_s, "sent_mib": sent / MIB, "received_mib": received / MIB, "left": stored_bytes()}
        say(f"{mib} MiB to {name}: {rows[name]}")
    return rows


def measure_messages(actor: WorkerGroup, rollout: WorkerGroup) -> dict[str, Any]:
    rows = {}
    for name, num_bytes in {"small": 0, "10 kB": 10_000, "1 MB": 1_000_000, "8 MB": 8_000_000}.items():
        count = NUM_MESSAGES if num_bytes < 1e6 else 10
        for _ in range(2):  # the second time counts
            handles = actor.ask(count, num_bytes), rollout.execute_on(0).answer(count)
            (seconds, _), _, sent, received = counted(wait_all, *handles)
        rows[name] = {"round_trip_ms": 1e3 * seconds[0], "sent_bytes": sent / count, "received_bytes": received / count}
        say(f"{name}: {rows[name]}")
    _, _, sent, received = counted(time.sleep, 5)
    rows["idle, per s"] = {"sent_bytes": sent / 5, "received_bytes": received / 5}
    say(f"idle: {rows['idle, per s']}")
    return rows


def inside(out: Path, mib: int, repeats: int) -> None:
    with Cluster(num_nodes=3, num_gpus_per_node=1, accelerator="cpu") as cluster:
        with cluster.launching():
            actor = Sending.create_group().launch(cluster, "0", name="actor")
            rollout = Receiving.create_group().launch(cluster, "1:0-3,2:4-5", name="rollout")
        found = {"messages": measure_messages(actor, rollout), "weights": measure_sync(actor, rollout, mib, repeats)}
    out.write_text(json.dumps(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=32, help="of weights")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        inside(args.inside, args.mib, args.repeats)
        return 0
    report = Report("nodes", vars(args) | {"rate_bits_per_s": RATE_BITS_PER_S, "delay_s": DELAY_S})
    with NetnsCluster(3) as cluster:
        out = cluster.shared / "measured.json"
        command = [sys.executable, __file__, "--inside", str(out), "--mib", str(args.mib)]
        command += ["--repeats", str(args.repeats)]
        with cluster.start(0, command, cluster.environment) as process:
            if process.wait(600):
                return 1
        report.settings["measured"] = json.loads(out.read_text())
    report.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
