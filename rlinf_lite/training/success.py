"""Training of a success classifier on logged episodes, its calibration and its figures on held-out ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from rlinf_lite.data.lerobot.frames import Frames, Keys, decode
from rlinf_lite.data.lerobot.layout import ACTION, PICTURES, SUCCESS, LeRobotError
from rlinf_lite.data.lerobot.reader import LeRobotDataset
from rlinf_lite.models.success import SuccessClassifier, calibrated, words_of

BATCH_SIZE = 128
_LEARNING_RATE = 1e-3
_AT_ONCE = 512  # frames that are judged together
_NUM_BINS = 15  # of the calibration error


@dataclass(frozen=True)
class LoggedFrames:
    """Decoded frames with their labels: `labels` bool [N], whether the observation of a frame shows success, and the
    frames' episodes int64 [N]."""

    frames: Frames
    labels: NDArray[np.bool_]
    episodes: NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """Frames by their use, int64 [n] each; no episode is in two of them."""

    training: NDArray[np.int64]
    calibration: NDArray[np.int64]
    test: NDArray[np.int64]


def read_logged(directory: Path, root: Path, report: Callable[[str, int, int], None]) -> LoggedFrames:
    """Read a LeRobotDataset with pictures and `next.success`. Its frames are decoded below `root`; for `report` see
    `decode`.

    Raises:
        LeRobotError: if it lacks pictures, `next.success`, episodes without success, or frames that show success.
    """
    dataset = LeRobotDataset(directory)
    features = dataset.info.features
    cameras = {key.removeprefix(PICTURES): key for key in dataset.info.pictures if key.startswith(PICTURES)}
    if not cameras:
        raise LeRobotError(f"{directory} has no pictures {PICTURES}<camera>, by which success could be seen")
    if SUCCESS not in features:
        text = f"{directory} has no column {SUCCESS}, which says from which frame on an episode has succeeded"
        raise LeRobotError(f"{text}. Collect episodes with rlinf-lite collect, or add that column")
    if ACTION not in features:
        raise LeRobotError(f"{directory} has no column {ACTION}, as every LeRobotDataset of episodes has")
    dataset.check([SUCCESS])
    succeeded = np.concatenate([columns[SUCCESS][:, 0] for _, columns in dataset.rows([SUCCESS])]).astype(bool)
    bounds = np.array([(one.first_frame, one.length) for one in dataset.episodes], np.int64)
    labels = labels_of(bounds, succeeded)
    won = np.logical_or.reduceat(succeeded, bounds[:, 0])
    if not won.any():
        raise LeRobotError(f"{directory}: none of {len(won)} episodes succeeds. Collect with a better policy or expert")
    if won.all():
        text = f"{directory}: all of {len(won)} episodes succeed, and a classifier has to see failures too"
        raise LeRobotError(f"{text}. Collect with --keep-failures, and more --noise if the policy never fails")
    if not labels.any():
        text = f"{directory}: episodes end with their success, so that no frame shows it"
        raise LeRobotError(f"{text}. Collect with env.train.ignore_terminations=true")
    frames = Frames(decode(dataset, Keys(cameras, None, ACTION), root, report, "--out"))
    return LoggedFrames(frames, labels, np.repeat(np.arange(len(bounds)), bounds[:, 1]))


def labels_of(episodes: NDArray[np.int64], succeeded: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether the observation of each frame shows success, bool [N]: whether the action before it led to success.

    `episodes` int64 [E, 2]: first frame and length, one after the other. `succeeded` bool [N]: whether each frame's
    action led to success.
    """
    labels = np.concatenate([[False], succeeded[:-1]])
    labels[episodes[:, 0]] = False  # the frame before is of another episode
    return labels


def split_by_episode(logged: LoggedFrames, held_out: float, seed: int) -> Split:
    """Hold out that share of the episodes, one half of them for calibration and one for the figures.

    Raises:
        LeRobotError: if one of the three parts has no frame of success, or none without.
    """
    num_episodes = len(logged.frames.episodes)
    order = np.random.default_rng(seed).permutation(num_episodes)
    num_test = round(num_episodes * held_out / 2)
    parts = np.split(order, [num_test, 2 * num_test])
    test, calibration, training = (np.flatnonzero(np.isin(logged.episodes, part)) for part in parts)
    for rows in (training, calibration, test):
        if len(np.unique(logged.labels[rows])) < 2:
            text = f"{num_episodes} episodes are too few to hold out {held_out:g} of them: training, calibration and"
            raise LeRobotError(f"{text} test each need frames with success and without. Collect more, or hold out more")
    return Split(training, calibration, test)


def train(
    logged: LoggedFrames, rows: NDArray[np.int64], num_updates: int, seed: int, report: Callable[[int, float], None]
) -> SuccessClassifier:
    """Train a new classifier on the frames `rows`; half of each batch shows success. `report` is called after each
    update with its number and loss."""
    frames, labels = logged.frames, logged.labels
    words = sorted({word for task in np.unique(frames.task[rows]) for word in words_of(frames.tasks[task])})
    sizes = {camera: (images.shape[1], images.shape[2]) for camera, images in frames.images.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        classifier = SuccessClassifier(sizes, words)
    optimizer = torch.optim.AdamW(classifier.parameters(), _LEARNING_RATE, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, num_updates)
    draw = np.random.default_rng([seed, 1])
    kinds = [rows[labels[rows]], rows[~labels[rows]]]
    for update in range(1, num_updates + 1):
        batch = np.concatenate([draw.choice(kind, BATCH_SIZE // 2) for kind in kinds])
        loss = F.binary_cross_entropy_with_logits(
            _logits(classifier, frames, batch), torch.from_numpy(labels[batch]).float()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        report(update, loss.item())
    return classifier.eval().requires_grad_(False)


def logits_of(classifier: SuccessClassifier, frames: Frames, rows: NDArray[np.int64]) -> Tensor:
    """Logits float64 [n] of the frames `rows`, not calibrated."""
    with torch.no_grad():
        parts = [_logits(classifier, frames, rows[i : i + _AT_ONCE]) for i in range(0, len(rows), _AT_ONCE)]
    return torch.cat(parts).double()


def _logits(classifier: SuccessClassifier, frames: Frames, rows: NDArray[np.int64]) -> Tensor:
    images = {camera: torch.from_numpy(np.asarray(pictures[rows])) for camera, pictures in frames.images.items()}
    logits: Tensor = classifier(images, classifier.word_numbers([frames.tasks[task] for task in frames.task[rows]]))
    return logits


def fit_calibration(logits: Tensor, labels: NDArray[np.bool_]) -> Tensor:
    """The factor and the shift, float64 [2], with which logits float64 [n] fit their labels best.

    Platt scaling (Platt 1999) by LBFGS. Its targets lie a little inside 0 and 1, as of one more example of each kind,
    so that the factor is finite where a threshold parts the labels without mistakes.
    """
    num_positive, num_negative = int(labels.sum()), int((~labels).sum())
    high, low = (num_positive + 1) / (num_positive + 2), 1 / (num_negative + 2)
    targets = torch.from_numpy(np.where(labels, high, low))
    found = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([found], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(calibrated(logits, found), targets)
        loss.backward()
        return loss

    optimizer.step(closure)
    return found.detach()


def figures(logits: Tensor, labels: NDArray[np.bool_], calibration: Tensor, threshold: float) -> dict[str, float]:
    """Figures of held-out frames, from logits float64 [n] that are not calibrated; see docs/off_policy.md."""
    before, after = (torch.sigmoid(x).numpy() for x in (logits, calibrated(logits, calibration)))
    said = after >= threshold
    true_positives = int((said & labels).sum())
    return {
        "auc": auc(logits.numpy(), labels),
        "accuracy": float((said == labels).mean()),
        "precision": true_positives / max(int(said.sum()), 1),
        "recall": true_positives / int(labels.sum()),
        "calibration_error_before": calibration_error(before, labels),
        "calibration_error": calibration_error(after, labels),
        "nll_before": negative_log_likelihood(logits, labels),
        "nll": negative_log_likelihood(calibrated(logits, calibration), labels),
    }


def negative_log_likelihood(logits: Tensor, labels: NDArray[np.bool_]) -> float:
    """The mean over frames of -log p(label)."""
    return float(F.binary_cross_entropy_with_logits(logits, torch.from_numpy(labels).double()))


def auc(scores: NDArray[np.float64], labels: NDArray[np.bool_]) -> float:
    """Area under the ROC curve: how often a frame with success has a higher score than one without; ties count half."""
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(count) - (count - 1) / 2  # ranks begin at 1; equal scores share theirs
    num_positive = int(labels.sum())
    above = mean_rank[place][labels].sum() - num_positive * (num_positive + 1) / 2
    return float(above / (num_positive * (len(labels) - num_positive)))


def calibration_error(probabilities: NDArray[np.float64], labels: NDArray[np.bool_]) -> float:
    """Expected calibration error: the mean distance between probability and share of successes, over 15 bins of equal
    width, each with the weight of its frames (Guo et al. 2017, arXiv:1706.04599)."""
    bins = np.minimum((probabilities * _NUM_BINS).astype(np.int64), _NUM_BINS - 1)
    gaps = np.bincount(bins, probabilities - labels, _NUM_BINS)
    return float(np.abs(gaps).sum() / len(labels))
