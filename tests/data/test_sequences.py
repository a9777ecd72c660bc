"""Sequences: how they are joined, trimmed, cut into micro-batches, and spread over ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlinf_lite.data import DataProto
from rlinf_lite.data.sequences import balanced_order, join_responses, micro_batches, sequence_lengths, take_rows


def sequences(
    prompts: list[list[int]], responses: list[list[int]], max_prompt: int = 6, max_response: int = 5
) -> DataProto:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    batch = DataProto({"prompt_ids": ids, "prompt_mask": ids > 0})
    return DataProto(join_responses(batch, responses, max_prompt, max_response))


def test_prompts_end_where_responses_begin() -> None:
    batch = sequences([[1, 2, 3], [4]], [[5], [6, 7]])
    assert batch.batch["input_ids"].tolist() == [[0, 0, 0, 1, 2, 3, 5, 0, 0, 0, 0], [0, 0, 0, 0, 0, 4, 6, 7, 0, 0, 0]]
    assert batch.batch["attention_mask"].int().tolist() == [
        [0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0],
    ]
    assert sequence_lengths(batch).tolist() == [4, 3]


def test_rows_come_without_the_columns_that_all_pad() -> None:
    batch = sequences([[1, 2, 3], [4]], [[5], [6, 7]])
    both, second = (take_rows(batch, np.array(rows), "cpu") for rows in ([0, 1], [1]))
    assert both.input_ids.tolist() == [[1, 2, 3, 5, 0], [0, 0, 4, 6, 7]] and both.response_length == 2
    assert second.input_ids.tolist() == [[4, 6, 7]]
    assert second.response(torch.arange(10).view(2, 5)).tolist() == [[5, 6]]


def random_batch(num_rows: int) -> DataProto:
    rng = np.random.default_rng(num_rows)
    tokens = [rng.integers(1, 9, length).tolist() for length in rng.integers(1, 30, 2 * num_rows)]
    return sequences(tokens[:num_rows], tokens[num_rows:], 30, 30)


@pytest.mark.parametrize("max_tokens", [10, 60, 200, 10_000])
def test_micro_batches_hold_at_most_so_many_tokens_with_padding(max_tokens: int) -> None:
    batch = random_batch(50)
    parts = micro_batches(batch, max_tokens)
    assert sorted(np.concatenate(parts).tolist()) == list(range(50))
    for part in parts:
        rows = take_rows(batch, part, "cpu")
        assert rows.input_ids.numel() <= max_tokens or len(part) == 1
    assert max_tokens != 10_000 or len(parts) == 1


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
def test_ranks_get_about_as_many_tokens(num_parts: int) -> None:
    batch = random_batch(50)
    order = balanced_order(sequence_lengths(batch), num_parts)
    assert sorted(order.tolist()) == list(range(50))
    tokens = [sequence_lengths(part).sum() for part in batch.reorder(order).chunk(num_parts)]
    in_order = [sequence_lengths(part).sum() for part in batch.chunk(num_parts)]
    assert max(tokens) <= 1.1 * sum(tokens) / num_parts + 1
    assert max(tokens) <= max(in_order)


def test_fewer_rows_than_ranks() -> None:
    assert balanced_order(np.array([5, 9]), 4).tolist() == [1, 0]
