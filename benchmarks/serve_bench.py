"""What a socket costs: requests to `rlinf-lite serve`, from a process of their own, against the policy's own time.

    python benchmarks/serve_bench.py [--requests 500] [--repeats 5]

Two tiny policies, each served by a process with one thread: an MLP that reads 11 numbers, and the VLA of assets/ with a
picture of 64 x 64 and an instruction. A request is timed by the client, from the observation in its hands to the
actions in its hands; the policy's own time is `infer_ms` of the same request, as the server measured it. What the
target is about is the difference, request by request: 1 ms at the most, by its median. Its p99 is given beside it, and
is what else the machine does. All runs through openpi-client where that is installed, else the same frames by hand.
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
from common import Comparison, Report, median, print_table, say
from websockets.sync.client import connect

from rlinf_lite.models import MLPGaussianPolicy
from rlinf_lite.serving.wire import pack, unpack

TARGET_MS = 1.0
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
def served(directory: Path) -> Iterator[int]:
    """The port of a server of its own."""
    command = [sys.executable, "-m", "rlinf_lite.cli", "serve", str(directory), "--port", "0", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        try:
            found = re.search(r"ws://[^:]+:(\d+)", said)
            assert found is not None, said
            yield int(found[1])
        finally:
            process.terminate()


def measure(client: Any, request: dict[str, Any], num: int) -> dict[str, np.ndarray]:
    """Milliseconds [num] of requests, of the policy in them, and of the rest."""
    whole, own = np.zeros(num), np.zeros(num)
    for i in range(num):
        began = time.perf_counter()
        reply = client.infer(request)
        whole[i], own[i] = 1e3 * (time.perf_counter() - began), reply["server_timing"]["infer_ms"]
    return {"request": whole, "policy": own, "over it": whole - own}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    report = Report("serve", vars(args) | {"client": Client.__module__})
    found: dict[str, list[float]] = {}

    with tempfile.TemporaryDirectory() as name:
        mlp = Path(name) / "mlp"
        MLPGaussianPolicy(11, [-1.0] * 3, [1.0] * 3, num_action_chunks=4).save_pretrained(mlp)
        vla = Path(__file__).parents[1] / "assets" / "tabletop_vla"
        with served(mlp) as mlp_port, served(vla) as vla_port:
            clients = {"mlp": Client("127.0.0.1", mlp_port), "vla": Client("127.0.0.1", vla_port)}
            for repeat in range(-1, args.repeats):
                for policy, client in clients.items():
                    for what, values in measure(client, REQUESTS[policy], args.requests).items():
                        for share in (50, 99) if repeat >= 0 else ():
                            found.setdefault(f"{policy}, {what}, p{share}, ms", []).append(
                                float(np.percentile(values, share))
                            )
                say(f"  {repeat + 1}/{args.repeats}")

    for policy in REQUESTS:
        for share in (50, 99):
            whole, own, over = (median(found[f"{policy}, {what}, p{share}, ms"]) for what in _PARTS)
            row = Comparison(
                f"{policy}: request, p{share}", whole, "policy", own, "ms", over, TARGET_MS, False, "ratio: ms over it"
            )
            report.comparisons += [row] * (share == 50)
    rows = [[name, f"{median(values):.3f}", f"{min(values):.3f}"] for name, values in found.items()]
    print_table("milliseconds", ["what", "median of repeats", "least"], rows)
    report.measurements = found
    report.write()


_PARTS = ("request", "policy", "over it")

if __name__ == "__main__":
    main()
