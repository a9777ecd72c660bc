"""KL in the rewards, and the controllers of its coefficient."""

import pytest
import torch

from rlinf_lite.algorithms import (
    AdaptiveKLController,
    FixedKLController,
    InputError,
    UnknownAlgorithmError,
    kl_in_rewards,
)


def test_rewards_lose_the_kl_of_each_valid_position() -> None:
    rewards = torch.tensor([[0.0, 1.0, 5.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    logprobs = torch.where(mask.bool(), -1.0, torch.nan)
    shaped, mean_kl = kl_in_rewards(rewards, logprobs, torch.full((3, 3), -1.5), mask, 0.1, "k1")
    torch.testing.assert_close(shaped, torch.tensor([[-0.05, 0.95, 5.0], [-0.05, 0.0, 0.0], [1.0, 1.0, 1.0]]))
    assert float(mean_kl) == pytest.approx(0.5)  # the row without a valid position does not count


def test_mean_kl_weighs_rows_and_not_positions() -> None:
    logprobs, mask = torch.tensor([[-1.0, -1.0], [-3.0, 0.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    _, mean_kl = kl_in_rewards(torch.zeros(2, 2), logprobs, torch.full((2, 2), -2.0), mask, 0.1, "k1")
    assert float(mean_kl) == pytest.approx((1.0 - 1.0) / 2)


def test_an_unknown_estimate_is_named() -> None:
    with pytest.raises(UnknownAlgorithmError, match="k4"):
        kl_in_rewards(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), 0.1, "k4")


def test_a_fixed_coefficient_stays() -> None:
    controller = FixedKLController(0.1)
    controller.update(current_kl=100.0, n_steps=1000)
    controller.load_state_dict(FixedKLController(0.5).state_dict())
    assert controller.coef == 0.1


@pytest.mark.parametrize(("current_kl", "error"), [(0.055, 0.1), (0.05, 0.0), (0.5, 0.2), (0.0, -0.2)])
def test_an_adaptive_coefficient_follows_the_kl(current_kl: float, error: float) -> None:
    controller = AdaptiveKLController(0.1, target=0.05, horizon=100)
    controller.update(current_kl, n_steps=64)
    assert controller.coef == pytest.approx(0.1 * (1 + error * 64 / 100))


def test_a_resumed_adaptive_coefficient_goes_on() -> None:
    controller, resumed = (AdaptiveKLController(0.1, target=0.05, horizon=100) for _ in range(2))
    controller.update(1.0, n_steps=10)
    resumed.load_state_dict(controller.state_dict())
    controller.update(0.01, n_steps=10)
    resumed.update(0.01, n_steps=10)
    assert resumed.coef == controller.coef != 0.1


def test_a_target_of_zero_is_refused() -> None:
    with pytest.raises(InputError, match="target=0"):
        AdaptiveKLController(0.1, target=0, horizon=100)
