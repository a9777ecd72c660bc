"""Every long phase reports progress with each unit of its work, as whoever watches sees it: no slow one is killed."""

import threading

import numpy as np
import pytest
import torch

from rlinf_lite.config import load_config
from rlinf_lite.data import DataProto
from rlinf_lite.generation import SamplingParams
from rlinf_lite.generation.engine import TransformersEngine
from rlinf_lite.models.text.causal_lm import CausalLM
from rlinf_lite.models.text.presets import preset
from rlinf_lite.rewards import RewardScorer
from rlinf_lite.scheduler import Worker
from rlinf_lite.scheduler.context import ProcessContext, set_context
from rlinf_lite.scheduler.heartbeat import Activity, Heartbeat
from rlinf_lite.scheduler.ray_network import RayNetwork
from rlinf_lite.training.learner import Learner
from rlinf_lite.training.metrics import MetricSums
from rlinf_lite.weights import WeightRoutes, WeightSender
from rlinf_lite.weights.segment import Segment
from rlinf_lite.weights.sync import Ready
from rlinf_lite.workers import EmbodiedFSDPActor, EnvWorker
from rlinf_lite.workers.actor import _Batch
from rlinf_lite.workers.layout import Layout
from rlinf_lite.workers.messages import ActionMessage
from rlinf_lite.workers.reasoning.base import LanguageModelWorker


class Watched:
    """Looks at a worker, as its heartbeat does, at every unit of its work."""

    def __init__(self, worker=None):
        self.worker = worker or Worker()
        self.worker._activity = Activity()
        told = threading.Event()
        self.heart = Heartbeat([("group", 0, self.worker._activity)], lambda beats: told.set(), beat_s=1e6)
        assert told.wait(60), "its own thread's one beat is over"
        self.num_units = self.num_moves = 0
        self.last = self.heart._seen[0]

    def unit(self, *_):
        self.heart.beats()
        before, self.last = self.last, self.heart._seen[0]
        self.num_moves += self.num_units > 0 and self.last[0] != before[0]
        self.num_units += 1

    def check(self, num_units):
        assert self.num_units == num_units and self.num_moves == num_units - 1


def model():
    torch.manual_seed(0)
    return CausalLM.from_config(preset("tiny"))


def test_generation_with_every_token():
    policy, watched = model(), Watched()
    policy.eval()
    engine = TransformersEngine(policy, 4, 40)
    policy.language_model.base_model.register_forward_pre_hook(watched.unit)
    engine.generate([[5, 6], [7]], SamplingParams(20, greedy=True))
    watched.check(20)


@pytest.mark.parametrize("update", [False, True])
def test_a_language_models_passes_with_every_micro_batch(update):
    cfg = load_config("math/math_arithmetic_grpo", ["actor.max_tokens_per_micro_batch=88", "actor.num_threads=1"])
    worker = LanguageModelWorker(cfg)
    worker.learner = Learner(worker, model(), cfg, "actor")
    watched = Watched(worker)
    ones = torch.ones(8, 44, dtype=torch.long)
    columns = {"input_ids": ones * 5, "attention_mask": ones, "response_mask": torch.ones(8, 4, dtype=torch.bool)}
    batch = DataProto(columns, {"row": np.arange(8)}, {"step": 0})
    forward = worker.learner.model.register_forward_pre_hook(watched.unit)

    def score(model, rows):
        return model(rows.input_ids, rows.attention_mask, rows.response_length, 1.0).logprobs

    if update:
        worker.learner.start_training(cfg.actor.optim, 1)

        def loss(model, data, rows):
            found = score(model, rows).mean()
            return found, [({"loss": found}, 1.0)]

        worker._update(batch, loss, MetricSums())
    else:
        worker._column(batch, score)
    forward.remove()
    assert watched.num_units >= 4
    watched.check(watched.num_units)


def pendulum():
    sizes = ["env.train.num_envs=8", "rollout.num_chunks=4", "actor.global_batch_size=32", "actor.micro_batch_size=4"]
    cfg = load_config("embodiment/gym_pendulum_ppo_mlp", [*sizes, "algorithm.update_epochs=2", "actor.num_threads=1"])
    return cfg, Layout(8, 1, 1, rollout_nodes=(0,), actor_nodes=(0,))


class Played(EnvWorker):
    def send(self, obj, group, rank, tag=None):
        self.sent = obj

    def recv_any(self, group, timeout_s=None, tag=None):
        return 0, ActionMessage(0, 0, np.zeros((8, 5, 1), np.float32))


def test_environments_with_every_step_of_a_chunk():
    cfg, layout = pendulum()
    worker = Played(cfg)
    spec = worker.init(layout)
    watched, simulator = Watched(worker), worker.stages[0].env.simulator
    step = simulator.step
    simulator.step = lambda *args: (watched.unit(), step(*args))
    worker.interact(0)
    watched.check(4 * 5)
    assert spec.action_low


def test_updates_with_every_micro_batch():
    cfg, layout = pendulum()
    env, actor = Played(cfg), EmbodiedFSDPActor(cfg)
    actor.init(layout, env.init(layout), total_steps=1)
    state = torch.randn(32, 3)
    with torch.no_grad():
        acted = actor.policy.predict_action_batch({"state": state}, "train")
    mask, ones = torch.ones(32, 1, dtype=torch.bool), torch.ones(32, 1)
    valid = np.ones(32, bool)
    scores = acted.logprobs, acted.logprobs, torch.zeros(32, dtype=torch.int64), acted.values
    actor.batch = _Batch(acted.forward_inputs, *scores, ones, ones, mask, mask, valid)
    watched = Watched(actor)
    actor.policy.register_forward_pre_hook(watched.unit)
    actor.run_training(0)
    watched.check(2 * 32 // 4)


def test_rewards_with_every_row(monkeypatch):
    watched, scorer = Watched(), RewardScorer()
    monkeypatch.setattr(scorer, "check_sources", lambda sources: None)
    monkeypatch.setattr(scorer, "_function", lambda source: watched.unit)
    scorer.score_batch(["x"] * 6, ["y"] * 6, ["z"] * 6, [{}] * 6)
    watched.check(6)


class Sending(Worker):
    def recv(self, group, rank, timeout_s=None, tag=None):
        return Ready(complete=False, segment=None, dtypes={}, gpu=None)

    def send(self, obj, group, rank, tag=None):
        pass


def test_weights_with_every_bucket(tmp_path, monkeypatch):
    worker = Sending()
    watched = Watched(worker)
    set_context(ProcessContext("uid", "node", str(tmp_path), str(tmp_path), RayNetwork("uid")))
    sender = WeightSender(worker, "rollout", WeightRoutes((0,), (0,)), 1000, 5.0)
    write = Segment.write
    monkeypatch.setattr(Segment, "write", lambda *args: (watched.unit(), write(*args)))
    sender.send(0, torch.nn.Sequential(*(torch.nn.Linear(30, 30, bias=False) for _ in range(5))))
    set_context(None)
    watched.check(5)


def test_files_with_every_mebibyte(tmp_path):
    """Of a library that saves a model in one call."""
    worker = Worker()
    watched = Watched(worker)
    with worker._activity.method("save_checkpoint"), open(tmp_path / "model", "wb", buffering=0) as file:
        watched.unit()
        began = watched.last[1]
        watched.unit()
        assert watched.last[1] == began, "nothing was done"
        file.write(bytes(2**20))
        watched.unit()
        assert watched.last[1] > began
