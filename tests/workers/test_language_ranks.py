"""An update of any number of rows over two ranks, sharded or replicated, is that of one rank: gloo, two processes."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from rlinf_lite.config import load_config
from rlinf_lite.data import DataProto
from rlinf_lite.runners import experience
from rlinf_lite.scheduler import Worker
from rlinf_lite.training.sharding import full_policy_state
from rlinf_lite.weights import WeightRoutes
from rlinf_lite.workers.reasoning import LanguageActor, LanguageCritic
from tests.ranks import spawn

OVERRIDES = [
    "data.max_prompt_length=6",
    "rollout.max_response_length=4",
    "actor.max_tokens_per_micro_batch=12",
    "actor.optim={lr: 1e-3, eps: 1e-3, warmup_steps: 0, lr_scheduler: constant}",  # a step is smooth in the gradient
    "critic.optim={lr: 1e-3, eps: 1e-3}",
    "model.gradient_checkpointing=true",
    "algorithm.kl={place: loss, kind: k3, coef: 0.1}",
]
SIZES = (1, 3, 0)


def make_rows(num_rows):
    rng = np.random.default_rng(num_rows)
    prompt, response = (torch.from_numpy(rng.integers(1, n, num_rows)) for n in (6, 5))
    mask = torch.arange(4) < response[:, None]
    attention = torch.cat([torch.arange(6) >= 6 - prompt[:, None], mask], 1)
    names = ("old_logprobs", "ref_logprobs", "advantages", "values", "returns", "rollout_logprobs")
    noise = torch.from_numpy(rng.normal(size=(len(names), num_rows, 4))).float()
    tensors = {"input_ids": torch.from_numpy(rng.integers(4, 60, (num_rows, 10))) * attention}
    tensors |= {"attention_mask": attention, "response_mask": mask}
    tensors |= {name: torch.where(mask, x - 4, 0.0) for name, x in zip(names, noise, strict=True)}
    tensors["acted_versions"] = torch.zeros(num_rows, 4, dtype=torch.int32)
    meta = {"step": 0, "first": True, "denominator": float(max(int(mask.sum()), 1))}
    return DataProto(tensors, {"row": np.arange(num_rows)}, meta)


def train(strategy, directory, rank=0, world_size=1, port=0):
    """What actor and critic say of rows and become by them; of a rank's rows, in the end of all."""
    cfg = load_config("math/math_arithmetic_ppo", [*OVERRIDES, f"actor.strategy={strategy}"])
    actor, critic = LanguageActor(cfg), LanguageCritic(cfg)
    for worker in (actor, critic):
        worker.rank, worker.world_size, worker.local_world_size, worker.master_port = rank, world_size, 2, port
        worker.fused = {"rollout": Worker()}  # nobody to send weights to
    actor.init(str(directory), WeightRoutes([0], [0] * world_size), 10)
    critic.init(str(directory), 10)
    columns = ["old_logprobs", "rollout_logprobs", "acted_versions", "ref_logprobs", "advantages", "values", "returns"]
    found = []
    for num_rows in SIZES:
        batch = experience.for_ranks(make_rows(num_rows), columns, world_size)
        own = batch.chunk(world_size)[rank]
        scored = DataProto.concat([actor.compute_log_prob(own).union(critic.compute_values(own))])
        metrics = actor.update_actor(own)["metrics"] | critic.update_critic(own)["metrics"]
        found.append((batch.non_tensor_batch["row"], scored, metrics))
    return found, [full_policy_state(worker.learner.model) for worker in (actor, critic)]


def rank_main(rank, port, directory, expected):
    torch.set_num_threads(1)
    for strategy in ("fsdp", "replicated"):
        found, states = train(strategy, directory, rank, 2, port)
        for (order, whole, wanted), (rows, scored, metrics) in zip(expected[0], found, strict=True):
            where = np.argsort(order)[np.array_split(rows, 2)[rank]]  # the larger part first, as ranks are given rows
            for name, column in scored.batch.items():
                torch.testing.assert_close(column, whole.batch[name][where], atol=1e-5, rtol=0)
            assert metrics.keys() == wanted.keys(), metrics.keys() ^ wanted.keys()
            for name in metrics:
                np.testing.assert_allclose(metrics[name], wanted[name], rtol=1e-3, atol=1e-5, err_msg=name)
        if rank == 0:
            for state, want in zip(states, expected[1], strict=True):
                for name, tensor in state.items():
                    torch.testing.assert_close(tensor, want[name], atol=2e-6, rtol=0, msg=name)
    dist.destroy_process_group()


def test_metrics_of_a_step_are_weighted_by_tokens_over_its_updates():
    """Of two updates with 1 and 3 tokens; the effective sample size is that of all four."""
    cfg = load_config("math/math_arithmetic_grpo", [*OVERRIDES[:3], "actor.optim={lr: 0, warmup_steps: 0}"])
    actor = LanguageActor(cfg)
    actor.fused = {"rollout": Worker()}
    actor.init(None, WeightRoutes([0], [0]), 10)
    whole = make_rows(2)
    whole.batch["response_mask"] = torch.arange(4) < torch.tensor([[1], [3]])
    whole.batch["attention_mask"][:, 6:] = whole.batch["response_mask"]
    scored = actor.compute_log_prob(whole).batch["old_logprobs"]
    whole.batch["old_logprobs"] = scored - torch.tensor([[0.5], [0.1]])  # 1 of 4 tokens beyond the clip of 0.2
    whole.batch["rollout_logprobs"] = whole.batch["old_logprobs"] - torch.tensor([[1.0], [0.0]])
    whole.batch["advantages"] = torch.ones(2, 4)
    for row, first in ((0, True), (1, False)):
        batch = whole[row]
        batch.meta_info = {"step": 0, "first": first, "denominator": 1.0}
        metrics = actor.update_actor(batch)["metrics"]
    assert abs(metrics["train/actor/clip_fraction"] - 1 / 4) < 1e-6
    assert abs(metrics["train/actor/approx_kl"] + (0.5 + 3 * 0.1) / 4) < 1e-5
    w = np.exp([1.0, 0.0, 0.0, 0.0])
    assert abs(metrics["train/actor/effective_sample_size"] - w.sum() ** 2 / (4 * (w * w).sum())) < 1e-5
    batch.meta_info["first"] = True  # of the next step
    assert actor.update_actor(batch)["metrics"]["train/actor/clip_fraction"] == 0


def test_what_stands_after_a_response_has_no_part_in_an_update():
    """Rows of 1 and 4 tokens go through the model together, with a KL to the reference in the loss."""
    found = []
    for other in (-3.0, -4.0):
        cfg = load_config("math/math_arithmetic_grpo", [*OVERRIDES[:2], *OVERRIDES[3:4], OVERRIDES[-1]])
        actor = LanguageActor(cfg)
        actor.fused = {"rollout": Worker()}  # nobody to send weights to
        actor.init(None, WeightRoutes([0], [0]), 10)
        rows = make_rows(2)
        mask = rows.batch["response_mask"] = torch.arange(4) < torch.tensor([[1], [4]])
        rows.batch["attention_mask"][:, 6:] = mask
        for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages"):
            rows.batch[name] = torch.where(mask, -3.0, other)
        metrics = actor.update_actor(rows)["metrics"]
        found.append([metrics, *(parameter.tolist() for parameter in actor.learner.model.parameters())])
    assert found[0] == found[1] and found[0][0]["train/actor/ref_kl"] != 0


def test_few_rows_over_two_ranks_are_those_of_one(tmp_path):
    cfg = load_config("math/math_arithmetic_ppo", OVERRIDES)
    start = LanguageActor(cfg)
    start.fused = {"rollout": Worker()}  # nobody to send weights to
    start.init(None, WeightRoutes([0], [0]), 10)
    start.save_policy(str(tmp_path))
    expected = train("fsdp", tmp_path)
    assert all(np.isfinite(list(metrics.values())).all() for _, _, metrics in expected[0])
    spawn(rank_main, 2, tmp_path, expected)
