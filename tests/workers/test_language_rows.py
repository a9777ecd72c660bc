"""Any number of rows over any number of workers: what nobody writes down as a size, and a run comes to."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from rlinf_lite.config import load_config
from rlinf_lite.config.reasoning import ReasoningAlgorithmConfig
from rlinf_lite.data import DataProto
from rlinf_lite.data.problems import open_problems
from rlinf_lite.runners import experience
from rlinf_lite.scheduler import Worker
from rlinf_lite.scheduler.dispatch import call_rule, get_dispatch_mode
from rlinf_lite.weights import WeightRoutes
from rlinf_lite.workers.reasoning import LanguageActor, LanguageRollout, RewardWorker

SMALL = [
    "data.max_prompt_length=12",
    "data.arithmetic={num_train: 40, num_val: 2, num_terms: 2}",
    "rollout.max_response_length=6",
    "sft.num_steps=0",
]


def make_cfg(tmp_path, *overrides):
    paths = [f"runner.logger.log_path={tmp_path}"]
    return load_config("math/math_arithmetic_grpo", [*SMALL, *paths, *overrides])


def call(workers, method, *args):
    """As a group of these workers would be called; without what they report."""
    mode = get_dispatch_mode(call_rule(getattr(type(workers[0]), method)).dispatch_mode)
    by_rank = mode.dispatch(len(workers), args, {})
    result = mode.collect([getattr(w, method)(*a, **k) for w, (a, k) in zip(workers, by_rank, strict=True)])
    if result is not None:
        result.meta_info.pop("metrics")
    return result


def make_rollouts(cfg, number):
    """Workers that share one model and engine."""
    first = LanguageRollout(cfg)
    first.init(None, WeightRoutes([0], [0]))
    workers = [first, *(LanguageRollout(cfg) for _ in range(number - 1))]
    shared = ("model", "engine", "stops", "version", "weights", "precision")
    for worker in workers:
        worker.check_abort = lambda doing: None
        vars(worker).update({name: x for name, x in vars(first).items() if name in shared})
    return workers


def answer(cfg, problems, rollouts, rewards, num_prompts, greedy=False):
    """One wave: generated in stages, scored part by part."""
    prompts = problems.train.batch(np.arange(num_prompts))
    prompts.batch["group"] = torch.arange(num_prompts)
    prompts.meta_info = {"seed": 5, "greedy": greedy}
    call(rollouts, "start_generation", prompts)
    parts = [call(rollouts, "next_sequences") for _ in range(cfg.rollout.pipeline_stage_num)]
    return DataProto.concat([part.union(call(rewards, "compute_rewards", part)) for part in parts])


def equal(a, b):
    assert len(a) == len(b) and a.batch.keys() == b.batch.keys()
    for name, column in a.batch.items():
        assert column.dtype == b.batch[name].dtype and torch.allclose(column, b.batch[name], atol=1e-5), name
    for name, array in a.non_tensor_batch.items():
        assert array.tolist() == b.non_tensor_batch[name].tolist(), name


@pytest.mark.parametrize("adv_type", ["grpo", "remax"])
def test_generation_and_rewards_of_few_prompts_over_many_workers(tmp_path, adv_type):
    for num_prompts, stages in itertools.product((1, 2, 3), (1, 3)):
        overrides = [f"rollout.pipeline_stage_num={stages}", f"algorithm.adv_type={adv_type}", "algorithm.group_size=2"]
        sizes = [f"data.num_prompts={num_prompts}", f"actor.global_batch_size={2 * num_prompts}"]
        cfg = make_cfg(tmp_path, *overrides, *sizes)
        problems, rollouts = open_problems(cfg), make_rollouts(cfg, 4)
        rewards = [RewardWorker(cfg) for _ in range(5)]
        for worker in rewards:
            worker.init()
        alone = experience.in_order(answer(cfg, problems, rollouts[:1], rewards[:1], num_prompts))
        assert len(alone) == num_prompts * (3 if adv_type == "remax" else 2)
        equal(experience.in_order(answer(cfg, problems, rollouts, rewards, num_prompts)), alone)
        greedy = answer(cfg, problems, rollouts, rewards, num_prompts, greedy=True)  # as in an evaluation
        assert len(greedy) == num_prompts and set(greedy.batch["sample"].tolist()) == {0}


def test_an_actor_scores_no_rows_with_all_columns(tmp_path):
    cfg = make_cfg(tmp_path)
    actor = LanguageActor(cfg)
    actor.fused = {"rollout": Worker()}  # nobody to send weights to
    actor.init(None, WeightRoutes([0], [0]), 1)
    rollouts, rewards = make_rollouts(cfg, 1), [RewardWorker(cfg)]
    rewards[0].init()
    batch = answer(cfg, open_problems(cfg), rollouts, rewards, 1)
    columns = actor.compute_log_prob(batch[:0])
    assert columns.batch["old_logprobs"].shape == (0, 6)
    united = DataProto.concat([columns, actor.compute_log_prob(batch)])
    torch.testing.assert_close(united.batch["old_logprobs"], batch.batch["rollout_logprobs"], atol=1e-5, rtol=0)


def rows(num_rows, seed=0):
    """Scored rows of groups of two, with every column that advantages read."""
    rng = np.random.default_rng(seed)
    lengths = torch.from_numpy(rng.integers(1, 4, num_rows))
    mask = torch.arange(3) < lengths[:, None]
    noise = torch.from_numpy(rng.normal(size=(4, num_rows, 3))).float()
    names = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "values")
    tensors = {
        "input_ids": torch.ones(num_rows, 4, dtype=torch.int64),
        "attention_mask": torch.cat([torch.ones(num_rows, 1, dtype=torch.bool), mask], 1),
        "response_mask": mask,
        "acted_versions": torch.zeros(mask.shape, dtype=torch.int32),
        "scores": torch.from_numpy(rng.integers(0, 2, num_rows)).float(),
        "group": torch.arange(num_rows) // 2,
        "sample": torch.arange(num_rows) % 2,
        "stopped": torch.ones(num_rows, dtype=torch.bool),
        "baselines": torch.zeros(num_rows),
        **{name: torch.where(mask, x, 0.0) for name, x in zip(names, noise, strict=True)},
    }
    return DataProto.from_dict(tensors, {"row": np.arange(num_rows)})


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 7])
def test_layouts_of_few_rows(num_rows):
    """Cut and put together again over more parts than rows; no row is lost or doubled."""
    batch = rows(num_rows)
    for parts in (1, 2, 3, 8):
        equal(DataProto.concat(batch.chunk(parts)), batch)
        spread = experience.for_ranks(batch, [], parts)
        assert sorted(spread.non_tensor_batch["row"].tolist()) == list(range(num_rows))
        assert [len(part) for part in spread.chunk(parts)] == [len(part) for part in batch.chunk(parts)]
        padded, added = batch.pad_to_divisor(parts)
        assert len(padded) % parts == 0
        equal(padded.unpad(added), batch)
    kept = experience.with_signal(batch)
    assert experience.num_groups(experience.first_groups(kept, 1)) <= 1
    assert (
        len(experience.in_order(batch))
        == len(experience.split_baselines(batch, ReasoningAlgorithmConfig(group_size=5)))
        == num_rows
    )
    assert experience.num_groups(batch) == -(-num_rows // 2)


@pytest.mark.parametrize(
    "adv_type", ["gae", "grpo", "rloo", "opo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
)
@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_advantages_and_updates_of_few_rows(tmp_path, adv_type, num_rows):
    algorithm = make_cfg(tmp_path, f"algorithm.adv_type={adv_type}").algorithm
    for length in (1, 3):
        batch = rows(num_rows)
        batch.batch["response_mask"] = (torch.arange(3) < length).expand(num_rows, 3).contiguous()
        controller = experience.kl_controller(algorithm.kl)
        found, metrics = experience.add_advantages(batch, algorithm, controller, recomputed_by=0)
        assert torch.isfinite(found.batch["advantages"]).all() and torch.isfinite(found.batch["returns"]).all()
        assert metrics["rollout/num_groups"] == -(-num_rows // 2)
        trained = [minibatch.non_tensor_batch["row"] for minibatch in experience.updates(found, algorithm, 2, 0, 0)]
        assert sorted(np.concatenate(trained).tolist()) == list(range(num_rows))
