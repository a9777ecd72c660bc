"""Prompts with responses as a DataProto, and the grouping of rows into micro-batches.

Rows have P + R positions: the prompt, padded on the left to P, then the response, padded on the right to R. Tensors:
`input_ids` int64 and `attention_mask` bool [B, P + R], `response_mask` bool [B, R].
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlinf_lite.copies import to_device
from rlinf_lite.data.proto import DataProto
from rlinf_lite.scheduler.dispatch import split_rows


def join_responses(
    prompts: DataProto, responses: Sequence[Sequence[int]], max_prompt: int, max_response: int
) -> dict[str, Tensor]:
    """The tensors of B prompts (`prompt_ids`, `prompt_mask`) and B responses, with P = `max_prompt`, R =
    `max_response`."""
    num_rows, length = prompts.batch["prompt_ids"].shape
    ids = torch.zeros(num_rows, max_prompt + max_response, dtype=torch.int64)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    ids[:, max_prompt - length : max_prompt] = prompts.batch["prompt_ids"]
    mask[:, max_prompt - length : max_prompt] = prompts.batch["prompt_mask"]
    lengths = torch.tensor([len(response) for response in responses], dtype=torch.int64)
    response_mask = torch.arange(max_response) < lengths[:, None]
    mask[:, max_prompt:] = response_mask
    tokens = [token for response in responses for token in response]
    ids[:, max_prompt:][response_mask] = torch.tensor(tokens, dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": mask, "response_mask": response_mask}


@dataclass(frozen=True)
class Rows:
    """Some rows of a batch, without the positions that are padding in all of them."""

    index: Tensor
    """int64 [b]: the indices of the rows in the batch."""
    input_ids: Tensor
    attention_mask: Tensor
    response_length: int

    def response(self, column: Tensor) -> Tensor:
        """The part of a column [B, R] of the batch that belongs to these rows and their response positions."""
        return to_device(column[self.index, : self.response_length], self.input_ids.device)


def take_rows(batch: DataProto, index: np.ndarray, device: torch.device | str) -> Rows:
    """The rows `index` [b], b >= 1, on `device`."""
    rows = torch.from_numpy(index)
    responses = batch.batch["response_mask"]
    max_response = responses.shape[1]
    mask = batch.batch["attention_mask"][rows]
    prompt_columns = mask.shape[1] - max_response
    first = int(mask[:, :prompt_columns].any(0).int().argmax())
    length = max(int(responses[rows].sum(1).max()), 1)
    kept = slice(first, prompt_columns + length)
    ids = batch.batch["input_ids"][rows, kept]
    return Rows(rows, to_device(ids, device), to_device(mask[:, kept], device), length)


def empty_row(batch: DataProto) -> DataProto:
    """One row with the columns of `batch`: a prompt of one token without a response. A rank without rows computes it,
    with weight 0."""
    row = DataProto({name: x.new_zeros(1, *x.shape[1:]) for name, x in batch.batch.items()}, {}, batch.meta_info)
    row.batch["attention_mask"][:, -row.batch["response_mask"].shape[1] - 1] = True
    return row


def sequence_lengths(batch: DataProto) -> np.ndarray:
    """The number of tokens of each row, int64 [B]."""
    lengths: np.ndarray = batch.batch["attention_mask"].sum(1).numpy()
    return lengths


def micro_batches(batch: DataProto, max_tokens: int) -> list[np.ndarray]:
    """Split rows into parts of at most `max_tokens` tokens, padding included; rows of similar length come together.

    A row that is longer forms a part of its own.
    """
    lengths, responses = sequence_lengths(batch), batch.batch["response_mask"].sum(1).numpy()
    order = np.lexsort((-responses, -lengths))
    parts: list[np.ndarray] = []
    start = 0
    while start < len(order):
        widths = np.maximum.accumulate((lengths - responses)[order[start:]])
        widths = widths + np.maximum.accumulate(responses[order[start:]])  # longest prompt and longest response
        fitting = widths * np.arange(1, len(widths) + 1) <= max_tokens
        size = max(len(fitting) if fitting.all() else int(fitting.argmin()), 1)
        parts.append(np.sort(order[start : start + size]))
        start += size
    return parts


def balanced_order(lengths: np.ndarray, num_parts: int) -> np.ndarray:
    """An order of rows in which contiguous parts (as by `DataProto.chunk`) have about equal numbers of tokens.

    Longest rows first, each row goes to the part with the fewest tokens so far that has room. Rows within a part keep
    their order.
    """
    room = [len(part) for part in split_rows(num_parts, len(lengths))]
    members: list[list[int]] = [[] for _ in range(num_parts)]
    heap = [(0, part) for part in range(num_parts) if room[part]]
    for row in np.argsort(-lengths, kind="stable").tolist():
        tokens, part = heapq.heappop(heap)
        members[part].append(row)
        if len(members[part]) < room[part]:
            heapq.heappush(heap, (tokens + int(lengths[row]), part))
    return np.concatenate([np.array(sorted(part), np.int64) for part in members])
