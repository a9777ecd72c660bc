"""Checks, before training, that scoring and generation give the results of a language model's own forward pass.

Scoring pads rows on the left and computes logits for responses only; generation has its own cache. For some families
this is wrong: recurrent layers that see padding, attention to later tokens, rotary frequencies that depend on the
longest row, an unusual output layer. They would train another distribution, without an error. Instead of a list of
families, a few forward passes of at most `max_length` tokens are compared for each model.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlinf_lite.models.text.causal_lm import CausalLM, LanguageModel, UnsupportedModelError
from rlinf_lite.scheduler.heartbeat import report_progress

_TOLERANCE = {True: 2e-4, False: 5e-2}
"""Largest difference allowed, relative to the largest logit: in float32 (True), which rounds to about 1e-6, and in
other types (False)."""


@torch.no_grad()
def check_supported(model: LanguageModel, max_length: int) -> None:
    """Compare a policy's log-probabilities, or a critic's values, of left-padded rows of up to `max_length` tokens with
    the results of the model's own forward pass over each row alone, without padding.

    Raises UnsupportedModelError if they differ.
    """
    own = model.language_model
    is_flash = "flash" in own.config._attn_implementation  # flash attention has no float32
    with refusing(model), torch.autocast(own.device.type, torch.bfloat16) if is_flash else nullcontext():
        num_compared = min(2, max_length - 1)
        lengths = (max_length, min(num_compared + 3, max_length))  # a long and a short row
        ids = torch.stack([pad(probe_tokens(model, n, seed), (max_length - n, 0)) for seed, n in enumerate(lengths)])
        columns = torch.arange(max_length, device=ids.device)
        mask = columns >= max_length - torch.tensor(lengths, device=ids.device)[:, None]
        found = model(ids, mask, num_compared)
        for row, i in itertools.product(range(len(ids)), range(num_compared)):
            expected = own_logits(model, ids[row, mask[row]][: i - num_compared], 1)[0]
            if isinstance(model, CausalLM):
                logprob = torch.log_softmax(expected, -1)[ids[row, i - num_compared]]
                check_equal(model, "log-probabilities", found.logprobs[row, i], logprob, expected.abs().max())
            else:
                check_equal(model, "values", found[row, i], expected[0], 1 + expected[0].abs())


def own_logits(model: LanguageModel, tokens: Tensor, num: int) -> Tensor:
    """Logits float32 [num, V] of the last `num` positions, by the model's own forward pass over `tokens` [L]."""
    report_progress()
    own = model.language_model
    accepted = inspect.signature(type(own).forward).parameters
    kept = {"logits_to_keep": num} if "logits_to_keep" in accepted else {}
    output = own(input_ids=tokens[None], use_cache=False, **kept)
    logits: Tensor = output.logits[0, -num:].float()
    return logits


def probe_tokens(model: LanguageModel, length: int, seed: int) -> Tensor:
    """Random ids [length] on the model's device, a function of `seed`, without the padding id."""
    config = model.language_model.config.get_text_config()
    ids = torch.randint(config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed))
    ids[ids == getattr(config, "pad_token_id", None)] += 1
    return (ids % config.vocab_size).to(model.language_model.device)


def check_equal(model: LanguageModel, what: str, found: Tensor, expected: Tensor, scale: Tensor) -> None:
    """Raises UnsupportedModelError if the two differ by more than the rounding of numbers as large as `scale`."""
    own = model.language_model
    exact = own.dtype == torch.float32 and not torch.is_autocast_enabled(own.device.type)
    limit = _TOLERANCE[exact] * float(scale) + 1e-6
    gap = float((found - expected).abs().max())
    if not gap <= limit:  # also true for nan
        raise UnsupportedModelError(
            f"models of type {own.config.model_type!r} with this config are not supported: {what} computed here differ "
            f"by {gap:.2g} from those of the model's own forward pass, and rounding would be {limit:.1g} at most. Use "
            "another model; where it changes beyond a length, a smaller data.max_prompt_length + "
            "rollout.max_response_length will do"
        )


@contextmanager
def refusing(model: LanguageModel) -> Iterator[None]:
    """Turn an error of a model's forward pass into an UnsupportedModelError."""
    try:
        yield
    except (UnsupportedModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # any error of the model's own code
        raise UnsupportedModelError(
            f"models of type {model.language_model.config.model_type!r} are not supported: their forward pass fails "
            f"here with {type(error).__name__}: {error}. Use another model"
        ) from error
