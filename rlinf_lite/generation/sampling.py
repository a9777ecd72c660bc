"""Drawing one token per row from logits."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_lite.generation.protocol import SamplingParams


def sample(logits: Tensor, params: SamplingParams, uniform: Tensor, greedy: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens int64 [B] and their log-probabilities float32 [B] before truncation, from logits [B, V].

    `uniform` [B] in (0, 1) is the place of a row's token on the cumulative distribution. Rows marked by `greedy`
    (bool [B]; None: no row) take the likeliest token instead.
    """
    logits = logits.float()
    if params.temperature != 1.0:
        logits = logits / params.temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    if params.greedy:
        tokens = logprobs.argmax(-1, keepdim=True)
    else:
        cumulative = _truncated(logprobs.exp(), params).cumsum(-1)
        # scaled by the sum, which may be below 1; a token of probability 0 adds nothing to it and is never found
        tokens = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:])
        if greedy is not None:
            tokens = torch.where(greedy[:, None], logprobs.argmax(-1, keepdim=True), tokens)
    return tokens.squeeze(-1), logprobs.gather(-1, tokens).squeeze(-1)


def _truncated(probabilities: Tensor, params: SamplingParams) -> Tensor:
    """The probabilities [B, V], with 0 for tokens that top-k and top-p leave out."""
    num_tokens = probabilities.shape[-1]
    top_k = min(params.top_k or num_tokens, num_tokens)
    if top_k == num_tokens and params.top_p == 1:
        return probabilities
    kept, order = torch.topk(probabilities, top_k, dim=-1)
    if params.top_p < 1:
        likelier = kept.cumsum(-1) - kept  # the sum of all likelier tokens
        kept = torch.where(likelier < params.top_p * kept.sum(-1, keepdim=True), kept, 0.0)
    return torch.zeros_like(probabilities).scatter_(-1, order, kept)
