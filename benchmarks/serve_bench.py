"""What a socket costs: requests to `rlinf-lite serve`, from a process of their own, against the policy's own time.

    python benchmarks/serve_bench.py [--requests 500] [--repeats 5]

Two tiny policies, each served by a process with one thread: an MLP that reads 11 numbers, and the VLA of assets/ with a
picture of 64 x 64 and an instruction. A request is timed by the client, from the observation in its hands to the
actions in its hands; the policy's own time is `infer_ms` of the same request, as the server measured it. The target is
about the difference, request by request: 1 ms at the most, by its median; its p99 is beside it. On a busy machine that
is mostly waiting for a core, the more so the longer the policy has held one; so processor time is compared as well: of
both processes per request, with that of `policy.act` in this one. All runs through openpi-client where that is
installed, else the same frames by hand.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Comparison, Report, median, print_table, say
from websockets.sync.client import connect

from rlinf_lite.models import MLPGaussianPolicy, Policy, load_policy
from rlinf_lite.serving.requests import observation
from rlinf_lite.serving.wire import pack, unpack

TARGET_MS = 1.0
MEASURED = ("request, p50", "policy, p50", "over it, p50", "cpu of a request", "cpu of the policy")
PICTURE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
REQUESTS: dict[str, dict[str, Any]] = {
    "mlp": {"observation/state": np.zeros(11, np.float32)},
    "vla": {"observation/image": PICTURE, "prompt": "pick up the red block"},
}


class ByHand:
    """The part of openpi's client that is used here."""

    def __init__(self, host: str, port: int) -> None:
        self._connection = connect(f"ws://{host}:{port}", compression=None, max_size=None)
        self._connection.recv()

    def infer(self, request: dict[str, Any]) -> Any:
        self._connection.send(pack(request))
        return unpack(self._connection.recv(decode=False))


try:
    from openpi_client.websocket_client_policy import WebsocketClientPolicy as Client
except ImportError:
    Client = ByHand


@contextmanager
def served(directory: Path) -> Iterator[tuple[int, int]]:
    """Port and process of a server of its own."""
    command = [sys.executable, "-m", "rlinf_lite.cli", "serve", str(directory), "--port", "0", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        try:
            found = re.search(r"ws://[^:]+:(\d+)", said)
            assert found is not None, said
            yield int(found[1]), process.pid
        finally:
            process.terminate()


def measure(client: Any, server: int, policy: Policy, request: dict[str, Any], num: int) -> dict[str, float]:
    """Milliseconds of requests, of the policy in them, of the rest, and of processor time per request."""
    whole, own = np.zeros(num), np.zeros(num)
    before = time.process_time() + cpu_seconds(server)
    for i in range(num):
        began = time.perf_counter()
        reply = client.infer(request)
        whole[i], own[i] = 1e3 * (time.perf_counter() - began), reply["server_timing"]["infer_ms"]
    served_cpu = time.process_time() + cpu_seconds(server) - before
    obs, before = observation(request, policy.reads()), time.process_time()
    for _ in range(num):
        policy.act(obs)
    in_process = time.process_time() - before
    parts = {"request": whole, "policy": own, "over it": whole - own}
    found = {f"{part}, p{share}": float(np.percentile(parts[part], share)) for part in parts for share in (50, 99)}
    return found | {"cpu of a request": 1e3 * served_cpu / num, "cpu of the policy": 1e3 * in_process / num}


def cpu_seconds(process: int) -> float:
    """User and system time of a process so far."""
    ticks = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("serve", vars(args) | {"client": Client.__module__})
    found: dict[str, list[float]] = {}

    with tempfile.TemporaryDirectory() as name:
        mlp = Path(name) / "mlp"
        MLPGaussianPolicy(11, [-1.0] * 3, [1.0] * 3, num_action_chunks=4).save_pretrained(mlp)
        vla = Path(__file__).parents[1] / "assets" / "tabletop_vla"
        with served(mlp) as mlp_server, served(vla) as vla_server:
            contestants = {}
            for name, (port, process), directory in (("mlp", mlp_server, mlp), ("vla", vla_server, vla)):
                contestants[name] = Client("127.0.0.1", port), process, load_policy(directory), REQUESTS[name]
            for repeat in range(-1, args.repeats):
                for name, contestant in contestants.items():
                    for what, value in measure(*contestant, args.requests).items():
                        found.setdefault(f"{name}, {what}, ms", []).extend([value] * (repeat >= 0))
                say(f"  {repeat + 1}/{args.repeats}")

    for name in REQUESTS:
        mine = {what: median(found[f"{name}, {what}, ms"]) for what in MEASURED}
        for what, ours, own, over in (
            ("p50 of a request", mine["request, p50"], mine["policy, p50"], mine["over it, p50"]),
            (
                "processor time of a request",
                cpu := mine["cpu of a request"],
                its := mine["cpu of the policy"],
                cpu - its,
            ),
        ):
            row = Comparison(f"{name}: {what}", ours, "policy", own, "ms", over, TARGET_MS, False, "ratio: ms over it")
            report.comparisons.append(row)
    rows = [[name, f"{median(values):.3f}", f"{min(values):.3f}"] for name, values in found.items()]
    print_table("milliseconds", ["what", "median of repeats", "least"], rows)
    report.measurements = found
    report.write()


if __name__ == "__main__":
    main()
