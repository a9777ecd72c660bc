"""The value network learns the mean of the returns of a state, and is the same for the same seed."""

import torch

from rlinf_lite.models.value_bins import ValueBins


def trained():
    torch.manual_seed(0)
    network = ValueBins(1, {}, reads_words=False)
    states = torch.tensor([[0.0], [0.0], [1.0], [1.0]])
    returns = torch.tensor([0.0, -0.5, -0.75, -0.75])
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(200):
        loss = network.loss({"state": states}, returns)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return network({"state": torch.tensor([[0.0], [1.0]])})


def test_two_states_with_known_values():
    values = trained()
    torch.testing.assert_close(values, torch.tensor([-0.25, -0.75]), atol=0.01, rtol=0)
    assert torch.equal(values, trained())
