"""Sizes that nobody tries, at random: one environment, one row, one-step episodes, chunks longer than episodes, more
workers than rows. Env workers, rollout workers and actors, as they are, against one environment after the other."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_lite.config import Config
from rlinf_lite.envs import env_seed, episode_seed
from rlinf_lite.models import NOISE_KEY, ActionOutput, MLPGaussianPolicy
from rlinf_lite.models.sampling import noise_keys
from rlinf_lite.scheduler.dispatch import route
from rlinf_lite.training.earlier import EarlierWeights
from rlinf_lite.training.learner import Learner
from rlinf_lite.training.minibatches import micro_batches, minibatches
from rlinf_lite.training.offload import ActingWeights
from rlinf_lite.workers import EmbodiedFSDPActor, EnvWorker, MultiStepRolloutWorker
from rlinf_lite.workers.layout import Layout
from tests.envs.test_chunked import SlowRow

RUN_SEED, EVAL_SEED, STEP = 3, 7, 2


@dataclass(frozen=True)
class Sizes:
    env_workers: int
    stages: int
    rollout_workers: int
    actors: int
    num_envs: int
    eval_envs: int
    eval_episodes: int
    limit: int
    chunk: int
    num_chunks: int
    auto_reset: bool
    ignore_terminations: bool
    bootstrap: str

    @staticmethod
    def draw(seed: int) -> Sizes:
        rng = np.random.default_rng(seed)
        workers, stages, actors = (int(rng.integers(1, n)) for n in (4, 3, 3))
        slices = workers * stages
        return Sizes(
            workers,
            stages,
            rollout_workers=int(rng.integers(1, 6)),
            actors=actors,
            num_envs=slices * actors * int(rng.integers(1, 3)) if rng.random() < 0.7 or slices % actors else slices,
            eval_envs=int(rng.integers(1, 2 * slices + 1)),
            eval_episodes=int(rng.integers(1, 8)),
            limit=int(rng.choice([1, 1, 2, 3, 7])),
            chunk=int(rng.choice([1, 2, 5])),
            num_chunks=int(rng.choice([1, 2, 4])),
            auto_reset=bool(rng.random() < 0.6),
            ignore_terminations=bool(rng.random() < 0.5),
            bootstrap=str(rng.choice(["standard", "always", "never"])),
        )

    def config(self) -> Config:
        rules = {"max_episode_steps": self.limit, "ignore_terminations": self.ignore_terminations}
        return Config.model_validate(
            {
                "runner": {"seed": RUN_SEED, "phase_timeout_s": 20},
                "env": {
                    "id": "tests.envs.toy:make_env",
                    "train": {"num_envs": self.num_envs, "auto_reset": self.auto_reset, **rules},
                    "eval": {
                        **rules,
                        "num_envs": self.eval_envs,
                        "num_episodes": self.eval_episodes,
                        "seed": EVAL_SEED,
                    },
                },
                "rollout": {"pipeline_stage_num": self.stages, "num_chunks": self.num_chunks},
                "model": {"num_action_chunks": self.chunk, "options": {"hidden_sizes": [8]}},
                "algorithm": {"bootstrap_type": self.bootstrap, "entropy_coef": 0.01},
                "actor": {"global_batch_size": 4, "micro_batch_size": 3},
            }
        )


class StubPolicy:
    """Actions follow from what is seen and from the noise key, row by row."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk

    def act(self, state: Any, keys: Any) -> Any:
        phase = state[:, :1] + (keys % np.uint64(1000)).astype(np.float32)[:, None] / 100
        return np.sin(phase + np.arange(self.chunk)).astype(np.float32)[..., None] + np.float32(0.3)  # [B, C, 1]

    def predict_action_batch(self, obs: Any, mode: str) -> ActionOutput:
        actions = torch.from_numpy(self.act(obs["state"], obs[NOISE_KEY]))
        inputs = {"state": torch.from_numpy(obs["state"].copy()), "sampled_actions": actions}
        return ActionOutput(actions, actions - 1, self.predict_values(obs), inputs if mode == "train" else {})

    def predict_values(self, obs: Any) -> Any:
        return torch.from_numpy(obs["state"][:, :1] * 0.5)

    def config_dict(self) -> dict[str, Any]:
        return {}


Post = dict[tuple[str, int], "queue.Queue[tuple[str, int, Any]]"]


def employ(kind: type, name: str, rank: int, cfg: Config, post: Post) -> Any:
    """A worker whose messages go through `post` instead of sockets."""

    class Employed(kind):
        def send(self, obj: Any, group: str, rank: int, tag: object = None) -> None:
            post[group, rank].put((self.name, self.rank, obj))

        def recv_any(self, group: str, timeout_s: float | None = None, tag: object = None) -> Any:
            return post[self.name, self.rank].get(timeout=timeout_s)[1:]

        def recv_first(self, tags: object, timeout_s: float | None = None) -> Any:
            return post[self.name, self.rank].get(timeout=timeout_s)

    worker = Employed(cfg)
    worker.name, worker.rank = name, rank
    return worker


class Crew:
    """All workers of a run, without processes."""

    def __init__(self, sizes: Sizes) -> None:
        self.cfg = sizes.config()
        groups = {"env": sizes.env_workers, "rollout": sizes.rollout_workers, "actor": sizes.actors}
        post: Post = {(name, rank): queue.Queue() for name, size in groups.items() for rank in range(size)}
        nodes = (0,) * sizes.rollout_workers, (0,) * sizes.actors
        self.layout = Layout(sizes.num_envs, sizes.env_workers, sizes.stages, *nodes)
        self.envs = [employ(EnvWorker, "env", rank, self.cfg, post) for rank in range(sizes.env_workers)]
        self.rollouts = [
            employ(MultiStepRolloutWorker, "rollout", rank, self.cfg, post) for rank in range(sizes.rollout_workers)
        ]
        self.actors = [employ(EmbodiedFSDPActor, "actor", rank, self.cfg, post) for rank in range(sizes.actors)]
        self.specs = [worker.init(self.layout) for worker in self.envs]
        for worker in self.rollouts:
            worker.layout, worker.policy, worker.num_chunks = self.layout, StubPolicy(sizes.chunk), sizes.num_chunks
            worker.version, worker.actor, worker.shares, worker.precision = 0, None, False, "fp32"
            worker.weights = ActingWeights(torch.nn.Module(), "cpu", enabled=False)
        for worker in self.actors:
            worker.layout = self.layout

    def all_at_once(self, calls: list[Any]) -> list[Any]:
        with ThreadPoolExecutor(len(calls)) as pool:
            return [future.result() for future in [pool.submit(*call) for call in calls]]


def slow_run(sizes: Sizes, env_id: int, env: SlowRow, decisions: range) -> list[dict[str, Any]]:
    """What one environment does in these decisions, and the value of what follows each."""
    policy, played = StubPolicy(sizes.chunk), []

    def value(state: Any) -> float:
        return float(np.float32(state[0]) * np.float32(0.5))

    for decision in decisions:
        state = env.observe()
        actions = policy.act(state[None], noise_keys(RUN_SEED, np.array([env_id]), decision))[0]
        done = env.chunk(actions)
        rewards, terminated, truncated, executed = (np.array(x) for x in zip(*done["steps"], strict=True))
        bootstrapped = {"standard": truncated.any(), "always": True, "never": False}[sizes.bootstrap]
        follows = value(done["obs"]) if done["final"] is None else value(done["final"]) if bootstrapped else 0.0
        played.append(
            {
                "rewards": rewards,
                "dones": terminated | truncated,
                "mask": executed,
                "logprobs": actions - 1,
                "values": np.array([value(state)]),
                "next_values": follows,
                "state": state,
                "episodes": done["episodes"],
            }
        )
    return played


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_trajectories_are_those_of_one_environment_after_the_other(first: int) -> None:
    for seed in range(first, first + 20):
        sizes = Sizes.draw(seed)
        crew = Crew(sizes)
        rows = [
            SlowRow(i, env_seed(RUN_SEED, i), sizes.auto_reset, sizes.ignore_terminations, sizes.limit)
            for i in range(sizes.num_envs)
        ]
        for step in range(STEP):
            if not sizes.auto_reset:
                for row in rows:
                    row.first_seed, row.index = episode_seed(env_seed(RUN_SEED, row.row), step), -1
                    row.next_episode()
            decisions = range(step * sizes.num_chunks, (step + 1) * sizes.num_chunks)
            expected = [slow_run(sizes, i, row, decisions) for i, row in enumerate(rows)]
            played = crew.all_at_once(
                [(worker.interact, step) for worker in crew.envs] + [(worker.generate,) for worker in crew.rollouts]
            )[: sizes.env_workers]
            for actor in crew.actors:
                actor.recv_rollout_batch()
            got = type(crew.actors[0].trajectories).concat([actor.trajectories for actor in crew.actors])
            assert got.env_ids.tolist() == list(range(sizes.num_envs)), sizes
            compare(got, expected, sizes)
            records = sorted((r for result in played for r in result["episodes"]), key=lambda r: (r.env_id, r.seed))
            ours = sorted((r for row in expected for t in row for r in t["episodes"]), key=lambda r: (r.env_id, r.seed))
            assert records == [replace(record) for record in ours], sizes
            assert sum(result["num_env_steps"] for result in played) == int(got.mask.sum()), sizes


def compare(got: Any, expected: list[list[dict[str, Any]]], sizes: Sizes) -> None:
    def stacked(name: str) -> Any:
        return np.array([[t[name] for t in row] for row in expected])

    for name in ("rewards", "dones", "mask", "logprobs", "values"):
        np.testing.assert_allclose(getattr(got, name).numpy(), stacked(name), rtol=1e-6, err_msg=f"{name} {sizes}")
    np.testing.assert_allclose(got.forward_inputs["state"].numpy(), stacked("state"), err_msg=str(sizes))
    decided = stacked("mask").any(-1)  # nothing follows the decisions of an environment that waits
    found, wanted = got.next_values.numpy()[decided], stacked("next_values")[decided]
    np.testing.assert_allclose(found, wanted, rtol=1e-6, err_msg=str(sizes))


def test_evaluations_play_each_episode_once_and_to_its_end() -> None:
    for seed in range(100, 140):
        sizes = Sizes.draw(seed)
        crew = Crew(sizes)
        expected = []
        for episode in range(sizes.eval_episodes):
            row = SlowRow(episode, env_seed(EVAL_SEED, episode), False, sizes.ignore_terminations, sizes.limit)
            for decision in range(sizes.limit):
                keys = noise_keys(EVAL_SEED, np.array([episode]), decision)
                expected += row.chunk(StubPolicy(sizes.chunk).act(row.observe()[None], keys)[0])["episodes"]
        for _ in range(2):
            calls = [(worker.evaluate,) for worker in (*crew.envs, *crew.rollouts)]
            results = crew.all_at_once(calls)[: sizes.env_workers]
            records = [record for result in results for record in result["episodes"]]
            assert sorted(records, key=lambda record: record.env_id) == expected, sizes


def actor_with(crew: Crew, **algorithm: Any) -> Any:
    """The only actor, with a policy and the trajectories of one step."""
    crew.all_at_once([(worker.interact, 0) for worker in crew.envs] + [(w.generate,) for w in crew.rollouts])
    (actor,) = crew.actors
    actor.cfg = crew.cfg.model_copy(update={"algorithm": crew.cfg.algorithm.model_copy(update=algorithm)})
    torch.manual_seed(0)
    actor.policy = MLPGaussianPolicy.from_config(crew.cfg.model, crew.specs[0])
    actor.version, actor.learner = 0, Learner(actor, actor.policy, actor.cfg, "actor")
    actor.learner.start_training(crew.cfg.actor.optim, 5)
    actor.earlier = EarlierWeights(actor.learner, max_staleness=0)
    actor.recv_rollout_batch()
    return actor


def test_the_entropy_of_a_chunk_is_that_of_the_actions_that_were_executed() -> None:
    sizes = replace(Sizes.draw(0), actors=1, limit=3, chunk=5, num_chunks=1, num_envs=4, env_workers=1, stages=1)
    actor = actor_with(Crew(sizes))
    executed = actor.trajectories.mask.sum(-1).double()
    assert executed.max() < sizes.chunk
    actor.compute_advantages_and_returns()
    per_action = 0.5 * np.log(2 * np.pi * np.e) + actor.cfg.model.options.log_std_init
    metrics = actor.run_training(0)["metrics"]
    assert metrics["train/actor/entropy"] == pytest.approx(float(executed.mean()) * per_action, rel=1e-5)


@pytest.mark.parametrize("logprob_type", ["chunk_level", "action_level", "token_level"])
def test_ratios_are_those_of_the_actions_that_were_executed(logprob_type: str) -> None:
    sizes = replace(Sizes.draw(0), actors=1, limit=3, chunk=5, num_chunks=1, num_envs=4, env_workers=1, stages=1)
    found = []
    for other in (0.0, 1.0):
        actor = actor_with(Crew(sizes), logprob_type=logprob_type)
        own = actor.trajectories
        assert not own.mask.all()
        own.logprobs[~own.mask] = other
        actor.compute_advantages_and_returns()
        metrics = actor.run_training(0)["metrics"]
        found.append([metrics, *(parameter.tolist() for parameter in actor.policy.parameters())])
    assert found[0] == found[1]


@pytest.mark.parametrize("adv_type", ["gae", "grpo"])
def test_an_actor_learns_from_however_little_there_is(adv_type: str) -> None:
    for seed in range(200, 212):
        sizes = replace(Sizes.draw(seed), actors=1)
        actor = actor_with(Crew(sizes), adv_type=adv_type, filter_groups=adv_type == "grpo", update_epochs=2)
        before = [parameter.clone() for parameter in actor.policy.parameters()]
        metrics = actor.compute_advantages_and_returns()
        trained = actor.run_training(0)["metrics"]
        assert trained.get("train/actor/skipped_updates", 0.0) == 0.0, sizes
        after = list(actor.policy.parameters())
        learnt = any(not torch.equal(x, y) for x, y in zip(before, after, strict=True))
        assert learnt == (metrics.get("rollout/filtered_groups_frac", 0.0) < 1), sizes
        assert all(torch.isfinite(parameter).all() for parameter in after), sizes


@pytest.mark.parametrize("adv_type", ["rloo", "reinforce_plus_plus_baseline"])
def test_what_is_filtered_has_no_part_in_how_advantages_are_scaled(adv_type: str) -> None:
    """Groups without a signal would else make those of the others larger, the more of them there are."""
    sizes = Sizes.draw(0)
    actor = actor_with(
        Crew(replace(sizes, actors=1, num_envs=8, env_workers=1, stages=1, num_chunks=sizes.limit)),
        adv_type=adv_type,
        filter_groups=True,
        normalize_advantages=True,
        group_size=2,
        reward_type="chunk_level",
    )
    own = actor.trajectories
    own.rewards[:] = 0
    own.rewards[0, 0], own.rewards[2, 0] = 1.0, 1.0  # of four groups, two have a signal
    metrics = actor.compute_advantages_and_returns()
    trained = actor.batch.advantages[actor.batch.valid]
    assert metrics["rollout/filtered_groups_frac"] == 0.5
    assert float(trained.std()) == pytest.approx(1, rel=1e-4) and float(trained.mean()) == pytest.approx(0, abs=1e-5)


def test_every_row_is_routed_to_one_place() -> None:
    for sources in range(1, 6):
        for destinations in range(1, 6):
            for batch in range(8):
                routes = route(sources, destinations, batch)
                first, arrived = 0, []
                for pieces in routes:
                    rows = [row for piece in pieces for row in range(piece.start, piece.stop)]
                    assert rows == list(range(len(rows)))
                    for piece in pieces:
                        arrived += [(piece.dst_rank, first + row) for row in range(piece.start, piece.stop)]
                    first += len(rows)
                assert [row for _, row in sorted(arrived)] == list(range(batch)), (sources, destinations, batch)


def test_every_sample_trains_once_per_epoch_on_its_own_rank() -> None:
    rng = np.random.default_rng(0)
    for world_size in (1, 2, 3):
        for per_rank in range(1, 5):
            for batch_size in (1, 2, 5, 100):
                for size in (1, 2, 7):
                    valid = rng.random(world_size * per_rank) < 0.6
                    seen: list[int] = []
                    for minibatch in minibatches(valid, batch_size, 0, 0, 0):
                        parts = [
                            micro_batches(minibatch, rank, world_size, len(valid), size) for rank in range(world_size)
                        ]
                        assert 1 <= len(minibatch) <= batch_size and len({len(of_rank) for of_rank in parts}) == 1
                        assert all(len(part) <= size for of_rank in parts for part in of_rank)
                        here = [
                            int(i) + r * per_rank for r, of_rank in enumerate(parts) for part in of_rank for i in part
                        ]
                        assert sorted(here) == sorted(minibatch.tolist())
                        seen += here
                    assert sorted(seen) == np.flatnonzero(valid).tolist()
