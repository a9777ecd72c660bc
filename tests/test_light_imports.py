"""What a process does not load: that decides how fast commands answer and workers start, and what they take."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_lite.lazy import imports_without_gc

HEAVY = ["torch", "ray", "gymnasium", "mani_skill", "sapien", "transformers", "tensorboard"]
DESCRIBED = "rlinf_lite.config, rlinf_lite.preview.dry_run, rlinf_lite.runners.checkpoints, rlinf_lite.envs"
COMMANDS = "from rlinf_lite.cli import main; assert not any(main([*words]) for words in"
TABLE = [
    (f"import {DESCRIBED}, rlinf_lite.metrics, rlinf_lite.jobs", HEAVY),
    ("import rlinf_lite.config", ["hydra"]),
    (f"{COMMANDS} (['info'], ['configs'], ['runs', '.']))", HEAVY),
    # gymnasium is asked for its own tasks
    (
        "from rlinf_lite.cli import parse_cli; parse_cli(['--config-name', 'gym_pendulum_ppo_mlp'], None)",
        [name for name in HEAVY if name != "gymnasium"],
    ),
    (
        "import rlinf_lite.workers.env, rlinf_lite.envs.tabletop, rlinf_lite.envs.gymnasium.simulator",
        ["torch", "transformers"],
    ),
    ("import rlinf_lite.workers.rollout", ["torch.distributed.tensor", "transformers"]),
    ("import rlinf_lite.jobs.trainer, rlinf_lite.jobs.trainer_host, rlinf_lite.control.master", ["torch", "hydra"]),
    ("import rlinf_lite.scheduler.ray_host", ["numpy", "torch"]),  # they read variables that it sets
    ("import rlinf_lite.launch", ["ray"]),  # which runs on threads do without
]


@pytest.mark.parametrize(("code", "heavy"), TABLE)
def test_only_what_is_needed_is_loaded(tmp_path: Path, code: str, heavy: list[str]) -> None:
    code += f"\nimport sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_during_imports_even_failing_ones_and_all_is_as_before(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ImportError), imports_without_gc():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
