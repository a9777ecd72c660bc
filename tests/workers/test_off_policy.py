"""Off-policy updates: equal to Stable-Baselines3's SAC from the same weights, transitions and noise; right in a problem
whose values are known; the same over several ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
import torch.distributed as dist
from stable_baselines3 import SAC
from stable_baselines3.common.logger import configure

from rlinf_lite.algorithms.off_policy import ActorInputs, CriticInputs, td3_bc
from rlinf_lite.config import load_config
from rlinf_lite.config.off_policy import OffPolicyConfig
from rlinf_lite.envs import EnvSpec
from rlinf_lite.models.critics import Critics
from rlinf_lite.training.replay import Block, Transitions, flags_of
from rlinf_lite.workers import OffPolicyActor
from rlinf_lite.workers.layout import Layout
from rlinf_lite.workers.transitions import Played
from tests.ranks import spawn

NUM_ENVS, T = 4, 8
PENDULUM = EnvSpec(1, 3, {}, [-2.0], [2.0], 200, False)


def actor_of(
    directory: Path, *overrides: str, spec: EnvSpec = PENDULUM, ranks: tuple[int, int, int] = (0, 1, 0)
) -> OffPolicyActor:
    """An actor; `ranks`: its rank, of how many, which meet at what port."""
    sizes = [f"env.train.num_envs={NUM_ENVS}", f"rollout.num_chunks={T}", "replay.min_size=1"]
    cfg = load_config("embodiment/gym_pendulum_sac_mlp", [*sizes, "off_policy.random_steps=0", *overrides])
    actor = OffPolicyActor(cfg)
    actor.rank, actor.world_size, actor.master_port = ranks
    actor.local_world_size = actor.world_size
    layout = Layout(NUM_ENVS, 1, 1, rollout_nodes=(0,), actor_nodes=(0,) * actor.world_size)
    actor.init(layout, spec, 100, str(directory))
    return actor


def played(step: int, spec: EnvSpec = PENDULUM, chunk: int = 1) -> Block:
    """Arbitrary decisions, some of which end an episode, by termination or not."""
    random = torch.Generator().manual_seed(step)
    shape = NUM_ENVS, T

    def normal(*more: int) -> torch.Tensor:
        return torch.randn(*shape, *more, generator=random)

    ended = normal() > 1
    has_next = ended.clone()
    has_next[:, -1] = True
    low, high = torch.tensor(spec.action_low), torch.tensor(spec.action_high)
    actions = low + (high - low) * torch.rand(*shape, chunk, len(low), generator=random)
    mask = torch.ones(*shape, chunk, dtype=torch.bool)
    if chunk > 1:
        mask[ended, -1] = False
    return Block(
        inputs={"state": normal(spec.state_dim or 0)},
        actions=actions,
        rewards=normal(chunk),
        mask=mask,
        terminated=ended & (normal() > 0),
        ended=ended,
        success=torch.where(ended, 1, -1).to(torch.int8),
        has_next=has_next,
        next_inputs={"state": torch.randn(int(has_next.sum()), spec.state_dim or 0, generator=random)},
    )


def filled(directory: Path, *overrides: str, num_steps: int = 3) -> OffPolicyActor:
    actor = actor_of(directory, *overrides)
    for step in range(num_steps):
        block = played(step)
        actor.replay.add(step, block, flags_of(block))
    return actor


class Theirs:
    """Stable-Baselines3's SAC with the weights of one of ours, which then gets our batches and noise."""

    def __init__(self, ours: OffPolicyActor) -> None:
        optim = ours.cfg.actor.optim
        settings: dict[str, Any] = {"policy_kwargs": {"optimizer_kwargs": {"eps": optim.eps}}, "device": "cpu"}
        self.model: Any = SAC("MlpPolicy", gymnasium.make("Pendulum-v1"), learning_rate=optim.lr, **settings)
        self.model.ent_coef_optimizer = torch.optim.Adam([self.model.log_ent_coef], lr=optim.lr, eps=optim.eps)
        self.model.set_logger(configure(None, []))
        self.batches: list[Transitions] = []
        self.noise: list[torch.Tensor] = []
        copy_weights(ours, self.model)
        self.model.replay_buffer = SimpleNamespace(sample=self._sample)
        self.model.actor.action_dist.sample = self._draw

    def _sample(self, batch_size: int, env: Any) -> Any:
        batch = self.batches.pop(0)
        return SimpleNamespace(
            observations=batch.inputs["state"],
            actions=batch.actions[:, 0] / 2,
            next_observations=batch.next_inputs["state"],
            rewards=batch.rewards[:, None],
            dones=(batch.discounts == 0).float()[:, None],
            discounts=None,
        )

    def _draw(self) -> torch.Tensor:
        own = self.model.actor.action_dist
        own.gaussian_actions = own.distribution.mean + own.distribution.stddev * self.noise.pop(0)
        return torch.tanh(own.gaussian_actions)

    def metrics(self) -> dict[str, float]:
        return {name: float(x) for name, x in self.model.logger.name_to_value.items() if name.startswith("train/")}


def pairs(ours: OffPolicyActor, theirs: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The parameters of both, of the same shape."""
    policy: Any = ours.policy
    critics: Any = ours.critics
    head, layers = policy.head, theirs.actor.latent_pi
    linear = [(head.trunk[0], layers[0]), (head.trunk[2], layers[2])]
    linear += [(head.mean, theirs.actor.mu), (head.log_std, theirs.actor.log_std)]
    found = [pair for own, other in linear for pair in ((own.weight, other.weight), (own.bias, other.bias))]
    for own, others in ((critics.online, theirs.critic), (critics.target, theirs.critic_target)):
        for number, network in enumerate((others.qf0, others.qf1)):
            for layer, other in zip(own.layers[::2], network[::2], strict=True):
                found += [(layer.weight[number].T, other.weight), (layer.bias[number, 0], other.bias)]
    return [*found, (critics.log_temperature[None], theirs.log_ent_coef)]


def copy_weights(ours: OffPolicyActor, theirs: Any) -> None:
    with torch.no_grad():
        for own, other in pairs(ours, theirs):
            other.copy_(own)


@pytest.mark.parametrize("num_updates", [1, 10])
def test_updates_are_those_of_stable_baselines3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_updates: int
) -> None:
    # with an epsilon that large a step is smooth in the gradient, whose last bits differ
    ours = filled(tmp_path, f"off_policy.updates_per_step={num_updates}", "actor.optim.eps=1e-3")
    theirs = Theirs(ours)
    read, noise = ours._read, ours._noise

    def reading(chosen: dict[str, Any]) -> tuple[Transitions, np.ndarray, int]:
        found = read(chosen)
        theirs.batches.append(found[0])
        return found

    def drawing(update: int, places: np.ndarray, which: int) -> torch.Tensor:
        drawn = noise(update, places, which)
        theirs.noise.append(drawn[:, 0])
        return drawn

    monkeypatch.setattr(ours, "_read", reading)
    monkeypatch.setattr(ours, "_noise", drawing)
    metrics = ours.run_training(3)["metrics"]
    theirs.model.train(num_updates, batch_size=256)
    assert not theirs.batches and not theirs.noise
    for own, other in pairs(ours, theirs.model):
        torch.testing.assert_close(own, other, atol=1e-6, rtol=0)
    found = theirs.metrics()
    assert metrics["train/critic/critic_loss"] == pytest.approx(found["train/critic_loss"], abs=1e-6)
    assert metrics["train/actor/actor_loss"] == pytest.approx(found["train/actor_loss"], abs=1e-6)


@pytest.mark.parametrize(("terminates", "value"), [(False, 10.0), (True, 1.0)])
def test_values_of_a_single_state(tmp_path: Path, terminates: bool, value: float) -> None:
    """A reward of 1 at every step, for ever and with time limits: 1 / (1 - 0.9); or once."""
    settings = ["off_policy.gamma=0.9", "off_policy.tau=0.1", "off_policy.hidden_sizes=[16]", "actor.optim.lr=1e-2"]
    settings += ["off_policy.entropy_in_target=false", "off_policy.updates_per_step=400", "actor.global_batch_size=64"]
    actor = actor_of(tmp_path, *settings, "actor.micro_batch_size=64")
    block = played(0)
    block.inputs["state"].zero_()
    block.next_inputs["state"].zero_()
    block.rewards.fill_(1.0)
    block.ended.fill_(True)
    block.has_next.fill_(True)
    block.next_inputs["state"] = torch.zeros(NUM_ENVS * T, 3)
    block.terminated.fill_(terminates)
    actor.replay.add(0, block, flags_of(block))
    actor.run_training(1)
    with torch.no_grad():
        found = actor.critics(
            {"state": torch.zeros(9, 3)}, torch.linspace(-1, 1, 9)[:, None, None], torch.ones(9, 1) > 0
        )
    torch.testing.assert_close(found, torch.full((2, 9), value), atol=0.3, rtol=0)


def test_actions_behind_the_end_of_an_episode_change_no_value() -> None:
    critics = Critics(3, {}, 4, 2)
    inputs, mask = {"state": torch.randn(5, 3)}, torch.arange(4) < torch.tensor([1, 2, 3, 4, 4])[:, None]
    actions = torch.randn(5, 4, 2)
    changed = torch.where(mask[..., None], actions, torch.randn(5, 4, 2))
    assert torch.equal(critics(inputs, actions, mask), critics(inputs, changed, mask))
    assert not torch.equal(critics(inputs, actions, mask), critics(inputs, actions, torch.ones_like(mask)))


def test_conservative_values_and_imitation_against_a_loop() -> None:
    cfg = OffPolicyConfig(bc_coef=0.7, cql_coef=0.3, cql_temperature=2.0)
    random = torch.Generator().manual_seed(0)
    q, q_policy, next_q = (torch.randn(3, 5, generator=random) for _ in range(3))
    rewards, logprobs, discounts = (torch.randn(5, generator=random) for _ in range(3))
    temperature = torch.tensor(0.2)
    loss, _ = td3_bc.critic(CriticInputs(q, rewards, discounts, next_q, logprobs, temperature, lambda: q_policy), cfg)
    for i in range(5):
        target = float(rewards[i] + discounts[i] * (min(next_q[:, i].tolist()) - 0.2 * logprobs[i]))
        expected = 0.0
        for j in range(3):
            a, b = float(q[j, i]), float(q_policy[j, i])
            expected += ((a - target) ** 2 + 0.3 * (2 * np.log(np.exp(a / 2) + np.exp(b / 2)) - a)) / 3
        assert float(loss[i]) == pytest.approx(expected, abs=1e-5)
    acted, _ = td3_bc.actor(ActorInputs(logprobs, q, temperature, torch.tensor(4.0)), cfg)
    assert float(acted[2]) == pytest.approx(0.2 * float(logprobs[2]) - min(q[:, 2].tolist()) + 0.7 * 4, abs=1e-5)


def trained(directory: Path, rank: int = 0, world_size: int = 1, port: int = 0) -> tuple[Any, ...]:
    """Metrics and weights after four steps, the second half of them after a return to a checkpoint that another number
    of ranks may have written."""
    sizes = ["off_policy.updates_per_step=2", "actor.global_batch_size=24", "actor.micro_batch_size=8"]
    more = [*sizes, "actor.strategy=replicated", "actor.optim.eps=1e-3", "replay.capacity=64"]
    actor = actor_of(directory / "replay", *more, ranks=(rank, world_size, port))
    share = NUM_ENVS // world_size
    metrics = []
    for step in (0, 1, 2, 3):
        whole = Played(torch.arange(NUM_ENVS), torch.zeros(NUM_ENVS, T, dtype=torch.int64), played(step))
        block = whole.rows(slice(rank * share, (rank + 1) * share)).block
        actor.replay.add(step, block, flags_of(whole.block))
        if step == 3:  # as few as make a rank that has none of them likely
            actor.cfg = actor.cfg.model_copy(
                update={"actor": actor.cfg.actor.model_copy(update={"global_batch_size": 2})}
            )
        metrics.append(actor.run_training(step)["metrics"])
        if step == 1:
            saved = directory / f"saved_{world_size}"
            actor.save_checkpoint(str(saved))
    # a rank without a transition of the batch, and all ranks with them again
    block = played(4)
    block.success[:] = torch.where(torch.arange(NUM_ENVS) == 0, 1, 0)[:, None]
    block.ended.fill_(True)
    own = (
        Played(torch.arange(NUM_ENVS), torch.zeros(NUM_ENVS, T, dtype=torch.int64), block)
        .rows(slice(rank * share, (rank + 1) * share))
        .block
    )
    actor.replay.add(4, own, flags_of(block))
    replay = actor.cfg.replay.model_copy(update={"shares": {"successes": 1.0}})
    actor.cfg = actor.cfg.model_copy(update={"replay": replay})
    metrics.append(actor.run_training(4)["metrics"])
    actor.load_checkpoint(str(directory / "saved_1"), 2)
    assert actor.replay.end == 2
    weights = {**actor.policy.state_dict(), **actor.critics.state_dict()}
    return metrics, {name: x.clone() for name, x in weights.items()}


def rank_main(rank: int, port: int, directory: Path, expected: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    metrics, weights = trained(directory, rank, 2, port)
    for got, want in zip(metrics, expected[0], strict=True):
        assert got.keys() == want.keys()
        for name in got:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-3, atol=1e-5, err_msg=name)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[1][name], atol=2e-6, rtol=0, msg=name)
    dist.destroy_process_group()


def test_two_ranks_train_as_one_does(tmp_path: Path) -> None:
    spawn(rank_main, 2, tmp_path, trained(tmp_path))


def test_only_demonstrations_and_successes_are_imitated_and_micro_batches_change_nothing(tmp_path: Path) -> None:
    states = []
    for micro in (8, 24):
        settings = [
            "off_policy.algorithm=td3_bc",
            "replay.shares={online: 0.5, successes: 0.5}",
            "actor.optim.eps=1e-3",
        ]
        sizes = ["actor.global_batch_size=24", f"actor.micro_batch_size={micro}", "off_policy.updates_per_step=3"]
        actor = filled(tmp_path / str(micro), *settings, *sizes)
        metrics = actor.run_training(3)["metrics"]
        assert metrics["train/actor/imitation_loss"] > 0 and np.isfinite(metrics["train/critic/cql"])
        states.append({name: x.clone() for name, x in actor.policy.state_dict().items()})
    for name, x in states[0].items():
        torch.testing.assert_close(x, states[1][name], atol=2e-6, rtol=0, msg=name)
    chosen, places = {"online": np.arange(3), "successes": np.arange(5)}, np.arange(8)
    batch = actor.replay.read(actor.replay.pool("online")[:8])
    assert actor._imitated(chosen, batch, places)[:, 0].tolist() == [False] * 3 + [True] * 5
    assert actor._imitated({"online": np.arange(8)}, batch, places).all()
