"""Probes of `rlinf-lite doctor`. Each runs in its own process, because it may crash or hang.

`python -m rlinf_lite.cli.probes NAME` prints what the probe found or measured as its last line. A probe that raises has
failed.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from rlinf_lite.registry import ENVIRONMENTS, env_card, import_part

_NUM_ENVS, _NUM_CHUNKS = 4, 25


def torch_build() -> str:
    import torch

    x = torch.randn(1024, 1024)
    seconds = min(_seconds(lambda: x @ x) for _ in range(5))
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    speed = f"{2 * 1024**3 / seconds / 1e9:.0f} GFLOP/s on {torch.get_num_threads()} threads"
    return f"{torch.__version__.partition('+')[0]}, {build}, {speed}"


def vision_and_language() -> str:
    """Import transformers with torchvision and timm, if those are installed: they fail if built for another torch."""
    found = [name for name in ("torchvision", "timm") if find_spec(name) is not None]
    for name in found:
        __import__(name)
    import transformers
    from transformers import Dinov2WithRegistersModel, LlamaForCausalLM, SiglipVisionModel  # noqa: F401

    others = f"{' and '.join(found)} installed, and not needed" if found else "no torchvision, no timm: none needed"
    return f"{transformers.__version__}; {others}"


def accelerators() -> str:
    import torch

    driver = shutil.which("nvidia-smi")
    if not torch.cuda.is_available():
        if driver is None:
            return "no GPU; slots are virtual, cluster.num_gpus_per_node of them"
        build = "is a CPU build" if torch.version.cuda is None else f"for CUDA {torch.version.cuda} sees no GPU"
        raise RuntimeError(f"nvidia-smi is installed, but torch {build}")
    values = []
    for index in range(torch.cuda.device_count()):
        x = torch.randn(4096, 4096, device=f"cuda:{index}", dtype=torch.bfloat16)
        torch.cuda.synchronize(index)
        (x @ x).sum().item()
        free, total = torch.cuda.mem_get_info(index)
        values.append(f"{torch.cuda.get_device_name(index)}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free")
    return "; ".join(values)


def ray_workers() -> str:
    from rlinf_lite.scheduler import Cluster, Worker

    class Echo(Worker):
        def echo(self, value: int) -> int:
            return value + self.rank

    started = time.monotonic()
    with Cluster(num_gpus_per_node=2, accelerator="cpu", log_to_driver=False) as cluster:
        group = Echo.create_group().launch(cluster, placement_strategy="0-1", name="echo")
        assert group.echo(1).wait(timeout_s=60) == [1, 2]
        seconds = time.monotonic() - started
        milliseconds = 1e3 * min(_seconds(lambda: group.echo(1).wait(timeout_s=60)) for _ in range(20))
    where = f"joined {os.environ['RAY_ADDRESS']}" if os.environ.get("RAY_ADDRESS") else "started"
    return f"{where}, 2 workers answer after {seconds:.1f} s, a call takes {milliseconds:.1f} ms"


def simulator(env_id: str) -> str:
    """Check an environment against the protocol, reset it and measure its steps."""
    import numpy as np

    from rlinf_lite.config import EnvConfig
    from rlinf_lite.envs import ensure_valid_env, make_env

    cfg = EnvConfig.model_validate({"id": env_id, "options": env_card(env_id).probe_options})
    env = make_env(cfg, "train", _NUM_ENVS)
    ensure_valid_env(env)
    env.reset(list(range(_NUM_ENVS)))
    actions = np.zeros((_NUM_ENVS, 1, env.action_dim), np.float32)
    seconds = _seconds(lambda: [env.chunk_step(actions) for _ in range(_NUM_CHUNKS)])
    return f"{cfg.task}: {_NUM_ENVS * _NUM_CHUNKS / seconds:,.0f} env steps/s in one process"


def _seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


PROBES: dict[str, Callable[[], str]] = {
    "torch": torch_build,
    "transformers": vision_and_language,
    "accelerators": accelerators,
    "ray": ray_workers,
}


def try_out(name: str) -> str:
    """Run the probe of a name: one of PROBES, or one of an environment's card."""
    if name in PROBES:
        return PROBES[name]()
    card = next(card for card in map(env_card, ENVIRONMENTS.names()) if name in card.probes())
    probe = card.probes()[name]
    return str(import_part(probe.function, name)(card.name))


if __name__ == "__main__":
    print(f"\n{try_out(sys.argv[1])}")
