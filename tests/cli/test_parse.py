"""The command line: --help, --dry-run, exit codes, and that none of it waits for ray, nor for torch but --dry-run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_lite.cli import parse_cli
from rlinf_lite.cli.parse import COMMON_KEYS
from rlinf_lite.config import Config, ReasoningConfig, load_config
from rlinf_lite.config.names import schema_keys
from rlinf_lite.preview.dry_run import describe
from rlinf_lite.runners.checkpoints import CheckpointStore
from rlinf_lite.runners.run_config import write_config

HEAVY = ("torch", "ray", "gymnasium", "mani_skill", "transformers")
HYBRID = str(Path(__file__).parents[1] / "config" / "yaml" / "hybrid.yaml")
DEFAULT = "embodiment/tabletop_ppo_vla"


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    """parse_cli in a process of its own, which fails where anything heavy was imported on the way out; --dry-run counts
    memory with torch."""
    heavy = {"ray", "gymnasium", "mani_skill"} if "--dry-run" in arguments else set(HEAVY)
    code = (
        "import atexit, os, sys\n"
        f"atexit.register(lambda: os._exit(99) if {heavy} & set(sys.modules) else None)\n"
        "from rlinf_lite.cli import parse_cli\n"
        f"config = parse_cli({list(arguments)!r}, {DEFAULT!r})\n"
        "print('seed', config.runner.seed, config.runner.resume, config.runner.run_name)\n"
    )
    return python(code)


def test_overrides_and_options_mix() -> None:
    done = cli("runner.seed=3", "--config-name", "tabletop_grpo_vla", "algorithm.gamma=0.5", "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "seed 3 auto tabletop_grpo_vla\n"


def test_hydras_config_path(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"defaults: [{DEFAULT}, _self_]\nrunner: {{seed: 11}}\n")
    config = parse_cli(["--config-path", str(tmp_path), "--config-name", "mine"], DEFAULT)
    assert (config.runner.seed, config.runner.run_name) == (11, "mine")


def test_a_bad_config_exits_with_2_and_a_list() -> None:
    done = cli("algorithm.lr=1", "env.train.num_envs=31")
    assert done.returncode == 2 and done.stdout == f"config: {DEFAULT}\n"
    assert "Traceback" not in done.stderr
    assert f"{DEFAULT}: " in done.stderr
    assert "  - algorithm.lr: there is no such key. lr belongs in actor.optim.lr\n" in done.stderr


LR = """\
  actor.optim.lr: 0.0003
      Learning rate; at 0 nothing changes, which tests whether acting and
      training agree.
"""


def test_help_fits_and_shows_what_is_changed_most() -> None:
    done = cli("--help")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) < 90 and max(map(len, lines)) <= 80
    assert LR in done.stdout and "actor.precision" not in done.stdout and "--help-all: every key" in lines[-1]
    assert set(COMMON_KEYS) <= {*schema_keys(Config), *schema_keys(ReasoningConfig)}


def test_help_all_lists_every_key() -> None:
    done = cli("--help-all")
    assert done.returncode == 0, done.stderr
    assert LR in done.stdout and "  actor.precision: fp32 (fp32 | bf16)\n" in done.stdout
    text = done.stdout.split("keys of runs in a simulator:\n")[1]
    entries = re.findall(r"^  (\S+): .*(?:\n    \S.*)*((?:\n      \S.*)*)", text, re.M)
    assert all(help_text.strip() for _, help_text in entries), "a key has no line of help in schema.py"
    code = "from rlinf_lite.config.names import schema_keys; print(*schema_keys())"
    keys = python(code).stdout.split()  # in this process other tests have registered parts
    leaves = [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]
    assert [key for key, _ in entries] == leaves


def test_dry_run_prints_the_plan_and_exits() -> None:
    done = cli("--dry-run", "--config-name", HYBRID, "cluster.accelerator=cpu")
    assert done.returncode == 0, done.stderr
    for expected in (
        "task: PushCube-v1",
        "slots 0..7 (1 node x 8, accelerator=cpu)",
        "32 / 4 env workers / 2 stages = 4 at a time per env worker; rollout workers: 4",
        "32 environments x 16 decisions = 512;",
        "512 samples / global batch 512 = 1; x 4 epochs = 4",
        "512 / 8 actor ranks = 64 samples a rank; / micro batch 64 = 1 forward and backward passes",
        "283921 parameters",
    ):
        assert expected in done.stdout


def test_the_entry_point_knows_dry_run(repo: Path, tmp_path: Path) -> None:
    script = repo / "examples/embodiment/train_embodied_agent.py"
    command = [sys.executable, str(script), "--config-name", "gym_pendulum_ppo_mlp", "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "task: Pendulum-v1" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_dry_run_says_what_a_run_goes_on_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One without a checkpoint is refused, as it would be."""
    run = tmp_path / "run"
    run.mkdir()
    write_config(load_config("gym_pendulum_ppo_mlp"), run)

    def planned(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            parse_cli([str(run), "--dry-run", *words], None)
        written = capsys.readouterr()
        return int(ended.value.code or 0), (written.out + written.err).strip().splitlines()[-1]

    code, said = planned()
    assert code == 1 and "run holds no complete checkpoint" in said

    cfg = load_config("gym_pendulum_ppo_mlp")
    checkpoint = CheckpointStore(run, keep=1).write(4, lambda directory: _write_state(directory, cfg))
    assert planned("runner.max_steps=8") == (0, f"goes on from step 4, {checkpoint}")
    nothing = "goes on from step 4: nothing is left to do, raise runner.max_steps (4)"
    assert planned("runner.max_steps=4") == (0, nothing)
    code, said = planned("runner.seed=9")
    assert code == 1 and said.startswith("Put them back, or start a new run with runner.resume=never")
    assert planned("runner.seed=9", "runner.max_steps=8", "runner.allow_changes=[runner.seed]")[0] == 0
    other = Path(shutil.copytree(run, tmp_path / "other" / "run"))
    code, said = planned(f"runner.logger.log_path={other.parent}")
    assert code == 1 and f"does not lie in the run {other}" in said


def test_a_run_goes_on_in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the shell stands and its config was written for, unless the command line names another place."""

    def write(run: Path, *overrides: str) -> Path:
        cfg = load_config("gym_pendulum_ppo_mlp", ["runner.max_steps=8", *overrides])
        save_path = cfg.actor.checkpoint_save_path
        store = CheckpointStore(run if save_path in (None, "results") else Path(save_path) / run.name, keep=1)
        checkpoint = store.write(4, lambda directory: _write_state(directory, cfg))
        run.mkdir(parents=True, exist_ok=True)
        write_config(cfg, run)
        return checkpoint

    def places(*words: object) -> tuple[str, str | None]:
        cfg = parse_cli([*map(str, words)], None)
        return cfg.runner.logger.log_path, cfg.actor.checkpoint_save_path

    home, name = tmp_path / "home", "gym_pendulum_ppo_mlp"
    run = home / "results" / "run"
    checkpoint = write(run)
    renamed = home / "backup of it" / "renamed"
    write(renamed)
    content = (renamed / "config.yaml").read_text()
    (renamed / "config.yaml").write_text(content.replace("log_path: results", "log_path: /proc/gone"))  # of no use here
    monkeypatch.chdir(home)
    (home / "current").symlink_to(run)
    for words in (["results/run"], ["current"], [name, f"runner.resume={run}"], [name, "--resume", checkpoint]):
        assert places(*words) == ("results", None)
    assert places("backup of it/renamed") == ("backup of it", None)
    assert places("results/run", "runner.resume=backup of it/renamed") == ("backup of it", None)
    assert places("results/run", "runner.logger.log_path=new") == ("new", None)
    assert places("results/run", "--resume", "never") == ("results", None)
    monkeypatch.chdir(tmp_path)
    assert places(run) == places(name, f"runner.resume={checkpoint}") == ("home/results", None)
    assert places(run, "runner.logger.log_path=results") == ("results", None)
    monkeypatch.chdir(run)
    assert places(".") == (str(run.parent), None)

    monkeypatch.chdir(tmp_path)
    one_root = home / "one" / "run"
    write(one_root, "actor.checkpoint_save_path=results")
    assert places(one_root) == ("home/one", None)
    disk = tmp_path / "disk"
    apart = write(home / "apart" / "elsewhere", f"actor.checkpoint_save_path={disk}")
    assert places(home / "apart" / "elsewhere") == ("home/apart", str(disk))
    assert places(name, f"runner.resume={apart}") == ("results", None)  # it does not say where the logs are


def _write_state(directory: Path, cfg: Config) -> None:
    (directory / "training_state" / "runner.json").write_text('{"completed_steps": 4}')
    write_config(cfg, directory / "training_state")


def test_unknown_sizes_are_said_to_be_unknown() -> None:
    text = describe(load_config("embodiment/maniskill_pushcube_ppo_mlp", ["env.task=LiftPegUpright-v1"]))
    assert "known once LiftPegUpright-v1 and mlp_gaussian are built" in text
