"""One of the ranks that train as actors do: `python -m tests.scheduler.training_ranks RANK RANKS ADDRESS STRATEGY`.

With a fifth argument, that is `actor.fsdp_size`, and an update has two micro-batches. Rank 0 prints "ready" after a
warm-up update, waits for a line, and prints "done" after a step: UPDATES updates, and gathering whole tensors for
rollout workers.
"""

import sys

import torch
import torch.distributed as dist

from rlinf_lite.config import load_config
from rlinf_lite.config.plan import observed
from rlinf_lite.models import build_policy
from rlinf_lite.models.check import random_obs
from rlinf_lite.preview.memory import spec_of
from rlinf_lite.registry import STRATEGIES
from rlinf_lite.training.strategies import init_process_group

UPDATES = 3


def main() -> None:
    rank, num_ranks, address, sizes = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], list(map(int, sys.argv[5:]))
    strategy = STRATEGIES.get(sys.argv[4])(*sizes)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cfg = load_config("embodiment/tabletop_ppo_vla", ["rollout.model_dir=null"])
    spec = spec_of(observed(cfg))
    policy = build_policy(cfg, spec).train()
    init_process_group(rank, num_ranks, address, 29500, "cpu", 200.0)
    with torch.no_grad():
        acted = policy.predict_action_batch(random_obs(spec, rows=4), "train")
    strategy.prepare(policy, num_ranks, "cpu", "fp32")
    parameters = list(policy.parameters())

    def update() -> None:
        for _ in range(2 if sizes else 1):
            output = policy(acted.forward_inputs)
            (output.logprobs.sum() + output.values.sum() + output.entropy.sum()).backward()
        strategy.reduce_gradients(parameters)
        for parameter in parameters:
            parameter.grad = None

    update()
    dist.barrier()
    if rank == 0:
        print("ready", flush=True)
        sys.stdin.readline()
    dist.barrier()
    for _ in range(UPDATES):
        update()
    for parameter in parameters:
        if hasattr(parameter, "full_tensor"):
            parameter.full_tensor()
    dist.barrier()
    if rank == 0:
        print("done", flush=True)
        sys.stdin.readline()
    dist.barrier()


if __name__ == "__main__":
    main()
