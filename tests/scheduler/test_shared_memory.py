import errno
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_lite.scheduler import shared_memory
from rlinf_lite.scheduler.errors import SchedulerError
from rlinf_lite.scheduler.segments import Parcel, discard, unpack
from tests.scheduler.parcels import pack

SIZE = 300_000


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shared_memory, "_is_half_free", lambda directory, num_bytes: True)  # the disk of this machine
    shared_memory.forget_all()  # messages of earlier tests
    yield
    shared_memory.forget_all()
    shared_memory._most_kept.cache_clear()


def sent(obj: Any, directory: Path, inbox: str = "inbox") -> Parcel:
    """The parcel in the state after the reader has taken it from its inbox."""
    parcel = pack(obj, str(directory), inbox)
    parcel.arrive()
    assert not parcel.place or parcel.mapped or not parcel.place.is_kept
    return parcel


def kept() -> list[shared_memory._Written]:
    return [segment for shelf in shared_memory._written.values() for segment in shelf]


def in_child(do: Callable[[], Any]) -> tuple[int, Any]:
    """Fork a process that calls a function and then waits; returns its id and the function's result."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        result = do()
        os.write(writing, pickle.dumps(result))
        time.sleep(60)
        os._exit(0)
    answer = os.read(reading, 2**16)
    os.close(reading)
    os.close(writing)
    return child, pickle.loads(answer)


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_memory_is_written_again(tmp_path: Path) -> None:
    places = []
    for i in range(5):
        parcel = sent(np.full(SIZE, i, np.uint8), tmp_path)
        assert os.listdir(tmp_path) == []
        places.append(parcel.place)
        assert (unpack(parcel) == i).all()
    assert len(set(places)) == 1 and len(kept()) == 1


PARTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "array": lambda message: message["a"],
    "slice": lambda message: message["a"][5:7],
    "tensor": lambda message: message["b"].view(torch.int32)[::2].numpy(),
    "memoryview": lambda message: memoryview(message["a"])[100:],
}


@pytest.mark.parametrize("part", PARTS)
def test_what_is_held_does_not_change(tmp_path: Path, part: str) -> None:
    held = PARTS[part](unpack(sent({"a": np.full(SIZE, 1, np.uint8), "b": torch.full((SIZE,), 2)}, tmp_path)))
    expected = np.array(held).copy()
    for i in range(10, 14):
        again = unpack(sent({"a": np.full(SIZE, i, np.uint8), "b": torch.full((SIZE,), i)}, tmp_path))
        assert (again["a"] == i).all() and (again["b"] == i).all()
        again["a"][:] = 77  # the reader's own
        again["b"].zero_()
        del again
        assert np.array_equal(np.array(held), expected)
    assert len(kept()) == 2
    del held
    assert all(segment.is_free() for segment in kept())


def test_the_sender_may_change_what_it_has_sent(tmp_path: Path) -> None:
    array = np.zeros(SIZE, np.uint8)
    for i in range(3):
        array[:] = i
        parcel = sent(array, tmp_path)
        array[:] = 99
        assert (unpack(parcel) == i).all()


def test_unread_messages_are_not_overwritten(tmp_path: Path) -> None:
    waiting = [sent(np.full(SIZE, i, np.uint8), tmp_path) for i in range(10)]
    assert [int(unpack(parcel).max()) for parcel in waiting] == list(range(10))


def test_a_message_whose_memory_is_gone_is_named(tmp_path: Path) -> None:
    for inbox in ("", "inbox"):
        parcel = pack(np.ones(SIZE, np.uint8), str(tmp_path), inbox)
        assert parcel.place is not None
        os.unlink(parcel.place.path)
        parcel.arrive()
        with pytest.raises(SchedulerError, match=r"memory of a message cannot be opened: .*No such file"):
            unpack(parcel)


def test_each_inbox_has_its_own(tmp_path: Path) -> None:
    names = {unpack(sent(np.zeros(SIZE, np.uint8), tmp_path, inbox)).size and kept()[-1].place.name for inbox in "abab"}
    assert len(names) == 2


def test_sizes_differ(tmp_path: Path) -> None:
    """A smaller message leaves a rest of an older one in the segment; a larger one needs more memory."""
    rng = np.random.default_rng(0)
    for size in rng.integers(65_536, 1_000_000, 40):
        array = rng.integers(0, 256, size, dtype=np.uint8)
        np.testing.assert_array_equal(unpack(sent([array, array[::-1]], tmp_path))[0], array)
    assert len(kept()) <= 5  # one for each power of two


def test_a_dropped_message_leaves_its_memory(tmp_path: Path) -> None:
    parcel = sent(np.zeros(SIZE, np.uint8), tmp_path)
    assert not kept()[0].is_free()
    discard(parcel)
    assert kept()[0].is_free()
    discard(sent(np.zeros(SIZE, np.uint8), tmp_path, ""))
    assert os.listdir(tmp_path) == []


def test_a_killed_reader(tmp_path: Path) -> None:
    holding: list[Any] = []
    opened, unopened = (pack(np.zeros(SIZE, np.uint8), str(tmp_path), "inbox") for _ in range(2))
    child, _ = in_child(lambda: holding.append(unpack(opened)))
    first, second = kept()
    assert not first.is_free() and not second.is_free()
    kill(child)
    assert first.is_free()  # the kernel has released it
    assert len(os.listdir(tmp_path)) == 1
    shared_memory.forget_inbox("inbox")
    assert os.listdir(tmp_path) == [] and unopened.mapped is None


def test_a_killed_writer(tmp_path: Path) -> None:
    child, parcel = in_child(lambda: pack(np.arange(SIZE), str(tmp_path), "inbox"))
    kill(child)
    parcel.arrive()  # sent before, it arrives
    assert os.listdir(tmp_path) == []
    shared_memory.forget_writers()
    received = unpack(parcel)
    del parcel
    shared_memory.forget_writers()
    assert not shared_memory._mapped
    np.testing.assert_array_equal(received, np.arange(SIZE))
    received[:] = 0


def test_a_forked_child_does_not_let_go_for_its_parent(tmp_path: Path) -> None:
    received = unpack(sent(np.ones(SIZE, np.uint8), tmp_path))

    def drop() -> None:
        nonlocal received
        del received

    child, _ = in_child(drop)
    assert not kept()[0].is_free()
    del received
    assert kept()[0].is_free()
    kill(child)


def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "KEPT_BYTES", 4 * SIZE)
    waiting = [sent(np.full(SIZE, i, np.uint8), tmp_path, f"inbox{i % 3}") for i in range(20)]
    assert len(kept()) == 4 and len(os.listdir(tmp_path)) == 16  # those are for one use
    assert [int(unpack(parcel).max()) for parcel in waiting] == list(range(20))
    del waiting
    assert os.listdir(tmp_path) == []
    assert (unpack(sent(np.ones(5 * SIZE, np.uint8), tmp_path)) == 1).all() and len(kept()) == 4
    assert (unpack(sent(np.ones(3 * SIZE, np.uint8), tmp_path)) == 1).all()
    assert sorted(segment.num_bytes for segment in kept()) == [SIZE, 3 * SIZE]  # others made way


def test_few_files_are_open(tmp_path: Path) -> None:
    waiting = [sent(np.full(70_000, i, np.uint8), tmp_path) for i in range(100)]
    assert len(kept()) == shared_memory.KEPT_SEGMENTS
    assert [int(unpack(parcel).max()) for parcel in waiting] == list(range(100))


def test_memory_that_is_let_go_is_free_at_once(tmp_path: Path) -> None:
    parcel = sent(np.ones(SIZE, np.uint8), tmp_path)
    mapped = parcel.mapped
    assert mapped is not None
    unpack(parcel)
    shared_memory.forget_inbox("inbox")
    assert os.fstat(mapped._fd).st_blocks == 0  # though it is mapped
    assert mapped.is_over()


def test_full_memory_takes_what_is_kept_unused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpack(sent(np.ones(SIZE, np.uint8), tmp_path))
    held = sent(np.full(SIZE, 7, np.uint8), tmp_path, "other")
    really, room = os.pwrite, [0]

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if len(data) > 1 and len(kept()) > room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return really(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    room[0] = 2  # the one that waits, and the new one
    assert (unpack(sent(np.full(3 * SIZE, 3, np.uint8), tmp_path)) == 3).all()
    room[0] = 0
    with pytest.raises(SchedulerError, match=r"shared memory is full: .*/messages \(a message\) needs 1\.7 MiB"):
        pack(np.ones(6 * SIZE, np.uint8), str(tmp_path), "inbox")
    assert os.listdir(tmp_path) == [] and len(kept()) == 1
    monkeypatch.setattr(os, "pwrite", really)
    assert (unpack(held) == 7).all()
    assert (unpack(sent(np.full(6 * SIZE, 4, np.uint8), tmp_path)) == 4).all()
    assert os.listdir(tmp_path) == []


def test_half_of_the_memory_is_left_to_what_comes_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for any number of processes: only free memory counts, so they need not know of each other."""
    monkeypatch.undo()
    for used, is_kept in ((0.4, True), (0.6, False)):
        usage = shutil._ntuple_diskusage(10**9, int(used * 10**9), int((1 - used) * 10**9))
        monkeypatch.setattr(shared_memory.shutil, "disk_usage", lambda path, usage=usage: usage)
        assert sent(np.zeros(SIZE, np.uint8), tmp_path, f"inbox{used}").place.is_kept == is_kept
