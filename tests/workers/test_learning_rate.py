"""The schedule of the learning rate, for the policy and for what only the value uses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from rlinf_lite.config import load_config
from rlinf_lite.scheduler import Worker
from rlinf_lite.training.learner import Learner


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.value_head = nn.Linear(2, 1), nn.Linear(2, 1)

    def value_parameters(self) -> list[nn.Parameter]:
        return list(self.value_head.parameters())


def rates(num_steps: int, value_steps: int, *overrides: str) -> tuple[list[float], list[float]]:
    """Of the policy and of its value, in each step, where both would be 1 without a schedule."""
    options = ["actor.optim.lr=1", "actor.optim.value_lr=1", *overrides]
    cfg = load_config("embodiment/gym_pendulum_ppo_mlp", options)
    learner = Learner(Worker(), Policy(), cfg, "actor")
    learner.start_training(cfg.actor.optim, num_steps, value_steps)
    found = []
    for step in range(num_steps):
        learner.set_learning_rate(step)
        found.append([group["lr"] for group in learner.optimizer.param_groups])
    policy, value = zip(*found, strict=True)
    return list(policy), list(value)


def test_the_policys_warm_up_begins_when_it_trains() -> None:
    constant = ["actor.optim.lr_scheduler=constant", "actor.optim.warmup_steps=3"]
    policy, value = rates(8, 3, *constant)
    assert value == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1])
    assert policy[3:] == pytest.approx([0.25, 0.5, 0.75, 1, 1])
    assert rates(8, 0, *constant)[0] == pytest.approx(value)


def test_both_fall_to_their_end_at_the_last_step() -> None:
    linear = ["actor.optim.lr_scheduler=linear", "actor.optim.warmup_steps=1", "actor.optim.min_lr_ratio=0.2"]
    policy, value = rates(7, 2, *linear)
    assert policy[2:] == pytest.approx([0.5, 1, 0.8, 0.6, 0.4])  # at 7 it would be 0.2
    assert value == pytest.approx([0.5, 1, 1 - 0.8 / 6, 1 - 1.6 / 6, 1 - 2.4 / 6, 1 - 3.2 / 6, 1 - 4 / 6])


def test_a_language_models_actor_waits_for_its_critic() -> None:
    from rlinf_lite.workers.reasoning import actor

    cfg = load_config("math/math_arithmetic_ppo", ["algorithm.critic_warmup_steps=4"])
    started: list[int] = []
    worker = actor.LanguageActor(cfg)
    worker.total_steps = 40
    worker.learner = SimpleNamespace(start_training=lambda optim, *steps: started.extend(steps))
    worker.finish_supervised()
    assert started == [40, 4]
