"""Threads are those of the config while a worker does its part, and the process's own afterwards, whatever happens."""

import numpy as np
import pytest
import torch

from rlinf_lite.config import load_config
from rlinf_lite.envs import EnvSpec
from rlinf_lite.scheduler import Worker
from rlinf_lite.threads import torch_threads, training_threads
from rlinf_lite.training.learner import Learner
from rlinf_lite.training.metrics import MetricSums
from rlinf_lite.workers import EmbodiedFSDPActor, EnvWorker, MultiStepRolloutWorker
from rlinf_lite.workers.layout import Layout
from rlinf_lite.workers.messages import ObsMessage

SPEC = EnvSpec(1, 3, {}, [-2.0], [2.0], 200, False)
LAYOUT = Layout(2, 1, 1, rollout_nodes=(0,), actor_nodes=(0,))


class Seen(RuntimeError):
    """Says how many threads there were."""


def look(*args, **kwargs):
    raise Seen(str(torch.get_num_threads()))


def config():
    threads = ["env.num_threads=2", "rollout.num_threads=3", "actor.num_threads=4", "env.train.num_envs=2"]
    sizes = ["actor.global_batch_size=16", "actor.micro_batch_size=16", "rollout.num_chunks=8"]
    return load_config("embodiment/gym_pendulum_ppo_mlp", [*threads, *sizes, "rollout.pipeline_stage_num=1"])


def env(cfg):
    worker = EnvWorker(cfg)
    worker.init(LAYOUT)
    worker.stages[0].env.reset = look
    worker.stages[0].reset([0, 1])


def rollout(cfg):
    worker = MultiStepRolloutWorker(cfg)
    worker.init(LAYOUT, SPEC)
    worker.policy.predict_action_batch = look
    obs = {"state": np.zeros((2, 3), np.float32)}
    worker._answer(0, ObsMessage(0, 0, 0, obs, np.arange(2), 0), 0, "train")


def actor(cfg):
    worker = EmbodiedFSDPActor(cfg)
    worker.init(LAYOUT, SPEC, 1)
    worker.learner.update([0], look, MetricSums(), "", str)


@pytest.mark.parametrize(("compute", "threads"), [(env, 2), (rollout, 3), (actor, 4)])
def test_each_role_has_its_own_number_and_gives_it_back_on_an_error(compute, threads):
    before = torch.get_num_threads()
    with pytest.raises(Seen, match=str(threads)):
        compute(config())
    assert torch.get_num_threads() == before


def test_contexts_nest():
    with torch_threads(3):
        with torch_threads(2):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 3


def test_actors_of_a_node_share_its_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert [training_threads(None, workers) for workers in (1, 3, 16)] == [8, 2, 1]
    worker = Worker()
    worker.local_world_size = 2
    assert Learner(worker, torch.nn.Linear(1, 1), config(), "actor").num_threads == 4  # as configured


def test_an_update_that_failed_leaves_nothing_for_the_next():
    def loss(model, part, found):
        if part is None:
            raise ValueError
        return model(part).sum()

    x, weights = torch.ones(1, 2), []
    for fails in (False, True):
        torch.manual_seed(0)
        trained = Learner(Worker(), torch.nn.Linear(2, 1), config(), "actor")
        trained.start_training(config().actor.optim, 1)
        if fails:
            with pytest.raises(ValueError):
                trained.update([x, None], loss, MetricSums(), "", str)
        trained.update([x], loss, MetricSums(), "", str)
        weights.append(trained.model.weight.detach())
    assert torch.equal(*weights)
