"""Threads of one process and processes on Ray give the same results, bit for bit, and can resume each other's runs."""

import hashlib
import shutil
import subprocess
import sys
from contextlib import nullcontext

import pytest
from safetensors import safe_open

from rlinf_lite.config import load_config
from rlinf_lite.launch import train
from rlinf_lite.scheduler import Cluster
from tests.conftest import SharedCluster
from tests.runners.conftest import SMALL_MATH, SMALL_PENDULUM, SMALL_SAC, read_metrics
from tests.runners.test_flow_runs import PPO as SMALL_TABLETOP
from tests.runners.test_flow_runs import TOGETHER
from tests.runners.test_recap import SMALL as SMALL_RECAP
from tests.runners.test_sft import SMALL as SMALL_SFT

SEVERAL = "cluster.component_placement={actor: '0', rollout: 0-1, env: 0-1}"
ROUNDS = "data={num_episodes: 16, dagger: {rounds: 1, interval: 1, episodes: 8}}"
LABELLED = "data.recap={rounds: 1, interval: 1, episodes: 8, value_updates: 4}"
FEW = "env.eval.num_episodes=8"
RUNS = {
    "simulator": ("gym_pendulum_ppo_mlp", [*SMALL_PENDULUM, SEVERAL, FEW, "rollout.pipeline_stage_num=2"]),
    "asynchronous": ("gym_pendulum_ppo_mlp", [*SMALL_PENDULUM, "runner.mode=async", "runner.max_staleness=0", FEW]),
    "tokens": ("tabletop_ppo_vla", [*SMALL_TABLETOP, *TOGETHER, FEW]),
    "flow": ("tabletop_ppo_flow", [*SMALL_TABLETOP, *TOGETHER, "rollout.model_dir=null", FEW]),
    "imitation": ("tabletop_sft_mlp", [*SMALL_SFT, "data.num_episodes=16", FEW]),
    "off-policy": ("gym_pendulum_sac_mlp", [*SMALL_SAC, SEVERAL, FEW]),
    "rounds": ("tabletop_sft_mlp", [*SMALL_SFT, ROUNDS, FEW]),
    "labels": ("tabletop_recap_flow", [*SMALL_RECAP, LABELLED, FEW]),
    "language": ("math/math_arithmetic_ppo", [*SMALL_MATH, "algorithm.kl={place: loss, coef: 0.1}"]),
}
COMMON = ["runner.save_interval=1", "runner.val_check_interval=1", "runner.report=false", "control.enabled=false"]
COMMON += ["runner.keep_checkpoints=5", "runner.run_name=run", "runner.resume=auto"]
MEASURED = ("train/", "rollout/", "replay/", "eval/", "env/", "async/staleness")


def run(runtime, what, steps, root, *more):
    """Train `what`, a config's name and overrides, until `steps` are done; from the newest checkpoint in `root`."""
    config, overrides = what
    where = [f"cluster.runtime={runtime}", f"runner.max_steps={steps}", f"runner.logger.log_path={root}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cluster, "from_config", lambda settings: nullcontext(SharedCluster.of(runtime)))
        try:
            result = train(load_config(config, [*overrides, *COMMON, *where, *more]))
        finally:
            SharedCluster.end_groups()
    assert result.completed_steps == steps
    return result


def tensors(result, step):
    """Digests of all tensors of a checkpoint, by file and name. The files themselves differ: the order of their headers
    depends on Python's hashes, which differ between processes."""
    directory, found = result.run_dir / "checkpoints" / f"step_{step:06d}", {}
    for file in sorted(directory.rglob("*.safetensors")):
        with safe_open(file, "np") as content:
            for name in content.keys():  # noqa: SIM118 (no dict)
                digest = hashlib.sha256(content.get_tensor(name).tobytes()).hexdigest()
                found[str(file.relative_to(directory)), name] = digest
    return found


def numbers(result):
    """The metrics by step, without times: a resumed run evaluates its step once more."""
    found = {}
    for line in read_metrics(result.run_dir):
        found.setdefault(line["step"], {}).update({key: line[key] for key in line if key.startswith(MEASURED)})
    return found


def differing(ours, theirs):
    """The differences between two lines of metrics."""
    return {key: (ours.get(key), theirs.get(key)) for key in ours | theirs if ours.get(key) != theirs.get(key)}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["simulator", *(pytest.param(x, marks=pytest.mark.slow) for x in [*RUNS][1:])])
def test_every_run(tmp_path, name):
    what, root, half = RUNS[name], tmp_path / "ray", tmp_path / "half"
    run("ray", what, 1, root)
    shutil.copytree(root, half, symlinks=True)
    expected = run("ray", what, 2, root)
    whole = run("local", what, 2, tmp_path / "whole")
    ours, theirs = numbers(whole), numbers(expected)
    assert ours.keys() == theirs.keys() == {0, 1, 2}
    for step in ours:
        assert differing(ours[step], theirs[step]) == {}
    for step in (1, 2):
        assert tensors(whole, step) == tensors(expected, step) and len(tensors(whole, step)) > 4
    assert tensors(whole, 1) != tensors(whole, 2)
    gone_on = run("local", what, 2, half)
    assert tensors(gone_on, 2) == tensors(expected, 2)


def test_a_local_run_imports_no_ray(tmp_path):
    code = f"""
import sys
import rlinf_lite
settings = {[*SMALL_PENDULUM, "cluster.runtime=local", "runner.max_steps=1", f"runner.logger.log_path={tmp_path}"]}
result = rlinf_lite.train(rlinf_lite.load_config("gym_pendulum_ppo_mlp", settings))
print("ray" in sys.modules, result.completed_steps)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout.splitlines()[-1:] == ["False 1"], done.stdout + done.stderr
