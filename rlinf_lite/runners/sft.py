"""Supervised training on demonstrations: collect them once, then one optimizer update per step.

env.begin_demonstrations()              # unless data.demos_dir holds a dataset
for wave: env.collect_demonstrations()
env.finish_demonstrations()
decode_frames()                         # once per dataset
actor.open_demonstrations()
every data.dagger.interval steps, data.dagger.rounds times: the student plays, env.collect_demonstrations() labels
every data.recap.interval steps, data.recap.rounds times: the student plays; also before the first step:
    actor.label_demonstrations()        # the first rank, by a value network
    actor.take_labels()
for step: actor.run_sft(step)           # each rank reads its part of the batch from the decoded frames
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_lite.data.dataset_notes import dataset_notes
from rlinf_lite.data.demonstrations import (
    DemonstrationError,
    Demonstrations,
    add_to_dataset,
    beyond_bounds,
    read_provenance,
    stride_of,
)
from rlinf_lite.data.lerobot.layout import is_dataset
from rlinf_lite.data.lerobot.statistics import Statistics
from rlinf_lite.runners.simulation import SimulationRunner

if TYPE_CHECKING:
    from rlinf_lite.data.lerobot.reader import LeRobotDataset
    from rlinf_lite.training.recap import Labels

PRINT_INTERVAL_S = 1.0
"""Steps may take milliseconds: progress is shown no more often than this; metrics are logged for every step."""


class SFTRunner(SimulationRunner):
    """Runs imitation of an expert; see `Runner` for the loop around the steps."""

    _shown = -math.inf
    _learned_from: dict[str, Any] | None = None
    """Properties that identify the demonstrations, so that a resumed run does not go on with others."""
    _statistics: dict[str, Statistics] | None = None
    """Statistics of the demonstrations that the policy took; empty if it took none."""

    _rounds: list[tuple[LeRobotDataset, Path]]
    """The datasets that the run learns from, each with the directory of its decoded frames."""

    def prepare(self) -> None:
        """Collect the demonstrations if they are not on disk, decode them, and open them in the actors."""
        cfg = self.cfg
        dataset, frames = self._demonstrations()
        directory = dataset.directory
        chunks, info = Demonstrations(frames, cfg.model.num_action_chunks, stride_of(cfg)), dataset.info
        had: dict[str, float] = {"num_episodes": info.num_episodes, "num_env_steps": info.num_frames}
        if cfg.data.source == "expert":
            had |= read_provenance(directory)["counts"]
        had["num_chunks"] = len(chunks)
        self.env_steps = int(had["num_env_steps"])
        self._check_same(chunks, directory)
        if self.completed_steps == 0:
            self.logger.log(0, {f"demos/{name}": value for name, value in had.items()})
        of_played = f" of {had['num_played']}" if "num_played" in had else ""
        success = f" (success {100 * had['success_once']:.1f}%)" if "success_once" in had else ""
        self.progress.message(
            f"demonstrations: {had['num_episodes']}{of_played} episodes{success}, "
            f"{had['num_chunks']:,} chunks, {had['num_env_steps']:,} env steps, in {directory}"
        )
        read_otherwise = chunks.frames.notes if cfg.data.source == "folder" else ()
        for line in (*read_otherwise, *dataset_notes(cfg, dataset, self.spec, self.reads)):
            self.progress.message(f"note: {line}")
        for line in beyond_bounds(chunks.frames, self.spec):
            self.progress.message(f"note: {line}; what is beyond is learned as the bound")
        opening = self.actor.open_demonstrations(str(frames), self._statistics)
        opened = self._wait(opening, what="demonstrations to be opened", says_so=True)[0][0]
        self._statistics, normalised, foreign = opened
        self._rounds = [(dataset, frames)]
        if self._statistics:
            self._wait(self.rollout.take_statistics(self._statistics), what="statistics to be taken")
            what = " and ".join(f"{name}s" for name in normalised)
            unsaid = f"the policy got the statistics of {directory}, and does not say what it normalises by them"
            self.progress.message(f"{what} are normalised by the statistics of {directory}" if what else unsaid)
        last_round = min(max(self.completed_steps - 1, 0) // cfg.data.rounds.interval, cfg.data.rounds.rounds)
        for number in range(1, last_round + 1):
            self._begin_round(number, plays=False)
        if cfg.data.recap.rounds:
            self._label(last_round)
        for line in foreign:
            self.progress.message(f"note: {line}, which it keeps: are they of another robot, or in other units?")

    def _check_same(self, chunks: Demonstrations, directory: Path) -> None:
        """Raise DemonstrationError if this run began with other demonstrations; the folder may have moved."""
        mean = chunks.frames.statistics["action"]["mean"]
        these = {"frames": self.env_steps, "tasks": chunks.frames.tasks, "action_mean": [f"{x:.5g}" for x in mean]}
        before, self._learned_from = self._learned_from, these
        if before in (None, these) or "data.demos_dir" in self.cfg.runner.allow_changes:
            return
        raise DemonstrationError(
            f"data.demos_dir: {directory} holds other demonstrations ({these['frames']:,} frames, mean action "
            f"{these['action_mean']}) than the run began with ({before['frames']:,}, {before['action_mean']}). Name "
            "those, start a new run with runner.resume=never, or go on with runner.allow_changes=[data.demos_dir]"
        )

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "learned_from": self._learned_from, "statistics": self._statistics}

    def _load_state(self, state: dict[str, Any]) -> None:
        super()._load_state(state)
        self._learned_from = state["learned_from"]
        self._statistics = state["statistics"]

    def _begin_round(self, number: int, plays: bool) -> None:
        """Collect a further round, unless it is on disk, and have the actors go on with it. `plays`: whether the actors
        have the weights with which the round begins."""
        data, directory = self.cfg.data, self.run_dir / f"round_{number}"
        if not is_dataset(directory / "demos"):
            if not plays:
                raise DemonstrationError(f"{directory} is gone, with which the run went on. Begin a new run")
            student = directory / "student"
            self._wait(self.actor.save_policy(str(student)), what="the student to be written")
            first_episode = data.num_episodes + (number - 1) * data.rounds.episodes
            counts = self._collect(directory / "demos", student, first_episode)
            success = f", {100 * counts['success_once']:.1f}% of them successes" if "success_once" in counts else ""
            self.progress.message(f"round {number}: {counts['num_episodes']} episodes of the student{success}")
            self.logger.log(self.completed_steps, {f"demos/{name}": value for name, value in counts.items()})
        dataset, frames = self._decoded(directory / "demos")
        self.env_steps += dataset.info.num_frames
        self._wait(self.actor.add_demonstrations(str(frames)), what="demonstrations to be opened")
        self._rounds.append((dataset, frames))

    def _label(self, number: int) -> None:
        """Label all demonstrations as RECAP does in round `number`, unless that is on disk, and have the actors go on
        with these labels."""
        from rlinf_lite.data.labels import LABELS, read_positive, write_labels  # needs the extra `data`

        file, sizes = self.run_dir / f"round_{number}" / LABELS, [x.info.num_frames for x, _ in self._rounds]
        if not file.is_file():
            labels: Labels = self._wait(self.actor.label_demonstrations(), what="labels")[0][0]
            if number:
                dataset, frames = self._rounds[-1]
                of_round = slice(sum(sizes[:-1]), None)
                columns = {"advantage": labels.advantages[of_round], "positive": labels.positive[of_round]}
                add_to_dataset(self.cfg, dataset, frames, self.spec, columns)
            write_labels(file, sizes, labels.advantages, labels.positive)  # last: then the round is complete
            if labels.metrics:
                self.logger.log(self.completed_steps, labels.metrics)
                said = ", ".join(f"{name.removeprefix('recap/')} {x:.3f}" for name, x in labels.metrics.items())
                self.progress.message(f"labels of round {number}: {said}")
        self._wait(self.actor.take_labels(read_positive(file, sum(sizes))), what="labels to be taken")

    def run_step(self, step: int) -> None:
        data = self.cfg.data
        number, within = divmod(step, data.rounds.interval)
        if within == 0 and 1 <= number <= data.rounds.rounds:
            self._begin_round(number, plays=True)
            if data.recap.rounds:
                self._label(number)
        with self.step_log.phase("training"):
            trained = self._train(self.actor.run_sft(step))[0]
        step_s = self.step_log.end_step()
        metrics = {
            **trained[0]["metrics"],
            **self.step_log.phase_metrics(),
            "perf/samples_per_s": self.cfg.actor.global_batch_size / step_s,
            "perf/peak_memory_bytes": max(result["peak_memory_bytes"] for result in trained),
        }
        self.logger.log(self.completed_steps, metrics)
        if time.monotonic() - self._shown >= PRINT_INTERVAL_S or self.completed_steps == self.total_steps:
            self._shown = time.monotonic()
            self.progress.update(self.completed_steps, metrics)
