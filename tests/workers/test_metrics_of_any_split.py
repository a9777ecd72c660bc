"""Every metric of training is of the whole batch: the same over one rank or two, in micro-batches of any size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from rlinf_lite.config import load_config
from rlinf_lite.config.plan import observed
from rlinf_lite.envs import EnvSpec
from rlinf_lite.models import NOISE_KEY, build_policy
from rlinf_lite.models.check import random_obs
from rlinf_lite.models.graphs import Unwaiting
from rlinf_lite.models.sampling import noise_keys
from rlinf_lite.preview.memory import spec_of
from rlinf_lite.runners import experience
from rlinf_lite.scheduler import Worker
from rlinf_lite.training.learner import Learner
from rlinf_lite.weights import WeightRoutes
from rlinf_lite.workers import EmbodiedFSDPActor
from rlinf_lite.workers.layout import Layout
from rlinf_lite.workers.reasoning import LanguageActor, LanguageCritic
from rlinf_lite.workers.trajectory import Trajectories
from tests.compilers import compiling_by
from tests.ranks import spawn
from tests.workers.test_language_ranks import make_rows

NUM_ENVS, T, STEPS = 8, 3, 1
SMOOTH = "{lr: 1e-3, eps: 1e-2, warmup_steps: 0, lr_scheduler: constant}"  # a step is smooth in the gradient

MLP = ("gym_pendulum_ppo_mlp", "model.num_action_chunks=2", "model.options.hidden_sizes=[16]")
VLA = ("tabletop_ppo_vla", "rollout.model_dir=null")
FLOW = ("tabletop_ppo_flow", "rollout.model_dir=null", "model.options.trainable=all", "model.options.keep_prefix=false")
PPO = ("algorithm.critic_warmup_steps=0", "algorithm.update_epochs=2")
CLIPS = ("algorithm.value_clip=0.1", "algorithm.clip_ratio_low=0.02", "algorithm.clip_ratio_high=0.02")
ROBOTS = {
    "PPO, MLP": (*MLP, *PPO, *CLIPS, "algorithm.clip_ratio_c=1.05", "algorithm.entropy_coef=0.01"),
    "PPO, MLP, of older weights": (
        *(*MLP, *PPO, "algorithm.recompute_logprobs=true", "algorithm.logprob_type=action_level"),
        "algorithm.correction={kind: reject, metric: k3, low: 0.0, high: 0.001}",
    ),
    "PPO, VLA": (*VLA, *PPO, *CLIPS),
    "PPO, flow": (*FLOW, *PPO, "algorithm.clip_ratio_low=0.02", "algorithm.clip_ratio_high=0.02"),
    "GRPO, MLP": (
        *(*MLP, *PPO, "algorithm.adv_type=grpo", "algorithm.group_size=2", "algorithm.filter_groups=true"),
        *("algorithm.value_coef=0", "env.train.auto_reset=false"),
        *("rollout.num_chunks=100", "actor.global_batch_size=200"),
    ),
    "imitation, MLP": ("tabletop_sft_mlp",),
    "imitation, VLA": ("tabletop_sft_vla",),
    "imitation, flow": ("tabletop_sft_flow",),
}
LANGUAGE = {
    "language, PPO": ("math_arithmetic_ppo", "algorithm.value_clip=0.02", "algorithm.kl={place: reward, coef: 0.1}"),
    "language, GRPO": (
        *("math_arithmetic_grpo", "algorithm.group_size=2", "algorithm.filter_groups=false"),
        "actor.global_batch_size=80",
        *("algorithm.kl={place: loss, kind: k3, coef: 0.1}", "algorithm.recompute_logprobs=true"),
        "algorithm.correction={kind: tis, high: 1.1}",
    ),
}
SPLITS = {
    "one pass": (1, 100),
    "uneven": (1, 3),
    "two ranks, uneven": (2, 2),
}
"""Ranks, and samples of a micro-batch (rows of a language model: of ten tokens)."""
Logged = dict[str, dict[str, list[dict[str, float]]]]
"""Metrics of the steps by kind and split; those of two ranks by rank besides."""


class SomeDemonstrations:
    """20 chunks, drawn from their numbers; of every third, one action."""

    def __init__(self, spec: EnvSpec, chunk: int) -> None:
        self.spec, self.chunk = spec, chunk

    def __len__(self) -> int:
        return 20

    def mask(self, indices: np.ndarray) -> np.ndarray:
        return (np.arange(self.chunk) == 0) | (indices % 3 > 0)[:, None]

    def episodes(self, indices: np.ndarray) -> np.ndarray:
        return indices // 4

    def read(self, indices: np.ndarray) -> tuple[dict[str, Any], torch.Tensor]:
        seen = [random_obs(self.spec, int(i), rows=1) for i in indices]
        obs: dict[str, Any] = {"instruction": [one["instruction"][0] for one in seen]}
        obs["images"] = {
            name: np.concatenate([one["images"][name] for one in seen]) for name in seen[0].get("images", {})
        }
        if "state" in seen[0]:
            obs["state"] = np.concatenate([one["state"] for one in seen])
        shape = self.chunk, self.spec.action_dim
        actions = np.stack([np.random.default_rng(int(i)).uniform(-1, 1, shape) for i in indices])
        return obs, torch.from_numpy(actions.astype(np.float32))


def trajectories(cfg: Any, spec: EnvSpec) -> Trajectories:
    """What a policy did that is a little different from the untrained one; of one environment nothing, of another not
    the last action; the rewards of one group are the same."""
    torch.manual_seed(cfg.runner.seed)
    policy = build_policy(cfg, spec)
    rng = np.random.default_rng(0)
    obs = {**random_obs(spec, rows=NUM_ENVS * T), NOISE_KEY: noise_keys(0, np.arange(NUM_ENVS * T), 0)}
    with torch.no_grad():
        acted = policy.predict_action_batch(obs, "train")
    drift = torch.from_numpy(rng.normal(scale=0.05, size=acted.logprobs.shape).astype(np.float32))
    chunk = acted.logprobs.shape[1]
    mask = torch.ones(NUM_ENVS, T, chunk, dtype=torch.bool)
    mask[1, -1, -1] = False
    mask[6] = False
    rewards = rng.normal(size=(NUM_ENVS, T, chunk)).astype(np.float32)
    rewards[2:4] = 1.0

    def by_decision(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (NUM_ENVS, T))

    return Trajectories(
        env_ids=torch.arange(NUM_ENVS),
        rewards=torch.from_numpy(rewards) * mask,
        dones=torch.zeros(NUM_ENVS, T, chunk, dtype=torch.bool),
        mask=mask,
        logprobs=by_decision(acted.logprobs + drift),
        values=by_decision(acted.values + 2 * drift.mean((1, 2))[:, None]),
        next_values=torch.from_numpy(rng.normal(size=(NUM_ENVS, T)).astype(np.float32)),
        versions=torch.zeros(NUM_ENVS, T, dtype=torch.int64),
        forward_inputs={name: by_decision(x) for name, x in acted.forward_inputs.items()},
    )


def placed(worker: Any, rank: int, world_size: int, port: int) -> Any:
    worker.rank, worker.world_size, worker.local_world_size, worker.master_port = rank, world_size, 2, port
    worker.fused = {"rollout": Worker()}  # nobody to send weights to
    return worker


def robot_steps(kind: str, size: int, rank: int = 0, world_size: int = 1, port: int = 0) -> list[dict[str, float]]:
    name, *overrides = ROBOTS[kind]
    threads = "actor.num_threads=1" if world_size == 2 or size != 3 else "actor.num_threads=2"
    cfg = load_config(f"embodiment/{name}", [*overrides, f"actor.optim={SMOOTH}", "actor.strategy=replicated", threads])
    sizes = {"global_batch_size": 9, "micro_batch_size": size}
    cfg = cfg.model_copy(update={"actor": cfg.actor.model_copy(update=sizes)})
    seen = observed(cfg)
    spec = EnvSpec(2, 5, {}, [-1.0] * 2, [1.0] * 2, 10, False) if seen is None else spec_of(seen)
    actor = placed(EmbodiedFSDPActor(cfg), rank, world_size, port)
    actor.init(Layout(NUM_ENVS, 1, 1, rollout_nodes=(0,), actor_nodes=(0,) * world_size), spec, total_steps=5)
    actor.demonstrations = SomeDemonstrations(spec, cfg.model.num_action_chunks)
    found = []
    for step in range(STEPS):
        if kind.startswith("imitation"):
            found.append(actor.run_sft(step)["metrics"])
            continue
        share = NUM_ENVS // world_size
        actor.trajectories = trajectories(cfg, spec).rows(slice(rank * share, (rank + 1) * share))
        found.append(actor.compute_advantages_and_returns() | actor.run_training(step)["metrics"])
    return found


def language_steps(
    kind: str, size: int, start: str, rank: int = 0, world_size: int = 1, port: int = 0
) -> list[dict[str, float]]:
    """As `ReasoningRunner` makes them of 7 scored responses, some of which are longer than others."""
    name, *overrides = LANGUAGE[kind]
    optim = f"actor.optim={SMOOTH}", *([f"critic.optim={SMOOTH}"] if "PPO" in kind else [])
    lengths = (
        "data.max_prompt_length=6",
        "rollout.max_response_length=4",
        f"actor.max_tokens_per_micro_batch={10 * size}",
    )
    cfg = load_config(f"math/{name}", [*overrides, *optim, *lengths, "actor.strategy=replicated"])
    actor, critic = placed(LanguageActor(cfg), rank, world_size, port), None
    actor.init(start, WeightRoutes([0], [0] * world_size), 10)
    if "PPO" in kind:
        critic = placed(LanguageCritic(cfg), rank, world_size, port)
        critic.init(start, 10)
    found = []
    for step in range(STEPS):
        batch = make_rows(7)
        own = batch.chunk(world_size)[rank]
        columns = actor.compute_log_prob(own).batch
        if critic is not None:
            columns |= critic.compute_values(own).batch
        parts: list[Any] = [columns] * world_size
        if world_size > 1:
            dist.all_gather_object(parts, columns)
        rows = batch.batch
        del rows["values"]
        rows |= {name: torch.cat([part[name] for part in parts]) for name in columns}
        for i, name in enumerate(("rollout_logprobs", "ref_logprobs")):
            noise = np.random.default_rng(i).normal(scale=0.1, size=rows[name].shape).astype(np.float32)
            rows[name] = rows["old_logprobs"] + torch.from_numpy(noise)
        rows["scores"], rows["stopped"] = torch.tensor([0.0, 1.0, 1.0, 0.5, 0.0, 0.0, 1.0]), torch.arange(7) % 2 == 0
        rows["group"], rows["sample"] = torch.arange(7) // 2, torch.arange(7) % 2
        batch, metrics = experience.add_advantages(batch, cfg.algorithm, experience.kl_controller(cfg.algorithm.kl), 0)
        reads = ["old_logprobs", "rollout_logprobs", "acted_versions", "advantages", "ref_logprobs"]
        for minibatch in experience.updates(batch, cfg.algorithm, 4, 0, step):
            part = experience.for_ranks(minibatch, reads, world_size).chunk(world_size)[rank]
            metrics |= actor.update_actor(part)["metrics"]
            if critic is not None:
                part = experience.for_ranks(minibatch, ["values", "returns"], world_size).chunk(world_size)[rank]
                metrics |= critic.update_critic(part)["metrics"]
        found.append(metrics)
    return found


def all_steps(directory: Path, kinds: list[str], rank: int = 0, world_size: int = 1, port: int = 0) -> None:
    """Write the metrics of these kinds, by split, for this many ranks into a file."""
    torch.set_num_threads(1)
    found: Logged = {kind: {} for kind in kinds}
    for split, (ranks, size) in SPLITS.items():
        for kind in found if ranks == world_size else ():
            if kind in ROBOTS:
                found[kind][split] = robot_steps(kind, size, rank, world_size, port)
            else:
                found[kind][split] = language_steps(kind, size, str(directory), rank, world_size, port)
    (directory / f"metrics_{world_size}_{rank}.json").write_text(json.dumps(found))
    if world_size > 1:
        dist.destroy_process_group()


def rank_main(rank: int, port: int, directory: Path, kinds: list[str]) -> None:
    all_steps(directory, kinds, rank, 2, port)


def save_language_model(directory: Path) -> None:
    start = placed(LanguageActor(load_config("math/math_arithmetic_ppo", [])), 0, 1, 0)
    start.init(None, WeightRoutes([0], [0]), 10)
    start.save_policy(str(directory))


def logged_of(directory: Path, kinds: list[str]) -> Logged:
    save_language_model(directory)
    all_steps(directory, kinds)
    spawn(rank_main, 2, directory, kinds)
    one, *two = (json.loads((directory / f"metrics_{name}.json").read_text()) for name in ("1_0", "2_0", "2_1"))
    for rank, found in enumerate(two):
        for kind, splits in found.items():
            one[kind] |= {f"{split}, rank {rank}": steps for split, steps in splits.items()}
    return one


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Logged:
    return logged_of(tmp_path_factory.mktemp("start"), FAST)


@pytest.fixture(scope="module")
def logged_slowly(tmp_path_factory: pytest.TempPathFactory) -> Logged:
    return logged_of(tmp_path_factory.mktemp("start"), SLOW)


def check(logged: Logged, kind: str) -> None:
    """But for float32's rounding, which differs by the size of a product of matrices: 1e-6 of what a mean is over, and
    more of it after updates. A fraction by this bound has the same positions in it."""
    wanted = logged[kind]["one pass"]
    assert len(logged[kind]) == 4
    for split, steps in logged[kind].items():
        for got, want in zip(steps, wanted, strict=True):
            assert got.keys() == want.keys(), split
            for name in want:
                assert got[name] == pytest.approx(want[name], rel=3e-5, abs=1e-6), f"{name}, {split}"


FAST = ["PPO, MLP", "PPO, MLP, of older weights", "GRPO, MLP", "language, PPO"]
SLOW = [kind for kind in (*ROBOTS, *LANGUAGE) if kind not in FAST]


@pytest.mark.parametrize("kind", FAST)
def test_metrics_of_a_step_are_those_of_its_whole_batch(logged: Logged, kind: str) -> None:
    check(logged, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SLOW)
def test_metrics_of_a_step_of_larger_policies_are_too(logged_slowly: Logged, kind: str) -> None:
    check(logged_slowly, kind)


def test_what_is_clipped_or_rejected_is_some_of_all(logged: Logged) -> None:
    for kind, name in (
        ("PPO, MLP", "actor/clip_fraction"),
        ("PPO, MLP", "actor/clip_fraction_lower"),
        ("PPO, MLP, of older weights", "actor/rejected_fraction"),
        ("language, PPO", "critic/value_clip_fraction"),
    ):
        assert 0.02 < logged[kind]["one pass"][0][f"train/{name}"] < 0.98, name


@pytest.mark.parametrize("kind", [*ROBOTS, *LANGUAGE])
def test_no_micro_batch_waits_for_the_device(kind: str, tmp_path: Path) -> None:
    """Python reads no number between a micro-batch's beginning and the end of its backward pass. With sdpa,
    transformers reads one of a language model: whether there is padding."""
    passes, counted = Learner.passes, []

    def unwaiting(self: Learner, compute: Any, micro_batches: Any) -> Any:
        def without_waiting(model: Any, micro_batch: Any) -> Any:
            counted.append(1)
            with Unwaiting():
                return compute(model, micro_batch)

        return passes(self, without_waiting, micro_batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "passes", unwaiting)
        if kind in ROBOTS:
            robot_steps(kind, 3)
        else:
            patch.setitem(LANGUAGE, kind, (*LANGUAGE[kind], "model.attn_implementation=eager", "cluster.fuse=null"))
            save_language_model(tmp_path)
            language_steps(kind, 3, str(tmp_path))
    assert counted


@pytest.mark.parametrize("kind", ["PPO, VLA", "language, GRPO"])
def test_scoring_by_compiled_layers_keeps_no_graph(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It records gradients, as another graph would be compiled without, and each graph goes before the next begins."""
    passes, with_gradients = Learner.passes, []

    def watched(self: Learner, compute: Any, micro_batches: Any) -> Any:
        def noted(model: Any, micro_batch: Any) -> Any:
            with_gradients.append(self.model.compiles_layers)
            return compute(model, micro_batch)

        for result in passes(self, noted, micro_batches):
            assert not any(x.grad_fn is not None for x in tree_leaves(result) if isinstance(x, torch.Tensor))
            yield result

    monkeypatch.setattr(Learner, "passes", watched)
    if kind in ROBOTS:
        more = "model.options.compile=true", "algorithm.recompute_logprobs=true"
        monkeypatch.setitem(ROBOTS, kind, (*ROBOTS[kind], *more))
        with compiling_by():
            robot_steps(kind, 3)
    else:
        monkeypatch.setitem(LANGUAGE, kind, (*LANGUAGE[kind], "model.compile=true"))
        save_language_model(tmp_path)
        with compiling_by():
            language_steps(kind, 3, str(tmp_path))
    assert with_gradients and all(with_gradients)
