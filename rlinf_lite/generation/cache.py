"""A cache of keys and values in memory that is allocated once."""

from __future__ import annotations

import torch
from torch import Tensor


class StaticCache:
    """The `past_key_values` of transformers models, whose rows have their own lengths.

    A sequence starts at column 0 of its row, without padding. Columns after its last token hold old numbers, which the
    caller must mask. Rows in use are the first ones. Call `start_prefill` or `start_decode` before each forward pass.
    """

    def __init__(self, num_layers: int, num_rows: int, max_length: int) -> None:
        self._shape = (num_layers, num_rows, max_length)
        self._keys: Tensor | None = None  # [layers, rows, heads, max_length, dim], once these are known
        self._values: Tensor | None = None
        self._prefill: tuple[int, Tensor] | None = None
        self._index = torch.empty(0)
        self._num_rows = self._num_columns = 0

    def start_prefill(self, first_row: int, sources: Tensor) -> None:
        """The next pass reads whole prompts; row `first_row + i` gets prompt `sources[i]` of the pass."""
        self._prefill = (first_row, sources)

    def start_decode(self, positions: Tensor, num_columns: int) -> None:
        """The next pass reads one token for each of the first rows, at `positions` [rows], all below `num_columns`."""
        assert self._keys is not None, "a prompt comes before its response"
        _, _, num_heads, max_length, _ = self._keys.shape
        self._prefill = None
        self._num_rows, self._num_columns = len(positions), num_columns
        heads = torch.arange(num_heads, device=positions.device)
        rows = torch.arange(len(positions), device=positions.device)
        self._index = ((rows[:, None] * num_heads + heads) * max_length + positions[:, None]).flatten()

    def move(self, sources: Tensor, targets: Tensor, num_columns: int) -> None:
        """Copy the first `num_columns` columns of rows `sources` into rows `targets`."""
        assert self._keys is not None and self._values is not None
        for held in (self._keys, self._values):
            held[:, targets, :, :num_columns] = held[:, sources, :, :num_columns]

    def get_seq_length(self, *_: object) -> int:
        """Number of columns before this pass; some model families ask for it."""
        return 0 if self._prefill is not None else self._num_columns - 1

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Store a layer's new `keys` and `values` [B, heads, tokens, dim]. Returns those that its attention reads: all
        columns so far of the same rows."""
        if self._keys is None or self._values is None:
            layers, rows, length = self._shape
            self._keys = keys.new_zeros(layers, rows, keys.shape[1], length, keys.shape[3])
            self._values = values.new_zeros(layers, rows, values.shape[1], length, values.shape[3])
        if self._prefill is not None:
            first_row, sources = self._prefill
            own = slice(first_row, first_row + len(sources))
            self._keys[layer, own, :, : keys.shape[2]] = keys[sources]
            self._values[layer, own, :, : values.shape[2]] = values[sources]
            return keys, values
        read = []
        for held, new in ((self._keys[layer], keys), (self._values[layer], values)):
            held.view(-1, held.shape[-1]).index_copy_(0, self._index, new.reshape(-1, new.shape[-1]))
            read.append(held[: self._num_rows, :, : self._num_columns])
        return read[0], read[1]
