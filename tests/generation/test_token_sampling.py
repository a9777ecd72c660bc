"""Which tokens top-k and top-p leave, how often they are drawn, and parameters that make no sense."""

import pytest
import torch

from rlinf_lite.generation import SamplingError, SamplingParams, sequence_keys
from rlinf_lite.generation.sampling import sample

LOGITS = torch.tensor([0.0, 2.0, -1.0, 1.5, 0.5, -4.0])


def drawn(num=20000, **settings):
    """(share of each token, log-probabilities by token) of evenly spread noise."""
    uniform = (torch.arange(num) + 0.5) / num
    tokens, logprobs = sample(LOGITS.expand(num, -1), SamplingParams(1, **settings), uniform, None)
    return torch.bincount(tokens, minlength=len(LOGITS)) / num, dict(
        zip(tokens.tolist(), logprobs.tolist(), strict=True)
    )


def kept_by_hand(probabilities, top_k, top_p):
    """The definition: the k likeliest, of these the fewest that sum to top_p, renormalised."""
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])[: top_k or None]
    total, sum_so_far, kept = sum(probabilities[i] for i in order), 0.0, []
    for i in order:
        kept.append(i)
        sum_so_far += probabilities[i] / total
        if sum_so_far >= top_p:
            break
    left = [p if i in kept else 0.0 for i, p in enumerate(probabilities)]
    return torch.tensor(left) / sum(left)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (1, 1.0), (3, 1.0), (0, 0.7), (0, 0.95), (4, 0.8), (99, 1e-6)])
def test_shares_are_those_of_the_truncated_distribution(temperature, top_k, top_p):
    shares, logprobs = drawn(temperature=temperature, top_k=top_k, top_p=top_p)
    distribution = torch.softmax(LOGITS / temperature, -1)
    torch.testing.assert_close(shares, kept_by_hand(distribution.tolist(), top_k, top_p), atol=2e-4, rtol=0)
    for token, logprob in logprobs.items():
        assert logprob == pytest.approx(float(distribution[token].log()), abs=1e-5)


def test_a_token_of_no_probability_is_never_drawn():
    logits = torch.full((3, 5), -torch.inf)
    logits[:, 2] = 0.0
    tokens, _ = sample(logits, SamplingParams(1), torch.tensor([1e-17, 0.5, 1.0]), None)
    assert tokens.tolist() == [2, 2, 2]


def test_greedy_rows_among_sampled_ones():
    tokens, _ = sample(
        LOGITS.expand(2, -1),
        SamplingParams(1, add_greedy=True),
        torch.tensor([0.01, 0.01]),
        torch.tensor([False, True]),
    )
    assert tokens.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": 0.0}, "greedy=True"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"n": 0}, "n is 0"),
        ({"n": 2, "greedy": True}, "n is 2, add_greedy False"),
    ],
)
def test_parameters_outside_their_range(settings, message):
    with pytest.raises(SamplingError, match=message):
        SamplingParams(**{"max_tokens": 1} | settings)


def test_keys_are_of_prompt_and_sample():
    keys = sequence_keys(0, [3, 5], 2)
    assert keys.shape == (2, 2) and len(set(keys.flatten().tolist())) == 4
    assert (sequence_keys(0, [5], 3)[0, :2] == keys[1]).all()
    assert not (sequence_keys(1, [3, 5], 2) == keys).any()
