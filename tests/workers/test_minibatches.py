"""Shuffles: seeded, different every step and epoch, and the same for every number of actors."""

import numpy as np
import pytest

from rlinf_lite.training.minibatches import micro_batches, minibatches


def test_minibatches_cover_the_valid_samples_once_in_nearly_equal_parts():
    valid = np.ones(103, bool)
    valid[::5] = False
    parts = list(minibatches(valid, 16, seed=0, step=0, epoch=0))
    assert sorted(np.concatenate(parts)) == np.flatnonzero(valid).tolist()
    sizes = [len(part) for part in parts]
    assert max(sizes) <= 16 and max(sizes) - min(sizes) <= 1


def test_shuffles_differ_by_step_and_epoch_and_repeat_with_the_seed():
    def order(*key):
        return np.concatenate(list(minibatches(np.ones(64, bool), 16, *key))).tolist()

    orders = [order(seed, step, epoch) for seed in (0, 1) for step in (0, 1) for epoch in (0, 1)]
    assert len({tuple(o) for o in orders}) == 8
    assert order(1, 1, 1) == orders[-1]


def test_nothing_valid_gives_no_minibatch():
    assert list(minibatches(np.zeros(8, bool), 4, 0, 0, 0)) == []


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("size", [3, 8, 100])
def test_micro_batches_split_a_minibatch_over_ranks_in_step(world_size, size):
    minibatch = np.random.default_rng(0).permutation(64)[:24]
    ranks = [micro_batches(minibatch, rank, world_size, 64, size) for rank in range(world_size)]
    assert len({len(parts) for parts in ranks}) == 1
    assert all(len(part) <= size for parts in ranks for part in parts)
    rows = [part + rank * 64 // world_size for rank, parts in enumerate(ranks) for part in parts]
    assert sorted(np.concatenate(rows)) == sorted(minibatch)
