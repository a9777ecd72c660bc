"""Checkpoint directories: `last` is always whole, damage is refused and the one before it named."""

import os

import pytest

from rlinf_lite.runners.checkpoints import CheckpointError, CheckpointStore, find_checkpoint, newest_run, verify


def write(store, step, text="weights"):
    partial = store.begin(step)
    (partial / "policy").mkdir()
    (partial / "policy" / "model.safetensors").write_text(text * 100)
    return store.commit(step, partial)


def test_last_moves_and_old_ones_go(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3):
        write(store, step)
    assert [path.name for path in store.steps()] == ["step_000002", "step_000003"]
    assert os.readlink(tmp_path / "checkpoints" / "last") == "step_000003"
    newest = store.steps()[-1].resolve()
    assert find_checkpoint(tmp_path) == find_checkpoint(tmp_path / "checkpoints" / "last") == newest
    verify(find_checkpoint(tmp_path))


def test_a_write_that_never_finished_leaves_last_whole(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    partial = store.begin(2)
    (partial / "half").write_text("x")
    assert find_checkpoint(tmp_path).name == "step_000001"
    verify(find_checkpoint(tmp_path))
    write(store, 2)
    assert not partial.exists() and find_checkpoint(tmp_path).name == "step_000002"


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_damage_is_refused_and_the_one_before_is_named(tmp_path, damage):
    store = CheckpointStore(tmp_path, keep=5)
    write(store, 1)
    file = write(store, 2) / "policy" / "model.safetensors"
    content = file.read_text()
    if damage == "remove":
        file.unlink()
    else:
        file.write_text(content[:50] if damage == "truncate" else "X" + content[1:])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*step_000001"):
        verify(find_checkpoint(tmp_path))


def test_a_disk_that_cannot_be_written_names_the_path(tmp_path):
    (tmp_path / "checkpoints").write_text("a file is in the way")
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        CheckpointStore(tmp_path, keep=1).begin(1)


def test_the_newest_run_of_a_name(tmp_path):
    for name in ("ppo-20260101-000000", "ppo-20260102-000000", "ppo-big-20260103-000000", "ppo-20260104-000000"):
        if name != "ppo-20260104-000000":  # the newest has no checkpoint
            write(CheckpointStore(tmp_path / name, 1), 1)
    assert newest_run(tmp_path, "ppo").name == "ppo-20260102-000000"
    assert newest_run(tmp_path, "sac") is None
