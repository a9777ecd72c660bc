"""RECAP's labels: a value network is trained on all episodes of a pool, and says which frames were better than usual.

The network begins from random weights of the run's seed, so that equal pools get equal labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlinf_lite.algorithms.recap import LoggedEpisodes, logged_advantages, normalised_returns, positive_frames
from rlinf_lite.config import Config
from rlinf_lite.data.demonstrations import DemonstrationPool, batch_indices
from rlinf_lite.data.lerobot.frames import read_frames
from rlinf_lite.models.value_bins import ValueBins

_LEARNING_RATE = 1e-3
_FRAMES_AT_ONCE = 256


@dataclass(frozen=True)
class Labels:
    """Labels of all F frames of a pool."""

    advantages: NDArray[np.float32]
    """[F]; NaN where nothing was played yet, and no value network was trained."""
    positive: NDArray[np.bool_]
    """[F]."""
    metrics: dict[str, float]
    """`recap/*`; empty where nothing was played yet."""


def logged_episodes(pool: DemonstrationPool, first_is_played: bool) -> LoggedEpisodes:
    """The episodes of a pool. A task is the sentence at an episode's beginning. `first_is_played`: the pool's first
    dataset is of episodes that a policy played, not of an expert's; all others are."""
    numbers: dict[str, int] = {}
    parts = pool.all_frames
    sentences = [frames.tasks[task] for frames in parts for task in frames.task[frames.episodes[:, 0]]]
    return LoggedEpisodes(
        lengths=np.concatenate([frames.episodes[:, 1] for frames in parts]),
        successes=np.concatenate([frames.successes for frames in parts]),
        tasks=np.array([numbers.setdefault(sentence, len(numbers)) for sentence in sentences]),
        played=np.concatenate(
            [np.full(len(frames.episodes), number > 0 or first_is_played) for number, frames in enumerate(parts)]
        ),
    )


def label_frames(
    pool: DemonstrationPool, cfg: Config, device: torch.device | str, report: Callable[[], None] = lambda: None
) -> Labels:
    """Label all frames of `pool` as `data.recap` says. `report` is called after each batch of frames."""
    recap, first_is_played = cfg.data.recap, cfg.data.source == "folder" or cfg.data.keep_failures
    episodes = logged_episodes(pool, first_is_played)
    num_frames = int(episodes.lengths.sum())
    if not episodes.played.any():
        return Labels(np.full(num_frames, np.nan, np.float32), np.ones(num_frames, bool), {})
    frames = pool.frames
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cfg.runner.seed)
        size = (recap.camera_size, recap.camera_size)
        state_dim = 0 if frames.state is None else frames.state.shape[1]
        network = ValueBins(state_dim, dict.fromkeys(frames.images, size), any(frames.tasks)).to(device)

    def read(rows: NDArray[np.int64]) -> dict[str, Tensor]:
        obs = read_frames(pool.all_frames, rows)
        if "state" in obs:
            state = frames.statistics["state"]
            obs["state"] = (obs["state"] - np.array(state["mean"])) / (np.array(state["std"]) + 1e-6)
        report()
        return {name: x.to(device) for name, x in network.encoder.inputs(obs).items()}

    returns = torch.from_numpy(normalised_returns(episodes, recap.failure_cost)).float()
    optimizer, losses = torch.optim.Adam(network.parameters(), _LEARNING_RATE), list[float]()
    for update in range(recap.value_updates):
        rows = batch_indices(num_frames, cfg.actor.global_batch_size, cfg.runner.seed, update)
        loss = network.loss(read(rows), returns[torch.from_numpy(rows)].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        parts = np.array_split(np.arange(num_frames), -(-num_frames // _FRAMES_AT_ONCE))
        values = torch.cat([network(read(part)).cpu() for part in parts]).numpy()
    advantages = logged_advantages(values, episodes, recap.failure_cost, recap.horizon)
    positive = positive_frames(advantages, episodes, recap.positive_share)
    successes, played = episodes.of_frames(episodes.successes), episodes.of_frames(episodes.played)
    metrics = {"recap/value_loss": float(np.mean(losses[-max(1, len(losses) // 10) :]))}
    metrics["recap/positive_share"] = float(positive.mean())
    for name, rows in (("successes", played & successes), ("failures", played & ~successes)):
        if rows.any():
            metrics[f"recap/advantage_{name}"] = float(advantages[rows].mean())
            metrics[f"recap/positive_share_{name}"] = float(positive[rows].mean())
    return Labels(advantages, positive, metrics)
