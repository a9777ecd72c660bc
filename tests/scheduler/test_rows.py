"""Dispatch modes that split batches by rows: the rows of each rank, the collected result, and who fetches it."""

from typing import Any

import numpy as np
import pytest
import torch

from rlinf_lite.data import DataProto
from rlinf_lite.scheduler import Cluster, Dispatch, Worker, WorkerError, nd_compute, register, wait_all
from rlinf_lite.scheduler.dispatch import MeshPlace, mesh_mode, take_rows


class Model(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, data: DataProto, plus: int = 0) -> DataProto:
        x = data.batch["x"] * 2 + plus
        ranks = np.full(len(data), self.rank)
        return DataProto.from_dict({"x": x}, {"rank": ranks}, {"metrics": {"rows": len(data)}})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def keep_even(self, data: DataProto) -> DataProto:
        return data.select(["x"], [], [])[data.batch["x"] % 2 == 0]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=True)
    def double_and_wait(self, data: DataProto) -> DataProto:
        return self.double(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def overwrite(self, data: DataProto) -> None:
        data.batch["x"] += 100
        data.meta_info["changed"] = True

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def wrong(self, data: DataProto) -> int:
        return len(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, function: Any, data: DataProto) -> DataProto:
        return function(data, self.rank)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update(self, data: DataProto) -> dict[str, float]:
        return {"rank": self.rank, "rows": len(data)}

    def whole(self, data: DataProto) -> int:
        return len(data)


class Sharded(Worker):
    """Workers of two data-parallel ranks, each with two tensor-parallel workers."""

    def init(self, joined: bool = True) -> None:
        if joined:
            self.join_mesh("mesh", self.rank // 2, 2, collects=self.rank % 2 == 1)

    @register(dispatch_mode=nd_compute("mesh"))
    def where(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"x": data.batch["x"]}, {"rank": np.full(len(data), self.rank)})

    @register(dispatch_mode=nd_compute("mesh"))
    def address(self, data: DataProto) -> None:
        return None


def batch(rows: int, width: int = 1) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows * width).reshape(rows, width).squeeze(-1)}, meta_info={"k": 1})


@pytest.fixture(scope="module")
def models(cluster: Cluster):
    two = Model.create_group().launch(cluster, "0-1", name="two")
    three = Model.create_group().launch(cluster, "0-2", name="three")
    yield two, three
    two.shutdown()
    three.shutdown()


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_rows_are_spread_evenly_and_come_back_in_order(models, rows):
    for group in models:
        data = batch(rows)
        got = group.double(data, plus=1).wait()
        assert got.batch["x"].tolist() == [2 * x + 1 for x in range(rows)]
        sizes = [one["rows"] for one in got.meta_info["metrics"]]
        assert len(sizes) == group.world_size and max(sizes) - min(sizes) <= 1, "every rank's metrics are kept"
        assert got.non_tensor_batch["rank"].tolist() == sorted(got.non_tensor_batch["rank"].tolist())
        blocking = group.double_and_wait(data)
        assert torch.equal(blocking.batch["x"] + 1, got.batch["x"])


def test_nothing_that_is_passed_is_changed(models):
    two, _ = models
    for rows in (4, 400_000):  # sent inside the call, and through the object store
        data = batch(rows)
        assert two.overwrite(data).wait() is None
        assert data.batch["x"][0] == 0 and data.meta_info == {"k": 1}


def test_functions_metrics_and_whole_batches(models):
    two, three = models
    got = three.apply(lambda data, rank: DataProto({"x": data.batch["x"] + 10 * rank}), batch(3)).wait()
    assert got.batch["x"].tolist() == [0, 11, 22]
    assert two.update(batch(3)).wait() == [{"rank": 0, "rows": 2}, {"rank": 1, "rows": 1}]
    assert two.whole(batch(3)).wait() == [3, 3], "ONE_TO_ALL gives everybody everything"
    with pytest.raises(TypeError, match="first argument"):
        two.apply(batch(3), batch(3))
    with pytest.raises(TypeError, match="returned int, int"):
        two.wrong(batch(2)).wait()


@pytest.mark.parametrize("rows", [3, 5, 6])
def test_a_handle_is_fetched_by_the_workers(models, rows):
    two, three = models
    handle = two.double(batch(rows))
    chained = three.double(handle)
    assert chained.wait().batch["x"].tolist() == [4 * x for x in range(rows)]
    # outputs that are not as long as inputs were, and other modes' handles
    even = two.keep_even(batch(rows))
    assert [one["rows"] for one in three.update(even).wait()] == [
        len(part) for part in even.wait().chunk(three.world_size)
    ]
    assert three.whole(handle).wait() == [rows] * 3
    assert wait_all(two.double(three.double(batch(rows))), handle)[0].batch["x"].tolist() == [
        4 * x for x in range(rows)
    ]


def test_a_worker_s_exception_names_it(models):
    two, _ = models
    with pytest.raises(WorkerError, match=r"two\[0\]"):
        two.apply(lambda data, rank: 1 / rank, batch(2)).wait()


def test_a_mesh_gives_each_data_parallel_rank_its_shard_and_collects_from_one_of_it(cluster: Cluster):
    group = Sharded.create_group().launch(cluster, "0-3", name="sharded")
    try:
        group.init(joined=False).wait()
        with pytest.raises(ValueError, match="ranks 0, 1, 2, 3 have not joined the mesh 'mesh'"):
            group.where(batch(5))
        group.init().wait()
        got = group.where(batch(5)).wait()
        assert got.batch["x"].tolist() == [0, 1, 2, 3, 4] and got.non_tensor_batch["rank"].tolist() == [1, 1, 1, 3, 3]
        again = group.where(group.where(batch(5))).wait()
        assert again.non_tensor_batch["rank"].tolist() == [1, 1, 1, 3, 3]
    finally:
        group.shutdown()


def test_each_shard_of_a_mesh_is_stored_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    import ray

    group = Sharded.create_group().launch(cluster, "0-3", name="sharded")
    try:
        group.init().wait()
        group.where(batch(2)).wait()
        stored = []
        put = ray.put
        monkeypatch.setattr(ray, "put", lambda value: stored.append(len(value)) or put(value))
        group.address(batch(100_001)).wait()
        assert stored == [50_001, 50_000]
    finally:
        group.shutdown()


def test_places_that_form_no_mesh_are_refused():
    whole = [MeshPlace(0, 2, True), MeshPlace(1, 2, True)]
    assert mesh_mode("m", whole).collect([batch(1), batch(2)]).batch["x"].tolist() == [0, 0, 1]
    for wrong in (
        [MeshPlace(0, 2, True), MeshPlace(0, 2, True)],
        [MeshPlace(0, 2, True), MeshPlace(1, 2, False)],
        [*whole, MeshPlace(1, 2, True)],
        [MeshPlace(0, 1, True), MeshPlace(1, 2, True)],
    ):
        with pytest.raises(ValueError, match="mesh 'm'"):
            mesh_mode("m", wrong)


@pytest.mark.parametrize("sizes", [[3, 4], [0, 5], [1, 1, 1], [7], [0, 0]])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rows_taken_from_parts_are_those_of_the_whole(sizes, world_size):
    whole = batch(sum(sizes))
    stops = np.cumsum(sizes)
    parts = [whole[int(stop - size) : int(stop)] for stop, size in zip(stops, sizes, strict=True)]
    for rank, expected in enumerate(whole.chunk(world_size)):
        assert torch.equal(take_rows(parts, rank, world_size).batch["x"], expected.batch["x"])
