"""Checkpoints resume exactly, evaluate alike, and refuse damage."""

import pytest
import torch
from safetensors.torch import load_file

from rlinf_lite.runners.checkpoints import CheckpointError
from tests.runners.conftest import read_metrics


def weights(checkpoint):
    return load_file(checkpoint / "policy" / "model.safetensors")


@pytest.mark.processes
def test_four_steps_equal_two_and_resume_and_two(start, tmp_path):
    """With two actors; with one, in test_interrupts."""
    spread = ["cluster.component_placement={actor: 0-1, rollout: '0', env: 0-1}"]
    whole = start("runner.max_steps=4", "runner.save_interval=4", *spread, root=tmp_path / "whole").run()
    start.stop()
    half = start("runner.max_steps=2", "runner.save_interval=2", *spread, root=tmp_path / "half").run()
    start.stop()
    resumed = start(
        "runner.max_steps=4", "runner.save_interval=4", "runner.resume=auto", *spread, root=tmp_path / "half"
    ).run()
    assert resumed.run_dir == half.run_dir and resumed.completed_steps == 4
    expected, got = weights(whole.checkpoint), weights(resumed.checkpoint)
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert [line["step"] for line in read_metrics(resumed.run_dir)] == [1, 2, 3, 4]


def test_a_damaged_checkpoint_is_refused_before_anything_starts(start, tmp_path):
    result = start("runner.max_steps=2", "runner.save_interval=1").run()
    start.stop()
    file = result.checkpoint / "policy" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors has .* bytes.*step_000001"):
        start("runner.resume=auto")


def test_evaluation_plays_the_same_episodes_every_time_and_everywhere(start, tmp_path):
    result = start("runner.max_steps=1", "runner.save_interval=1").run()
    start.stop()
    load = f"actor.checkpoint_load_path={result.checkpoint}"
    first = start(load)
    summaries = [first.evaluate(), first.evaluate()]
    start.stop()
    summaries.append(start(load, "cluster.component_placement.env=0-1", "rollout.pipeline_stage_num=2").evaluate())
    assert all(len(summary.episodes) == 6 for summary in summaries)
    for other in summaries[1:]:
        assert [e["seed"] for e in other.episodes] == [e["seed"] for e in summaries[0].episodes]
        assert other.total.return_mean == pytest.approx(summaries[0].total.return_mean, abs=1e-4)
