"""Collecting demonstrations: an expert plays seeded episodes, and what it would have done is kept.

The expert is the environment's own (`Demonstrator`), which gives as many next actions as it cares to without looking,
or a trained policy that acts on the state and looks as often as it did in its own training. Noise moves the episodes
off the expert's path; labels are what it wants where it then is.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf_lite.config import Config
from rlinf_lite.config.resources import policy_directory
from rlinf_lite.data.demonstrations import Chunks, DemonstrationError, ShardWriter
from rlinf_lite.envs import Demonstrator, EpisodeRecord, Obs, VecEnv, balanced_seed, get_env_spec
from rlinf_lite.envs.observations import take_rows
from rlinf_lite.models import Policy, load_policy
from rlinf_lite.models.sampling import noise_keys, normal_noise
from rlinf_lite.registry import env_card


class Collector:
    """Plays episodes in one env worker and writes its shards."""

    def __init__(self, cfg: Config, env: VecEnv, obs: Obs, directory: Path, rank: int, device: str) -> None:
        spec = get_env_spec(env, obs)
        self._cfg = cfg
        self._low, self._high = np.array(spec.action_low, np.float32), np.array(spec.action_high, np.float32)
        self._noise = cfg.data.action_noise * (self._high - self._low) / 2
        self._teacher: Policy | None = None
        if cfg.data.teacher_dir is not None:
            self._teacher = load_policy(policy_directory(cfg.data.teacher_dir)).to(device).eval()
            self._teacher.check_env_spec(spec)
        self._writer = ShardWriter(directory, rank)
        self._records: list[EpisodeRecord] = []
        self._num_env_steps = 0

    def play(self, env: VecEnv, episodes: np.ndarray) -> None:
        """Play the episodes of these numbers, one per row, as far as `data.num_episodes` goes."""
        data, chunk = self._cfg.data, self._cfg.model.num_action_chunks
        num_tasks = env_card(self._cfg.env.id).num_tasks(self._cfg.env.task)
        obs = env.reset([balanced_seed(data.seed, int(episode), num_tasks) for episode in episodes])
        running = episodes < data.num_episodes
        kept = np.zeros(len(episodes), np.bool_)
        played: list[tuple[np.ndarray, Chunks]] = []
        for decision in range(-(-env.max_episode_steps // chunk)):
            rows = np.flatnonzero(running)
            if not rows.size:
                break
            before: dict[str, Any] = take_rows(obs, rows)
            actions = np.zeros((len(episodes), chunk, len(self._low)), np.float32)  # clean
            mask = np.zeros((len(episodes), chunk), np.bool_)  # which were executed
            keys = noise_keys(data.seed, episodes, decision)
            noise = normal_noise(keys, chunk * len(self._low)).reshape(actions.shape) * self._noise
            first = 0
            while first < chunk:
                wanted = self._wanted(env, obs, chunk - first)
                part = slice(first, first + wanted.shape[1])
                actions[:, part] = np.clip(wanted, self._low, self._high)
                result = env.chunk_step(np.clip(actions[:, part] + noise[:, part], self._low, self._high))
                mask[:, part] = result.executed & running[:, None]
                for record in result.episodes:
                    if running[record.env_id]:
                        running[record.env_id] = False
                        kept[record.env_id] = data.keep_failures or bool(record.success_once)
                        self._records.append(replace(record, env_id=int(episodes[record.env_id])))
                obs, first = result.obs, part.stop
            self._num_env_steps += int(mask.sum())
            chunks = Chunks(before, actions[rows], mask[rows], episodes[rows], np.full(len(rows), decision))
            played.append((rows, chunks))
        for rows, chunks in played:
            here = np.flatnonzero(kept[rows])
            if here.size:
                self._writer.add(Chunks(**take_rows(vars(chunks), here)))

    def finish(self) -> dict[str, Any]:
        """Write what is left. Returns episode records, shards and the number of env steps."""
        self._writer.flush()
        return {"episodes": self._records, "shards": self._writer.shards, "num_env_steps": self._num_env_steps}

    def _wanted(self, env: VecEnv, obs: Obs, num_actions: int) -> np.ndarray:
        """The expert's next actions [B, n, D], at most `num_actions`, from what is seen."""
        if self._teacher is not None:
            with torch.inference_mode():
                taught: np.ndarray = self._teacher.predict_action_batch(obs, "greedy").actions.float().cpu().numpy()
            return taught
        if not isinstance(env, Demonstrator):
            raise DemonstrationError(
                f"data.teacher_dir: {self._cfg.env.id} has no expert of its own (expert_actions). Name a trained policy"
            )
        return env.expert_actions(num_actions)
