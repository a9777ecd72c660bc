"""The shared part of runs with simulators: building environments, evaluation, and environment states as files."""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load_file, save_file

from rlinf_lite.config import Config
from rlinf_lite.config.schema import BaseConfig
from rlinf_lite.data.lerobot.layout import is_dataset
from rlinf_lite.envs import EnvSpec, episode_order
from rlinf_lite.hub import local_path
from rlinf_lite.metrics import EvalSummary, summarize_episodes
from rlinf_lite.registry import env_card
from rlinf_lite.report.video import write_gif
from rlinf_lite.runners.base import Runner
from rlinf_lite.runners.protocol import notes_of_run, protocol_of
from rlinf_lite.runners.run_config import CONFIG, changes_episodes, read_config
from rlinf_lite.runners.run_paths import RunClaim
from rlinf_lite.scheduler import Handle, WorkerGroup
from rlinf_lite.workers.layout import Layout

if TYPE_CHECKING:
    from rlinf_lite.control import Supervisor
    from rlinf_lite.data.lerobot.reader import LeRobotDataset
    from rlinf_lite.models.base import PolicyInputs

log = logging.getLogger(__name__)
DECODING_INTERVAL_S = 5.0


class SimulationRunner(Runner):
    """A runner with the three groups env, rollout and actor."""

    cfg: Config
    layout: Layout
    spec: EnvSpec
    reads: PolicyInputs | None
    """The inputs that the policy reads."""
    env_steps: int
    _decoding_shown = -math.inf

    def __init__(
        self,
        cfg: Config,
        actor: WorkerGroup,
        rollout: WorkerGroup,
        env: WorkerGroup,
        supervisor: Supervisor | None = None,
        claim: RunClaim | None = None,
    ) -> None:
        super().__init__(cfg, actor, rollout, env, supervisor=supervisor, claim=claim)
        self.env, self.env_steps = env, 0
        limit, epochs = cfg.runner.max_steps, cfg.runner.max_epochs
        self.total_steps = epochs if limit < 0 else min(limit, epochs)  # an epoch is one step
        if cfg.runner.task_type == "sft":
            self.total_steps = limit

    def _flows(self) -> list[tuple[WorkerGroup, WorkerGroup]]:
        return [*super()._flows(), (self.env, self.rollout), (self.rollout, self.actor)]

    def init_workers(self) -> None:
        """Build simulators, policies and optimizers, and load the checkpoint if the run resumes."""
        cfg = self.cfg
        self.layout = Layout(
            num_envs=cfg.env.train.num_envs,
            num_env_workers=self.env.world_size,
            num_stages=cfg.rollout.pipeline_stage_num,
            rollout_nodes=tuple(member.node.rank for member in self.rollout.members),
            actor_nodes=tuple(member.node.rank for member in self.actor.members),
        )
        self.spec = self._wait(self.env.init(self.layout), what="environments to be built", says_so=True)[0][0]
        actor = self._init_actor()  # before the rollout workers
        rollout = self.rollout.init(self.layout, self.spec)
        [self._num_parameters, *_], [self.reads, *_] = self._wait(
            actor, rollout, what="policies to be built", says_so=True
        )
        self._resume()
        log.info("policy of %s parameters; %s", f"{self._num_parameters:,}", self.spec)

    def _init_actor(self) -> Handle:
        """Have the actors build what they train."""
        return self.actor.init(self.layout, self.spec, self.total_steps)

    def _begin(self) -> None:
        for line in notes_of_run(self.cfg, self.spec, self.reads):
            self.progress.message(f"note: {line}")
        super()._begin()

    def evaluate(self, videos: Path | None = None) -> EvalSummary:
        """Play the fixed set of seeded evaluation episodes with the actor's present weights.

        `videos`: the path for a GIF of the first episodes, written if observations have images.
        """
        with self.step_log.phase("eval"):
            self.update_rollout_weights()
            num_waves = -(-self.cfg.env.eval.num_episodes // self.cfg.env.eval.num_envs)
            calls = self.env.evaluate(), self.rollout.evaluate()
            results, policies = self._wait(*calls, what="evaluation", num_phases=num_waves)
        episodes = [record for result in results for record in result["episodes"]]
        recorded = sorted((video for result in results for video in result["videos"]), key=lambda video: video.episode)
        if videos is not None and recorded:
            self.states.disk.write(videos, lambda: write_gif(recorded, videos))
        episodes.sort(key=lambda record: record.env_id)
        groups = env_card(self.cfg.env.id).task_groups
        tasks = (record.task_id for record in episodes)
        protocol = protocol_of(self.cfg, tasks, results[0]["played"], policies[0], self.spec, self.reads)
        return summarize_episodes(episodes, self.cfg.env.eval.mode, groups, protocol)

    def _demonstrations(self) -> tuple[LeRobotDataset, Path]:
        """The dataset of demonstrations that `data` names, collected if it is not on disk, and the directory of its
        decoded frames."""
        cfg, demos_dir = self.cfg, self.cfg.data.demos_dir
        directory = self.run_dir / "demos" if demos_dir is None else Path(local_path(demos_dir))
        if cfg.data.source == "expert" and not is_dataset(directory):
            self._collect(directory)
        return self._decoded(directory)

    def _decoded(self, directory: Path) -> tuple[LeRobotDataset, Path]:
        """A dataset of demonstrations that is on disk, and the directory of its decoded frames."""
        from rlinf_lite.data.demonstrations import decode_frames, open_dataset  # needs the extra `data`

        dataset = open_dataset(self.cfg, directory, self.spec)
        return dataset, decode_frames(self.cfg, dataset, self.spec, self._report_decoding)

    def _collect(self, directory: Path, student: Path | None = None, first_episode: int = 0) -> dict[str, float]:
        """Have the expert play episodes, or `student` (see `Collector`), and write them as a dataset. Returns its
        counts."""
        from rlinf_lite.data.lerobot.writer import begin
        from rlinf_lite.workers.collecting import complete

        data, env, started = self.cfg.data, self.cfg.env, time.time()
        num_episodes, plays = data.num_episodes, ""
        if student is not None:
            labelled = "" if data.recap.rounds else " and labelled by the expert"
            num_episodes, plays = data.rounds.episodes, f", played by the student{labelled},"
        self.progress.message(f"collecting {num_episodes} episodes{plays} into {directory}")
        begin(directory)
        with self.step_log.phase("collect"):
            waves = episode_order(num_episodes, self.layout.num_envs, env_card(env.id).num_scenes(env.task))
            # each worker goes on to the next wave by itself, and one that hangs is noticed after the limit of one wave
            acts = None if student is None else str(student)
            calls = [self.env.begin_demonstrations(str(directory), acts, first_episode)]
            calls += [self.env.collect_demonstrations(wave) for wave in waves]
            for call in [*calls, self.env.finish_demonstrations()]:
                found = self._wait(call, what="demonstrations")[0]
        return complete(self.cfg, directory, self.spec, found, time.time() - started, student is not None)

    def _report_decoding(self, what: str, done: int, total: int) -> None:
        if time.monotonic() - self._decoding_shown >= DECODING_INTERVAL_S:
            self._decoding_shown = time.monotonic()
            self.progress.message(f"decoding {what}: {done:,} of {total:,}")

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "env_steps": self.env_steps}

    def _load_state(self, state: dict[str, Any]) -> None:
        super()._load_state(state)
        self.env_steps = state["env_steps"]

    def _experience(self) -> dict[str, int]:
        return {"env_steps": self.env_steps}


def save_env_states(rows: list[dict[str, Any]], directory: Path) -> None:
    """Write one entry per environment: numbers to `envs.json`, arrays (action histories) to `envs.safetensors`, under
    `<env_id>.<key>`."""
    arrays: dict[str, np.ndarray] = {}
    numbers: list[dict[str, Any]] = []
    for row in rows:
        arrays |= {f"{row['env_id']}.{key}": value for key, value in row.items() if isinstance(value, np.ndarray)}
        numbers.append({key: value for key, value in row.items() if not isinstance(value, np.ndarray)})
    save_file(arrays, directory / "envs.safetensors")
    (directory / "envs.json").write_text(json.dumps(numbers))


def load_env_states(directory: Path, cfg: BaseConfig) -> list[dict[str, Any]]:
    """Read the entries that `save_env_states` wrote. Empty, with a warning, if the config beside them describes other
    episodes than `cfg`."""
    changes = changes_episodes(read_config(directory / CONFIG) or {}, cfg)
    if changes:
        log.warning("unfinished episodes start again: %s", "; ".join(map(str, changes)))
        return []
    rows = {row["env_id"]: row for row in json.loads((directory / "envs.json").read_text())}
    for name, array in load_file(directory / "envs.safetensors").items():
        env_id, _, key = name.partition(".")
        rows[int(env_id)][key] = array
    return list(rows.values())
