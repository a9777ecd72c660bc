"""The gap between acting and training where all that is trained on is older than the weights: measured with the weights
that did it, in one process, and in shards over two."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from rlinf_lite.config import load_config
from rlinf_lite.runners import experience
from rlinf_lite.scheduler import Worker
from rlinf_lite.training.sharding import full_policy_state
from rlinf_lite.weights import WeightRoutes
from rlinf_lite.workers import EmbodiedFSDPActor
from rlinf_lite.workers.layout import Layout
from rlinf_lite.workers.reasoning import LanguageActor
from tests.ranks import spawn
from tests.workers.test_language_ranks import make_rows
from tests.workers.test_strategies import CONFIGS, NUM_ENVS, trajectories

ASYNC = ["runner.mode=async", "runner.max_staleness=2", "algorithm.correction.kind=tis", "actor.num_threads=1"]
GAP = "rollout/logprob_drift"
ACTED = [0, 0, 1, 2, 3]  # by step: the version that did what it trains on
MEASURED = [0, 2, 4]  # version 1 and 3 were kept in between; what version 2 did came while 3 was


def place(actor, rank, world_size, port):
    actor.rank, actor.world_size, actor.local_world_size, actor.master_port = rank, world_size, 2, port
    actor.fused = {"rollout": Worker()}  # nobody to send weights to


def robot(strategy, keeps, off, rank=0, world_size=1, port=0):
    """Metrics by step, and the policy in the end. `keeps`: earlier weights; `off`: what acting gets wrong."""
    config, overrides, spec = CONFIGS["ppo"]
    more = [*overrides, *ASYNC, "actor.optim={lr: 3e-2, warmup_steps: 0}", "algorithm.critic_warmup_steps=0"]
    cfg = load_config(f"embodiment/{config}", [*more, f"actor.strategy={strategy}"])
    actor = EmbodiedFSDPActor(cfg)
    place(actor, rank, world_size, port)
    actor.init(Layout(NUM_ENVS, 1, 1, rollout_nodes=(0,), actor_nodes=(0,) * world_size), spec, total_steps=5)
    share, played, lines = NUM_ENVS // world_size, {}, []
    for step, version in enumerate(ACTED):
        played[step] = trajectories(cfg, spec, actor.policy, step)
        played[step].logprobs += off
        if keeps:
            actor.earlier.published(step)
        actor.trajectories = played[version].rows(slice(rank * share, (rank + 1) * share))
        actor.compute_advantages_and_returns()
        lines.append(actor.run_training(step)["metrics"])
    return lines, full_policy_state(actor.policy)


def language_model(strategy, keeps, off, rank=0, world_size=1, port=0):
    """The same; half of the tokens of a response are one version's, half the next one's."""
    sizes = ["data.max_prompt_length=6", "rollout.max_response_length=4", "actor.max_tokens_per_micro_batch=40"]
    more = [
        *sizes,
        *ASYNC,
        "actor.optim={lr: 1e-3, warmup_steps: 0}",
        "cluster.fuse=null",
        f"actor.strategy={strategy}",
    ]
    cfg = load_config("math/math_arithmetic_grpo", more)
    actor = LanguageActor(cfg)
    place(actor, rank, world_size, port)
    actor.init(None, WeightRoutes([0], [0] * world_size), 10)
    played, lines = {}, []
    for step, version in enumerate(ACTED):
        whole = experience.for_ranks(make_rows(6), ["advantages"], world_size)
        played[step] = batch = whole.chunk(world_size)[rank]
        batch.batch["rollout_logprobs"] = actor.compute_log_prob(batch).batch["old_logprobs"] + off
        batch.batch["acted_versions"] = torch.full(batch.batch["response_mask"].shape, step, dtype=torch.int32)
        batch.meta_info = {"step": step, "first": True, "denominator": 20.0}
        if keeps:
            actor.earlier.published(step)
        batch = played[version]
        if version:  # later tokens are those of the version before, earlier ones this one's
            batch.batch["rollout_logprobs"][:, 2:] = played[version - 1].batch["rollout_logprobs"][:, 2:]
            batch.batch["acted_versions"][:, 2:] = version - 1
        batch.meta_info["step"] = step
        batch = batch.union(actor.compute_log_prob(batch))
        lines.append(actor.update_actor(batch)["metrics"])
        actor.complete_step(step + 1)
    return lines, full_policy_state(actor.learner.model)


def rank_main(rank, port, train, expected):
    torch.set_num_threads(1)
    for strategy in ("fsdp", "replicated"):
        lines, state = train(strategy, True, 0.0, rank, 2, port)
        check(lines)
        for name, tensor in state.items():  # on rank 0
            torch.testing.assert_close(tensor, expected[name], atol=2e-4, rtol=0, msg=f"{strategy}: {name}")
    dist.destroy_process_group()


def check(lines):
    assert [step for step, line in enumerate(lines) if GAP in line] == [step for step in MEASURED if GAP in lines[step]]
    for step in MEASURED[1:]:
        assert lines[step][GAP] < 1e-5 and abs(lines[step]["train/actor/importance_weight_max"] - 1) > 1e-2


@pytest.mark.parametrize("train", [robot, language_model])
def test_older_weights_are_scored_by_themselves_and_training_is_what_it_was(train):
    lines, state = train("replicated", True, 0.0)
    check(lines)
    without, unchanged = train("replicated", False, 0.0)
    assert not any(GAP in line for line in without[1:])
    assert all(torch.equal(tensor, unchanged[name]) for name, tensor in state.items())
    for line, other in zip(lines, without, strict=True):
        assert {name: x for name, x in line.items() if name != GAP} == {
            name: x for name, x in other.items() if name != GAP
        }
    wrong, _ = train("replicated", True, 0.1)
    assert all(wrong[step][GAP] == pytest.approx(0.1, abs=1e-3) for step in MEASURED[1:])


@pytest.mark.parametrize("train", [robot, language_model])
def test_over_two_ranks(train):
    _, expected = train("replicated", True, 0.0)
    spawn(rank_main, 2, train, expected)
