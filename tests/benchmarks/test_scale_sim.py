"""What the simulator of many nodes says of one worker's decisions, against an event loop."""

import sys
from collections import Counter
from pathlib import Path

import pytest

from rlinf_lite.preview.traffic import Traffic

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from scale_sim import Costs, Load, main, step_parts

DECISIONS = 1000


def played(env_s: float, policy_s: float, delay_s: float, stages: int) -> float:
    """Seconds per decision of an env worker and a rollout worker, each of which does one thing at a time."""
    env_free = policy_free = 0.0
    ready = [0.0] * stages  # when a stage's actions are at the env worker
    for _ in range(DECISIONS):
        sent = []
        for stage in sorted(range(stages), key=ready.__getitem__):
            env_free = max(env_free, ready[stage]) + env_s / stages
            sent.append((env_free + delay_s, stage))
        for arrives, stage in sorted(sent):
            policy_free = max(policy_free, arrives) + policy_s / stages
            ready[stage] = policy_free + delay_s
    return max(ready) / DECISIONS


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.05, 0.15])
@pytest.mark.parametrize(("env_s", "policy_s"), [(0.4, 0.3), (0.3, 0.3), (0.02, 0.4)])
def test_what_of_the_network_hides_behind_computing(env_s, policy_s, delay_s, stages):
    link = Counter({(0, 1): 1})
    sent = Traffic({"actions": link, "observations": link}, link)
    parts = step_parts(Load(DECISIONS, env_s, policy_s, 0.0, 1, 64, stages), Costs(0.0, 0.0), 1, sent, 1e18, delay_s)
    assert sum(parts.values()) / DECISIONS == pytest.approx(played(env_s, policy_s, delay_s, stages), rel=0.01)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gbit", "-5"], "--gbit: -5 is no finite number above 0"),
        (["--gbit", "0"], "--gbit: 0 is no finite number above 0"),
        (["--gbit", "nan"], "--gbit: nan is no finite number above 0"),
        (["--stages", "0"], "--stages: 0 is not above 0"),
        (["--delay-ms", "-1"], "--delay-ms: -1 is no finite number above 0"),
        (["--trains", "typo"], "--trains: invalid choice: 'typo' (choose from 'LoRA, rank 32', 'all weights')"),
    ],
)
def test_what_makes_no_sense_is_refused(words, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scale_sim.py", *words])
    monkeypatch.setattr("scale_sim.simulate", lambda *given: pytest.fail("it went on"))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and said in capsys.readouterr().err
