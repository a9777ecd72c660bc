"""Training of a success classifier on logged episodes, its calibration and its figures on held-out ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from rlinf_lite.data.lerobot.frames import Frames, Keys, decode, read_frames, split_by_part
from rlinf_lite.data.lerobot.layout import ACTION, PICTURES, SUCCESS, LeRobotError
from rlinf_lite.data.lerobot.reader import LeRobotDataset
from rlinf_lite.models.success import SuccessClassifier, calibrated, words_of

BATCH_SIZE = 128
_LEARNING_RATE = 1e-3
_AT_ONCE = 512  # frames that are judged together
_NUM_BINS = 15  # of the calibration error


class LoggedFrames:
    """Decoded frames of one or more datasets with the same cameras, one dataset after the other. `labels` bool [N]:
    whether the observation of a frame shows success. `succeeded` bool [N]: whether the action of a frame led to
    success. `episodes` int64 [N]: the episode of each frame. `cameras`: height and width of pictures."""

    def __init__(self, parts: Sequence[Frames], succeeded: NDArray[np.bool_]) -> None:
        """`succeeded`: as above, of all datasets."""
        self._parts = list(parts)
        lengths = np.concatenate([part.episodes[:, 1] for part in parts])
        self.succeeded, self.episodes = succeeded, np.repeat(np.arange(len(lengths)), lengths)
        self.labels = labels_of(self.episodes, succeeded)
        self.cameras = {camera: images.shape[1:3] for camera, images in parts[0].images.items()}

    @property
    def num_episodes(self) -> int:
        return int(self.episodes[-1]) + 1

    def sentences(self, rows: NDArray[np.int64]) -> set[str]:
        """The instructions of these frames."""
        places = split_by_part(rows, [len(part.task) for part in self._parts])
        return {
            part.tasks[task]
            for part, (_, own) in zip(self._parts, places, strict=True)
            for task in np.unique(part.task[own])
        }

    def read(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        """The observations (see `envs.Obs`) of these frames, in their order."""
        return read_frames(self._parts, rows)


@dataclass(frozen=True)
class Split:
    """Frames by their use, int64 [n] each; no episode is in two of them."""

    training: NDArray[np.int64]
    calibration: NDArray[np.int64]
    test: NDArray[np.int64]


def read_logged(directories: Sequence[Path], root: Path, report: Callable[[str, int, int], None]) -> LoggedFrames:
    """Read LeRobotDatasets with pictures and `next.success`. Their frames are decoded below `root`; for `report` see
    `decode`.

    Raises:
        LeRobotError: if one lacks pictures or `next.success`, or has other cameras than the first; if no episode of
            all fails, or none succeeds, or no frame shows it; if one is named twice, or has other values than 0 and 1.
    """
    parts, decoded, succeeded = list[Frames](), list[Path](), list[NDArray[np.bool_]]()
    for directory in directories:
        dataset = LeRobotDataset(directory)
        features = dataset.info.features
        cameras = {key.removeprefix(PICTURES): key for key in dataset.info.pictures if key.startswith(PICTURES)}
        if not cameras:
            raise LeRobotError(f"{directory} has no pictures {PICTURES}<camera>, by which success could be seen")
        for key, why in ((SUCCESS, "says whether an action led to success"), (ACTION, "every dataset of episodes has")):
            if key not in features:
                text = f"{directory} has no column {key}, which {why}"
                raise LeRobotError(f"{text}. Collect episodes with rlinf-lite collect, or add that column")
        dataset.check([SUCCESS])
        found = np.concatenate([columns[SUCCESS][:, 0] for _, columns in dataset.rows([SUCCESS])])
        if len(odd := np.flatnonzero((found != 0) & (found != 1))):
            text = f"{directory}: {SUCCESS} of frame {odd[0]} is {found[odd[0]]}, neither true nor false"
            raise LeRobotError(f"{text}. Leave out what is not known")
        frames = decode(dataset, Keys(cameras, None, ACTION), root, report, "--out")
        if frames in decoded:
            text = f"{directory} is named twice, or is a copy of another"
            raise LeRobotError(f"{text}, so that its episodes would be in two parts. Name it once")
        decoded.append(frames)
        succeeded.append(found.astype(bool))
        parts.append(Frames(frames))
        first, other = ({camera: x.shape[1:3] for camera, x in part.images.items()} for part in (parts[0], parts[-1]))
        if first != other:
            text = f"{directory} has pictures {other}, and {directories[0]} {first}"
            raise LeRobotError(f"{text}. Name datasets of one environment")
    logged = LoggedFrames(parts, np.concatenate(succeeded))
    count, won = logged.num_episodes, np.unique(logged.episodes[logged.succeeded])
    if not len(won):
        raise LeRobotError(f"none of {count} episodes succeeds. Collect with a better policy or expert")
    if len(won) == count:
        text = f"all of {count} episodes succeed, and a classifier has to see failures too"
        raise LeRobotError(f"{text}. Collect with --keep-failures, and more --noise if the policy never fails")
    if not logged.labels.any():
        text = "episodes end with their success, so that no frame shows it"
        raise LeRobotError(f"{text}. Collect with env.train.ignore_terminations=true")
    return logged


def labels_of(episodes: NDArray[np.int64], succeeded: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether the observation of each frame shows success, bool [N]: whether the action before it led to success.

    `episodes` int64 [N]: the episode of each frame. `succeeded` bool [N]: whether each frame's action led to success.
    """
    goes_on = episodes[1:] == episodes[:-1]
    return np.concatenate([[False], succeeded[:-1] & goes_on])


def split_by_episode(logged: LoggedFrames, held_out: float, seed: int) -> Split:
    """Hold out that share of the episodes, one half of them for calibration and one for the figures.

    Raises:
        LeRobotError: if one of the three parts has no frame of success, or none without.
    """
    num_episodes = logged.num_episodes
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
    labels = logged.labels
    words = sorted({word for sentence in logged.sentences(rows) for word in words_of(sentence)})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        classifier = SuccessClassifier(logged.cameras, words)
    optimizer = torch.optim.AdamW(classifier.parameters(), _LEARNING_RATE, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, num_updates)
    draw = np.random.default_rng([seed, 1])
    kinds = [rows[labels[rows]], rows[~labels[rows]]]
    for update in range(1, num_updates + 1):
        batch = np.concatenate([draw.choice(kind, BATCH_SIZE // 2) for kind in kinds])
        loss = F.binary_cross_entropy_with_logits(
            _logits(classifier, logged, batch), torch.from_numpy(labels[batch]).float()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        report(update, loss.item())
    return classifier.eval().requires_grad_(False)


def logits_of(classifier: SuccessClassifier, logged: LoggedFrames, rows: NDArray[np.int64]) -> Tensor:
    """Logits float64 [n] of the frames `rows`, not calibrated."""
    with torch.no_grad():
        parts = [_logits(classifier, logged, rows[i : i + _AT_ONCE]) for i in range(0, len(rows), _AT_ONCE)]
    return torch.cat(parts).double()


def _logits(classifier: SuccessClassifier, logged: LoggedFrames, rows: NDArray[np.int64]) -> Tensor:
    obs = logged.read(rows)
    images = {camera: torch.from_numpy(pictures) for camera, pictures in obs["images"].items()}
    logits: Tensor = classifier(images, classifier.word_numbers(obs["instruction"]))
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
