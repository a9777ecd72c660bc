"""Contiguous rows between groups of different size. Pure: needs neither ray nor torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) of a source rank's block, which go to `dst_rank`."""

    dst_rank: int
    start: int
    stop: int


def split_rows(world: int, batch: int) -> list[range]:
    """The contiguous block of each rank; sizes differ by at most 1, larger ones first."""
    if world < 1 or batch < 0:
        raise ValueError(f"cannot split {batch} rows over {world} ranks")
    small, extra = divmod(batch, world)
    starts = [rank * small + min(rank, extra) for rank in range(world + 1)]
    return [range(starts[rank], starts[rank + 1]) for rank in range(world)]


def route(src_world: int, dst_world: int, batch: int) -> list[list[Piece]]:
    """For every source rank, the pieces that it sends, in row order; every row goes to exactly one place."""
    destinations = split_rows(dst_world, batch)
    return [
        [
            Piece(rank, start - rows.start, stop - rows.start)
            for rank, block in enumerate(destinations)
            if (start := max(rows.start, block.start)) < (stop := min(rows.stop, block.stop))
        ]
        for rows in split_rows(src_world, batch)
    ]
