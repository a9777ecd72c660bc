"""`rlinf-lite sweep`: every combination, through the door of `train`; what runs is a stand-in here."""

import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlinf_lite.cli import sweep as module
from rlinf_lite.cli.sweep import trials_of
from rlinf_lite.config import ConfigError, load_config
from rlinf_lite.launch import train

CommandLine = Callable[[list[str]], int]
NAME = "gym_pendulum_ppo_mlp"
STAND_IN = """
import os, signal, sys, time
from pathlib import Path
from rlinf_lite.config import load_config
from tests.report.test_report import write_run

command, name, *overrides = sys.argv[1:]
cfg = load_config(name, overrides)
assert command == "train"
run = Path(cfg.runner.logger.log_path) / f"{cfg.runner.run_name}-Pendulum-v1-seed{cfg.runner.seed}-x"
run.parent.mkdir(exist_ok=True)
if cfg.runner.seed == 1:
    sys.exit(1)
if cfg.runner.seed == 2:  # somebody presses Ctrl-C
    try:
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)
    except KeyboardInterrupt:
        write_run(run, last=60)
        sys.exit(130)
write_run(run, last=90)
"""


@pytest.fixture
def stand_in(tmp_path: Path, repo: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(repo))
    monkeypatch.setattr(module, "COMMAND", (sys.executable, str(script)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_failure_does_not_stop_the_others(
    stand_in: Path, capsys: pytest.CaptureFixture[str], command_line: CommandLine
) -> None:
    assert command_line(["sweep", NAME, "runner.seed=0,1,3", "runner.max_steps=4"]) == 1
    first, *rows = [line.split() for line in capsys.readouterr().out.splitlines()[-4:]]
    assert first == ["seed", "status", "metric", "last", "95%", "directory"]
    where = f"results/{NAME}-01-seed0-Pendulum-v1-seed0-x"
    assert rows[0] == ["0", "finished", "success", "90.0%", "[82.6,", "94.5]", where] and (stand_in / where).is_dir()
    assert rows[1] == ["1", "failed", "(1)", "-", "-", "-", "-"]
    assert rows[2][:4] == ["3", "finished", "success", "90.0%"]


def test_ctrl_c_stops_the_present_one_and_shows_what_is_done(
    stand_in: Path, capsys: pytest.CaptureFixture[str], command_line: CommandLine
) -> None:
    assert command_line(["sweep", NAME, "runner.seed=0,2,3"]) == 130
    *_, done, stopped, last = capsys.readouterr().out.splitlines()
    assert done.split()[:2] == ["0", "finished"]
    assert stopped.split()[:4] == ["2", "stopped", "success", "60.0%"]
    assert last == "interrupted: 1 of 3 were not started"


BESIDE = """
import json, os, sys, time
from pathlib import Path
from rlinf_lite.config import load_config
from tests.report.test_report import write_run

cfg = load_config(sys.argv[2], sys.argv[3:])
run = Path("results") / f"{cfg.runner.run_name}-Pendulum-v1-seed{cfg.runner.seed}-x"
print("playing")
Path(f"here{cfg.runner.seed}").write_text(str(sorted(os.sched_getaffinity(0))))
if cfg.runner.max_steps == 7:  # until it is stopped
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        write_run(run, last=60)
        sys.exit(130)
while not (Path("here0").exists() and Path("here1").exists()):
    time.sleep(0.01)
write_run(run, last=90)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_two_at_a_time(stand_in: Path, capsys: pytest.CaptureFixture[str], command_line: CommandLine) -> None:
    """Each waits for the other, so that none would end alone; cores are shared out."""
    (stand_in / "stand_in.py").write_text(BESIDE)
    assert command_line(["sweep", NAME, "runner.seed=0,1,2", "--parallel", "2"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()[-4:]]
    assert [row[0] for row in rows[1:]] == ["0", "1", "2"] and rows[0][0] == "seed"
    assert [row[1] for row in rows[1:]] == ["finished"] * 3
    cores = [set(json.loads((stand_in / f"here{seed}").read_text())) for seed in (0, 1)]
    assert cores[0] | cores[1] == os.sched_getaffinity(0) and not cores[0] & cores[1]
    assert (stand_in / "results" / f"{NAME}-01-seed0.log").read_text() == "playing\n" and "playing" not in out


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_ctrl_c_stops_all_that_run(
    stand_in: Path, capsys: pytest.CaptureFixture[str], command_line: CommandLine
) -> None:
    (stand_in / "stand_in.py").write_text(BESIDE)

    def press() -> None:
        while not ((stand_in / "here0").exists() and (stand_in / "here1").exists()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    assert command_line(["sweep", NAME, "runner.seed=0,1,2", "runner.max_steps=7", "--parallel", "2"]) == 130
    *_, first, second, last = capsys.readouterr().out.splitlines()
    assert first.split()[:4] == ["0", "stopped", "success", "60.0%"]
    assert second.split()[:4] == ["1", "stopped", "success", "60.0%"]
    assert last == "interrupted: 1 of 3 were not started"


def test_a_run_that_has_no_handler_yet_is_stopped_too(
    stand_in: Path, capsys: pytest.CaptureFixture[str], command_line: CommandLine
) -> None:
    beginning = "signal.signal(signal.SIGINT, signal.SIG_DFL)\nos.kill(os.getppid(), signal.SIGINT)\ntime.sleep(60)\n"
    (stand_in / "stand_in.py").write_text("import os, signal, time\n" + beginning)
    assert command_line(["sweep", NAME, "runner.seed=0,1"]) == 130
    *_, first, _ = capsys.readouterr().out.splitlines()
    assert first.split()[:2] == ["0", "stopped"]


def test_a_run_has_gpus_of_its_own_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def shares(number: int, *overrides: str) -> list[tuple[str, ...]]:
        cluster = load_config(NAME, [*overrides, "cluster.component_placement={actor: 0, rollout: 0, env: 0}"]).cluster
        return [share.gpus for share in module.shares_of(NAME, number, [cluster]) if share is not None]

    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr("rlinf_lite.scheduler.placement.detect_num_gpus", lambda: 4)
    two = "cluster.num_gpus_per_node=2"
    assert shares(2, two) == [("0", "1"), ("2", "3")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert shares(2, two) == [("4", "5"), ("6", "7")] and shares(1, two) == []
    with pytest.raises(ConfigError, match=r"each run has 2 GPUs .*3 have 6, and this machine has 4\. Run 2 at a time"):
        shares(3, two)
    with pytest.raises(ConfigError, match="each run has 4 GPUs"):  # all that are found, where the key is not set
        shares(2)
    assert shares(3, "cluster.accelerator=cpu") == [(), (), ()]
    with pytest.raises(ConfigError, match=r"this machine has 3\. Run 3 at a time"):
        shares(4, "cluster.accelerator=cpu")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    with pytest.raises(ConfigError, match="RAY_ADDRESS"):
        shares(2, two)


def test_commands_are_listed(capsys: pytest.CaptureFixture[str], command_line: CommandLine) -> None:
    sizes = "model.options.hidden_sizes=[32,16],[64,64]"
    fixed = ["runner.max_steps=3", "cluster.component_placement={actor: 0, rollout: 0, env: 0}"]
    assert command_line(["sweep", NAME, sizes, *fixed, "actor.optim.lr=1e-4,3e-4", "--dry-run"]) == 0
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [words[:3] for words in commands] == [["rlinf-lite", "train", NAME]] * 4
    configs = [load_config(words[2], words[3:]) for words in commands]
    values = [(cfg.model.options.hidden_sizes, cfg.actor.optim.lr) for cfg in configs]
    assert values == [([32, 16], 1e-4), ([32, 16], 3e-4), ([64, 64], 1e-4), ([64, 64], 3e-4)]
    names = [cfg.runner.run_name for cfg in configs]
    assert len(set(names)) == 4 and names[1] == f"{NAME}-02-hidden_sizes32_16-lr0.0003"
    assert all(cfg.runner.max_steps == 3 for cfg in configs)


def test_long_names_keep_their_number() -> None:
    _, trials = trials_of(NAME, [f"runner.run_name={'x' * 80}", "runner.seed=1,2"])
    assert [trial.run_name for trial in trials] == [f"{'x' * 66}-0{number}-" for number in (1, 2)]


def test_values_and_names_may_have_letters_of_any_script() -> None:
    keys, trials = trials_of(NAME, ["runner.run_name=läufer", "runner.logger.project_name=ä,'ö, ü'", "runner.seed=1,2"])
    assert keys == ["runner.logger.project_name", "runner.seed"]
    configs = [load_config(trial.words[1], trial.words[2:]) for trial in trials]
    assert [cfg.runner.logger.project_name for cfg in configs] == ["ä", "ä", "ö, ü", "ö, ü"]
    assert [cfg.runner.run_name for cfg in configs] == [trial.run_name for trial in trials]
    assert trials[0].run_name == "läufer-01-project_nameä-seed1"


def test_one_command_trains_every_kind() -> None:
    for name in ("math_arithmetic_grpo", "tabletop_sft_mlp"):
        _, trials = trials_of(name, ["runner.seed=1,2"])
        assert {trial.words[:2] for trial in trials} == {("train", name)}


def test_what_is_wrong_is_said_before_anything_starts(
    stand_in: Path, capsys: pytest.CaptureFixture[str], command_line: CommandLine
) -> None:
    assert command_line(["sweep", NAME, "actor.micro_batch_size=7,256", "runner.seed=0,1", "runer.x=1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{NAME}: 2 problems\n") and "Did you mean runner" in said and "passes of 7" in said
    for words, twice in (
        (["runner.seed=0,1,00"], "runner.seed=00 is the same run as runner.seed=0"),
        (["runner.seed=0,1", "runner.seed=2,3"], "runner.seed=1 runner.seed=3 is the same run as runner.seed=0 runner"),
    ):
        with pytest.raises(ConfigError, match=twice):
            trials_of(NAME, words)
    with pytest.raises(ConfigError, match="nothing varies"):
        trials_of(NAME, ["model.options.hidden_sizes=[32,16]"])
    assert command_line(["sweep", NAME, "tabletop_ppo_vla", "runner.seed=1,2"]) == 2
    assert "2 were given" in capsys.readouterr().err
    assert not (stand_in / "results").exists()


def test_a_config_of_evaluations_alone_trains_nowhere() -> None:
    with pytest.raises(ConfigError, match="is eval, which trains nothing"):
        trials_of(NAME, ["runner.task_type=eval", "runner.seed=0,1"])
    with pytest.raises(ConfigError, match="is eval, which trains nothing"):
        train(load_config(NAME, ["runner.task_type=eval"]))
