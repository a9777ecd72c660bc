"""A user's own policy trains, is saved, and is loaded again, from its one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_lite.models import load_policy
from rlinf_lite.models.tensor_files import read_tensors
from tests.runners.conftest import read_metrics

POLICY = "examples.embodiment.custom_policy:SquashedGaussianPolicy"


def test_a_custom_policy_trains_and_goes_on_from_its_checkpoint(start: Any, tmp_path: Path) -> None:
    mine = [f"model.id={POLICY}", "model.options.hidden_size=16", "runner.max_steps=2", "runner.save_interval=2"]
    result = start(*mine).run()
    losses = [line["train/actor/policy_loss"] for line in read_metrics(result.run_dir)]
    assert len(losses) == 2 and np.isfinite(losses).all()
    start.stop()

    assert result.checkpoint is not None
    policy = load_policy(result.checkpoint / "policy")
    assert (policy.policy_id, policy.config_dict()["hidden_size"]) == (POLICY, 16)
    runner = start(*mine, f"runner.resume={result.run_dir}", "runner.max_steps=3")
    assert runner.run().completed_steps == 3


@pytest.mark.parametrize("place", ["actor: '0'", pytest.param("actor: 0-1", marks=pytest.mark.processes)])
def test_a_tied_policy_acts_as_it_trains_and_goes_on_as_if_nothing_had_happened(
    start: Any, tmp_path: Path, place: str
) -> None:
    mine = ["model.id=tests.models.tied:TiedPolicy", "model.options={}", "runner.save_interval=2"]
    mine += [f"cluster.component_placement={{{place}, rollout: '0', env: 0-1}}", "algorithm.recompute_logprobs=false"]
    whole = start("runner.max_steps=4", *mine, root=tmp_path / "whole").run()
    start.stop()
    assert all(line["rollout/logprob_drift"] < 1e-6 for line in read_metrics(whole.run_dir))
    start("runner.max_steps=2", *mine, root=tmp_path / "half").run()
    start.stop()
    half = start("runner.max_steps=4", "runner.resume=auto", *mine, root=tmp_path / "half").run()
    assert whole.checkpoint is not None and half.checkpoint is not None
    expected, got = (read_tensors(one.checkpoint / "policy" / "model.safetensors") for one in (whole, half))
    assert half.completed_steps == 4 and all(torch.equal(x, got[name]) for name, x in expected.items())
    assert torch.equal(got["back.weight"], got["embed.weight"])
