"""`actor.strategy` of robot policies: two ranks train as one does, by PPO or imitation, in shards or whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rlinf_lite.algorithms import LossOutputs, ppo
from rlinf_lite.config import ConfigError, load_config
from rlinf_lite.envs import EnvSpec
from rlinf_lite.models import NOISE_KEY, build_policy
from rlinf_lite.models.sampling import noise_keys
from rlinf_lite.training.sharding import full_policy_state, load_policy_state
from rlinf_lite.training.strategies import Replicated
from rlinf_lite.workers import EmbodiedFSDPActor
from rlinf_lite.workers.layout import Layout
from rlinf_lite.workers.trajectory import Trajectories
from tests.ranks import spawn

NUM_ENVS, T, C = 4, 3, 2
OPTIM = "actor.optim={lr: 1e-3, value_lr: 2e-3, eps: 1e-3, weight_decay: 0.1}"  # a step is smooth in the gradient
CONFIGS = {
    "ppo": (
        "gym_pendulum_ppo_mlp",
        [
            f"model.num_action_chunks={C}",
            "model.options.hidden_sizes=[16]",
            "algorithm.critic_warmup_steps=1",
            "algorithm.update_epochs=2",
            "actor.global_batch_size=4",
            "actor.micro_batch_size=2",
        ],
        EnvSpec(2, 5, {}, [-1.0] * 2, [1.0] * 2, 10, False),
    ),
    "tied": (
        "gym_pendulum_ppo_mlp",
        [
            "model.id=tests.models.tied:TiedPolicy",
            "model.options={}",
            f"model.num_action_chunks={C}",
            "algorithm.update_epochs=2",
            "actor.global_batch_size=4",
            "actor.micro_batch_size=2",
        ],
        EnvSpec(2, 5, {}, [-1.0] * 2, [1.0] * 2, 10, False),
    ),
    "imitation": (
        "tabletop_sft_vla",
        [f"model.num_action_chunks={C}", "actor.global_batch_size=8", "actor.micro_batch_size=2"],
        EnvSpec(3, 4, {"front": (64, 64)}, [-1.0] * 3, [1.0] * 3, 24, True),
    ),
}


def viewing_loss(inputs, cfg):
    """Of a user's own: PPO's, of inputs that it views, and writes to when it has read them."""
    outputs = ppo(inputs, cfg)
    flat = [x.view(-1) for x in (inputs.advantages, inputs.old_logprobs, inputs.returns, inputs.old_values)]
    loss = outputs.loss + 0.0 * (inputs.logprobs.view(-1) * flat[0]).sum()
    inputs.old_logprobs.zero_()
    return LossOutputs(loss, outputs.metrics)


class Counted(Replicated):
    """A strategy of a user's own."""

    num_updates = 0

    def reduce_gradients(self, parameters):
        Counted.num_updates += 1
        super().reduce_gradients(parameters)


STRATEGIES = ("fsdp", "replicated", f"{__name__}:Counted")


class SomeDemonstrations:
    """20 chunks, drawn from their numbers."""

    def __len__(self):
        return 20

    def mask(self, indices):
        return np.stack([np.ones(len(indices), bool), indices % 3 > 0], 1)

    def episodes(self, indices):
        return indices // 4

    def read(self, indices):
        rng = [np.random.default_rng(int(i)) for i in indices]
        images = np.stack([r.integers(0, 256, (64, 64, 3), dtype=np.uint8) for r in rng])
        actions = np.stack([r.uniform(-1, 1, (C, 3)) for r in rng]).astype(np.float32)
        return {"images": {"front": images}, "instruction": ["push"] * len(indices)}, torch.from_numpy(actions)


def trajectories(cfg, spec, policy=None, version=0):
    """What the policy did (None: one that is untrained), with rewards from nowhere; some actions of the last decision
    were not executed."""
    if policy is None:
        torch.manual_seed(cfg.runner.seed)
        policy = build_policy(cfg, spec)
    rng = np.random.default_rng(0)
    obs = {"state": rng.normal(size=(NUM_ENVS * T, spec.state_dim)).astype(np.float32)}
    with torch.no_grad():
        acted = policy.predict_action_batch({**obs, NOISE_KEY: noise_keys(0, np.arange(NUM_ENVS * T), 0)}, "train")
    mask = torch.ones(NUM_ENVS, T, C, dtype=torch.bool)
    mask[1, -1, 1] = False
    mask[3] = False  # waits for its next reset: fewer samples on one rank than on the other

    def by_decision(x):
        return x.unflatten(0, (NUM_ENVS, T))

    return Trajectories(
        env_ids=torch.arange(NUM_ENVS),
        rewards=torch.from_numpy(rng.normal(size=(NUM_ENVS, T, C)).astype(np.float32)) * mask,
        dones=torch.zeros(NUM_ENVS, T, C, dtype=torch.bool),
        mask=mask,
        logprobs=by_decision(acted.logprobs),
        values=by_decision(acted.values),
        next_values=torch.from_numpy(rng.normal(size=(NUM_ENVS, T)).astype(np.float32)),
        versions=torch.full((NUM_ENVS, T), version, dtype=torch.int64),
        forward_inputs={name: by_decision(x) for name, x in acted.forward_inputs.items()},
    )


def make_actor(kind, more, rank=0, world_size=1, port=0):
    config, overrides, spec = CONFIGS[kind]
    actor = EmbodiedFSDPActor(load_config(f"embodiment/{config}", [*overrides, OPTIM, "actor.num_threads=1", *more]))
    actor.rank, actor.world_size, actor.local_world_size, actor.master_port = rank, world_size, 2, port
    actor.init(Layout(NUM_ENVS, 1, 1, rollout_nodes=(0,), actor_nodes=(0,) * world_size), spec, total_steps=5)
    return actor


def train(kind, strategy, rank=0, world_size=1, port=0, as_loaded=None, more=()):
    """Metrics of three steps, and the policy in the end. `as_loaded`: a state that every rank has, to be loaded."""
    actor = make_actor(kind, [f"actor.strategy={strategy}", *more], rank, world_size, port)
    cfg, spec = actor.cfg, actor.spec
    actor.demonstrations = SomeDemonstrations()
    metrics = []
    for step in range(3):
        if kind != "imitation":
            share = NUM_ENVS // world_size
            actor.trajectories = trajectories(cfg, spec).rows(slice(rank * share, (rank + 1) * share))
            metrics.append(actor.compute_advantages_and_returns() | actor.run_training(step)["metrics"])
        else:
            metrics.append(actor.run_sft(step)["metrics"])
    state = {name: x.clone() for name, x in full_policy_state(actor.policy).items()}
    whole = {name: x + 1.0 for name, x in (as_loaded or state).items()}
    load_policy_state(actor.policy, whole)
    again = full_policy_state(actor.policy)
    assert again.keys() == state.keys() and all(torch.equal(x, whole[name]) for name, x in again.items())
    return metrics, state


@pytest.mark.parametrize("level", ["chunk_level", "action_level", "token_level"])
def test_a_loss_of_ones_own_views_and_writes_its_inputs_and_inputs_are_of_any_type(level):
    config, overrides, spec = CONFIGS["ppo"]
    states = []
    for loss in ("ppo", f"{__name__}:viewing_loss"):
        more = [f"algorithm.loss_type={loss}", f"algorithm.logprob_type={level}", OPTIM, "actor.num_threads=2"]
        actor = EmbodiedFSDPActor(load_config(f"embodiment/{config}", [*overrides, *more]))
        actor.init(Layout(NUM_ENVS, 1, 1, rollout_nodes=(0,), actor_nodes=(0,)), spec, total_steps=5)
        for step in range(2):
            actor.trajectories = trajectories(actor.cfg, spec)
            keys = torch.from_numpy(noise_keys(0, np.arange(NUM_ENVS * T), step)).unflatten(0, (NUM_ENVS, T))
            actor.trajectories.forward_inputs[NOISE_KEY] = keys  # uint64, a number a row
            actor.compute_advantages_and_returns()
            actor.run_training(step)
        states.append(full_policy_state(actor.policy))
    assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())


def rank_main(rank, port, kind, expected):
    torch.set_num_threads(1)
    for strategy in STRATEGIES:
        metrics, state = train(kind, strategy, rank, 2, port, expected[1])
        for got, want in zip(metrics, expected[0], strict=True):
            assert got.keys() == want.keys()
            for name in got:
                np.testing.assert_allclose(got[name], want[name], rtol=1e-3, atol=1e-5, err_msg=f"{strategy}: {name}")
        for name, tensor in state.items():  # on rank 0
            torch.testing.assert_close(tensor, expected[1][name], atol=2e-6, rtol=0, msg=f"{strategy}: {name}")
    assert Counted.num_updates == (3 if kind == "imitation" else 3 * 2 * 3)
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", CONFIGS)
def test_two_ranks_train_as_one_does(kind):
    expected = train(kind, "fsdp")
    again = train(kind, "replicated")  # one rank has nobody to share with
    assert expected[0] == again[0] and all(torch.equal(x, again[1][name]) for name, x in expected[1].items())
    assert all(line["train/actor/skipped_updates"] == 0 for line in expected[0])
    spawn(rank_main, 2, kind, expected)


def hybrid_main(rank, port, kind, expected):
    torch.set_num_threads(1)
    metrics, state = train(
        kind, "fsdp", rank, 4, port, expected[1], more=["actor.fsdp_size=2", "actor.micro_batch_size=1"]
    )
    for got, want in zip(metrics, expected[0], strict=True):
        for name in got:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-3, atol=1e-5, err_msg=name)
    for name, tensor in state.items():  # on rank 0
        torch.testing.assert_close(tensor, expected[1][name], atol=2e-6, rtol=0, msg=name)
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["ppo", "imitation"])
def test_two_copies_of_two_shards_train_as_one_rank_does(kind):
    """In micro-batches of a sample, of which gradients are exchanged between the copies once."""
    spawn(hybrid_main, 4, kind, train(kind, "fsdp", more=["actor.micro_batch_size=1"]))


def going_on_main(rank, port, directory):
    torch.set_num_threads(1)
    actor = make_actor("ppo", ["actor.fsdp_size=2"], rank, 4, port)

    def step(number):
        actor.trajectories = trajectories(actor.cfg, actor.spec).rows(slice(rank, rank + 1))
        actor.compute_advantages_and_returns()
        actor.run_training(number)
        return {name: x.clone() for name, x in full_policy_state(actor.policy).items()}

    step(0)
    step(1)
    actor.save_checkpoint(str(directory))
    dist.barrier()
    went_on = step(2)
    actor.load_checkpoint(str(directory), 2)
    again = step(2)
    assert all(torch.equal(went_on[name], x) for name, x in again.items())
    dist.destroy_process_group()


def test_copies_of_shards_go_on_from_a_checkpoint_bit_for_bit_and_one_rank_does_too(tmp_path):
    spawn(going_on_main, 4, tmp_path)
    actor = make_actor("ppo", [])
    actor.load_checkpoint(str(tmp_path), 2)
    assert len(actor.learner.optimizer.state) == len(list(actor.policy.parameters()))


def test_a_strategy_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"actor\.strategy: .* has no 'Missing'"):
        train("ppo", f"{__name__}:Missing")
