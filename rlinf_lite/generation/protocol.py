"""What a generation engine is asked and what it answers; without torch at run time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from rlinf_lite.models.sampling import noise_keys


class SamplingError(ValueError):
    """A sampling parameter outside its range, or noise keys that do not fit the sequences."""


class PromptError(ValueError):
    """A prompt that is empty, too long, or has ids that the model does not know."""


@dataclass(frozen=True)
class SamplingParams:
    """How responses are drawn. Truncation is top-k first, then top-p of what that leaves; ties at the edge stay out.

    Raises:
        SamplingError: for a value outside its range.
    """

    max_tokens: int
    """Of a response, the stop token included."""
    temperature: float = 1.0
    top_k: int = 0
    """Draw from the k likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens whose probabilities sum to this or more."""
    n: int = 1
    """Sampled responses per prompt."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, as its last."""
    greedy: bool = False
    """Take the likeliest token always; n is 1 then."""
    add_greedy: bool = False
    """One more response per prompt, sample number n: the greedy one (a baseline, as ReMax needs it)."""

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
            raise SamplingError(f"greedy responses are all alike: n is {self.n}, add_greedy {self.add_greedy}. Sample")

    @property
    def num_sequences(self) -> int:
        """Responses per prompt."""
        return self.n + self.add_greedy


@dataclass(frozen=True)
class Generation:
    """One response: `token_ids`, and of each its log-probability under the model at the sampling temperature.

    Log-probabilities are those before top-k and top-p: what `CausalLM.forward` at that temperature gives.
    """

    index: int
    """Of the prompt, in the order they were given."""
    sample: int
    """Of this prompt's responses."""
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    versions: list[int]
    """Of the weights that each token was drawn with; empty without a `WeightSource`."""


class WeightSource(Protocol):
    """Where newer weights of the model come from while it generates."""

    version: int
    """Of those that the model has."""

    def offered(self) -> Any:
        """What could be taken now, or None; does not wait."""
        ...

    def take(self, offer: Any) -> None:
        """Put what `offered` gave into the model."""
        ...


class GenerationEngine(Protocol):
    """Prompts in, responses out. `rollout.engine` names a class of these; vLLM and SGLang fit behind it.

    It is built as `Engine(model, max_batch_size, max_length, max_prefill_tokens, before_step)`: a `CausalLM`, sequences
    at a time, tokens of a prompt and its response together, prompt tokens of one pass, and what to call again and again
    while generating, which raises where the run gives it up.
    """

    weights: WeightSource | None
    """In asynchronous runs, where newer weights come from while it generates."""
    within_responses: bool
    """Take them between two tokens of a response, not only between responses."""

    def weights_changed(self) -> None:
        """The model that it was built with has other weights. An engine with a copy of its own takes them now."""
        ...

    def stream(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, keys: np.ndarray | None = None
    ) -> Iterator[Generation]:
        """Responses in the order in which they end. Everything is checked before this returns.

        `keys`: uint64 [prompts, n], one per sampled response. The noise of a token is a function of its response's key
        and its position there, so responses depend neither on each other nor on the order of the prompts; without
        keys it is random. An engine that cannot do so takes them as seeds.

        Raises:
            PromptError: where a prompt is empty, unknown to the vocabulary, or leaves no room for `max_tokens`.
            SamplingError: where keys do not fit.
        """
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, keys: np.ndarray | None = None
    ) -> list[Generation]:
        """All responses of `stream`, sorted by prompt and sample."""
        ...


def sequence_keys(seed: int, prompt_ids: Sequence[int] | np.ndarray, n: int) -> np.ndarray:
    """Keys for `stream`, uint64 [prompts, n], from a seed (of the run and the step) and each prompt's own number."""
    ids = np.asarray(prompt_ids)
    return noise_keys(seed, np.repeat(ids, n), np.tile(np.arange(n), len(ids))).reshape(len(ids), n)
