"""Files of a run on a disk that is full, for a while or for good; without workers."""

import errno
import os
import subprocess
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlinf_lite.cli.train import run_to_its_end
from rlinf_lite.file_modes import AppendedFile
from rlinf_lite.metrics import MetricLogger
from rlinf_lite.runners import CheckpointError, full_disk
from rlinf_lite.runners.checkpoints import CheckpointStore
from rlinf_lite.runners.full_disk import Disk, DiskFullError, has_no_room
from rlinf_lite.runners.saved_states import SavedStates
from rlinf_lite.runners.stopping import StopRequest
from rlinf_lite.scheduler import SharedMemoryFullError, WorkerError
from rlinf_lite.scheduler.segments import no_room
from tests.runners.conftest import read_metrics

pytestmark = pytest.mark.usefixtures("forks")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(full_disk, "RETRY_S", 0.01)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 64 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place]).returncode:
        pytest.skip("only root may mount a small disk")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def full(times):
    """A write that fails this many times because there is no room."""
    left = [times]

    def write():
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return "written"

    return write


def fill(place):
    with pytest.raises(OSError, match="No space left"), (place / "fill").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(512))


def test_it_is_waited_for_and_said_once(tmp_path, caplog):
    disk = Disk(60.0, check=lambda: None, hint=lambda: "Go on so.")
    assert disk.write(tmp_path / "new" / "file", full(5), num_bytes=1234) == "written"
    first, last = (record.getMessage() for record in caplog.records)
    for part in (f"{tmp_path}/new/file needs 1,234 bytes, and ", " bytes are free", "at most 60 s. Go on so."):
        assert part in first
    assert "there is room again" in last


def test_after_its_limit_nothing_is_waited_for(tmp_path):
    disk = Disk(0.05, check=lambda: None, hint=str)
    with pytest.raises(DiskFullError, match=rf"the disk is full: {tmp_path}/file .* \(runner\.phase_timeout_s\)"):
        disk.write(tmp_path / "file", full(10**6))
    with pytest.raises(DiskFullError):
        disk.write(tmp_path / "file", full(1))


def test_a_wait_ends_where_the_run_is_stopped_and_other_errors_are_raised(tmp_path):
    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Disk(60.0, stop, hint=str).write(tmp_path / "file", full(10**6))

    def refuse():
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(PermissionError):
        Disk(60.0, stop, hint=str).write(tmp_path / "file", refuse)


def test_full_disks_are_known_by_whatever_says_so():
    error = CheckpointError("it cannot be written")
    assert not has_no_room(error) and not has_no_room(OSError(errno.EIO, "Input/output error"))
    error.__cause__ = OSError(errno.EDQUOT, "Disk quota exceeded")
    assert has_no_room(error)
    assert has_no_room(CheckpointError("Error while serializing: I/O error: No space left on device (os error 28)"))


def test_metrics_and_curves_of_a_disk_that_was_full_are_whole(small_disk):
    tries = []

    def patiently(path, write, num_bytes=0):
        while True:
            try:
                return write()
            except OSError as error:
                tries.append(error.filename)
                if len(tries) % 3 == 0:
                    (small_disk / "fill").unlink()

    metrics = {f"train/{number}": float(number) for number in range(200)} | {"env/num_steps": 8.0}
    with MetricLogger(small_disk, patiently=patiently) as logger:
        for step in (1, 2, 3):
            if step > 1:
                fill(small_disk)
            logger.log(step, metrics)
    assert {os.path.basename(path).partition(".")[0] for path in tries} >= {"metrics"}
    assert [line["step"] for line in read_metrics(small_disk)] == [1, 2, 3]
    events = EventAccumulator(str(small_disk / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/7")] == [1, 2, 3]


def test_what_finds_no_room_is_written_before_what_comes_next(small_disk):
    file = AppendedFile(small_disk / "file")
    file.append(b"one\n")
    fill(small_disk)
    with pytest.raises(OSError, match=rf"No space left on device.*{file.path}"):
        file.append(b"two" * 5000)
    assert file.path.read_bytes() == b"one\n"
    (small_disk / "fill").unlink()
    file.append(b"\nthree")
    file.close()
    assert file.path.read_bytes() == b"one\n" + b"two" * 5000 + b"\nthree"


def test_shared_memory_that_is_full_is_one_line(tmp_path, capsys):
    cause = no_room(str(tmp_path / "messages"), "a message", 2**20)
    assert isinstance(cause, SharedMemoryFullError)

    def train(cfg):
        raise WorkerError("rollout", 0, "generate", "SharedMemoryFullError: ...", "Traceback ...") from cause

    assert run_to_its_end(train, None) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{tmp_path}/messages (a message) needs 1.0 MiB" in said and "--shm-size" in said


def test_workers_serve_calls_again_before_a_checkpoint_is_tried_again(tmp_path):
    """One rank finds no room while another still writes: the failed wait aborts their group."""
    group = MagicMock(aborted=False)
    group.abort.side_effect = lambda reason: setattr(group, "aborted", True)
    group.clear_abort.side_effect = lambda timeout_s: setattr(group, "aborted", False)
    write = full(1)

    def save(directory):
        assert not group.aborted
        try:
            write()
        except OSError as error:
            group.abort("another rank has failed")
            raise WorkerError("actor", 0, "save_checkpoint", "OSError", "") from error

    state = {"completed_steps": 1}
    states = SavedStates(
        CheckpointStore(tmp_path, 3), tmp_path, StopRequest(60.0), lambda: state, save, [group], [group]
    )
    states.open(SimpleNamespace(newest=lambda: None, num_bytes=0), resumed_from=None, say=print)
    assert states.save().name == "step_000001" and not group.aborted
