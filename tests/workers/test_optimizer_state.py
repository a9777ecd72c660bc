"""Optimizer states as files: what had no gradient yet has none after loading either."""

import torch
from safetensors.torch import save_file

from rlinf_lite.config.schema import OptimConfig
from rlinf_lite.models import MLPGaussianPolicy
from rlinf_lite.training import sharding


def make():
    torch.manual_seed(0)
    policy = MLPGaussianPolicy(4, [-1.0, 0.0], [1.0, 2.0], hidden_sizes=(8,))
    return policy, sharding.build_optimizer(policy, OptimConfig(lr=1e-2, weight_decay=0.1))


def test_a_rate_of_zero_for_the_value_is_one():
    policy, _ = make()
    for value_lr, expected in ((None, 1e-2), (0.0, 0.0), (1e-3, 1e-3)):
        groups = sharding.build_optimizer(policy, OptimConfig(lr=1e-2, value_lr=value_lr)).param_groups
        assert [group["base_lr"] for group in groups] == [1e-2, expected]


def imitate(policy, optimizer, step):
    generator = torch.Generator().manual_seed(step)
    batch = {"state": torch.randn(6, 4, generator=generator), "actions": torch.rand(6, 1, 2, generator=generator)}
    policy.sft_loss({**batch, "mask": torch.ones(6, 1, dtype=torch.bool)}).backward()
    if step >= 3:  # the value comes later
        policy.predict_values({"state": batch["state"]}).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def test_training_goes_on_as_if_nothing_had_happened(tmp_path):
    for start in (0, 2):
        policy, optimizer = make()
        for step in range(start):
            imitate(policy, optimizer, step)
        save_file(sharding.full_optimizer_state(policy, optimizer), tmp_path / "optimizer.safetensors")
        other, other_optimizer = make()
        other.load_state_dict(policy.state_dict())
        sharding.load_optimizer(other, other_optimizer, tmp_path / "optimizer.safetensors")
        assert len(other_optimizer.state) == len(optimizer.state)
        for step in range(start, 6):
            imitate(policy, optimizer, step)
            imitate(other, other_optimizer, step)
        assert all(torch.equal(x, y) for x, y in zip(policy.parameters(), other.parameters(), strict=True))


def test_a_state_from_before_the_first_update_leaves_none(tmp_path):
    policy, optimizer = make()
    save_file(sharding.full_optimizer_state(policy, optimizer), tmp_path / "optimizer.safetensors")
    imitate(policy, optimizer, 0)
    assert optimizer.state
    sharding.load_optimizer(policy, optimizer, tmp_path / "optimizer.safetensors")
    assert not optimizer.state


def test_imitation_counts_executed_actions_in_normalised_units():
    policy, _ = make()
    state = torch.randn(3, 4)
    mean = policy._mean(state).detach()
    actions = torch.tensor([[[1.0, 2.0]], [[-1.0, 5.0]], [[9.0, 9.0]]])  # normalised: 1, 1; -1, 1 (clipped); masked
    mask = torch.tensor([[True], [True], [False]])
    expected = (mean[:2, 0] - torch.tensor([[1.0, 1.0], [-1.0, 1.0]])).square().mean()
    loss = policy.sft_loss({"state": state, "actions": actions, "mask": mask})
    torch.testing.assert_close(loss, expected)
