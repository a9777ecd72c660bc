"""Batches through worker groups: DP_COMPUTE_PROTO against bare Ray actors that are given numpy shards.

    python benchmarks/dataproto_bench.py [--mb 8] [--calls 20] [--repeats 7]

Echo: a batch goes to two workers, half each, and comes back as one. Chain: the same through two groups of two workers;
what the first ones return, the second ones fetch themselves. The opponent's actors get slices of a numpy array and
return them; its driver puts the halves together, as a DataProto does. Contestants take turns within one run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
import torch
from common import Comparison, Report, interleaved, median, print_table, timed

from rlinf_lite.data import DataProto
from rlinf_lite.scheduler import Cluster, Dispatch, Worker, register

TARGET = 1.3


class Echo(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, data: DataProto) -> DataProto:
        return data


class BareEcho:
    def echo(self, shard: np.ndarray) -> np.ndarray:
        return shard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=8.0, help="of the batch")
    parser.add_argument("--calls", type=int, default=20, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    report = Report("dataproto", vars(args))
    with Cluster(num_nodes=1, num_gpus_per_node=2, accelerator="cpu") as cluster:
        first = Echo.create_group().launch(cluster, "0-1", name="first")
        second = Echo.create_group().launch(cluster, "0-1", name="second")
        remote: Any = ray.remote(num_cpus=0)(BareEcho)
        bare = [[remote.remote() for _ in range(2)] for _ in range(2)]

        rows = round(args.mb * 1e6 / 4096)
        data = DataProto.from_dict({"tokens": torch.arange(rows * 512).reshape(rows, 512)})
        array = data.batch["tokens"].numpy()
        halves = np.array_split(array, 2)

        def bare_echo() -> np.ndarray:
            pairs = zip(bare[0], halves, strict=True)
            return np.concatenate(ray.get([actor.echo.remote(half) for actor, half in pairs]))

        def bare_chain() -> np.ndarray:
            pairs = zip(*bare, halves, strict=True)
            return np.concatenate(ray.get([b.echo.remote(a.echo.remote(half)) for a, b, half in pairs]))

        def echo() -> DataProto:
            got: DataProto = first.echo(data).wait()
            return got

        def chain() -> DataProto:
            got: DataProto = second.echo(first.echo(data)).wait()
            return got

        for result in (
            echo().batch["tokens"],
            chain().batch["tokens"],
            *map(torch.tensor, (bare_echo(), bare_chain())),
        ):
            assert torch.equal(result, data.batch["tokens"])

        def per_call(call: Callable[[], object]) -> Callable[[], float]:
            return lambda: 1e3 * timed(lambda: [call() for _ in range(args.calls)]) / args.calls

        contestants = {"echo": echo, "bare echo": bare_echo, "chain": chain, "bare chain": bare_chain}
        found = interleaved({name: per_call(call) for name, call in contestants.items()}, args.repeats, unit="ms")

    report.measurements |= {f"{name}, ms": figures for name, figures in found.items()}
    print_table("ms per call", ["what", "median"], [[name, f"{median(v):.3g}"] for name, v in found.items()])
    for what in ("echo", "chain"):
        ours, opponent = median(found[what]), median(found[f"bare {what}"])
        name = f"DP_COMPUTE_PROTO {what}, {args.mb:g} MB, 2 workers"
        report.comparisons.append(
            Comparison(name, ours, "bare Ray, numpy shards", opponent, "ms", ours / opponent, TARGET, at_least=False)
        )
    report.write()


if __name__ == "__main__":
    main()
