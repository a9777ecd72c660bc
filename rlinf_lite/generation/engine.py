"""A generation engine for transformers models: continuous batching over a static cache; each forward pass gives one
token to every row of the batch.

The time of a small model's pass is that of launching its operations. So a step adds little to it: one mask and one
index for all layers, one draw for all rows, one copy of 2 B numbers to the host. On a GPU, a step is recorded
(`models.graphs`) for numbers of rows and columns that are rounded up, and then launched as a whole. For bf16, use a
model in bf16 or, slower, call the engine under autocast.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rlinf_lite.generation.cache import StaticCache
from rlinf_lite.generation.protocol import Generation, PromptError, SamplingError, SamplingParams, WeightSource
from rlinf_lite.generation.sampling import sample
from rlinf_lite.models import graphs
from rlinf_lite.models.sampling import uniform_noise
from rlinf_lite.models.text.causal_lm import CausalLM, UnsupportedModelError
from rlinf_lite.models.text.supported import check_equal, own_logits, probe_tokens, refusing
from rlinf_lite.scheduler.heartbeat import report_progress

_REFILL = 8
"""New prompts start when one row in this many is free, as the pass of a prompt costs about as much as a step."""
_SIZES, _ROWS, _COLUMNS = 8, 8, 128
"""Steps are recorded for at most `_SIZES` numbers of rows, at least `_ROWS` apart, and as many of columns, at least
`_COLUMNS` apart."""


@dataclass
class _Request:
    index: int
    sample: int
    prompt: Sequence[int]
    key: np.uint64 | None  # None: greedy
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.token_ids)


class TransformersEngine:
    """Generates with a `CausalLM` whose layers attend to all earlier tokens; see `GenerationEngine`.

    Waiting sequences take the rows of those that end; when none wait, the batch gets smaller. Responses to one prompt
    that start together share its pass. The model is shared, not copied, so changes of its weights take effect here.

    With `weights`, newer weights are taken during generation. With `within_responses` this happens between two tokens,
    and keys and values of all tokens so far are computed again, so that a token's log-probability is that of the
    version in `Generation.versions`. Otherwise it happens after the running responses have ended, and no new one starts
    before.
    """

    weights: WeightSource | None = None
    within_responses: bool = False

    def __init__(
        self,
        model: CausalLM,
        max_batch_size: int,
        max_length: int,
        max_prefill_tokens: int = 16384,
        before_step: Callable[[], None] = lambda: None,
    ) -> None:
        """`max_length`: tokens of a prompt and its response together. `max_prefill_tokens`: prompt tokens of one pass.
        `before_step` is called before every forward pass; an exception from it ends the stream.

        Raises:
            UnsupportedModelError: if the engine cannot serve the model's layers or positions, or its results differ
                from the model's own forward pass, to which they are compared here.
        """
        self.model = model
        self.max_batch_size, self.max_length, self.max_prefill_tokens = max_batch_size, max_length, max_prefill_tokens
        self._before_step = before_step
        self._check_config()
        self._check_model()

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, keys: np.ndarray | None = None
    ) -> list[Generation]:
        return sorted(self.stream(prompts, params, keys), key=lambda done: (done.index, done.sample))

    def stream(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, keys: np.ndarray | None = None
    ) -> Iterator[Generation]:
        self._check_prompts(prompts, params)
        shape = (len(prompts), params.n)
        if keys is None:
            keys = torch.randint(0, 2**62, shape).numpy()
        elif keys.shape != shape:
            raise SamplingError(
                f"keys are {list(keys.shape)}; one per prompt and sampled response is needed, {list(shape)}"
            )
        requests = []  # in the order in which they start: a prompt's responses one after the other
        for index, prompt in enumerate(prompts):
            own: list[np.uint64 | None] = [None] if params.greedy else list(keys[index].astype(np.uint64))
            if params.add_greedy:
                own.append(None)
            requests += [_Request(index, number, prompt, key) for number, key in enumerate(own)]
        return self._run(requests, params)

    def weights_changed(self) -> None:
        """Nothing to do: the engine has no copy of the model."""

    def _check_config(self) -> None:
        config = self.model.language_model.config
        if (attention := config._attn_implementation) != "sdpa":
            raise UnsupportedModelError(f"model.attn_implementation: the engine needs sdpa, not {attention}")
        text = config.get_text_config()
        positions = getattr(text, "max_position_embeddings", self.max_length)
        if self.max_length > positions:
            raise UnsupportedModelError(
                f"max_length is {self.max_length}, and the model has positions for {positions} tokens"
            )
        layers = set(getattr(text, "layer_types", None) or ["full_attention"])
        named = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
        sizes = {kind: getattr(text, name, None) for kind, name in named.items()}
        windows = {kind: size for kind, size in sizes.items() if size is not None}  # tokens that each kind attends to
        if unknown := layers - {"full_attention", *windows}:
            raise UnsupportedModelError(
                f"the engine knows layers of full_attention; the model's are {', '.join(sorted(unknown))}"
            )
        # in configs without layer_types (Mistral, Phi-3, Starcoder2), all layers have the window
        for kind in windows.keys() & layers if getattr(text, "layer_types", None) else windows:
            if self.max_length > windows[kind]:
                raise UnsupportedModelError(
                    f"max_length is {self.max_length}, and the model's layers of {kind} see {windows[kind]} tokens; "
                    "the engine's see all. Use a data.max_prompt_length + rollout.max_response_length of "
                    f"{windows[kind]} or less"
                )

    @torch.no_grad()
    def _check_model(self) -> None:
        """Compare responses to a long and a short prompt, in which errors of windows, cache or padding would show."""
        num_tokens = min(3, self.max_length - 1)
        longest = self.max_length - num_tokens
        with refusing(self.model):
            prompts = [probe_tokens(self.model, n, seed).tolist() for seed, n in enumerate((longest, min(3, longest)))]
            keys = np.zeros((len(prompts), 1), np.uint64)  # given, so that torch's random generator is not used
            for done in self.generate(prompts, SamplingParams(num_tokens, greedy=True), keys):
                tokens = torch.tensor([*prompts[done.index], *done.token_ids], device=self.model.language_model.device)
                expected = own_logits(self.model, tokens[:-1], num_tokens)
                logprobs = torch.log_softmax(expected, -1).gather(1, tokens[-num_tokens:, None]).squeeze(1)
                found = logprobs.new_tensor(done.logprobs)
                check_equal(self.model, "generated log-probabilities", found, logprobs, expected.abs().max())

    def _check_prompts(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        room = self.max_length - params.max_tokens
        vocab_size = self.model.language_model.config.get_text_config().vocab_size
        for index, prompt in enumerate(prompts):
            if not len(prompt):
                raise PromptError(f"prompt {index} has no tokens; at least one is needed to start from")
            if len(prompt) > room:
                raise PromptError(
                    f"prompt {index} has {len(prompt)} tokens, and {room} fit: max_length {self.max_length} - "
                    f"max_tokens {params.max_tokens}. Filter prompts by length, or raise max_length"
                )
            if min(prompt) < 0 or max(prompt) >= vocab_size:
                raise PromptError(
                    f"prompt {index} has ids from {min(prompt)} to {max(prompt)}; the model's go from 0 to "
                    f"{vocab_size - 1}. Is it another model's tokenizer?"
                )

    def _run(self, requests: list[_Request], params: SamplingParams) -> Iterator[Generation]:
        if not requests:
            return
        num_rows = min(self.max_batch_size, len(requests))
        length = max(len(request.prompt) for request in requests) + params.max_tokens
        waiting, batch = deque(requests), _Batch(self.model, params, num_rows, length)
        offer: Any = None
        while waiting or batch.requests or offer:
            self._before_step()
            if self.weights is not None:
                offer = offer or self.weights.offered()
                if offer and (self.within_responses or not batch.requests):
                    self.weights.take(offer)
                    batch.forget(self.max_prefill_tokens)
                    offer = None
                    continue  # the next offer may have arrived already
                batch.version = self.weights.version
            num_free = num_rows - len(batch.requests)
            if waiting and not offer and num_free >= min(len(waiting), -(-num_rows // _REFILL)):
                yield from batch.admit(self._next(waiting, num_free))
            else:
                yield from batch.step()

    def _next(self, waiting: deque[_Request], num_free: int) -> list[_Request]:
        """The next requests: at most `num_free`, with at most `max_prefill_tokens` tokens, padding included."""
        taken = [waiting.popleft()]
        num_prompts, width = 1, len(taken[0].prompt)
        while waiting and len(taken) < num_free:
            num_prompts += waiting[0].index != taken[-1].index
            width = max(width, len(waiting[0].prompt))
            if num_prompts * width > self.max_prefill_tokens:
                break
            taken.append(waiting.popleft())
        return taken


class _Batch:
    """The running sequences. Row i of the cache and of every tensor here belongs to `requests[i]`."""

    version: int | None = None
    """Version of the weights, which is noted for each token."""

    def __init__(self, model: CausalLM, params: SamplingParams, num_rows: int, length: int) -> None:
        self.model, self.params = model, params
        self.requests: list[_Request] = []
        self._stops = frozenset(params.stop_token_ids)
        self._cache = StaticCache(model.language_model.config.get_text_config().num_hidden_layers, num_rows, length)
        device = next(model.parameters()).device
        self._columns = torch.arange(length, device=device)
        self._numbers = torch.zeros(3, num_rows, dtype=torch.long, device=device)
        self._last, self._position, self._count = self._numbers  # token, its column, tokens drawn so far
        self._uniform = torch.zeros(num_rows, params.max_tokens, device=device)
        self._greedy = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self._num_columns = 0  # columns of the longest row, with the next token's
        self._recordings: graphs.Recordings | None = None
        if graphs.can_record(device):
            self._recordings, self._weights = graphs.Recordings(), [*model.parameters(), *model.buffers()]

    @torch.no_grad()
    def admit(self, requests: list[_Request]) -> list[Generation]:
        """Append sequences to the batch and draw their first token. Returns those that end with it."""
        device, first_row = self._columns.device, len(self.requests)
        rows = slice(first_row, first_row + len(requests))
        source_of = {index: source for source, index in enumerate(dict.fromkeys(r.index for r in requests))}
        prompts = {request.index: request.prompt for request in requests}
        sources = torch.tensor([source_of[request.index] for request in requests], device=device)
        lengths = torch.tensor([len(request.prompt) for request in requests], device=device)
        keys = np.array([request.key or 0 for request in requests], np.uint64)
        uniform = uniform_noise(keys, self.params.max_tokens)

        states = self._prefill([*prompts.values()], first_row, sources)
        self._uniform[rows] = torch.from_numpy(uniform).float().to(device)
        self._greedy[rows] = torch.tensor([request.key is None for request in requests], device=device)
        self._position[rows], self._count[rows] = lengths - 1, 0
        self.requests += requests
        return self._append(self._draw(states[sources, lengths - 1], rows), first_row)

    @torch.no_grad()
    def step(self) -> list[Generation]:
        """One more token for every row. Returns the sequences that end with it."""
        report_progress()
        num_rows, num_columns = len(self.requests), self._num_columns
        if self._recordings is None:
            return self._append(self._next(num_rows, num_columns), 0)
        num_rows = _rounded(num_rows, len(self._greedy), _ROWS)
        num_columns = _rounded(num_columns, len(self._columns), _COLUMNS)
        key = num_rows, num_columns
        drawn = self._recordings.run(key, lambda: self._next(num_rows, num_columns), self._weights)
        return self._append(drawn, 0)

    @torch.no_grad()
    def forget(self, max_tokens: int) -> None:
        """Compute all keys and values again, as weights have changed, in passes of at most `max_tokens` tokens (padding
        included) or of one row."""
        device, waiting = self._columns.device, list(enumerate(self.requests))
        while waiting:
            rows = max(1, max_tokens // max(self.requests[row].num_tokens for row, _ in waiting))
            taken, waiting = waiting[:rows], waiting[rows:]
            known = [[*request.prompt, *request.token_ids[:-1]] for _, request in taken]  # the last is the next input
            self._prefill(known, taken[0][0], torch.arange(len(taken), device=device))

    def _prefill(self, sequences: Sequence[Sequence[int]], first_row: int, sources: Tensor) -> Tensor:
        """States of whole sequences, padded on the right. Cache row `first_row + i` gets sequence `sources[i]`."""
        device, width = self._columns.device, max(map(len, sequences))
        ids = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens in sequences], device=device)
        report_progress()
        self._cache.start_prefill(first_row, sources)
        causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
        return self._states(ids, causal[None, None], self._columns[None, :width])  # padding comes last: unseen

    def _next(self, num_rows: int, num_columns: int) -> Tensor:
        """As `_draw`, for the first `num_rows` rows, which attend to the first `num_columns` columns. It writes only
        keys and values of each row's last token, so it can be repeated. Unused rows have token 0 in column 0."""
        positions = self._position[:num_rows, None]
        self._cache.start_decode(self._position[:num_rows], num_columns)
        seen = self._columns[:num_columns] <= positions
        states = self._states(self._last[:num_rows, None], seen[:, None, None], positions)
        return self._draw(states[:, 0], slice(num_rows))

    def _states(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        output = self.model.language_model.base_model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=self._cache, use_cache=True
        )
        states: Tensor = output.last_hidden_state
        return states

    def _draw(self, states: Tensor, rows: slice) -> Tensor:
        """Tokens and their log-probabilities, as float64 [2, rows], drawn for `rows` from the hidden `states`
        [rows, D] of the tokens before."""
        uniform = self._uniform[rows].gather(1, self._count[rows, None]).squeeze(1)
        greedy = self._greedy[rows] if self.params.add_greedy else None
        return torch.stack([x.double() for x in sample(self.model.logits(states), self.params, uniform, greedy)])

    def _append(self, drawn: Tensor, first_row: int) -> list[Generation]:
        """Append the `drawn` tokens to the rows from `first_row` on. Returns the sequences that end with them, and
        frees their rows."""
        rows = slice(first_row, len(self.requests))
        drawn = drawn[:, : len(self.requests) - first_row]
        self._last[rows] = drawn[0].long()
        self._numbers[1:, rows] += 1
        finished: list[int] = []
        done: list[Generation] = []
        numbers = zip(self.requests[rows], *drawn.tolist(), strict=True)
        for row, (request, number, logprob) in enumerate(numbers, first_row):
            token = int(number)
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            if self.version is not None:
                request.versions.append(self.version)
            if token in self._stops or len(request.token_ids) == self.params.max_tokens:
                finished.append(row)
                reason: Literal["stop", "length"] = "stop" if token in self._stops else "length"
                found = request.token_ids, request.logprobs, reason, request.versions
                done.append(Generation(request.index, request.sample, *found))
        if finished:
            self._remove(finished)
        self._num_columns = max((request.num_tokens for request in self.requests), default=0)
        return done

    def _remove(self, finished: list[int]) -> None:
        """Free these rows; the last rows of the batch move to their places."""
        left = len(self.requests) - len(finished)
        holes = [row for row in finished if row < left]
        movers = sorted(set(range(left, len(self.requests))) - set(finished))
        if holes:
            sources, targets = (torch.tensor(r, device=self._columns.device) for r in (movers, holes))
            self._cache.move(sources, targets, max(self.requests[row].num_tokens for row in movers))
            self._numbers[:, targets] = self._numbers[:, sources]
            self._uniform[targets] = self._uniform[sources]
            self._greedy[targets] = self._greedy[sources]
            for source, target in zip(movers, holes, strict=True):
                self.requests[target] = self.requests[source]
        del self.requests[left:]
        self._numbers[:, left:] = 0  # valid indices into cache and noise, as recorded steps include free rows


def _rounded(number: int, most: int, step: int) -> int:
    """`number` rounded up to a multiple of `step`, or of a multiple of it that gives at most `_SIZES` sizes; at most
    `most`."""
    step *= -(-most // (_SIZES * step))
    return min(-(-number // step) * step, most)
