"""The synchronous embodied loop. `Runner.run` adds checkpoints, evaluations and snapshots around the steps.

rollout.sync_model_from_actor() || actor.sync_model_to_rollout()
env.interact() || rollout.generate() || actor.recv_rollout_batch()
actor.compute_advantages_and_returns()
actor.run_training()
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlinf_lite.metrics import Span, env_metrics
from rlinf_lite.runners.simulation import SimulationRunner, load_env_states, save_env_states
from rlinf_lite.scheduler import Handle


class EmbodiedRunner(SimulationRunner):
    """Runs reinforcement learning in simulators; see `Runner` for the loop around the steps."""

    _env_states: dict[int, list[dict[str, Any]]]
    """The states of all environments after the two newest completed steps, restored if a step is interrupted."""

    def init_workers(self) -> None:
        super().init_workers()
        if self._resume_from is None:
            found = self._wait(self.env.state_dict(), what="environment states")[0]
            self._env_states = {self.completed_steps: [row for rows in found for row in rows]}

    def run_step(self, step: int) -> None:
        self.update_rollout_weights()
        env_results, rollout_results = self.generate_rollouts(step)
        metrics = self._measure_batch()
        with self.step_log.phase("training"):
            trained = self._train(self.actor.run_training(step))[0]
        step_s = self.step_log.end_step()

        num_env_steps = sum(result["num_env_steps"] for result in env_results)
        self.env_steps += num_env_steps
        metrics = {
            **env_metrics([record for result in env_results for record in result["episodes"]]),
            **metrics,
            **trained[0]["metrics"],
            "perf/env_steps_per_s": num_env_steps / step_s,
            "perf/peak_memory_bytes": max(result["peak_memory_bytes"] for result in trained),
            "env/num_steps": self.env_steps,
        }
        played = [span for result in (*env_results, *rollout_results) for span in result["spans"]]
        self._log_played(metrics, played, [span for result in trained for span in result["spans"]])

    def _measure_batch(self) -> dict[str, float]:
        """Have the actors compute what updates need of the whole batch. Returns its metrics."""
        with self.step_log.phase("advantages"):
            metrics: dict[str, float] = self._wait(self.actor.compute_advantages_and_returns(), what="advantages")[0][0]
        return metrics

    def _log_played(self, metrics: dict[str, float], played: list[Span], trained: list[Span]) -> None:
        """Log a step; `played`: spans of env and rollout workers, `trained`: spans of the actor."""
        self._log_step(metrics, played + trained)

    def generate_rollouts(self, step: int) -> list[list[dict[str, Any]]]:
        """Run env workers, rollout workers and the actor's receiving side together until the batch of `step` is
        complete. Returns the results of env and rollout workers."""
        with self.step_log.phase("generate_rollouts"):
            handles = self._play(step)
            played = self._wait(*handles, self.actor.recv_rollout_batch(step), what="rollouts")[:2]
        states = [row for result in played[0] for row in result["states"]]
        self._env_states = {step: self._env_states[step], step + 1: states}
        return played

    def _play(self, step: int) -> tuple[Handle, ...]:
        """Start the rollouts of `step`. Returns the calls of env and rollout workers, then further calls to wait
        for."""
        return self.env.interact(step), self.rollout.generate(step)

    def _forget_unfinished_step(self) -> None:
        self._restore_envs(self._env_states[self.completed_steps])

    def _restore_envs(self, rows: list[dict[str, Any]]) -> None:
        found = self._wait(self.env.load_state_dict(rows), what="environments to be brought to where they were")[0]
        self._env_states = {self.completed_steps: [row for rows in found for row in rows]}

    def _save_state(self, directory: Path) -> None:
        super()._save_state(directory)
        save_env_states(self._env_states[self.completed_steps], directory)

    def _load(self, checkpoint: Path) -> None:
        super()._load(checkpoint)
        self._restore_envs(load_env_states(checkpoint / "training_state", self.cfg))
