"""Division of samples into minibatches, a function of seed, step and epoch, but not of the number of actors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def minibatches(valid: np.ndarray, global_batch_size: int, seed: int, step: int, epoch: int) -> Iterator[np.ndarray]:
    """Shuffled indices of the True entries of `valid` [N], in ceil(n / global_batch_size) nearly equal parts."""
    samples = np.flatnonzero(valid)
    np.random.default_rng([seed, step, epoch]).shuffle(samples)
    yield from np.array_split(samples, -(-len(samples) // global_batch_size)) if len(samples) else ()


def micro_batches(minibatch: np.ndarray, rank: int, world_size: int, num_samples: int, size: int) -> list[np.ndarray]:
    """This rank's samples of a minibatch, as local indices, in parts of at most `size`.

    Rank r owns the samples from r * num_samples / world_size up to (r + 1) * num_samples / world_size. All ranks get
    the same number of parts, as the collectives of sharded models require; a part may be empty.
    """
    per_rank = num_samples // world_size
    counts = np.bincount(minibatch // per_rank, minlength=world_size)
    own = np.sort(minibatch[minibatch // per_rank == rank]) - rank * per_rank
    return np.array_split(own, -(-int(counts.max()) // size))
