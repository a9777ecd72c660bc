"""Which worker owns which environments."""

import itertools

import numpy as np
import pytest

from rlinf_lite.workers.layout import Layout

SHAPES = list(itertools.product((1, 2, 4), (1, 2), (1, 2, 3), (1, 2, 4)))


@pytest.mark.parametrize(("num_env", "num_stages", "num_rollout", "num_actors"), SHAPES)
def test_every_environment_has_one_stage_one_server_and_one_actor(num_env, num_stages, num_rollout, num_actors):
    layout = Layout(48, num_env, num_stages, (0,) * num_rollout, (0,) * num_actors)
    served, trained = [], {}
    for piece in layout.pieces():
        ids = layout.env_ids(piece.env_rank, piece.stage)[piece.start : piece.stop]
        served += ids.tolist()
        for actor, rows in layout.actor_slices(ids):
            trained.update(dict.fromkeys(ids[rows].tolist(), actor))
    assert sorted(served) == list(range(48))
    assert trained == {i: i * num_actors // 48 for i in range(48)}
    per_rollout = np.bincount([p.rollout_rank for p in layout.pieces() for _ in range(p.start, p.stop)])
    assert len(per_rollout) == num_rollout and per_rollout.max() - per_rollout.min() <= num_stages * num_env


def test_weights_come_from_the_own_node_where_an_actor_is_there():
    layout = Layout(8, 1, 1, rollout_nodes=(0, 1, 2, 1), actor_nodes=(1, 1, 2))
    assert [layout.weight_routes.sender(rank) for rank in range(4)] == [0, 0, 2, 0]
