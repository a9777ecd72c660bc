import pytest

from rlinf_lite.scheduler import route


@pytest.mark.parametrize("src_world", range(1, 6))
@pytest.mark.parametrize("dst_world", range(1, 6))
@pytest.mark.parametrize("batch", [0, 1, 3, 12, 13])
def test_every_row_arrives_once_and_in_order(src_world: int, dst_world: int, batch: int) -> None:
    def blocks(world: int) -> list[list[int]]:
        sizes = [batch // world + (rank < batch % world) for rank in range(world)]
        return [list(range(sum(sizes[:rank]), sum(sizes[: rank + 1]))) for rank in range(world)]

    received: list[list[int]] = [[] for _ in range(dst_world)]
    for rows, pieces in zip(blocks(src_world), route(src_world, dst_world, batch), strict=True):
        for piece in pieces:
            assert piece.start < piece.stop
            received[piece.dst_rank] += rows[piece.start : piece.stop]
    assert received == blocks(dst_world)


def test_equal_groups_talk_one_to_one() -> None:
    assert [[piece.dst_rank for piece in pieces] for pieces in route(4, 4, 8)] == [[0], [1], [2], [3]]
