"""Each script in examples/ launches one kind of run, as the package does; both give the same results."""

from contextlib import nullcontext

import pytest

import rlinf_lite
from examples.embodiment import eval_embodied_agent, train_embodied_agent, train_sft
from examples.math import train_math
from rlinf_lite.config import load_config
from rlinf_lite.envs import EnvSpec
from rlinf_lite.models import MLPGaussianPolicy
from rlinf_lite.scheduler import Cluster
from tests.runners.conftest import SMALL_MATH, SMALL_PENDULUM, read_metrics
from tests.runners.test_sft import CONFIG as SFT
from tests.runners.test_sft import SMALL as SMALL_SFT

pytestmark = pytest.mark.usefixtures("forks")

PENDULUM, MATH = "gym_pendulum_ppo_mlp", "math/math_arithmetic_grpo"
SAVED = ["cluster.runtime=local", "runner.max_steps=1", "runner.save_interval=1", "runner.report=false"]
MEASURED = ("step", "train/", "rollout/", "env/", "demos/num", "async/staleness")
ASYNC = ["runner.mode=async", "runner.max_staleness=0"]  # so that results repeat


@pytest.fixture(autouse=True)
def shared(cluster, monkeypatch):
    monkeypatch.setattr(Cluster, "from_config", lambda settings: nullcontext(cluster))


@pytest.fixture
def trained(cluster, tmp_path, capsys):
    def trained(train, name, *overrides):
        """The metrics without times, the first words of each printed line, and the result."""
        root = tmp_path / train.__module__
        result = train(load_config(name, [*overrides, *SAVED, f"runner.logger.log_path={root}"]))
        for processes in list(cluster.processes):
            cluster.end(processes)
        lines = [
            {key: value for key, value in line.items() if key.startswith(MEASURED)}
            for line in read_metrics(result.run_dir)
        ]
        words = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[:1].strip()]
        return lines, words, result

    return trained


@pytest.mark.parametrize(
    ("script", "name", "overrides"),
    [
        (train_embodied_agent, PENDULUM, SMALL_PENDULUM),
        (train_embodied_agent, PENDULUM, [*SMALL_PENDULUM, *ASYNC, "control.enabled=false"]),
        (train_sft, SFT, [*SMALL_SFT, "data.num_episodes=16"]),
        (train_math, MATH, SMALL_MATH),
    ],
    ids=["embodied", "async", "sft", "reasoning"],
)
def test_a_script_and_the_package_train_alike(trained, script, name, overrides):
    shown, own = trained(script.train, name, *overrides), trained(rlinf_lite.train, name, *overrides)
    assert shown[:2] == own[:2]
    assert own[0] and ("async/staleness_max" in own[0][-1]) == ("runner.mode=async" in overrides)
    assert own[1][0] == "slots" and own[1][-1] == "finished"
    results = [result.describe().splitlines() for *_, result in (shown, own)]
    assert [line.split(":")[0] for line in results[0]] == [line.split(":")[0] for line in results[1]]


def test_a_script_and_the_package_evaluate_alike(cluster, tmp_path):
    spec = EnvSpec(1, 3, {}, [-2.0], [2.0], 10, False)
    MLPGaussianPolicy.from_config(load_config(PENDULUM).model, spec).save_pretrained(tmp_path)
    cfg = load_config(PENDULUM, [*SMALL_PENDULUM, "cluster.runtime=local", f"rollout.model_dir={tmp_path}"])
    episodes = []
    for evaluate in (eval_embodied_agent.evaluate, rlinf_lite.evaluate):
        episodes.append(evaluate(cfg).episodes)
        for processes in list(cluster.processes):
            cluster.end(processes)
    assert episodes[0] == episodes[1] and len(episodes[0]) == 6
