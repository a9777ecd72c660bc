"""The protocol of generation engines: parameters, responses and methods. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from rlinf_lite.models.sampling import noise_keys


class SamplingError(ValueError):
    """A sampling parameter is outside its range, or noise keys do not fit the sequences."""


class PromptError(ValueError):
    """A prompt is empty, too long, or has ids outside the vocabulary."""


@dataclass(frozen=True)
class SamplingParams:
    """The way in which responses are sampled. Top-k is applied first, then top-p to the tokens left by it; of tokens
    with equal probability at the limit, only as many as needed are kept.

    Raises:
        SamplingError: for a value outside its range.
    """

    max_tokens: int
    """Largest number of tokens of a response, with its stop token."""
    temperature: float = 1.0
    top_k: int = 0
    """Draw from the k likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the smallest set of likeliest tokens whose probabilities sum to at least this."""
    n: int = 1
    """Sampled responses per prompt."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response; the response includes them."""
    greedy: bool = False
    """Always take the likeliest token; n must be 1."""
    add_greedy: bool = False
    """Generate one more response per prompt, the greedy one, as sample number n (ReMax's baseline)."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise SamplingError(f"max_tokens is {self.max_tokens}; a response has at least 1")
        if not self.temperature > 0:
            raise SamplingError(f"temperature is {self.temperature}; it divides logits. For the likeliest: greedy=True")
        if self.top_k < 0:
            raise SamplingError(f"top_k is {self.top_k}; 0 draws from all tokens, 1 or more from that many")
        if not 0 < self.top_p <= 1:
            raise SamplingError(f"top_p is {self.top_p}; it has to be above 0 and at most 1, which draws from all")
        if self.n < 1:
            raise SamplingError(f"n is {self.n}; at least 1 response per prompt is needed")
        if self.greedy and (self.n > 1 or self.add_greedy):
            text = f"greedy responses are all equal: n is {self.n}, add_greedy {self.add_greedy}"
            raise SamplingError(f"{text}. Set greedy to False, or n to 1 and add_greedy to False")

    @property
    def num_sequences(self) -> int:
        """Responses per prompt."""
        return self.n + self.add_greedy


@dataclass(frozen=True)
class Generation:
    """One response: `token_ids`, and the log-probability of each under the model at the sampling temperature.

    Log-probabilities are those before top-k and top-p, as from `CausalLM.forward` at that temperature.
    """

    index: int
    """Number of the prompt, in the order of the call."""
    sample: int
    """Number of the response among those to its prompt."""
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    versions: list[int]
    """Version of the weights that drew each token; empty without a `WeightSource`."""


class WeightSource(Protocol):
    """A source of newer weights for a model that generates."""

    version: int
    """Version of the weights that the model has."""

    def offered(self) -> Any:
        """An offer of newer weights, if one has arrived, or None; does not wait."""
        ...

    def take(self, offer: Any) -> None:
        """Put the weights of an offer into the model."""
        ...


class GenerationEngine(Protocol):
    """Generates responses to prompts. `rollout.engine` names a class of this kind; it can wrap vLLM or SGLang.

    It is built as `Engine(model, max_batch_size, max_length, max_prefill_tokens, before_step)`: a `CausalLM`, the
    number of sequences at a time, tokens of a prompt and its response together, prompt tokens of one pass, and a
    function to call often while generating, which raises when the run ends the generation.
    """

    weights: WeightSource | None
    """In asynchronous runs, the source of newer weights during generation."""
    within_responses: bool
    """Take newer weights between two tokens of a response, not only between responses."""

    def weights_changed(self) -> None:
        """Called when the weights of the engine's model have changed. An engine with its own copy updates it now."""
        ...

    def stream(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, keys: np.ndarray | None = None
    ) -> Iterator[Generation]:
        """Responses in the order in which they end. Prompts and keys are checked before this returns.

        `keys`: uint64 [prompts, n], one per sampled response. The noise of a token is a function of its response's key
        and its position in the response, so responses depend neither on each other nor on the order of prompts. Without
        keys the noise is random. An engine that cannot do so uses keys as seeds.

        Raises:
            PromptError: if a prompt is empty, has ids outside the vocabulary, or leaves no room for `max_tokens`.
            SamplingError: if keys do not fit.
        """
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, keys: np.ndarray | None = None
    ) -> list[Generation]:
        """All responses of `stream`, sorted by prompt and sample."""
        ...


def sequence_keys(seed: int, prompt_ids: Sequence[int] | np.ndarray, n: int) -> np.ndarray:
    """Keys for `stream`, uint64 [prompts, n], from a seed (of the run and the step) and each prompt's id."""
    ids = np.asarray(prompt_ids)
    return noise_keys(seed, np.repeat(ids, n), np.tile(np.arange(n), len(ids))).reshape(len(ids), n)
