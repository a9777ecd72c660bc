"""`rlinf-lite`: commands from any directory, installed or not, with true exit codes."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import rlinf_lite
from examples.embodiment import train_embodied_agent, train_sft
from examples.math import train_math
from rlinf_lite import __version__
from rlinf_lite.cli.collect import requested
from rlinf_lite.config import ConfigError, ReasoningConfig
from rlinf_lite.config.loading import config_names, load_config
from rlinf_lite.models import CheckpointFormatError, MLPGaussianPolicy
from rlinf_lite.runners.checkpoints import CheckpointStore
from rlinf_lite.runners.run_config import write_config
from tests.runners.conftest import SMALL_MATH

pytestmark = pytest.mark.usefixtures("forks")

CommandLine = Callable[[list[str]], int]


def run(*words: str, cwd: Path, timeout_s: float = 60, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": path} if path else None
    command = [sys.executable, "-m", "rlinf_lite.cli", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, env=environment)


@pytest.mark.parametrize(("words", "code"), [([], 2), (["--help"], 0), (["--version"], 0), (["trian"], 2)])
def test_exit_codes(words: list[str], code: int, capsys: pytest.CaptureFixture[str], command_line: CommandLine) -> None:
    assert command_line(words) == code
    written = capsys.readouterr()
    assert ("there is no command trian. Did you mean train?" in written.err) == (words == ["trian"])
    assert (f"rlinf_lite {__version__}" in written.out) == (words == ["--version"])
    assert max(map(len, (written.out + written.err).splitlines())) <= 80


def test_info_is_complete(capsys: pytest.CaptureFixture[str], command_line: CommandLine) -> None:
    assert command_line(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["rlinf_lite"].startswith(__version__)
    assert found["versions"]["torch"][0].isdigit()
    assert set(found["extras"]) >= {"maniskill", "wandb", "data"}
    assert found["configs"] == config_names()
    assert {"gymnasium", "maniskill"} <= set(found["env.id"]) and "mlp_gaussian" in found["model.id"]


def test_info_reads_well(capsys: pytest.CaptureFixture[str], command_line: CommandLine) -> None:
    assert command_line(["info"]) == 0
    written = capsys.readouterr().out
    assert f"versions\n  rlinf_lite     {__version__} (" in written
    assert "\nconfigs\n  embodiment/gym_pendulum_ppo_mlp\n" in written


@pytest.mark.parametrize(
    ("script", "config"),
    [
        (train_embodied_agent, "gym_pendulum_ppo_mlp"),
        (train_sft, "tabletop_sft_mlp"),
        (train_math, "math_arithmetic_grpo"),
    ],
)
def test_train_does_what_the_example_of_that_kind_does(
    script: ModuleType,
    config: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command_line: CommandLine,
) -> None:
    words = ["--config-name", config, "--dry-run", "runner.seed=3"]
    assert command_line(["train", *words]) == 0
    ours = capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [str(script.__file__), *words])
    assert exit_code(script.main) == 0
    assert capsys.readouterr() == ours


def exit_code(main: Callable[[], int]) -> int:
    try:
        return main()
    except SystemExit as ended:
        return int(str(ended.code))


def test_an_example_is_for_one_kind(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["train_sft.py", "--config-name", "gym_pendulum_ppo_mlp"])
    assert exit_code(train_sft.main) == 2
    assert "this script trains sft. Use `rlinf-lite train`" in capsys.readouterr().err


def test_a_config_by_its_name_alone(capsys: pytest.CaptureFixture[str], command_line: CommandLine) -> None:
    words = ["--dry-run", "runner.seed=3"]
    assert command_line(["train", "gym_pendulum_ppo_mlp", *words]) == 0
    short = capsys.readouterr().out
    assert "task: Pendulum-v1" in short
    assert command_line(["train", "--config-name", "gym_pendulum_ppo_mlp", *words]) == 0
    assert capsys.readouterr().out == short
    assert command_line(["train", "gym_pendulum_ppo_mlp", "tabletop_ppo_vla"]) == 2
    said = "gym_pendulum_ppo_mlp tabletop_ppo_vla: 2 configs. Name one; a change of it is key=value\n"
    assert capsys.readouterr().err == said
    assert command_line(["train", "tabletop_ppo_vlaa"]) == 2
    assert "Did you mean tabletop_ppo_vla" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["info"]])
def test_nobody_has_to_read_it_to_the_end(words: list[str]) -> None:
    command = [sys.executable, "-m", "rlinf_lite.cli", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode in ([0, 141] if words == ["--help"] else [141])  # where argparse writes, it is no matter


def test_help_names_the_command(capsys: pytest.CaptureFixture[str], command_line: CommandLine) -> None:
    assert command_line(["eval", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: rlinf-lite eval ")


@pytest.mark.parametrize(
    "words",
    [
        ["train", "actor.optim.lr=fast"],
        ["train", "gym_pendulum_ppo_mlp", "tabletop_ppo_vla"],
        ["train", "tabletop_ppo_vlaa"],
        ["train", "runner.seed=1"],
        ["eval", "--checkpoint", "nope"],
        ["eval", "nope"],
        ["eval"],
        ["eval", "nope", "--config-name", "libero_eval"],
        ["report", "nope"],
        ["compare", "nope", "nope"],
        ["sweep", "tabletop_ppo_vlaa", "runner.seed=0,1"],
        ["init", "env", "3d"],
    ],
)
def test_what_cannot_work_exits_with_2(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command_line: CommandLine,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command_line(words) == 2
    written = capsys.readouterr().err
    assert "Traceback" not in written and written
    assert list(tmp_path.iterdir()) == []


def test_a_suite_that_a_policy_does_not_fit_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command_line: CommandLine
) -> None:
    said = {"policy_id": "mlp_gaussian", "state_dim": 39, "action_low": [-1.0] * 4}
    (tmp_path / "config.json").write_text(json.dumps(said))
    words = ["--config-name", "metaworld_ppo_mlp", "--suite", "metaworld-mt10", f"rollout.model_dir={tmp_path}"]
    assert command_line(["eval", *words]) == 2
    written = capsys.readouterr().err
    assert "the policy's state has 39 numbers, and that of MT10 49" in written and "Traceback" not in written
    assert "--suite metaworld-mt10 sets env.id=metaworld env.task=MT10" in written


@pytest.fixture
def runs_without_a_policy(tmp_path: Path) -> Path:
    """A run that wrote no checkpoint, and one whose checkpoint lost the end of a file."""
    results = tmp_path / "results"
    (results / "none").mkdir(parents=True)
    (results / "none" / "metrics.jsonl").touch()
    store = CheckpointStore(results / "damaged", keep=2)
    for step in (1, 2):
        store.write(step, lambda directory: (directory / "weights").write_bytes(b"12345678"))
    (results / "damaged/checkpoints/step_000002/weights").write_bytes(b"1234")
    return results


@pytest.mark.parametrize(
    ("run_dir", "said"),
    [
        ("nope", "nope: no such directory (looked for "),
        ("results/none", "results/none holds no complete checkpoint"),
        ("results/damaged", "weights has 4 of 8 bytes: this checkpoint is damaged"),
        ("policy", "This is a policy without a run: --config-name NAME actor.checkpoint_load_path=policy measures it"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_message(
    run_dir: str,
    said: str,
    runs_without_a_policy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command_line: CommandLine,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    assert command_line(["eval", run_dir]) == 2
    written = capsys.readouterr()
    assert said in written.err and "Traceback" not in written.err and written.out == ""
    assert len(written.err.splitlines()) <= 2


def test_options_that_a_checkpoint_has_settled_are_not_measured_as_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlinf_lite.scheduler.Cluster.from_config", lambda cluster: pytest.fail("Ray was started"))

    def write(directory: Path) -> None:
        write_config(
            load_config("gym_pendulum_ppo_mlp", ["model.options.hidden_sizes=[64,64]"]), directory / "training_state"
        )
        (directory / "policy").mkdir()
        (directory / "policy" / "config.json").write_text("{}")

    checkpoint = CheckpointStore(tmp_path / "run", keep=1).write(2, write)
    assert command_line(["eval", str(tmp_path / "run"), "model.options.hidden_sizes=[32]"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"{checkpoint} cannot be measured with other options than it has",
        "  - model.options.hidden_sizes: [64, 64] -> [32]",
        "Leave them out",
    ]


def pasted(said: str, what: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """What the line of that name at a run's end says to type, typed."""
    [command] = [line.partition(": ")[2] for line in said.splitlines() if line.startswith(f"  {what}: ")]
    return subprocess.run(command, shell=True, cwd=cwd, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_language_model_is_trained_and_measured_by_the_same_commands(tmp_path: Path) -> None:
    trained = run("train", "math_arithmetic_grpo", *SMALL_MATH, "runner.save_interval=2", cwd=tmp_path, timeout_s=300)
    assert trained.returncode == 0, trained.stderr
    [run_dir] = [path.parent for path in tmp_path.glob("results/*/config.yaml")]
    measured = pasted(trained.stdout, "measure", tmp_path)
    assert measured.returncode == 0, measured.stderr
    assert "/6), greedy" in measured.stdout
    assert measured.stdout.endswith(f"written to results/{run_dir.name}/eval_step_000002.json\n")
    assert len(list(tmp_path.glob("results/*/config.yaml"))) == 1  # no run beside it


def test_a_language_model_is_not_loaded_as_a_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command_line: CommandLine
) -> None:
    monkeypatch.chdir(tmp_path)
    elsewhere = f"actor.checkpoint_save_path={tmp_path / 'disk'}"
    cfg = load_config("math_arithmetic_grpo", [elsewhere, "runner.run_name=mine"])
    run, store = tmp_path / "results" / "run", CheckpointStore(tmp_path / "disk" / "run", keep=1)
    checkpoint = store.write(2, lambda directory: write_language_checkpoint(directory, cfg))
    run.mkdir(parents=True)
    write_config(cfg, run)

    said = rf"{checkpoint.parent}/last/policy is a language model, .*AutoModelForCausalLM\.from_pretrained\('/"
    with pytest.raises(CheckpointFormatError, match=said + r".*PeftModel\.from_pretrained\(model, '/.*/adapter'\)"):
        rlinf_lite.load_policy(run)
    assert command_line(["serve", "results/run", "--port", "0"]) == 2
    assert "is a language model, which transformers loads" in capsys.readouterr().err


def write_language_checkpoint(directory: Path, cfg: ReasoningConfig) -> None:
    (directory / "policy" / "adapter").mkdir(parents=True)
    said = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096}
    (directory / "policy" / "config.json").write_text(json.dumps(said))
    write_config(cfg, directory / "training_state")


def test_every_command_takes_a_config_by_its_name_alone(
    capsys: pytest.CaptureFixture[str], command_line: CommandLine
) -> None:
    assert requested(["--out", "demos", "metaworld_sft_vla", "--episodes", "2"]).env.id == "metaworld"
    for words in (["doctor", "tabletop_ppo_vlaa"], ["collect", "--out", "demos", "tabletop_ppo_vlaa"]):
        assert command_line(words) == 2
        assert "Did you mean tabletop_ppo_vla" in capsys.readouterr().err


@pytest.mark.slow
def test_an_ordinary_installation_has_configs_and_examples(repo: Path, tmp_path: Path) -> None:
    """Without the clone: what the wheel holds is enough."""
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*pip, "--target", str(target), str(repo)], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    found = json.loads(run("info", "--json", cwd=elsewhere, path=str(target)).stdout)
    assert str(target) in found["versions"]["rlinf_lite"]
    assert found["configs"] == config_names()
    planned = run("train", "--dry-run", "--config-name", "gym_pendulum_ppo_mlp", cwd=elsewhere, path=str(target))
    assert planned.returncode == 0, planned.stderr
    assert "task: Pendulum-v1" in planned.stdout
    assert (target / "bin" / "rlinf-lite").is_file()
    templates = {path.name for path in (target / "rlinf_lite" / "report" / "templates").iterdir()}
    assert templates == {"compare.html", "page.html", "drawings.html", "style.css"}


@pytest.mark.slow
def test_train_eval_and_report_with_a_policy_beside_the_command(repo: Path, tmp_path: Path) -> None:
    shutil.copy(repo / "examples/embodiment/custom_policy.py", tmp_path / "mine.py")
    small = ["env.train.num_envs=8", "rollout.num_chunks=8", "rollout.pipeline_stage_num=1", "env.eval.num_envs=4"]
    small += ["env.eval.num_episodes=4", "env.eval.max_episode_steps=10", "actor.global_batch_size=64"]
    small += ["cluster.component_placement={actor: 0, rollout: 0, env: 0}", "model.id=mine:SquashedGaussianPolicy"]
    words = ["--config-name", "gym_pendulum_ppo_mlp", "runner.max_steps=2", "runner.save_interval=2", *small]
    trained = run("train", *words, "runner.val_check_interval=2", cwd=tmp_path, timeout_s=200)
    assert trained.returncode == 0, trained.stderr
    [run_dir] = (tmp_path / "results").iterdir()
    assert f"eval results/{run_dir.name}\n" in trained.stdout
    assert f"tensorboard --logdir results/{run_dir.name}" in trained.stdout
    assert str(tmp_path) not in trained.stdout
    said = json.loads((run_dir / "versions.json").read_text())["command"]
    assert said.startswith("rlinf-lite train --config-name gym_pendulum_ppo_mlp runner.max_steps=2 ")

    evaluated = pasted(trained.stdout, "measure", tmp_path)
    assert evaluated.returncode == 0, evaluated.stderr
    assert "(4 episodes)" in evaluated.stdout or "return" in evaluated.stdout
    assert evaluated.stdout.endswith(f"written to results/{run_dir.name}/eval_step_000002.json\n")
    own = (run_dir / "eval_step_000002.json").read_text()
    for seed, name in ((5, "_changed"), (6, "_changed-2")):
        again = run("eval", str(run_dir), f"env.eval.seed={seed}", cwd=tmp_path, timeout_s=200)
        assert again.returncode == 0, again.stderr
        assert f"written to results/{run_dir.name}/eval_step_000002{name}.json" in again.stdout
    assert f"{run_dir}/eval_step_000002_changed.json has other settings or code, and is kept" in again.stdout
    assert (run_dir / "eval_step_000002.json").read_text() == own
    assert json.loads(own)["protocol"]["seed"] == 10_000

    gone_on = pasted(trained.stdout, "go on", tmp_path)
    assert gone_on.returncode == 0, gone_on.stderr
    assert "2 steps are done" in gone_on.stdout and "finished after 4 of 4 steps" in gone_on.stdout
    assert [path.name for path in (tmp_path / "results").iterdir()] == [run_dir.name]

    (run_dir / "report.html").unlink(missing_ok=True)
    assert run("report", str(run_dir), cwd=tmp_path).returncode == 0
    assert (run_dir / "report.html").is_file()


def test_one_process_collects_whatever_workers_a_config_has() -> None:
    """The config spreads environments over two workers in two stages; a list of tasks is one text."""
    words = ["--out", "demos", "--config-name", "metaworld_sft_vla", "--task", "reach-v3,push-v3", "--num-envs", "1"]
    cfg = requested([*words, "--episodes", "2"])
    assert (cfg.env.task, cfg.env.train.num_envs, cfg.data.num_episodes) == ("reach-v3,push-v3", 1, 2)
    few = requested(["--out", "demos", "--env", "tabletop", "--episodes", "3"])
    assert few.env.train.num_envs == 3, "no environment is made that plays nothing"


@pytest.mark.parametrize(("name", "model_id"), [("tabletop_vla", "openvla"), ("tabletop_flow", "pi0")])
def test_a_policy_that_collects_acts_in_its_own_chunks(name: str, model_id: str) -> None:
    """Whose length is in one file or another; asked more often, it would not be the policy that was trained."""
    words = ["--out", "demos", "--env", "tabletop", "--policy", f"assets/{name}", "--episodes", "2", "--num-envs", "2"]
    cfg = requested(words)
    assert (cfg.model.id, cfg.model.num_action_chunks, cfg.env.options.obs_mode) == (model_id, 4, "rgb")
    with pytest.raises(ConfigError, match=r"a chunk of 6 is no whole number of the teacher's chunks of 4"):
        requested([*words, "model.num_action_chunks=6"])


def test_what_an_expert_collects_is_not_asked_of_a_policy(tmp_path: Path) -> None:
    """A state that lacks the objects is nothing to an expert, nor to a published checkpoint, which looks."""
    rgb = ["env.options.obs_mode=rgb", "env.train.num_envs=2"]
    words = ["--out", "demos", "--env", "metaworld", "--task", "reach-v3", "--episodes", "2", *rgb]
    assert requested(words).env.options.obs_mode == "rgb"
    libero = ["--out", "demos", "--env", "libero", "--task", "libero_goal", "--episodes", "2", "--num-envs", "2"]
    with pytest.raises(ConfigError) as caught:
        requested(libero)
    found = [
        problem for problem in caught.value.problems if "is not installed" not in problem and "assets" not in problem
    ]
    [problem] = found
    assert problem.startswith("data.teacher_dir: no scripted expert for open_the_middle_drawer")
    (tmp_path / "config.json").write_text('{"model_type": "openvla"}')
    assert requested([*words, "--policy", str(tmp_path)]).data.teacher_dir == str(tmp_path)
    (tmp_path / "config.json").write_text('{"policy_id": "mlp_gaussian"}')
    with pytest.raises(ConfigError, match=r"rgb has no objects in its state, which is what mlp_gaussian reads"):
        requested([*words, "--policy", str(tmp_path)])


def test_a_run_collects_in_its_own_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command_line: CommandLine
) -> None:
    """A run of reinforcement learning beside generation; its config, changed, imitates what it has played."""
    run, out = tmp_path / "run", tmp_path / "played there"
    own = ["runner.mode=async", "algorithm.correction.kind=decoupled", "env.train.max_episode_steps=8"]
    cfg = load_config("gym_pendulum_ppo_mlp", [*own, "rollout.num_chunks=8", "actor.global_batch_size=128"])
    policy, state = (run / "checkpoints" / "last" / name for name in ("policy", "training_state"))
    state.mkdir(parents=True)
    for directory in (run, state):
        write_config(cfg, directory)
    MLPGaussianPolicy(3, [-2.0], [2.0]).save_pretrained(policy)
    words = ["collect", "--episodes", "2", "--num-envs", "2", "--keep-failures", "--policy"]
    assert command_line([*words, str(run), "--out", str(out)]) == 0
    command = capsys.readouterr().out.partition("imitate it: rlinf-lite train ")[2]
    assert command_line(["train", *shlex.split(command), "--dry-run"]) == 0
    assert f"demonstrations the LeRobotDataset in {out}" in capsys.readouterr().out
    assert command_line([*words, str(policy), "--out", str(tmp_path / "again")]) == 0

    other = tmp_path / "other"
    assert command_line([*words, str(run), "--out", str(other), "--env", "tabletop", "env.options.obs_mode=state"]) == 1
    said = capsys.readouterr().err
    assert f"data.teacher_dir: {run} does not act in tabletop pick: " in said and "Name the environment of its" in said
    assert not other.exists()


def test_collecting_where_nothing_can_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command_line: CommandLine
) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "demos"
    assert command_line(["collect", "--out", str(out), "--env", "tabletop", "--num-envs", "2", "--episodes", "2"]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"LeRobotError: --out: {out} cannot be written to") and "Traceback" not in said.err
    assert not said.out, "it has begun to play"


def test_collected_episodes_are_a_dataset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command_line: CommandLine
) -> None:
    out = tmp_path / "demos"
    words = ["collect", "--out", str(out), "--env", "tabletop", "--task", "push", "--episodes", "6", "--num-envs", "4"]
    words += ["--pictures", "video", "--fps", "5", "--seed", "3", "env.options.obs_mode=rgb+state"]
    assert command_line(words) == 0
    written = capsys.readouterr().out
    assert "6 of 6 episodes (successes)" in written
    imitated = "env.id=tabletop env.task=push env.options.obs_mode=rgb+state"  # else another task's environment
    expected = f"rlinf-lite train embodiment/tabletop_sft_vla data.source=folder data.demos_dir={out} {imitated}"
    assert written.endswith(f"  imitate it: {expected}\n")
    info = json.loads((out / "meta" / "info.json").read_text())
    assert (info["total_episodes"], info["fps"], info["robot_type"]) == (6, 5, "tabletop")
    assert info["features"]["observation.images.top"]["dtype"] == "video"

    folder = [
        "train",
        "tabletop_sft_vla",
        "data.source=folder",
        f"data.demos_dir={out}",
        *imitated.split(),
        "--dry-run",
    ]
    assert command_line(folder) == 0
    assert f"demonstrations the LeRobotDataset in {out}" in capsys.readouterr().out
    [table] = (out / "data").glob("*/*.parquet")
    table.write_bytes(table.read_bytes()[:-50])
    assert command_line(folder) == 1, "the run itself would be refused"
    assert f"LeRobotError: {table} cannot be read" in capsys.readouterr().err

    assert command_line(words) == 1
    assert "is a dataset already" in capsys.readouterr().err
    assert command_line(["collect", "--out", str(tmp_path / "x"), "--env", "tabletob"]) == 2
    assert "Did you mean tabletop?" in capsys.readouterr().err
    assert command_line(["collect", "--env", "tabletop"]) == 2 and "--out" in capsys.readouterr().err


def test_processes_share_the_environments_of_a_collection(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes write the files that one writes; an error, or the end, of one of them is said."""
    words = ["collect", "--env", "tabletop", "--task", "push", "--episodes", "5", "--num-envs", "3"]
    words += ["env.options.obs_mode=rgb+state"]
    one, two = tmp_path / "one", tmp_path / "two"
    assert command_line([*words, "--out", str(one)]) == 0
    assert command_line([*words, "--out", str(two), "--processes", "2"]) == 0
    assert "3 at a time in 2 processes" in capsys.readouterr().out
    files = [path.relative_to(one) for path in one.rglob("*") if path.is_file() and path.name != "rlinf_lite.json"]
    assert len(files) > 3
    for file in files:
        assert (two / file).read_bytes() == (one / file).read_bytes(), file

    (tmp_path / "failing.py").write_text(
        "import os\n"
        "from rlinf_lite.envs.errors import EnvError\n"
        "from rlinf_lite.envs.tabletop.card import Tabletop\n"
        "from rlinf_lite.envs.tabletop.simulator import TabletopSimulator\n"
        "class Card(Tabletop):\n"
        "    simulator = 'failing:Failing'\n"
        "class Failing(TabletopSimulator):\n"
        "    def expert_actions(self, num_actions):\n"
        "        if os.environ['HOW'] == 'ends':\n"
        "            os._exit(7)\n"
        "        raise EnvError('the arm is stuck')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    words[2] = "failing:Card"
    for how, said in (("ends", "of 2 that collects ended (exit code 7)"), ("fails", "the arm is stuck")):
        monkeypatch.setenv("HOW", how)
        out = tmp_path / how
        assert command_line([*words, "--out", str(out), "--processes", "2"]) == 1
        assert said in capsys.readouterr().err


def test_a_run_of_any_letters_is_trained_resumed_and_measured_by_the_commands_that_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command_line: CommandLine
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = {"train.num_envs": 4, "train.max_episode_steps": 4, "eval.num_envs": 2, "eval.num_episodes": 2}
    words = [f"env.{key}={value}" for key, value in (sizes | {"eval.max_episode_steps": 4}).items()]
    words += ["rollout.num_chunks=4", "rollout.pipeline_stage_num=1", "algorithm.update_epochs=1"]
    words += ["actor.global_batch_size=16", "actor.micro_batch_size=16", "runner.max_steps=1", "cluster.runtime=local"]
    words += ["runner.run_name=läufer", "runner.logger.log_path='jö rg/läufe (2), neu'"]
    assert command_line(["train", "gym_pendulum_ppo_mlp", *words]) == 0
    shown = capsys.readouterr().out
    [run] = (tmp_path / "jö rg" / "läufe (2), neu").iterdir()
    assert run.name.startswith("läufer-Pendulum-v1-seed0-") and "läufer" in (run / "report.html").read_text()
    commands = {line.partition(":")[0].strip(): shlex.split(line.partition(":")[2]) for line in shown.splitlines()[-2:]}
    assert command_line(commands["go on"][1:]) == 0
    assert (run / "checkpoints" / "step_000002").is_dir() and list(run.parent.iterdir()) == [run]
    assert command_line(commands["measure"][1:]) == 0
    assert list(run.glob("eval_step_000002*.json"))
