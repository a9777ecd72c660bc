"""What processes load decides how fast they start again, and what they take."""

import gc
import subprocess
import sys

import pytest

from rlinf_lite.lazy import imports_without_gc


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        (
            "rlinf_lite.workers.env, rlinf_lite.envs.tabletop, rlinf_lite.envs.gymnasium.simulator",
            ["torch", "transformers"],
        ),
        ("rlinf_lite.workers.rollout", ["torch.distributed.tensor", "transformers"]),
        ("rlinf_lite.jobs.trainer_host, rlinf_lite.control.master", ["torch", "hydra"]),
        ("rlinf_lite.scheduler.ray_host", ["numpy", "torch"]),  # they read variables that it sets
        ("rlinf_lite.launch", ["ray"]),  # which runs on threads do without
    ],
)
def test_workers_load_only_what_they_need(module, heavy):
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout == "[]\n"


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_during_imports_even_failing_ones_and_all_is_as_before(enabled):
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ImportError), imports_without_gc():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
