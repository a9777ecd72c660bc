"""`benchmarks/gpu_check.py` runs where there is no GPU, with `--rehearse`: what it measures then is of no interest."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from rlinf_lite import registry
from rlinf_lite.models import graphs
from tests.compilers import compiling_by

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
APART = ("tabletop", "pushcube", "simulation", "openvla_full", "weight_sync", "precision", "same_bits", "shards")
COMPILED = ("updates", "language_update")
"""A training run is enough, and one update of OpenVLA; weights are sent on a cluster that is there already; what bf16
moves, and what placements do not change, have tests of their own."""


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(graphs, "enabled", graphs.enabled)  # rows that change it have a process of their own
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu_check")


def test_every_row(check: Any) -> None:
    for name, (_, measure) in check.ROWS.items():
        if name in (*APART, *COMPILED):
            continue
        found = measure(True)
        figures = [value for value in found.values() if isinstance(value, float)]
        assert figures and all(value > 0 for value in figures), name
        if name in ("openvla_lora", "pi0"):
            assert 0.001 < found["predicted_gib"] < 0.5, name
            assert (found["act_tokens_per_s"] is not None) == (name == "openvla_lora")
    trained = check.ROWS["tabletop"][1](True)
    assert 0 < trained["success"] <= 1 and 0 <= trained["rollout/logprob_drift"] < 1e-5
    assert 0.5 < trained["predicted_gib"]["actor"] / trained["actor_peak_gib"] < 2


@pytest.mark.parametrize("name", COMPILED)
def test_rows_that_compile(name: str, check: Any) -> None:
    with compiling_by():
        found = check.ROWS[name][1](True)
    assert all(value > 0 for label, value in found.items() if not label.endswith("distance"))
    assert all(value < 1e-3 for label, value in found.items() if label.endswith("distance"))
    assert len(found) == (12 if name == "updates" else 2), found


def test_acting_and_training_are_as_far_from_fp32_as_each_other(check: Any) -> None:
    """They are measured with the same weights: after an update, acting would be several times as far."""
    drift = check.ROWS["precision"][1](True)
    assert len(drift) == 9
    for name in ("openvla", "openvla_one_by_one", "pi0"):
        acting, training = drift[f"{name}_acting_to_fp32"], drift[f"{name}_training_to_fp32"]
        assert 0 < acting < 0.1 and acting == pytest.approx(training, rel=0.25), name
        assert 0 <= drift[f"{name}_acting_to_training"] < acting + training, name


def test_the_sizes_of_log_probabilities_on_a_card_are_those_that_policies_have(
    check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rehearsal has other ones."""
    sizes: list[str] = []

    def checked(name: str, size: str, *_: Any, **__: Any) -> Any:
        options: Any = registry.policy_card(name).options({"size": size})
        sizes.append(options.size)
        return MagicMock(device=torch.device("cpu"), precision="fp32")

    monkeypatch.setattr(check, "Contestant", checked)
    check.ROWS["precision"][1](False)
    assert sizes == ["small", "small", "tiny"]


def test_weights_are_sent() -> None:
    """In a process whose workers find the benchmark's modules."""
    program = "import json, gpu_check; print(json.dumps(gpu_check.ROWS['weight_sync'][1](True)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=BENCHMARKS, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(found[name] > 0 for name in ("first_s", "sync_gb_s", "device_copy_gb_s")), found


def test_an_update_is_the_same_work_where_it_computes_again(check: Any) -> None:
    plain, again = (
        check.Contestant("openvla", "tiny", 2, check._args(True, checkpointing=checkpointing)).update_flops
        for checkpointing in (False, True)
    )
    assert plain == again > 0


def test_what_breaks_or_is_late_costs_its_row(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = {"device": 0.1, "attention": 60, "generation": 60}
    monkeypatch.setattr(check, "ROWS", {name: (limits[name], check.ROWS[name][1]) for name in limits})
    words = ["--rehearse", "--rows", "device", "attention", "--out", str(tmp_path / "rows.jsonl")]
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *words])
    check.main()
    late, measured = (json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines())
    assert late["row"] == "device" and late["error"] == "not done after 0 s"
    assert measured["row"] == "attention" and measured["math_ms"] > 0 and measured["took_s"] < 60
    # what is measured again takes the place of what was there, and nothing else does
    again = ["--rehearse", "--rows", "attention", "generation", "--out", str(tmp_path / "rows.jsonl"), "--total-s", "5"]
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *again])
    check.main()
    *before, skipped = (json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines())
    assert before == [late, measured] and (skipped["row"], skipped["skipped"]) == ("generation", "no time left")
    monkeypatch.setattr(check, "_measured", lambda *_: {"error": "broken"})
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *words[:-4], "device", *words[-2:]])
    check.main()
    after = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert after[1:] == [measured, skipped] and after[0]["error"] == "broken"


def test_rehearsals_leave_the_figures_of_cards_alone(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(check.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    monkeypatch.setattr(check, "_measured", lambda *_: {"figure": 1.0})
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--rehearse", "--rows", "device"])
    check.main()
    assert not (tmp_path / "results").exists() and (tmp_path / "temporary" / "gpu_check_rehearsal.jsonl").is_file()


def test_without_a_gpu_it_says_so(check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(check.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path / "rows.jsonl")])
    with pytest.raises(SystemExit, match="sees no GPU"):
        check.main()
    assert not (tmp_path / "rows.jsonl").exists()
