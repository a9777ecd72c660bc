"""Supervised training on demonstrations: collect them once, then one optimizer update per step.

env.collect_demonstrations()            # unless data.demos_dir holds them
actor.open_demonstrations()
for step: actor.run_sft(step)           # each rank reads its part of the batch from disk
"""

from __future__ import annotations

import math
import time
from pathlib import Path

from rlinf_lite.config import Config
from rlinf_lite.data.demonstrations import DemonstrationError, check_meta, recipe, remove_shards, write_meta
from rlinf_lite.metrics import summarize_episodes
from rlinf_lite.runners.simulation import SimulationRunner

PRINT_INTERVAL_S = 1.0
"""Steps may take milliseconds: progress is shown no more often than this; metrics are logged for every step."""


class SFTRunner(SimulationRunner):
    """Imitation of an expert; see `Runner` for what surrounds the steps."""

    _shown = -math.inf

    def prepare(self) -> None:
        """Have the demonstrations on disk, and open them in the actors."""
        demos_dir = self.cfg.data.demos_dir
        directory = self.run_dir / "demos" if demos_dir is None else Path(demos_dir)
        if not (directory / "meta.json").exists():
            self._collect(directory)
        meta = check_meta(directory, recipe(self.cfg), self.spec)
        had = meta["counts"]
        self.env_steps = had["num_env_steps"]
        if self.completed_steps == 0:
            self.logger.log(0, {f"demos/{name}": value for name, value in had.items()})
        success = f" (success {100 * had['success_once']:.1f}%)" if "success_once" in had else ""
        self.progress.message(
            f"demonstrations: {had['num_episodes']} of {had['num_played']} episodes{success}, "
            f"{had['num_chunks']:,} chunks, {had['num_env_steps']:,} env steps, in {directory}"
        )
        self._wait(self.actor.open_demonstrations(str(directory)), what="demonstrations to be opened")

    def run_step(self, step: int) -> None:
        started = time.time()
        with self._phase("training"):
            trained = self._train(self.actor.run_sft(step))[0]
        self._times["step"] = time.time() - started
        metrics = {
            **trained[0]["metrics"],
            **{f"time/{name}": seconds for name, seconds in self._times.items()},
            "perf/samples_per_s": self.cfg.actor.global_batch_size / self._times["step"],
            "perf/peak_memory_bytes": max(result["peak_memory_bytes"] for result in trained),
        }
        self.logger.log(self.completed_steps, metrics)
        if time.monotonic() - self._shown >= PRINT_INTERVAL_S or self.completed_steps == self.total_steps:
            self._shown = time.monotonic()
            self.progress.update(self.completed_steps, metrics)

    def _collect(self, directory: Path) -> None:
        data, started = self.cfg.data, time.time()
        self.progress.message(f"collecting {data.num_episodes} episodes into {directory}")
        directory.mkdir(parents=True, exist_ok=True)
        remove_shards(directory)
        with self._phase("collect"):
            found = self._wait(self.env.collect_demonstrations(str(directory)), what="demonstrations")[0]
        shards = [shard for result in found for shard in result["shards"]]
        summary = summarize_episodes([record for result in found for record in result["episodes"]], "expert")
        if not shards:
            raise DemonstrationError(
                f"the expert played {data.num_episodes} episodes and none succeeded ({summary.headline()}). Lower "
                "data.action_noise, raise env.train.max_episode_steps, or set data.keep_failures to true"
            )
        counts = {
            "num_played": summary.total.num_episodes,
            "success_once": summary.total.success_once,
            "num_episodes": summary.total.num_episodes if data.keep_failures else summary.total.num_successes,
            "num_chunks": sum(shard["num_chunks"] for shard in shards),
            "num_env_steps": sum(result["num_env_steps"] for result in found),
            "collect_s": round(time.time() - started, 3),
        }
        counts = {name: value for name, value in counts.items() if value is not None}
        write_meta(directory, recipe(self.cfg), self.spec, shards, counts)


def check_demonstrations(cfg: Config) -> None:
    """Raise DemonstrationError where `data.demos_dir` holds other demonstrations; for before anything is started."""
    if cfg.data.demos_dir is not None and (Path(cfg.data.demos_dir) / "meta.json").exists():
        check_meta(Path(cfg.data.demos_dir), recipe(cfg))
