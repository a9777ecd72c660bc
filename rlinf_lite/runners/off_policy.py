"""The loop of off-policy runs. `Runner.run` adds checkpoints, evaluations and snapshots around the steps.

rollout.sync_model_from_actor() || actor.sync_model_to_rollout()
env.interact() || rollout.generate() || actor.recv_rollout_batch()
actor.store_transitions()                                            # in the replay buffer
actor.run_training()                                                 # any number of updates on batches from it

With `runner.mode: async` the next steps are played meanwhile, as in `async_embodied.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

from rlinf_lite.config import Config
from rlinf_lite.config.names import reads_demonstrations
from rlinf_lite.data.demonstrations import PROVENANCE, DemonstrationError, read_provenance
from rlinf_lite.runners.async_embodied import AsyncEmbodiedRunner
from rlinf_lite.runners.checkpoints import CheckpointError
from rlinf_lite.runners.embodied import EmbodiedRunner
from rlinf_lite.runners.full_disk import DiskFullError, has_no_room, room_at
from rlinf_lite.scheduler import Handle, WorkerError
from rlinf_lite.training.replay import DemonstratedTransitions, ReplayError
from rlinf_lite.workers.off_policy import DEMONSTRATIONS


class OffPolicyRunner(EmbodiedRunner):
    """Runs reinforcement learning from a replay buffer; see `Runner` for the loop around the steps."""

    @property
    def replay_directory(self) -> Path:
        """Where the replay buffer is."""
        return self.run_dir / "replay"

    def _init_actor(self) -> Handle:
        return self.actor.init(self.layout, self.spec, self.total_steps, str(self.replay_directory))

    def prepare(self) -> None:
        """Collect and decode the demonstrations, if batches draw from them."""
        self.replay_directory.mkdir(parents=True, exist_ok=True)
        if reads_demonstrations(self.cfg):
            dataset, frames = self._demonstrations()
            check_transitions(self.cfg, dataset.directory, frames)
            (self.replay_directory / DEMONSTRATIONS).write_text(json.dumps({"frames": str(frames.absolute())}))

    def _measure_batch(self) -> dict[str, float]:
        """Have the actors put the batch into the replay buffer. Returns its metrics. Raises DiskFullError if that has
        no room."""
        try:
            with self.step_log.phase("store_transitions"):
                storing = self.actor.store_transitions(self.completed_steps)
                metrics: dict[str, float] = self._wait(storing, what="transitions to be stored")[0][0]
            return metrics
        except WorkerError as error:
            if not has_no_room(error.__cause__):
                raise
            room = room_at(self.replay_directory)
            raise DiskFullError(f"the replay buffer has no room: {room}. Make room") from error

    def _load(self, checkpoint: Path) -> None:
        try:
            super()._load(checkpoint)
        except WorkerError as error:
            if not isinstance(error.__cause__, ReplayError):
                raise
            raise CheckpointError(f"{checkpoint}: {error.__cause__}") from error

    def save_checkpoint(self) -> Path | None:
        """As in other runs; then transitions that no kept checkpoint goes back to are deleted."""
        saved = super().save_checkpoint()
        if saved is not None:
            kept = [path / "training_state" / "replay.json" for path in self.store.steps()]
            try:
                before = min(int(json.loads(path.read_text())["first"]) for path in kept)
            except (OSError, ValueError, KeyError) as error:
                raise CheckpointError(f"a checkpoint in {self.store.root} names no replay buffer: {error}") from error
            self._wait(self.actor.forget_replay(before), what="old transitions to be deleted")
        return saved


class AsyncOffPolicyRunner(AsyncEmbodiedRunner, OffPolicyRunner):
    """As `OffPolicyRunner`, with rollouts ahead of training; see `AsyncEmbodiedRunner` for what a resume repeats."""


def check_transitions(cfg: Config, dataset: Path, frames: Path) -> None:
    """Raise DemonstrationError if the demonstrations in `dataset`, decoded into `frames`, make no transitions."""
    ignores, chunk, gamma = cfg.env.train.ignore_terminations, cfg.model.num_action_chunks, cfg.off_policy.gamma
    try:
        DemonstratedTransitions(frames, chunk, gamma, None, ignores)
    except ReplayError as error:
        raise DemonstrationError(f"data.demos_dir: {dataset} {error}") from error
    if (dataset / "meta" / PROVENANCE).is_file():
        noise = read_provenance(dataset)["made_from"].get("data.action_noise", 0.0)
        if noise:
            text = f"was played with noise on the actions (data.action_noise={noise:g}) that it does not hold, so that"
            advice = "what follows is not what its actions led to. Collect another without noise"
            raise DemonstrationError(f"data.demos_dir: {dataset} {text} {advice}")
