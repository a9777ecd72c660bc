"""The embodied training loop: sync weights, generate, estimate advantages, train.

rollout.sync_model_from_actor() || actor.sync_model_to_rollout()
env.interact() || rollout.generate() || actor.recv_rollout_batch()
actor.compute_advantages_and_returns()
actor.run_training()
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rlinf_lite.metrics import env_metrics, utilization, write_chrome_trace
from rlinf_lite.runners.env_state import load_env_states, save_env_states
from rlinf_lite.runners.simulation import SimulationRunner


class EmbodiedRunner(SimulationRunner):
    """Reinforcement learning in simulators; see `Runner` for what surrounds the steps."""

    _env_states: dict[int, list[dict[str, Any]]]
    """By completed steps, the newest two: where every environment was, for steps that are broken off."""

    def init_workers(self) -> None:
        super().init_workers()
        if self._resume_from is None:
            found = self._wait(self.env.state_dict(), what="environment states")[0]
            self._env_states = {self.completed_steps: [row for rows in found for row in rows]}

    def run_step(self, step: int) -> None:
        started = time.time()
        self._times, self._driver_spans = {}, []
        self.update_rollout_weights()
        played = self.generate_rollouts(step)
        with self._phase("advantages"):
            metrics = self._wait(self.actor.compute_advantages_and_returns(), what="advantages")[0][0]
        with self._phase("training"):
            trained = self._train(self.actor.run_training(step))[0]
        self._times["step"] = time.time() - started
        self._log_step(started, metrics, played, trained)

    def generate_rollouts(self, step: int) -> list[list[dict[str, Any]]]:
        """Environments, policy and the actor's intake run against each other until the batch is complete."""
        with self._phase("generate_rollouts"):
            env, rollout = self.env.interact(step), self.rollout.generate()
            played = self._wait(env, rollout, self.actor.recv_rollout_batch(), what="rollouts")[:2]
        states = [row for result in played[0] for row in result["states"]]
        self._env_states = {step: self._env_states[step], step + 1: states}
        return played

    def _rewind(self) -> None:
        self._replay(self._env_states[self.completed_steps])

    def _replay(self, rows: list[dict[str, Any]]) -> None:
        found = self._wait(self.env.load_state_dict(rows), what="environments to be brought to where they were")[0]
        self._env_states = {self.completed_steps: [row for rows in found for row in rows]}

    def _save_state(self, directory: Path) -> None:
        super()._save_state(directory)
        save_env_states(self._env_states[self.completed_steps], directory)

    def _load(self, checkpoint: Path) -> None:
        super()._load(checkpoint)
        self._replay(load_env_states(checkpoint / "training_state", self.cfg))

    def _log_step(
        self,
        started: float,
        metrics: dict[str, float],
        played: list[list[dict[str, Any]]],
        trained: list[dict[str, Any]],
    ) -> None:
        env_results, rollout_results = played
        num_env_steps = sum(result["num_env_steps"] for result in env_results)
        self.env_steps += num_env_steps
        spans = [span for result in (*env_results, *rollout_results, *trained) for span in result["spans"]]
        metrics = {
            **env_metrics([record for result in env_results for record in result["episodes"]]),
            **metrics,
            **trained[0]["metrics"],
            **{f"time/{name}": seconds for name, seconds in self._times.items()},
            **utilization(spans, self._window("generate_rollouts"), (started, started + self._times["step"])),
            "perf/env_steps_per_s": num_env_steps / self._times["step"],
            "perf/peak_memory_bytes": max(result["peak_memory_bytes"] for result in trained),
            "env/num_steps": self.env_steps,
            **self._control_metrics(),
        }
        step = self.completed_steps
        self.logger.log(step, metrics)
        self.progress.update(step, metrics)
        timeline = self.run_dir / "timeline.json"
        if self.cfg.runner.timeline and step in (3, self.total_steps) and not timeline.exists():
            of_step = (span for span in spans + self._driver_spans if span.start >= started)
            write_chrome_trace(of_step, timeline, step=step)
            self.progress.message(f"timeline of step {step}: {timeline}")

    def _window(self, phase: str) -> tuple[float, float]:
        span = next(span for span in self._driver_spans if span.name == phase)
        return span.start, span.end
