import pickle
import signal
from collections import Counter

import numpy as np
import pytest
import torch

from rlinf_lite.data import DataProto, DataProtoError


def make(rows: int = 5, **meta) -> DataProto:
    return DataProto.from_dict(
        tensors={"x": torch.arange(rows * 2).reshape(rows, 2), "y": torch.arange(rows).to(torch.bfloat16)},
        non_tensors={"text": [f"row {i}" for i in range(rows)], "n": np.arange(rows)},
        meta_info=meta,
    )


def same(a: DataProto, b: DataProto) -> bool:
    return (
        a.batch.keys() == b.batch.keys()
        and a.non_tensor_batch.keys() == b.non_tensor_batch.keys()
        and all(torch.equal(a.batch[key], b.batch[key]) and a.batch[key].dtype == b.batch[key].dtype for key in a.batch)
        and all((a.non_tensor_batch[key] == b.non_tensor_batch[key]).all() for key in a.non_tensor_batch)
        and a.meta_info == b.meta_info
    )


def rows_of(data: DataProto) -> list[int]:
    return data.non_tensor_batch["n"].tolist()


def test_rows_of_all_columns_must_be_equal_in_number():
    with pytest.raises(DataProtoError, match="x 2, n 3"):
        DataProto.from_dict({"x": torch.zeros(2)}, {"n": np.zeros(3)})
    assert len(DataProto()) == 0 and len(make(3)) == 3


@pytest.mark.parametrize("index", [[3, 0], np.array([3, 0]), torch.tensor([3, 0])])
def test_rows_are_gathered(index):
    data = make()
    got = data[index]
    assert rows_of(got) == [3, 0] and got.batch["x"].tolist() == [[6, 7], [0, 1]]
    assert got.non_tensor_batch["text"].tolist() == ["row 3", "row 0"]


def test_slices_masks_and_single_rows():
    data = make()
    assert rows_of(data[1:4:2]) == [1, 3] and rows_of(data[-1]) == [4] and rows_of(data[2]) == [2]
    assert rows_of(data[np.array([True, False, False, False, True])]) == [0, 4]
    assert rows_of(data[torch.tensor([False] * 5)]) == []
    for row in (np.int64(2), torch.tensor(2)):  # what numpy and torch count in is a row as well
        assert rows_of(data[row]) == [2] and data[row].batch["x"].shape == (1, 2)
    with pytest.raises(IndexError):
        data[5]
    with pytest.raises(DataProtoError, match="mask"):
        data[np.array([True])]
    assert data[1:3].batch["x"].data_ptr() == data.batch["x"][1:].data_ptr(), "a slice is a view"


def test_columns():
    data = make(step=3)
    assert data.select(["x"], []).batch.keys() == {"x"} and not data.select(["x"], []).non_tensor_batch
    assert data.rename("x", "z").batch.keys() == {"z", "y"} and "x" in data.batch
    taken = data.pop(["x"], ["n"])
    assert taken.batch.keys() == {"x"} and taken.non_tensor_batch.keys() == {"n"}
    assert data.batch.keys() == {"y"} and data.non_tensor_batch.keys() == {"text"} and data.meta_info == {"step": 3}
    for wrong in (lambda: data.select(["nothing"]), lambda: data.pop(["nothing"]), lambda: data.rename("nothing", "x")):
        with pytest.raises(DataProtoError, match="no nothing; there are y"):
            wrong()
    with pytest.raises(DataProtoError, match="would be called y"):
        make().rename("x", "y")


def test_union_refuses_values_that_differ():
    data = make()
    both = data.union(DataProto.from_dict({"z": torch.ones(5), "x": data.batch["x"].clone()}, meta_info={"k": 1}))
    assert both.batch.keys() == {"x", "y", "z"} and both.meta_info == {"k": 1} and "z" not in data.batch
    with pytest.raises(DataProtoError, match="both have x"):
        data.union(DataProto.from_dict({"x": data.batch["x"] + 1}))
    with pytest.raises(DataProtoError, match="both have text"):
        data.union(DataProto.from_dict(non_tensors={"text": ["other"] * 5}))
    with pytest.raises(DataProtoError, match="both have k"):
        both.union(DataProto.from_dict({"w": torch.ones(5)}, meta_info={"k": 2}))
    with pytest.raises(DataProtoError, match="numbers of rows"):
        data.union(DataProto.from_dict({"z": torch.ones(4)}))
    nan = DataProto.from_dict({"z": torch.tensor([1.0, float("nan")])}, meta_info={"k": float("nan")})
    assert nan.union(DataProto.from_dict({"z": torch.tensor([1.0, float("nan")])}, meta_info={"k": float("nan")}))


@pytest.mark.parametrize("rows", [0, 1, 5, 8])
@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_chunks_put_together_are_the_batch(rows, chunks):
    data = make(rows, step=1)
    parts = data.chunk(chunks)
    sizes = [len(part) for part in parts]
    assert len(parts) == chunks and sum(sizes) == rows and max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert same(DataProto.concat(parts), data)


def test_split_repeat_and_reorder():
    data = make(3)
    assert [rows_of(part) for part in data.split(2)] == [[0, 1], [2]]
    assert rows_of(data.repeat(2)) == [0, 0, 1, 1, 2, 2]
    assert rows_of(data.repeat(2, interleave=False)) == [0, 1, 2, 0, 1, 2]
    assert rows_of(data.reorder(torch.tensor([2, 0, 1]))) == [2, 0, 1] and rows_of(data) == [0, 1, 2]
    with pytest.raises(DataProtoError, match="permutation"):
        data.reorder([0, 0, 1])


def test_concat_refuses_parts_that_do_not_fit_and_keeps_all_metrics():
    with pytest.raises(DataProtoError, match="different columns: x"):
        DataProto.concat([make(), make().select(["y"])])
    with pytest.raises(DataProtoError, match="both have step"):
        DataProto.concat([make(step=1), make(step=2)])
    parts = [make(2, metrics={"loss": 1.0}), make(2, metrics={"loss": 2.0}), make(1)]
    assert DataProto.concat(parts).meta_info["metrics"] == [{"loss": 1.0}, {"loss": 2.0}]
    assert parts[0].meta_info == {"metrics": {"loss": 1.0}}


@pytest.mark.parametrize(("rows", "divisor", "added"), [(5, 4, 3), (4, 4, 0), (1, 4, 3), (3, 7, 4)])
def test_padding_repeats_rows_mutates_nothing_and_is_undone(rows, divisor, added):
    data = make(rows)
    padded, count = data.pad_to_divisor(divisor)
    assert count == added and len(padded) % divisor == 0 and len(data) == rows
    assert rows_of(padded)[rows:] == [row % rows for row in range(added)]
    assert same(padded.unpad(count), make(rows))
    padded.batch["x"] = padded.batch["x"] + 1
    assert same(data, make(rows))


def test_files_hold_everything_and_no_pickle(tmp_path):
    data = make(4, step=3, nested={"a": [1, 2]})
    data.save(tmp_path / "batch")
    assert {path.suffix for path in (tmp_path / "batch").iterdir()} == {".safetensors", ".json"}
    loaded = DataProto.load(tmp_path / "batch")
    assert same(loaded, data) and loaded.non_tensor_batch["n"].dtype == data.non_tensor_batch["n"].dtype
    with pytest.raises(DataProtoError, match="JSON"):
        DataProto.from_dict(non_tensors={"x": [object()]}).save(tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("meta_info", "rows", "said"),
    [
        ({"shape": (2, 3)}, ["a"], r"meta_info\['shape'\] is a tuple. Save list\(...\) of it"),
        ({"names": {1: "a"}}, ["a"], r"meta_info\['names'\] has the key 1. Make it a string"),
        ({"deep": [{"x": [None, {2}]}]}, ["a"], r"meta_info\['deep'\]\[0\]\['x'\]\[1\] is a set"),
        ({}, ["a", {"pair": (1, 2)}], r"x\[1\]\['pair'\] is a tuple"),
        ({"kind": signal.SIGINT}, ["a"], r"meta_info\['kind'\] is a Signals. Save int\(...\) of it"),
        ({"counts": Counter("a")}, ["a"], r"meta_info\['counts'\] is a Counter. Save dict\(...\) of it"),
        ({}, [np.float64(1), "a"], r"x\[0\] is a float64. Save float\(...\) of it"),
        ({}, np.array(["2020-01-01"], "M8[ns]"), r"x is an array of datetime64\[ns\]. Make it one of plain numbers"),
        ({}, np.zeros(1, ">f4"), "x is an array of >f4. Make it one of plain numbers"),
        ({}, np.array([["a", "b"]]), r"x is an array \[1, 2\] of <U1. Make its rows lists"),
        ({}, np.array([["a", {}]]), r"x is an array \[1, 2\] of object. Make its rows lists"),
    ],
)
def test_what_json_would_change_is_refused(tmp_path, meta_info, rows, said):
    with pytest.raises(DataProtoError, match=said):
        DataProto.from_dict(non_tensors={"x": rows}, meta_info=meta_info).save(tmp_path / "batch")
    assert not (tmp_path / "batch").exists()


def test_objects_and_strings_come_back_from_files_as_they_were(tmp_path):
    numbers = np.array([1, 2.5, True], dtype=object)
    words = np.array(["pick", "it", "up"])
    DataProto(non_tensor_batch={"n": numbers, "w": words}, meta_info={"nan": float("nan")}).save(tmp_path / "batch")
    found, read = DataProto.load(tmp_path / "batch").non_tensor_batch.values()
    assert read.dtype == words.dtype and read.tolist() == words.tolist()
    assert found.dtype == object and [type(x) for x in found] == [int, float, bool] and list(found) == list(numbers)


@pytest.mark.parametrize("buffers", [True, False])
def test_pickling_carries_bytes_beside_and_owns_what_arrives_read_only(buffers):
    data, beside = make(3, step=1), []
    data.batch["empty"] = torch.zeros(3, 0)
    head = pickle.dumps(data, protocol=5, buffer_callback=beside.append if buffers else None)
    frozen = [bytes(buffer.raw()) for buffer in beside]
    got = pickle.loads(head, buffers=frozen)
    passed_on = DataProto.concat([got[:1], got[1:]])
    assert got._borrowed == buffers, "looked at too early"
    assert same(got, data) and same(passed_on, data)
    got.batch["x"] += 1
    got.non_tensor_batch["n"] += 1
    assert same(pickle.loads(head, buffers=frozen), data) and data.batch["x"][0, 0] == 0


def test_a_column_of_a_batch_of_one_travels():
    data = DataProto({"x": torch.ones(1, 6)[:, 0]})  # its stride is 6
    assert same(pickle.loads(pickle.dumps(data)), data)
    assert DataProto.concat([data, data]).batch["x"].tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_concat_equals_torch_cat(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(rows, *shape).to(dtype) for rows in (2, 0, 5)]
    parts.append(torch.randn(*shape, 4).to(dtype).movedim(-1, 0))  # not contiguous
    for chosen in (parts[:3], parts):
        joined = DataProto.concat([DataProto({"x": part}) for part in chosen]).batch["x"]
        assert joined.dtype == dtype and torch.equal(joined, torch.cat(chosen))
