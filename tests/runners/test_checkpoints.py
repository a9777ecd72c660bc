"""Checkpoint directories: `last` is always complete, and a damaged checkpoint is refused with the name of an earlier
one."""

import io
import os

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rlinf_lite.config.resources import policy_directory
from rlinf_lite.config.schema import ModelConfig
from rlinf_lite.data import DataProto
from rlinf_lite.data.lerobot.layout import vector_feature
from rlinf_lite.data.lerobot.writer import Episode, PartWriter, begin, publish
from rlinf_lite.envs import EnvSpec
from rlinf_lite.models import MLPGaussianPolicy, load_policy
from rlinf_lite.models.text.causal_lm import CausalLM
from rlinf_lite.models.text.presets import preset
from rlinf_lite.runners.checkpoints import CheckpointError, CheckpointStore, find_checkpoint, verify
from rlinf_lite.runners.simulation import save_env_states
from rlinf_lite.shipped import shipped


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


class Crash(BaseException):
    """Stands for the end of the process: it is not caught."""


WRITES = {os: ["mkdir", "rename", "replace", "rmdir", "symlink", "unlink", "chmod", "fsync"], io: ["open"]}


def crash_at(monkeypatch, number):
    """Make the file operation with this number, and all later ones, fail."""
    done = 0

    def counted(operation):
        def call(*args, **kwargs):
            nonlocal done
            reads = operation is io_open and (list(args[1:2]) or ["r"])[0] in ("r", "rb")
            done += not reads
            if done > number and not reads:
                raise Crash
            return operation(*args, **kwargs)

        return call

    io_open = io.open
    for module, names in WRITES.items():
        for name in names:
            monkeypatch.setattr(module, name, counted(getattr(module, name)))


def content(checkpoint):
    verify(checkpoint)
    return (checkpoint / "policy" / "model.safetensors").read_text()[:3]


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("steps", [[1, 2, 3], [1, 2, 2], [2, 2], [1, 2, 3, 2]], ids=str)
def test_a_crash_at_any_file_operation_leaves_a_whole_checkpoint(tmp_path, monkeypatch, steps, durable):
    *earlier, last = steps
    seen = set()
    for number in range(1000):
        run = tmp_path / str(number)
        store = CheckpointStore(run, 2, durable)
        for step in earlier:
            write(store, step, f"{step}: ")
        before = content(find_checkpoint(run))
        with monkeypatch.context() as patch:
            crash_at(patch, number)
            try:
                write(store, last, f"new{last}")
                finished = True
            except Crash:
                finished = False
        found = content(find_checkpoint(run))
        assert found in (before, "new", f"{last}: "), f"operation {number}"
        seen.add(found)
        write(CheckpointStore(run, 2, durable), 9, "9: ")  # the leftovers disturb nothing
        assert content(find_checkpoint(run)) == "9: "
        assert not [path for path in store.root.iterdir() if path.name.startswith(".")]
        if finished:
            break
    assert finished and number > 10 and "new" in seen and len(seen) > 1


def test_where_last_leads_nowhere_the_newest_whole_one_is_taken_and_named(tmp_path, caplog):
    store = CheckpointStore(tmp_path, keep=5)
    for step in (1, 999_999, 1_000_000):
        write(store, step)
    (store.root / "step_1000001").mkdir()  # not whole
    for damage in (lambda: (store.root / "last").unlink(), lambda: (store.root / "last").symlink_to("step_000777")):
        damage()
        for path in (tmp_path, store.root, store.root / "last"):
            caplog.clear()
            assert find_checkpoint(path).name == "step_1000000"
            assert "step_1000000" in caplog.text and "last" in caplog.text
        for path in (tmp_path, store.root):
            assert policy_directory(path) == (store.root / "step_1000000" / "policy").resolve()


def test_steps_are_in_the_order_of_their_numbers(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (999_999, 1_000_000, 1_000_001):
        write(store, step)
    assert [path.name for path in store.steps()] == ["step_1000000", "step_1000001"]
    (store.root / "step_1000001" / "policy" / "model.safetensors").write_text("")
    with pytest.raises(CheckpointError, match=r"step_1000000$"):
        verify(find_checkpoint(tmp_path))


def test_checksums_that_cannot_be_read_are_damage_too(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    (write(store, 2) / "checksums.json").write_text('{"policy')
    with pytest.raises(CheckpointError, match=r"checksums\.json cannot be read.*step_000001"):
        verify(find_checkpoint(tmp_path))


def test_steps_that_are_done_again_are_not_taken_for_the_newest(tmp_path):
    store = CheckpointStore(tmp_path, keep=5)
    for step in (2, 4, 6, 8):
        write(store, step, "old")
    assert [path.name for path in store.go_on_from(4)] == ["step_000006", "step_000008"]
    write(store, 5, "new")
    assert [path.name for path in store.steps()] == ["step_000002", "step_000004", "step_000005"]
    assert find_checkpoint(tmp_path).name == "step_000005"
    verify(store.root / "superseded" / "step_000008")
    assert store.go_on_from(5) == []


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_the_umask_decides_who_may_read(tmp_path, umask, mode):
    previous = os.umask(umask)
    try:
        store = CheckpointStore(tmp_path, keep=2)
        partial = store.begin(1)
        save_file({"a": torch.zeros(2)}, partial / "training_state" / "optimizer.safetensors")
        save_env_states([{"env_id": 0, "actions": np.zeros((2, 1))}], partial / "training_state")
        spec = EnvSpec(2, 3, {}, [-1.0, -1.0], [1.0, 1.0], 10, False)
        MLPGaussianPolicy.from_config(ModelConfig(), spec).save_pretrained(tmp_path / "export")
        DataProto({"x": torch.zeros(2, 1)}).save(tmp_path / "proto")
        part = PartWriter(begin(tmp_path / "demos") / "0", {"action": vector_feature("action", 1)}, 10)
        part.add(Episode(0, {"action": np.zeros((1, 1), np.float32)}, ["push"]))
        part.finish()
        publish(tmp_path / "demos", 10, None)
        store.commit(1, partial)
        CausalLM.from_config(preset("tiny"), shipped("assets") / "char_tokenizer").save_pretrained(tmp_path / "text")
        load_policy(shipped("assets") / "tabletop_vla").save_pretrained(tmp_path / "vla")
    finally:
        os.umask(previous)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 15
    assert {path: oct(path.stat().st_mode & 0o777) for path in files} == dict.fromkeys(files, oct(mode))
