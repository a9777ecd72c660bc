"""A success classifier's labels, split, figures and calibration against slow loops and planted values."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_lite.data.lerobot.layout import LeRobotError
from rlinf_lite.envs import StepRewardError
from rlinf_lite.models.success import SuccessClassifier
from rlinf_lite.training.success import (
    auc,
    calibration_error,
    figures,
    fit_calibration,
    labels_of,
    negative_log_likelihood,
    split_by_episode,
)


def test_a_frame_is_a_success_if_the_action_before_it_led_to_one():
    lengths = np.array([4, 1, 3, 5])
    first = np.cumsum(lengths) - lengths
    succeeded = np.random.default_rng(0).random(lengths.sum()) < 0.6  # success may be lost again
    expected = []
    for start, length in zip(first, lengths, strict=True):
        for i in range(length):
            expected.append(i > 0 and succeeded[start + i - 1])
    found = labels_of(np.repeat(np.arange(4), lengths), succeeded)
    assert found.tolist() == expected and any(expected)


def test_no_episode_is_in_two_parts_and_none_is_lost():
    episodes = np.repeat(np.arange(50), 7)
    labels = np.tile(np.arange(7) > 3, 50)
    logged: Any = SimpleNamespace(labels=labels, episodes=episodes, num_episodes=50)
    split = split_by_episode(logged, 0.3, seed=4)
    parts = [set(episodes[rows].tolist()) for rows in (split.training, split.calibration, split.test)]
    assert [len(part) for part in parts] == [34, 8, 8]
    assert set.union(*parts) == set(range(50)) and sum(map(len, parts)) == 50
    assert sorted(np.concatenate([split.training, split.calibration, split.test]).tolist()) == list(range(350))
    assert not np.array_equal(split.test, split_by_episode(logged, 0.3, seed=5).test)
    with pytest.raises(LeRobotError, match=r"50 episodes are too few to hold out 0\.01 of them"):
        split_by_episode(logged, 0.01, seed=4)


def test_auc_is_the_share_of_pairs_in_order():
    draw = np.random.default_rng(1)
    scores, labels = np.round(draw.normal(size=80), 1), draw.random(80) < 0.3  # with ties
    scores += labels * 0.5
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[labels] for b in scores[~labels]]
    assert auc(scores, labels) == pytest.approx(np.mean(pairs), abs=1e-12)
    assert len(set(scores)) < 80 and auc(labels.astype(float), labels) == 1


def test_calibration_finds_a_planted_temperature_and_lowers_the_error():
    draw = np.random.default_rng(2)
    true = draw.normal(size=40_000) * 2 - 0.5
    labels = draw.random(40_000) < 1 / (1 + np.exp(-true))
    said = torch.from_numpy(3 * true - 1)  # three times too sure, and shifted
    calibration = fit_calibration(said, labels)
    assert calibration[0].item() == pytest.approx(1 / 3, abs=0.02) and calibration[1].item() == pytest.approx(
        1 / 3, abs=0.03
    )
    found = figures(said, labels, calibration, 0.5)
    assert found["nll"] < found["nll_before"] - 0.1
    assert found["calibration_error"] < 0.01 < found["calibration_error_before"]
    assert found["accuracy"] == pytest.approx(np.mean((true >= 0) == labels), abs=0.005)
    right = (true >= 0) & labels
    assert found["precision"] == pytest.approx(right.sum() / (true >= 0).sum(), abs=0.01)
    assert found["recall"] == pytest.approx(right.sum() / labels.sum(), abs=0.01)
    assert negative_log_likelihood(said[:3], labels[:3]) == pytest.approx(
        np.mean([-np.log(1 / (1 + np.exp(-x if y else x))) for x, y in zip(said[:3].tolist(), labels[:3], strict=True)])
    )


def test_labels_without_mistakes_leave_a_finite_calibration():
    logits = torch.linspace(-5, 5, 100, dtype=torch.float64)
    calibration = fit_calibration(logits, (logits > 0).numpy())
    assert torch.isfinite(calibration).all() and 1 < calibration[0] < 100


def test_the_calibration_error_is_the_gap_of_each_bin():
    probabilities = np.array([0.01, 0.02, 0.51, 0.52, 1.0])
    labels = np.array([False, True, True, True, True])
    gaps = [abs(0.03 - 1), abs(1.03 - 2), abs(1.0 - 1)]  # sums of bins 0, 7 and 14
    assert calibration_error(probabilities, labels) == pytest.approx(sum(gaps) / 5)


def test_the_instruction_decides_and_unknown_words_are_ignored(tmp_path):
    torch.manual_seed(0)
    classifier = SuccessClassifier({"top": (20, 24), "wrist": (64, 48)}, ["blue", "block", "red"])
    draw = np.random.default_rng(3)
    sizes = {"top": (20, 24), "wrist": (64, 48)}
    images = {name: draw.integers(0, 256, (3, *size, 3)).astype(np.uint8) for name, size in sizes.items()}
    images = {name: np.concatenate([x, x[:1]]) for name, x in images.items()}
    obs: Any = {"images": images, "instruction": ["Red block.", "blue block", "red", "the BLUE block"]}
    found = classifier.probabilities(obs)
    assert found.shape == (4,) and found.dtype == np.float32 and abs(found[0] - found[3]) > 1e-6
    obs["instruction"] = ["the red, block!", "blue block", "red", "blue block"]
    other = classifier.probabilities(obs)
    np.testing.assert_allclose(other, found, rtol=1e-6)

    classifier.calibration.copy_(torch.tensor([2.0, 1.0]))
    classifier.save_pretrained(tmp_path, {"figures": {"auc": 1.0}})
    logits = np.log(found / (1 - found))
    loaded = SuccessClassifier.from_pretrained(tmp_path).probabilities(obs)
    np.testing.assert_allclose(loaded, 1 / (1 + np.exp(-2 * logits - 1)), rtol=1e-4)
    with pytest.raises(StepRewardError, match=r"judges top \(20 x 24\), wrist \(64 x 48\), and the environment shows"):
        classifier.probabilities({"images": {"top": images["wrist"]}})
