"""The roles of own_roles.py: rollout workers sample from a Gaussian policy, the actor moves it by policy gradient."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np

from rlinf_lite.jobs import BaseTrainer, BaseWorkload, trainer_invocation


class Rollout(BaseWorkload):
    """Samples actions and computes their rewards. It has no state, so that a dead one is started again alone."""

    failover = "worker"

    @trainer_invocation(timeout=60)
    def sample(self, mean: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Actions [N, D] and their rewards [N], minus the squared distance to the target."""
        time.sleep(self.config["simulation_s"])
        rng = np.random.default_rng([self.config["seed"], step, self.rank])  # a repeated call gives the same result
        actions = mean + self.config["std"] * rng.standard_normal((self.config["num_samples"], len(mean)))
        return actions, -np.square(actions - self.config["target"]).sum(axis=1)


class Actor(BaseWorkload):
    """Holds the policy, a Gaussian around `mean`. If an actor dies, all actors and the trainer are started again."""

    failover = "group"

    @trainer_invocation(timeout=60, target="RANK0")
    def init(self) -> int:
        """Begin, or continue from the saved state; returns the number of completed steps."""
        self.file = Path(self.config["state"])
        self.step, self.mean = 0, np.zeros(2)
        if self.file.exists():
            state = json.loads(self.file.read_text())
            self.step, self.mean = state["step"], np.array(state["mean"])
        return self.step

    @trainer_invocation(timeout=60, target="RANK0")
    def policy(self) -> np.ndarray:
        return self.mean

    @trainer_invocation(timeout=60, target="RANK0")
    def update(self, actions: np.ndarray, rewards: np.ndarray) -> float:
        """One step of REINFORCE: E[A (a - mean)] / std^2, with a learning rate in units of std."""
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        direction = (advantages[:, None] * (actions - self.mean)).mean(axis=0) / self.config["std"]
        self.mean = self.mean + self.config["lr"] * direction
        self.step += 1
        self._save()
        return float(rewards.mean())

    def _save(self) -> None:
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps({"step": self.step, "mean": self.mean.tolist()}))
        os.replace(partial, self.file)  # the file is always complete, whenever this process dies


class Trainer(BaseTrainer):
    """The driver of the job. After an actor was started again, `init` and `fit` run again on a new Trainer."""

    def init(self) -> None:
        self.report_progress(self.RG_ACTOR.init())

    def fit(self) -> None:
        while self.step < self.config["num_steps"]:
            mean = self.RG_ACTOR.policy()
            sampled = self.RG_ROLLOUT.sample(mean, self.step)  # (actions, rewards) by rank
            actions, rewards = (np.concatenate(parts) for parts in zip(*sampled, strict=True))
            reward = self.RG_ACTOR.update(actions, rewards)
            self.report_progress(self.step + 1)
            print(f"step {self.step}: reward {reward:.3f}", flush=True)  # `rlinf-lite job logs NAME --role trainer`
