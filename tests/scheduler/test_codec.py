import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_lite.scheduler import shared_memory
from rlinf_lite.scheduler.errors import SchedulerError
from rlinf_lite.scheduler.segments import BULK_BYTES, unpack
from tests.scheduler.parcels import pack

Travel = Callable[[Any], Any]


@pytest.fixture(params=["once", "kept", "again"])
def travel(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Travel]:
    """Send an object through shared memory and unpack it: in memory that is used once, that is kept, and that is
    reused."""

    def go(obj: Any) -> Any:
        inbox = "" if request.param == "once" else "inbox"
        if request.param == "again":
            unpack(pack(obj, str(tmp_path), inbox))
            for mapped in shared_memory._mapped.values():
                mapped.open()[:] = b"\xff" * len(mapped.open())
        received = unpack(pack(obj, str(tmp_path), inbox))
        assert os.listdir(tmp_path) == []  # opening it removes its name
        return received

    yield go
    shared_memory.forget_all()


@pytest.mark.parametrize("num_rows", [3, 100_000])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_tensors_of_every_type(travel: Travel, dtype: torch.dtype, num_rows: int) -> None:
    sent = torch.randint(0, 2, (num_rows, 3)).to(dtype)
    received = travel(sent)
    assert received.dtype == dtype and torch.equal(received, sent)
    received.zero_()  # belongs to the receiver
    assert sent.any()


@pytest.mark.parametrize(
    "sent",
    [
        torch.tensor(1.5),
        torch.empty(0, 7),
        torch.arange(60_000).reshape(200, 300).T,
        torch.arange(10)[::2],
        torch.ones(1, 6)[:, 0],
        torch.ones(4, requires_grad=True),
        torch.nn.Parameter(torch.ones(4)),
        torch.eye(3).to_sparse(),
    ],
    ids=["scalar", "empty", "transposed", "strided", "column_of_one", "with_grad", "parameter", "sparse"],
)
def test_tensors_of_every_layout(travel: Travel, sent: torch.Tensor) -> None:
    received = travel(sent)
    assert received.shape == sent.shape and received.dtype == sent.dtype
    assert torch.equal(received.to_dense(), sent.to_dense())


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "sent",
    [
        np.arange(100_000),
        np.asfortranarray(np.arange(90_000).reshape(300, 300)),
        np.arange(180_000).reshape(300, 600)[:, ::2],
        np.array(3.0),
        np.array(["pick", "push"]),
        np.array([{"a": 1}, None], dtype=object),
        np.zeros(3, dtype=[("x", "f4"), ("y", "i8")]),
        np.frombuffer(bytes(range(12)), np.uint8).reshape(3, 4),
        np.broadcast_to(np.arange(3), (2, 3)),
        np.zeros((0, 3)),
        read_only(np.ones(3, dtype=np.dtype([("a", "i1"), ("b", "f8")], align=True))),
        read_only(np.ones(3, dtype=np.dtype("i1,f8", align=True))),
        np.ones((4, 2), dtype=np.dtype({"names": ["x", "y"], "formats": ["i4", "i4"], "offsets": [4, 0]}))[:, ::2],
    ],
    ids=[
        *("big", "fortran", "strided", "scalar", "strings", "objects", "records", "read_only", "broadcast", "empty"),
        *("padded", "unnamed", "disordered"),
    ],
)
def test_arrays(travel: Travel, sent: np.ndarray) -> None:
    received = travel(sent)
    assert received.dtype == sent.dtype
    np.testing.assert_array_equal(received, sent)
    assert received.flags.writeable


def test_nested_tensors(travel: Travel) -> None:
    received = travel(torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)]))
    assert [part.tolist() for part in received.unbind()] == [[[1.0] * 3] * 2, [[0.0] * 3]]


@dataclass
class Observation:
    images: dict[str, torch.Tensor]
    instruction: list[str]


def test_nested_objects(travel: Travel) -> None:
    image = torch.randint(0, 255, (4, 128, 128, 3), dtype=torch.uint8)
    obs = Observation({"wrist": image, "base": image[:1]}, ["pick up", "the cube ☐"])
    sent = {"obs": obs, "list": [1, (None, b"x")]}
    received = travel(sent)
    assert torch.equal(received["obs"].images["wrist"], image)
    assert torch.equal(received["obs"].images["base"], image[:1])
    assert received["obs"].instruction == obs.instruction and received["list"] == sent["list"]


def test_functions_and_local_classes(travel: Travel) -> None:
    class Local:
        value = 3

    assert travel(lambda x: x + Local.value)(1) == 4


def test_small_objects_use_no_file(tmp_path: Path) -> None:
    assert pack({"x": np.zeros(BULK_BYTES - 1, np.uint8)}, str(tmp_path)).place is None
    assert pack({"x": np.zeros(BULK_BYTES, np.uint8)}, str(tmp_path)).place is not None


def test_memory_outlives_its_file_and_its_neighbours(travel: Travel) -> None:
    received = travel([np.full(BULK_BYTES, i, np.uint8) for i in range(3)])
    last = received[2]
    del received
    assert (last == 2).all()


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(SchedulerError, match=rf"{tmp_path}/.* needs 1\.0 MiB, and .* MiB are free .*--shm-size"):
        pack(np.zeros(2**20, np.uint8), str(tmp_path))
    assert os.listdir(tmp_path) == []
