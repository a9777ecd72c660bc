"""The env worker by itself; this process plays the policy."""

import numpy as np
import pytest

from rlinf_lite.config import load_config
from rlinf_lite.data.layout import Layout
from rlinf_lite.data.messages import ActionMessage
from rlinf_lite.scheduler import AbortedError
from rlinf_lite.workers import EnvWorker


class Played(EnvWorker):
    """Two rollout workers serve halves of its one stage; `answers` says whose half of which decision comes next."""

    def send(self, obj, group, rank):
        self.sent.append(obj)

    def recv_any(self, group, timeout_s=None):
        half = next(self.answers)
        if half is None:
            raise AbortedError("a worker is being started again")
        observed = [message for message in self.sent if message.start == 4 * half][-1]
        actions = np.full((4, 1, 1), np.tanh(observed.obs["state"][:, :1].sum() + observed.t), np.float32)
        return half, ActionMessage(0, 4 * half, actions)


def test_half_an_answer_is_forgotten_with_the_phase_that_was_given_up():
    sizes = ["env.train.num_envs=8", "rollout.num_chunks=4", "actor.global_batch_size=32"]
    cfg = load_config("embodiment/gym_pendulum_ppo_mlp", sizes)
    layout = Layout(8, 1, 1, rollout_nodes=(0, 0), actor_nodes=(0,))
    worker = Played(cfg)
    worker.name, worker.rank, worker.sent = "env", 0, []
    worker.init(layout)
    start = worker.state_dict()
    worker.answers = iter([0, 1] * 4)
    worker.interact(0)
    observed = worker.sent

    worker.load_state_dict(start)
    worker.sent, worker.answers = [], iter([0, 1, 0, 1, 0, None])
    with pytest.raises(AbortedError):
        worker.interact(0)
    worker.load_state_dict(start)
    worker.sent, worker.answers = [], iter([1, 0] * 4)
    worker.interact(0)
    for one, other in zip(observed, worker.sent, strict=True):
        assert (one.start, one.t) == (other.start, other.t)
        np.testing.assert_array_equal(one.obs["state"], other.obs["state"])
