"""Collecting demonstrations: an expert plays seeded episodes, and its intended action at every env step is recorded.

The expert is the environment's own (`Demonstrator`), which returns any number of next actions at once, or a trained
policy, which returns as many as in its own training. Noise moves the episodes off the expert's path; the labels are the
expert's actions without noise, for the states that the noise led to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf_lite.config import Config
from rlinf_lite.config.resources import policy_directory
from rlinf_lite.data.demonstrations import PROVENANCE, DemonstrationError, provenance, recipe
from rlinf_lite.data.lerobot.layout import ACTION, PICTURES, STATE, SUCCESS, Feature, picture_feature, vector_feature
from rlinf_lite.data.lerobot.writer import PARTS, Episode, PartWriter, publish
from rlinf_lite.dimensions import policy_misfits
from rlinf_lite.envs import (
    Demonstrator,
    EnvSpec,
    EpisodeRecord,
    Obs,
    VecEnv,
    balanced_seed,
    episode_order,
    get_env_spec,
    make_env,
)
from rlinf_lite.envs.observations import take_rows
from rlinf_lite.metrics import summarize_episodes
from rlinf_lite.models import NOISE_KEY, Mode, Policy, load_policy
from rlinf_lite.models.sampling import noise_keys, normal_noise
from rlinf_lite.registry import env_card

_FPS_WITHOUT_CLOCK = 10


@dataclass
class _Played:
    """The frames of one row so far: the observation before each action, and the action without noise."""

    frames: list[dict[str, Any]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    successes: list[float] = field(default_factory=list)
    """After each action 1: success, 0: none, -1: not reported; empty if the environment never says it."""
    record: EpisodeRecord | None = None


class Collector:
    """Plays episodes in one env worker, and writes its part of the dataset in `directory`."""

    def __init__(
        self,
        cfg: Config,
        env: VecEnv,
        obs: Obs,
        directory: Path,
        rank: int,
        device: str,
        student: Path | None = None,
        first_episode: int = 0,
    ) -> None:
        """`student`: the directory of a policy that plays, of which all episodes are kept. The expert only says what it
        would do, or in rounds of RECAP is not there, and what the student does is recorded. Numbers of episodes begin
        at `first_episode` where initial states are drawn."""
        spec = get_env_spec(env, obs)
        self._cfg = cfg
        self._low, self._high = np.array(spec.action_low, np.float32), np.array(spec.action_high, np.float32)
        self._noise = cfg.data.action_noise * (self._high - self._low) / 2
        self._teacher: Policy | None = None
        if cfg.data.teacher_dir is not None:
            self._teacher = load_policy(cfg.data.teacher_dir).to(device).eval()
            try:
                self._teacher.check_env_spec(spec)
            except ValueError as error:
                text = f"{cfg.data.teacher_dir} does not act in {cfg.env.id} {cfg.env.task}: {error}"
                advice = "Name the environment of its training (env.id, env.task, env.options), or another policy"
                raise DemonstrationError(f"data.teacher_dir: {text}. {advice}") from error
            for problem in policy_misfits("data.teacher_dir", policy_directory(cfg.data.teacher_dir), spec):
                raise DemonstrationError(f"{problem}")
        self._student = None if student is None else load_policy(student).to(device).eval()
        self._plays_alone = student is not None and cfg.data.recap.rounds > 0
        self._first_episode = first_episode
        self._num_episodes = cfg.data.num_episodes if student is None else cfg.data.rounds.episodes
        self._directory, self._spec = directory / PARTS / f"rank_{rank:03d}", spec
        self._writer: PartWriter | None = None
        """None until the first episodes have shown whether success is reported at every step."""
        self.records: list[EpisodeRecord] = []
        """Records of the episodes played so far; their `env_id` is the number of the episode."""
        self.num_env_steps = 0
        self.on_progress: Callable[[], None] = lambda: None
        """Called after each reset, each chunk and each written episode."""

    def play(self, env: VecEnv, episodes: np.ndarray) -> None:
        """Play the episodes with these numbers, one per row. Those from the number of episodes on are not recorded."""
        data, chunk = self._cfg.data, self._cfg.model.num_action_chunks
        num_tasks = env_card(self._cfg.env.id).num_tasks(self._cfg.env.task)
        obs = env.reset([balanced_seed(data.seed, self._first_episode + int(x), num_tasks) for x in episodes])
        self.on_progress()
        running, keeps_all = episodes < self._num_episodes, data.keep_failures or self._student is not None
        played = [_Played() for _ in episodes]
        for decision in range(-(-env.max_episode_steps // chunk)):
            if not running.any():
                break
            obs = self._play_chunk(env, obs, episodes, decision, running, played)
            self.on_progress()
        writer = self._opened(any(success >= 0 for episode in played for success in episode.successes[:1]))
        for episode in played:
            if episode.record is not None and (keeps_all or episode.record.success_once):
                writer.add(_episode(episode, episode.record))
                self.on_progress()

    def finish(self) -> dict[str, Any]:
        """Finish this part of the dataset. Returns the episode records and the number of env steps."""
        self._opened(reports_steps=False).finish()
        return {"episodes": self.records, "num_env_steps": self.num_env_steps}

    def _opened(self, reports_steps: bool) -> PartWriter:
        """The writer of this part, opened at the first call."""
        if self._writer is None:
            features = features_of(self._cfg, self._spec, reports_steps)
            self._writer = PartWriter(self._directory, features, fps_of(self._cfg))
        return self._writer

    def _play_chunk(
        self, env: VecEnv, obs: Obs, episodes: np.ndarray, decision: int, running: np.ndarray, played: list[_Played]
    ) -> Obs:
        """Play one chunk, env step by env step, and ask the expert when its actions are used up. Returns the last
        observation."""
        chunk, data = self._cfg.model.num_action_chunks, self._cfg.data
        keys = noise_keys(data.seed, self._first_episode + episodes, decision)
        noise = normal_noise(keys, chunk * len(self._low))
        noise = noise.reshape(len(episodes), chunk, -1) * self._noise
        wanted, first = np.empty((len(episodes), 0, len(self._low)), np.float32), 0
        played_by = None if self._student is None else self._acted(self._student, {**obs, NOISE_KEY: keys}, "sampled")
        for step in range(chunk):
            if step == first + wanted.shape[1]:
                if played_by is not None and self._plays_alone:
                    asked = played_by
                else:
                    asked = self._wanted(env, obs, chunk - step, keys + np.uint64(step))
                first, wanted = step, np.clip(asked, self._low, self._high)
            action = wanted[:, step - first]
            taken = action + noise[:, step] if played_by is None else played_by[:, step]
            result = env.chunk_step(np.clip(taken, self._low, self._high)[:, None])
            success = getattr(env, "last_success", None)
            for row in np.flatnonzero(running & result.executed[:, 0]).tolist():
                played[row].frames.append({**_frame(obs, row), ACTION: action[row].astype(np.float32)})
                played[row].rewards.append(float(result.rewards[row, 0]))
                if success is not None:
                    played[row].successes.append(float(success[row]))
                self.num_env_steps += 1
            for record in result.episodes:
                if running[record.env_id]:
                    running[record.env_id] = False
                    played[record.env_id].record = replace(record, env_id=int(episodes[record.env_id]))
                    self.records.append(replace(record, env_id=int(episodes[record.env_id])))
            obs = result.obs
        return obs

    def _acted(self, policy: Policy, obs: Any, mode: Mode) -> np.ndarray:
        with torch.inference_mode():
            actions: np.ndarray = policy.predict_action_batch(obs, mode).actions.float().cpu().numpy()
        return actions

    def _wanted(self, env: VecEnv, obs: Obs, num_actions: int, keys: np.ndarray) -> np.ndarray:
        """The expert's next actions [B, n, D]; those of an environment's expert are at most `num_actions`, and a
        policy's noise is that of `keys` [B]."""
        if self._teacher is not None:
            return self._acted(self._teacher, {**obs, NOISE_KEY: keys}, self._cfg.data.teacher_mode)
        if not isinstance(env, Demonstrator):
            raise DemonstrationError(
                f"data.teacher_dir: {self._cfg.env.id} has no expert of its own (expert_actions). Name a trained policy"
            )
        return env.expert_actions(num_actions)


def play_part(
    cfg: Config, directory: Path, rank: int, rows: np.ndarray, num_envs: int, report: Callable[[int, int, int], None]
) -> tuple[dict[str, Any], EnvSpec]:
    """Play the episodes of `rows` of `num_envs` environments in this process, and write them as part `rank` of the
    dataset in `directory`.

    `report` is called after each reset, each chunk and each written episode with the numbers of episodes, of successes
    and of env steps so far. Returns what `Collector.finish` does, and the properties of the environment.
    """
    env = make_env(cfg.env, "train", len(rows))
    try:
        report(0, 0, 0)
        obs = env.reset()
        report(0, 0, 0)
        collector = Collector(cfg, env, obs, directory, rank, device="cpu")

        def on_progress() -> None:
            records = collector.records
            report(len(records), sum(bool(record.success_once) for record in records), collector.num_env_steps)

        collector.on_progress = on_progress
        num_scenes = env_card(cfg.env.id).num_scenes(cfg.env.task)
        for wave in episode_order(cfg.data.num_episodes, num_envs, num_scenes):
            collector.play(env, wave[rows])
        return collector.finish(), get_env_spec(env, obs)
    finally:
        if callable(close := getattr(env, "close", None)):
            close()


def features_of(cfg: Config, spec: EnvSpec, reports_steps: bool) -> dict[str, Feature]:
    """The features of a frame, without counters. `reports_steps`: whether the environment reports success at every
    step."""
    data, fps = cfg.data, fps_of(cfg)
    features = {
        PICTURES + camera: picture_feature(data.pictures, height, width, fps)
        for camera, (height, width) in spec.cameras.items()
    }
    if spec.state_dim:
        features[STATE] = vector_feature("state", spec.state_dim, spec.state_names)
    features[ACTION] = vector_feature("action", spec.action_dim, spec.action_names)
    features |= {"next.reward": Feature("float32", (1,)), "next.done": Feature("bool", (1,))}
    return features | ({SUCCESS: Feature("bool", (1,))} if reports_steps else {})


def fps_of(cfg: Config) -> int:
    """The env steps per second of the dataset that is written."""
    own = env_card(cfg.env.id).steps_per_s(cfg.env.task, cfg.env.options) if cfg.data.fps is None else cfg.data.fps
    return _FPS_WITHOUT_CLOCK if own is None else max(1, round(own))


def complete(
    cfg: Config, directory: Path, spec: EnvSpec, found: list[dict[str, Any]], took_s: float, keeps_all: bool = False
) -> dict[str, float]:
    """Make one dataset of the parts that the collectors wrote. `found`: the results of their `finish`. `keeps_all`:
    failures too, whatever `data` says. Returns counts.

    Raises:
        DemonstrationError: if there is no episode to keep.
    """
    data = cfg.data
    summary = summarize_episodes([record for result in found for record in result["episodes"]], "expert")
    num_kept = summary.total.num_episodes if data.keep_failures or keeps_all else summary.total.num_successes or 0
    if not num_kept:
        raise DemonstrationError(
            f"the expert played {data.num_episodes} episodes and none succeeded ({summary.headline()}). Lower "
            "data.action_noise, raise env.train.max_episode_steps, or set data.keep_failures to true"
        )
    counts = {
        "num_played": summary.total.num_episodes,
        "success_once": summary.total.success_once,
        "num_episodes": num_kept,
        "num_env_steps": sum(result["num_env_steps"] for result in found),
        "collect_s": round(took_s, 3),
    }
    known = {name: value for name, value in counts.items() if value is not None}
    publish(directory, fps_of(cfg), cfg.env.id, {PROVENANCE: provenance(recipe(cfg), spec, known)})
    return known


def _frame(obs: Obs, row: int) -> dict[str, Any]:
    seen: dict[str, Any] = take_rows(obs, [row])
    frame = {PICTURES + camera: images[0] for camera, images in seen.get("images", {}).items()}
    frame |= {STATE: seen["state"][0]} if "state" in seen else {}
    return frame | {"task": seen.get("instruction", [""])[0]}


def _episode(played: _Played, record: EpisodeRecord) -> Episode:
    frames, length = played.frames, len(played.frames)
    columns = {key: np.stack([frame[key] for frame in frames]) for key in frames[0] if key != "task"}
    columns["next.reward"] = np.array(played.rewards, np.float32)[:, None]
    columns["next.done"] = (np.arange(length) == length - 1)[:, None]
    if played.successes:
        columns[SUCCESS] = np.array(played.successes)[:, None] > 0
    facts = {"seed": record.seed, "success": bool(record.success_once)}
    return Episode(record.env_id, columns, [frame["task"] for frame in frames], facts)
