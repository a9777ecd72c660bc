"""The replay buffer: what it holds, what a checkpoint comes back to, and what it refuses."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from rlinf_lite.training import replay
from rlinf_lite.training.replay import ReplayBuffer, ReplayError, drawn, flags_of
from tests.workers.test_off_policy import NUM_ENVS, T, played

ALL = slice(0, NUM_ENVS)


def buffer_of(directory: Path, num_steps: int = 5, rows: slice = ALL, capacity: int = 3 * NUM_ENVS * T) -> ReplayBuffer:
    buffer = ReplayBuffer(directory, NUM_ENVS, rows, T, capacity, 0.99)
    for step in range(num_steps):
        block = played(step)
        buffer.add(step, block, flags_of(block))
    return buffer


def content(buffer: ReplayBuffer) -> list[bytes]:
    found = buffer.read(buffer.pool("online"))
    tensors = [*found.inputs.values(), found.actions, found.mask, found.rewards, found.discounts]
    return [x.numpy().tobytes() for x in [*tensors, *found.next_inputs.values()]]


def test_it_holds_the_newest_steps_and_reads_what_was_played(tmp_path: Path) -> None:
    buffer = buffer_of(tmp_path)
    assert (buffer.first, buffer.end) == (2, 5)
    places = buffer.pool("online")
    assert len(places) == 3 * NUM_ENVS * T
    found, at = buffer.read(places), 0
    for step in (2, 3, 4):
        block = played(step)
        own = iter(block.next_inputs["state"])
        following = {place: next(own) for place in map(tuple, np.argwhere(block.has_next.numpy()).tolist())}
        for row in range(NUM_ENVS):
            for t in range(T):
                expected = following[row, t] if (row, t) in following else block.inputs["state"][row, t + 1]
                assert torch.equal(found.next_inputs["state"][at], expected)
                assert torch.equal(found.inputs["state"][at], block.inputs["state"][row, t])
                assert torch.equal(found.actions[at], block.actions[row, t])
                assert float(found.discounts[at]) == pytest.approx(0.0 if block.terminated[row, t] else 0.99)
                at += 1


def test_decisions_without_an_action_are_no_transitions(tmp_path: Path) -> None:
    buffer, block = ReplayBuffer(tmp_path, NUM_ENVS, ALL, T, 1000, 0.99), played(0)
    block.mask[1, 3:] = False
    buffer.add(0, block, flags_of(block))
    assert buffer.pool("online").tolist() == [x for x in range(NUM_ENVS * T) if not T + 3 <= x < 2 * T]


def test_outcomes_are_those_of_the_end_of_the_episode(tmp_path: Path) -> None:
    """Over the border of steps; of an episode that goes on, and of one whose outcome is not known, nothing is said."""
    buffer, blocks = ReplayBuffer(tmp_path, NUM_ENVS, ALL, T, 1000, 0.99), [played(0), played(1)]
    for block in blocks:
        block.ended.fill_(False)
        block.success.fill_(-1)
    for step, row, t, success in ((0, 0, 2, 1), (1, 0, 1, 0), (1, 1, 4, 1), (1, 2, 0, -1)):
        blocks[step].ended[row, t] = True
        blocks[step].success[row, t] = success
    for step, block in enumerate(blocks):
        buffer.add(step, block, flags_of(block))

    def places(*spans: tuple[int, int, int, int]) -> list[int]:
        return sorted((step * NUM_ENVS + row) * T + t for step, row, a, b in spans for t in range(a, b))

    assert buffer.pool("successes").tolist() == places((0, 0, 0, 3), (0, 1, 0, T), (1, 1, 0, 5))
    assert buffer.pool("failures").tolist() == places((0, 0, 3, T), (1, 0, 0, 2))


def test_a_return_to_a_checkpoint_forgets_what_came_later(tmp_path: Path) -> None:
    buffer = buffer_of(tmp_path, 4)
    state, before = json.loads(json.dumps(buffer.state(buffer.end))), content(buffer)
    for step in (4, 5, 6):
        buffer.add(step, played(step + 10), flags_of(played(step + 10)))
    assert content(buffer) != before
    for one in (buffer, buffer_of(tmp_path, 0)):  # the same process, or a new one
        one.go_back(state["first"], one.load(state))
        assert (one.first, one.end) == (1, 4) and content(one) == before
    buffer.add(4, played(4), flags_of(played(4)))
    assert content(buffer) == content(buffer_of(tmp_path / "other"))


def test_steps_are_deleted_when_no_checkpoint_needs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_FILE_DECISIONS", 2 * NUM_ENVS * T)
    buffer = buffer_of(tmp_path, 9)
    assert len([*tmp_path.glob("steps_*")]) == 5 and buffer.first == 6
    buffer.forget(before=5)
    assert sorted(path.name for path in tmp_path.glob("steps_*")) == [f"steps_{i:06d}" for i in (2, 3, 4)]
    buffer.forget(before=100)
    assert sorted(path.name for path in tmp_path.glob("steps_*")) == [f"steps_{i:06d}" for i in (3, 4)]
    assert content(buffer) == content(buffer_of(tmp_path / "other", 9))


def test_another_run_takes_a_copy_also_over_what_is_there(tmp_path: Path) -> None:
    buffer = buffer_of(tmp_path / "one")
    for number in (0, 4):  # of steps that are another run's
        other = buffer_of(tmp_path / f"two_{number}", 0)
        for step in range(number):
            other.add(step, played(step + 50), flags_of(played(step + 50)))
        other.go_back(2, other.load(buffer.state(5)))
        assert content(other) == content(buffer)
    sizes = [sum(file.stat().st_blocks for file in (tmp_path / x).rglob("*")) for x in ("one", "two_0")]
    assert sizes[1] <= sizes[0]  # the holes stay holes
    other.add(5, played(5), flags_of(played(5)))
    assert len(buffer.load(buffer.state(5))) == 3  # what it was copied from is as it was


def test_a_moved_run_finds_its_steps(tmp_path: Path) -> None:
    buffer = buffer_of(tmp_path / "here")
    state, before = buffer.state(5), content(buffer)
    (tmp_path / "here").rename(tmp_path / "there")
    moved = buffer_of(tmp_path / "there", 0)
    moved.go_back(2, moved.load(state))
    assert content(moved) == before


@pytest.mark.parametrize("rows", [ALL, slice(1, 2)])
def test_a_checkpoint_before_the_first_step_holds_none(tmp_path: Path, rows: slice) -> None:
    state = buffer_of(tmp_path, 0, rows).state(0)
    buffer = buffer_of(tmp_path, 2, rows)
    flags = buffer.load(state)
    assert flags.shape == (0, rows.stop - rows.start, T)
    buffer.go_back(0, flags)
    assert (buffer.first, buffer.end, len(buffer.pool("online"))) == (0, 0, 0)


def test_the_state_is_that_of_the_steps_that_are_done(tmp_path: Path) -> None:
    """A rank may have stored one more than the others when the disk is full."""
    assert buffer_of(tmp_path, 5).state(4) == buffer_of(tmp_path / "b", 4).state(4) | {"directory": str(tmp_path)}


def test_a_resume_may_change_the_capacity(tmp_path: Path) -> None:
    state = buffer_of(tmp_path, 5).state(5)
    for capacity, first in ((2, 3), (100, 2)):
        other = buffer_of(tmp_path, 0, capacity=capacity * NUM_ENVS * T)
        other.go_back(2, other.load(state))
        assert (other.first, other.end) == (first, 5)
        assert len(other.pool("online")) == (5 - first) * NUM_ENVS * T
        other.add(5, played(5), flags_of(played(5)))
        assert other.first == max(first, 6 - capacity) and other.state(6)["first"] == other.first


@pytest.mark.parametrize("field", ["obs.state", "next.state", "actions", "rewards", "flags", "checksum"])
def test_a_damaged_file_is_named(tmp_path: Path, field: str) -> None:
    state = buffer_of(tmp_path).state(5)
    content = (tmp_path / "steps_000000" / field).read_bytes()
    shape = json.loads((tmp_path / "steps_000000" / "fields.json").read_text())[field][0]
    of_step = len(content) // shape[0]
    place = 3 * of_step + (of_step - 1 if field == "next.state" else 0)
    with open(tmp_path / "steps_000000" / field, "r+b") as file:
        file.seek(place)
        file.write(bytes([content[place] ^ 1]))
    with pytest.raises(ReplayError, match=r"steps_000000: environment \d of step 3 is damaged\. The run cannot go on"):
        buffer_of(tmp_path, 0).load(state)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    state = buffer_of(tmp_path).state(5)
    narrow = played(5)
    narrow.inputs, narrow.next_inputs = ({"state": x["state"][..., :2]} for x in (narrow.inputs, narrow.next_inputs))
    with pytest.raises(ReplayError, match=r"steps_000000 holds .*, and this run plays .*\. Name another run"):
        buffer_of(tmp_path, 0).add(0, narrow, flags_of(narrow))
    with pytest.raises(ReplayError, match=r"steps_000000 cannot be read: .*No such file"):
        buffer_of(tmp_path / "nowhere", 0).load({**state, "directory": str(tmp_path / "nowhere")})
    with pytest.raises(ReplayError, match=r"steps 2 to 4 of environments 1 are not those of the checkpoint"):
        buffer_of(tmp_path, 0).load({**state, "checksum": {**state["checksum"], "1": 7}})


def test_a_full_disk_is_an_error_and_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, block = buffer_of(tmp_path, 2), played(2)
    before = content(buffer)

    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            buffer.add(2, block, flags_of(block))
    assert buffer.end == 2 and content(buffer) == before
    buffer.add(2, block, flags_of(block))
    assert buffer.end == 3


def test_batches_have_their_shares_and_depend_on_seed_step_and_number() -> None:
    sizes, shares = {"online": 1000, "demonstrations": 30}, {"online": 0.25, "demonstrations": 0.75}
    found = drawn(sizes, 256, shares, [0, 3, 1])
    assert {name: len(x) for name, x in found.items()} == {"online": 64, "demonstrations": 192}
    assert found["demonstrations"].max() < 30 <= found["online"].max()
    for other in ([1, 3, 1], [0, 4, 1], [0, 3, 2]):
        assert not np.array_equal(drawn(sizes, 256, shares, other)["online"], found["online"])
    assert np.array_equal(drawn(sizes, 256, shares, [0, 3, 1])["online"], found["online"])
    only = drawn({"online": 10, "successes": 0}, 64, {"online": 0.5, "successes": 0.5}, [0, 0, 0])
    assert {name: len(x) for name, x in only.items()} == {"online": 64}
    counts = np.bincount(drawn({"online": 4}, 100_000, {"online": 1.0}, [0, 0, 0])["online"])
    assert abs(counts - 25_000).max() < 600
