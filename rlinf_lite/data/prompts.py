"""Prompts from JSONL and Parquet files, with known answers if rules score the responses.

A row is `{data_source, prompt, reward_model: {style: "rule", ground_truth}, extra_info}`. `prompt` is a list of
`{role, content}`, which the tokenizer's chat template joins, or text, which is tokenised unchanged. Rows with
`question` and `answer`, as in published GSM8K, are read too. `style: "model"` needs no ground truth: only a reward
model scores such a row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jinja2 import TemplateError

from rlinf_lite.data.prompt_files import BadRowError, DatasetError, PromptRow, open_prompts, parse_row
from rlinf_lite.data.proto import DataProto

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS_AT_ONCE = 1024  # rows tokenised together while lengths are measured


@dataclass(frozen=True)
class Prompt:
    """One row, tokenised; `row` is its index in the data set."""

    prompt_ids: list[int]
    prompt: str | list[dict[str, str]]
    """The prompt as in the file: text, or the messages of a chat."""
    data_source: str
    ground_truth: str | None
    extra_info: dict[str, Any]
    row: int


class PromptDataset:
    """The rows of some files, in order. Rows stay on disk; only their places are kept in memory.

    Every row is checked when the data set is opened. Prompts with more than `max_prompt_length` tokens are left out and
    counted in `num_overlong`; with `filter_overlong=False` they are an error. `data_sources`: the sources of rows with
    a ground truth ("" if a row names none), sorted, each with the file and row where it comes first.
    `num_without_truth`: the number of other rows. `digest`: a hash of the rows' content in order, before the chat
    template (which may add today's date). Plain text gets the special tokens that the tokenizer adds by default.

    Raises DatasetError, which lists every bad row by file and number (no prompt, no ground truth, a prompt that is too
    long), or if a file cannot be read, a needed chat template is missing, or there are no rows at all.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_length: int,
        prompt_key: str = "prompt",
        filter_overlong: bool = True,
    ) -> None:
        self.tokenizer, self.max_prompt_length, self.prompt_key = tokenizer, max_prompt_length, prompt_key
        self.num_overlong = self.num_without_truth = 0
        self.data_sources: dict[str, str] = {}
        self._files = open_prompts([paths] if isinstance(paths, str | Path) else paths, prompt_key)
        self._places = self._check(filter_overlong)  # [num_rows, 2]: number of the file, place in the file

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, row: int) -> Prompt:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of a data set of {len(self)}")
        file, place = self._places[row].tolist()
        found = self._row(self._files[file].read(place))
        prompt = found.text if found.messages is None else found.messages
        ids = self._tokenise([found])[0]
        return Prompt(ids, prompt, found.data_source, found.ground_truth, found.extra_info, row)

    def place(self, row: int) -> str:
        """The file and the line of a row, for error messages."""
        file, place = self._places[row].tolist()
        return f"{self._files[file].path}, row {place + 1}"

    def batch(self, rows: Sequence[int] | np.ndarray) -> DataProto:
        """The batch of these rows; see `collate`."""
        return self.collate([self[int(row)] for row in rows])

    def collate(self, prompts: Sequence[Prompt]) -> DataProto:
        """Make a batch of B prompts, padded on the left to the longest, P tokens.

        Tensors `prompt_ids` int64 [B, P] and `prompt_mask` bool [B, P], False where padded; arrays `prompt`,
        `data_source`, `ground_truth`, `extra_info` and `row` [B].
        """
        length = max((len(prompt.prompt_ids) for prompt in prompts), default=0)
        fillers = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        filler = next(int(token) for token in fillers if token is not None)
        ids = torch.full((len(prompts), length), filler, dtype=torch.int64)
        mask = torch.zeros(len(prompts), length, dtype=torch.bool)
        for i, prompt in enumerate(prompts):
            start = length - len(prompt.prompt_ids)
            ids[i, start:] = torch.tensor(prompt.prompt_ids)
            mask[i, start:] = True
        names = ("prompt", "data_source", "ground_truth", "extra_info", "row")
        columns = {name: [getattr(prompt, name) for prompt in prompts] for name in names}
        return DataProto.from_dict({"prompt_ids": ids, "prompt_mask": mask}, columns)

    def _check(self, filter_overlong: bool) -> np.ndarray:
        """Read and check all rows once. Returns the places of the rows to use, int64 [num_rows, 2]."""
        problems: list[str] = []
        places: list[tuple[int, int]] = []
        sources: dict[str, str] = {}
        digest = hashlib.sha256()
        limit = self.max_prompt_length
        for number, file in enumerate(self._files):
            rows = file.rows()
            while some := list(islice(rows, _ROWS_AT_ONCE)):
                good: list[tuple[int, PromptRow]] = []
                for place, raw in some:
                    try:
                        good.append((place, self._row(raw)))
                    except BadRowError as error:
                        problems.append(f"{file.path}, row {place + 1}: {error}")
                for (place, row), ids in zip(good, self._tokenise([row for _, row in good]), strict=True):
                    if 0 < len(ids) <= limit:
                        places.append((number, place))
                        digest.update(_as_written(row).encode())
                        if row.ground_truth is None:
                            self.num_without_truth += 1
                        else:
                            sources.setdefault(row.data_source, f"{file.path}, row {place + 1}")
                    elif not ids:
                        problems.append(f"{file.path}, row {place + 1}: the prompt has no tokens. Give it some text")
                    elif filter_overlong:
                        self.num_overlong += 1
                    else:
                        problems.append(
                            f"{file.path}, row {place + 1}: the prompt has {len(ids)} tokens, {len(ids) - limit} more "
                            f"than max_prompt_length {limit}. Raise it, or set filter_overlong"
                        )
        if not places and not problems:
            names = ", ".join(str(file.path) for file in self._files) or "no files"
            overlong = f"all {self.num_overlong} prompts have more than {limit} tokens. Raise max_prompt_length"
            problems.append(f"{names}: {overlong if self.num_overlong else 'there are no rows'}")
        if problems:
            raise DatasetError(problems)
        self.data_sources, self.digest = dict(sorted(sources.items())), digest.hexdigest()
        return np.array(places, dtype=np.int64)

    def _row(self, raw: Any) -> PromptRow:
        """Check a raw row, and turn a chat into text by the tokenizer's chat template. A last message of the assistant
        is the beginning of the answer. Raises BadRowError, and DatasetError if there is no template."""
        row = parse_row(raw, self.prompt_key)
        if row.messages is None:
            return row
        if self.tokenizer.chat_template is None:
            raise DatasetError(
                f"prompts are chat messages, and the tokenizer {self.tokenizer.name_or_path!r} has no chat template. "
                "Use an instruction-tuned model's tokenizer, set tokenizer.chat_template, or give prompts as text"
            )
        is_begun = row.messages[-1]["role"] == "assistant"
        try:
            text = self.tokenizer.apply_chat_template(
                row.messages, tokenize=False, add_generation_prompt=not is_begun, continue_final_message=is_begun
            )
        except (TemplateError, ValueError) as error:  # ValueError: the template drops the message to continue
            raise BadRowError(f"the tokenizer's chat template refuses it: {error}") from error
        return replace(row, text=str(text))

    def _tokenise(self, rows: Sequence[PromptRow]) -> list[list[int]]:
        """The token ids of each row. A chat template writes special tokens itself, so the tokenizer adds none to
        chats."""
        ids: list[list[int]] = [[] for _ in rows]
        for is_chat in (False, True):
            chosen = [i for i, row in enumerate(rows) if (row.messages is not None) == is_chat]
            if chosen:
                encoded = self.tokenizer([rows[i].text for i in chosen], add_special_tokens=not is_chat)
                for i, row_ids in zip(chosen, encoded["input_ids"], strict=True):
                    ids[i] = list(row_ids)
        return ids


def _as_written(row: PromptRow) -> str:
    prompt = row.text if row.messages is None else row.messages
    return json.dumps([prompt, row.data_source, row.ground_truth, row.extra_info], sort_keys=True, default=str)


class ResumableSampler:
    """Endless batches of row indices, int64 [batch_size]; every row once per pass, in a new order each time.

    Rows left over from a pass begin the first batch of the next pass, so that every batch is full; no row is twice in a
    batch. `seed` determines the orders. Raises ValueError if a batch needs more rows than there are.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: int) -> None:
        if not 0 < batch_size <= num_rows:
            raise ValueError(
                f"a batch of {batch_size} prompts out of a data set of {num_rows} rows ({num_rows} / {batch_size} = "
                f"{num_rows / batch_size if batch_size > 0 else 0:.2f} batches per pass). Use a batch size of 1 to "
                f"{num_rows}, or more data"
            )
        self.num_rows, self.batch_size, self.seed = num_rows, batch_size, seed
        self._left = np.empty(0, dtype=np.int64)  # remaining rows of this pass and of the one before
        self._pass = self._num_batches = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        if len(self._left) < self.batch_size:
            # after the rows left over comes a new order, in which those rows come only after the batch that they share
            order = np.random.default_rng([self.seed, self._pass]).permutation(self.num_rows)
            again = np.isin(order, self._left)
            others = np.flatnonzero(~again)[: self.batch_size - len(self._left)]
            self._left = np.concatenate([self._left, order[others], np.delete(order, others)])
            self._pass += 1
        batch, self._left = self._left[: self.batch_size], self._left[self.batch_size :]
        self._num_batches += 1
        return batch

    def state_dict(self) -> dict[str, int]:
        """The state, from which a sampler with the same arguments continues with exactly the next batch."""
        arguments = {"num_rows": self.num_rows, "batch_size": self.batch_size, "seed": self.seed}
        return {**arguments, "num_batches": self._num_batches}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a `state_dict`. Raises ValueError if it is of other data, another batch size or another
        seed."""
        own = self.state_dict()
        different = [name for name in ("num_rows", "batch_size", "seed") if state[name] != own[name]]
        if different:
            listed = ", ".join(f"{name} was {state[name]} and is {own[name]}" for name in different)
            raise ValueError(f"the order of prompts cannot be continued: {listed}. Put it back, or start a new run")
        self._pass = self._num_batches = 0
        self._left = self._left[:0]
        for _ in range(state["num_batches"]):
            next(self)
