"""A run directory has one owner and a unique name, and a resume reports the checkpoint that it goes on from."""

import errno
import fcntl
import itertools
import os
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache, reduce
from pathlib import Path

import pytest
import yaml

from rlinf_lite.cards import PolicyCard
from rlinf_lite.config import load_config
from rlinf_lite.config.resources import policy_directory
from rlinf_lite.runners import run_paths
from rlinf_lite.runners.checkpoints import CheckpointError, CheckpointStore, find_checkpoint
from rlinf_lite.runners.run_config import check_options, write_config
from rlinf_lite.runners.run_paths import RunInUseError, begin_run, claim_run, find_run

PENDULUM = "embodiment/gym_pendulum_ppo_mlp"
VLA = "embodiment/tabletop_ppo_vla"


loaded = cache(load_config)


def config(root, *overrides, name=PENDULUM):
    """A config as from `load_config`, in 1/100 of the time, without its checks."""
    content = loaded(name).model_dump(mode="json")
    for override in (f"runner.logger.log_path={root}", *overrides):
        *sections, key = (words := override.partition("="))[0].split(".")
        reduce(dict.__getitem__, sections, content)[key] = yaml.safe_load(words[2])
    return type(loaded(name)).model_validate(content)


def save(cfg, run_dir, step):
    """A checkpoint as written by a run, without weights."""
    store = CheckpointStore(run_dir, 5)
    partial = store.begin(step)
    (partial / "training_state" / "runner.json").write_text(f'{{"completed_steps": {step}, "run": "{run_dir.name}"}}')
    write_config(cfg, partial / "training_state")
    return store.commit(step, partial)


def train(cfg, *steps):
    """A run that has ended; returns its directory."""
    with claim_run(cfg) as claim:
        begin_run(cfg, claim.log_dir, CheckpointStore(claim.checkpoint_dir, 5), 0, 10)
        for step in steps:
            save(cfg, claim.checkpoint_dir, step)
    return claim.log_dir


def child(act):
    """A process that calls `act` and then sleeps; returns its pid when `act` is done."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        held = act()  # a claim ends when nothing refers to it any more
        os.write(write, b"x")
        time.sleep(100)
        os._exit(held is None)
    os.close(write)
    assert os.read(read, 1) == b"x"
    os.close(read)
    return pid


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_names_carry_config_task_and_seed_and_are_safe(tmp_path):
    for settings, start in (
        ([], "gym_pendulum_ppo_mlp-Pendulum-v1-seed0-2"),
        (["runner.run_name=../a b/c", "env.task=Pendulum-v1", "runner.seed=7"], "_a_b_c-Pendulum-v1-seed7-2"),
        ([f"runner.run_name={'x' * 300}"], "x" * 80 + "-Pendulum"),
    ):
        claim = find_run(config(tmp_path, *settings))
        assert claim.log_dir.name.startswith(start) and claim.log_dir.parent == tmp_path
    math = find_run(config(tmp_path, name="math/math_arithmetic_grpo"))
    assert math.log_dir.name.startswith("math_arithmetic_grpo-seed0-2")
    assert not list(tmp_path.iterdir())  # nothing is created before a run begins: an evaluation needs no directory


def test_runs_that_start_in_the_same_second_have_directories_of_their_own(tmp_path, monkeypatch):
    numbers = itertools.count()  # which threads can share, unlike a generator
    monkeypatch.setattr(run_paths.secrets, "token_hex", lambda _: f"{next(numbers) // 4:04x}")  # four times the same
    monkeypatch.setattr(run_paths.time, "strftime", lambda _: "20261122-111736")
    cfg = config(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        claims = list(threads.map(lambda _: claim_run(cfg), range(24)))
    assert len({claim.log_dir for claim in claims}) == 24 and all(claim.log_dir.is_dir() for claim in claims)
    pid = child(lambda: claim_run(cfg))
    assert len(list(tmp_path.iterdir())) == 25
    kill(pid)


@pytest.mark.parametrize("how", ["auto", "run", "checkpoint"])
def test_a_run_that_lives_is_not_resumed_by_another(tmp_path, how):
    cfg = config(tmp_path)
    run = train(cfg, 4)
    resume = {"auto": "auto", "run": run, "checkpoint": run / "checkpoints" / "step_000004"}[how]
    again = config(tmp_path, f"runner.resume={resume}")
    pid = child(lambda: claim_run(again))
    with pytest.raises(RunInUseError, match=rf"{run}.*process {pid} on .* since \d\d\d\d-.*runner\.resume=never"):
        claim_run(again)
    assert find_checkpoint(run).name == "step_000004"  # it can be evaluated
    kill(pid)
    with claim_run(again) as claim:
        assert claim.log_dir == run and claim.resume_from.name == "step_000004"
        with pytest.raises(RunInUseError, match=f"process {os.getpid()} "):
            claim_run(again)
    claim_run(again).release()


def test_programs_and_forks_that_a_run_starts_do_not_keep_it(tmp_path):
    cfg = config(tmp_path, "runner.resume=auto")
    train(cfg, 1)
    pids = tmp_path.parent / "pids"

    def act():
        claim = claim_run(cfg)
        program = subprocess.Popen(["sleep", "100"], close_fds=False)
        pids.write_text(f"{program.pid} {child(lambda: None)}")
        return claim

    pid = child(act)
    with pytest.raises(RunInUseError):
        claim_run(cfg)
    kill(pid)
    left = [int(word) for word in pids.read_text().split()]
    try:
        for other in left:
            os.kill(other, 0)  # it lives
        claim_run(cfg).release()
    finally:
        for other in left:
            os.kill(other, signal.SIGKILL)


def test_two_roots_are_two_locks_and_one_by_two_names_is_one(tmp_path):
    logs, checkpoints = tmp_path / "logs", tmp_path / "checkpoints"
    cfg = config(logs, f"actor.checkpoint_save_path={checkpoints}")
    with claim_run(cfg) as claim:
        begin_run(cfg, claim.log_dir, CheckpointStore(claim.checkpoint_dir, 5), 0, 10)
        save(cfg, claim.checkpoint_dir, 1)
        for path in (logs, checkpoints):  # half of the calls would be enough to collide
            mine = [f"runner.logger.log_path={path}", "runner.resume=auto"]
            with pytest.raises(RunInUseError):
                claim_run(config(tmp_path / "other", *mine, f"actor.checkpoint_save_path={checkpoints}"))
    (tmp_path / "link").symlink_to(logs)
    claim_run(config(logs, f"actor.checkpoint_save_path={tmp_path / 'link'}")).release()
    assert not (tmp_path / "other").exists() or not list((tmp_path / "other").iterdir())


def test_a_run_that_never_began_leaves_nothing(tmp_path):
    with claim_run(config(tmp_path / "logs", f"actor.checkpoint_save_path={tmp_path / 'c'}")) as claim:
        assert claim.log_dir.is_dir() and claim.checkpoint_dir.is_dir()
    claim.release()
    assert not list((tmp_path / "logs").iterdir()) and not list((tmp_path / "c").iterdir())


def test_a_file_system_without_locks_is_said_and_no_obstacle(tmp_path, monkeypatch, caplog):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with claim_run(config(tmp_path)):
        assert "no locks on this file system" in caplog.text


def test_auto_goes_by_name_task_and_seed_and_not_by_directories_names(tmp_path, capsys):
    first = train(config(tmp_path, "runner.seed=1"), 2)
    old = tmp_path / "gym_pendulum_ppo_mlp-20250101-000000"
    first.rename(old)  # as an older version named it
    newer = train(config(tmp_path, "runner.seed=1"), 3)
    train(config(tmp_path, "runner.seed=2"), 9)
    train(config(tmp_path, "runner.seed=1", "env.task=MountainCarContinuous-v0"), 9)
    train(config(tmp_path, "runner.seed=1", "runner.run_name=gym_pendulum_ppo_mlp-seed1"), 9)
    auto = config(tmp_path, "runner.seed=1", "runner.resume=auto")
    assert find_run(auto).log_dir == newer
    save(auto, old, 5)  # the one that was written last
    capsys.readouterr()
    claim = claim_run(auto)
    assert claim.log_dir == old and f"{old}/checkpoints/step_000005: 5 steps are done" in capsys.readouterr().out
    claim.release()
    new = find_run(config(tmp_path, "runner.seed=3", "runner.resume=auto"))
    assert new.resume_from is None and not new.log_dir.exists()
    [line] = capsys.readouterr().out.splitlines()
    assert "gym_pendulum_ppo_mlp" in line and "Pendulum-v1" in line and "seed 3" in line and "new run" in line


def test_auto_takes_what_was_trained_and_passes_by_what_is_no_run(tmp_path):
    """A run that failed in its first step also leaves a checkpoint, of step 0."""
    cfg = config(tmp_path, "runner.seed=1")
    auto = config(tmp_path, "runner.seed=1", "runner.resume=auto")
    untrained = train(cfg, 0)
    assert find_run(auto).log_dir == untrained
    trained = train(cfg, 4)
    save(cfg, untrained, 0)  # the one that was written last
    stranger = CheckpointStore(tmp_path / "another-program", 1)
    stranger.commit(7, stranger.begin(7))
    assert find_run(auto).log_dir == trained


@pytest.mark.parametrize(
    "change",
    [
        *("runner.seed=5", "env.task=MountainCarContinuous-v0", "env.train.num_envs=32", "env.options={g: 9.0}"),
        *("model.options.hidden_sizes=[64]", "rollout.num_chunks=7", "env.train.max_episode_steps=11"),
    ],
)
def test_a_changed_run_is_refused_with_what_to_write_and_goes_on_when_told(tmp_path, capsys, change):
    run, key = train(config(tmp_path), 3), change.partition("=")[0]
    changed = [change, f"runner.resume={run}"]
    with pytest.raises(CheckpointError, match=rf"step_000003 cannot be resumed.*\n  - {key}: .* -> ") as error:
        claim_run(config(tmp_path, *changed))
    allow = str(error.value).rpartition("'")[0].rpartition("'")[2]
    assert allow == f"runner.allow_changes=[{key}]"
    capsys.readouterr()
    claim_run(config(tmp_path, *changed, allow)).release()
    assert f"changed: {key}: " in capsys.readouterr().out
    claim_run(config(tmp_path, *changed, f"runner.allow_changes=[{key.partition('.')[0]}]")).release()


def test_the_advice_is_an_override():
    assert load_config(PENDULUM, ["runner.allow_changes=[env.train.num_envs,runner.seed]"]).runner.allow_changes == [
        *("env.train.num_envs", "runner.seed")
    ]


def test_every_other_difference_is_shown(tmp_path, capsys):
    run = train(config(tmp_path), 3)
    changes = ["algorithm.gamma=0.5", "actor.optim.lr=1e-5", "runner.max_steps=9", "env.eval.num_episodes=7"]
    claim_run(config(tmp_path, *changes, f"runner.resume={run}")).release()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"resuming {run}/checkpoints/step_000003: 3 steps are done"
    assert sorted(line.split()[1] for line in lines[1:]) == sorted(f"{change.partition('=')[0]}:" for change in changes)
    assert f"  changed: algorithm.gamma: {loaded(PENDULUM).algorithm.gamma} -> 0.5" in lines


def test_what_a_language_models_run_cannot_change_is_not_offered(tmp_path):
    math = "math/math_arithmetic_grpo"
    run = train(config(tmp_path, name=math), 3)
    for change in ("runner.seed=5", "data.num_prompts=8"):
        with pytest.raises(CheckpointError, match="the order of prompts could not be continued") as error:
            claim_run(config(tmp_path, change, f"runner.resume={run}", "runner.allow_changes=[runner,data]", name=math))
        assert "allow_changes=" not in str(error.value)
    with pytest.raises(CheckpointError, match=r"another kind of run.*actor\.checkpoint_load_path="):
        claim_run(config(tmp_path, f"runner.resume={run}"))


@pytest.mark.parametrize("name", ["math/math_arithmetic_grpo", "embodiment/tabletop_ppo_vla"])
def test_adapters_stay_what_they_are(tmp_path, name):
    key = "model.lora.rank" if "math" in name else "model.options.lora.rank"
    run = train(config(tmp_path, f"{key}=8", name=name), 3)
    for rank in (0, 4):
        with pytest.raises(CheckpointError, match=rf"{key}: 8 -> {rank}\n.*rlinf-lite export .*step_000003") as error:
            claim_run(
                config(tmp_path, f"{key}={rank}", f"runner.resume={run}", "runner.allow_changes=[model]", name=name)
            )
        assert "allow_changes=" not in str(error.value)


def test_an_evaluation_may_change_options_that_the_weights_leave_open(tmp_path):
    saved = loaded(VLA).model_dump(mode="json")
    open_ones = [
        "model.options.max_prompt_length=45",
        "model.options.compile=true",
        "model.options.lora.save_base=false",
    ]
    check_options(saved, config(tmp_path, *open_ones, name=VLA), tmp_path)
    with pytest.raises(CheckpointError, match=r"other options than it has\n  - model\.options\.size: tiny -> small\n"):
        check_options(saved, config(tmp_path, *open_ones, "model.options.size=small", name=VLA), tmp_path)


class WithoutOptions:
    card = PolicyCard


def test_an_evaluation_changes_no_options_of_a_policy_that_declares_none(tmp_path):
    own = [f"model.id={__name__}:WithoutOptions", "model.options={width: 8}"]
    saved = config(tmp_path, *own).model_dump(mode="json")
    check_options(saved, config(tmp_path, *own), tmp_path)
    with pytest.raises(CheckpointError, match=r"\n  - model\.options: \{width: 8\} -> \{width: 16\}\n"):
        check_options(saved, config(tmp_path, *own, "model.options={width: 16}"), tmp_path)


def test_checkpoints_are_found_where_the_runs_config_has_them_go(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    cfg = config(tmp_path, f"actor.checkpoint_save_path={elsewhere}")
    run = train(cfg, 3)
    checkpoints = elsewhere / run.name / "checkpoints"
    assert not (run / "checkpoints").exists()
    assert find_checkpoint(run) == checkpoints / "step_000003"
    with claim_run(cfg.model_copy(update={"runner": cfg.runner.model_copy(update={"resume": str(run)})})) as claim:
        assert (claim.log_dir, claim.resume_from) == (run, checkpoints / "step_000003")
    (checkpoints / "step_000003" / "policy").mkdir()
    assert policy_directory(run) == checkpoints / "last" / "policy"
    monkeypatch.chdir(run)
    assert find_checkpoint(Path(".")) == checkpoints / "step_000003"

    write_config(config(tmp_path, f"actor.checkpoint_save_path={tmp_path / 'gone'}"), run)
    with pytest.raises(CheckpointError, match=rf"nor does {tmp_path}/gone/{run.name}/checkpoints, where its config"):
        find_checkpoint(run)
    for content in ("actor: null\n", "[", "actor: {checkpoint_save_path: 5}\n", ""):
        (run / "config.yaml").write_text(content)
        with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
            find_checkpoint(run)


def test_a_checkpoint_of_another_version_is_compared_by_what_both_have(tmp_path, capsys):
    cfg = config(tmp_path)
    run = train(cfg)
    content = cfg.model_dump(mode="json")
    del content["control"], content["env"]["num_threads"]
    content["algorithm"] |= {"gamma": 0.5, "gone": 1}
    content["gone"] = {"a": 1}
    content["env"]["options"] = None
    checkpoint = save(cfg, run, 1)
    store = CheckpointStore(run, 5)
    partial = store.begin(2)
    for name in ("runner.json", "config.yaml"):
        (partial / "training_state" / name).write_text((checkpoint / "training_state" / name).read_text())
    content["env"]["options"] = {}
    (partial / "training_state" / "config.yaml").write_text(yaml.safe_dump(content))
    store.commit(2, partial)
    claim_run(config(tmp_path, "runner.resume=auto")).release()
    assert "changed: algorithm.gamma: 0.5 -> " in capsys.readouterr().out


def test_the_config_of_earlier_steps_is_kept(tmp_path, capsys):
    cfg = config(tmp_path)
    run = train(cfg, 3)
    original = (run / "config.yaml").read_text()

    def resume(*overrides):
        cfg = config(tmp_path, *overrides, "runner.resume=auto")
        with claim_run(cfg) as claim:
            begin_run(cfg, claim.log_dir, CheckpointStore(claim.checkpoint_dir, 5), 3, 10)

    resume()
    assert (run / "config.yaml").read_text() == original and len(list(run.glob("config*"))) == 1
    resume("algorithm.gamma=0.5")
    assert (run / "config.1.yaml").read_text().partition("\n")[2] == original
    resume("algorithm.gamma=0.6")
    later = [yaml.safe_load((run / name).read_text()) for name in ("config.2.yaml", "config.yaml")]
    assert [content["algorithm"]["gamma"] for content in later] == [0.5, 0.6]
    assert "config of the steps until 3 is now" in capsys.readouterr().out
    assert load_config(str(run / "config.1.yaml")).algorithm.gamma == cfg.algorithm.gamma


def test_a_crash_while_a_step_is_written_again_is_mended_by_the_next_owner(tmp_path):
    run = train(config(tmp_path), 3)
    store = CheckpointStore(run, 5)
    (store.root / "step_000003").rename(store.root / ".step_000003.old")
    with claim_run(config(tmp_path, "runner.resume=auto")) as claim:
        assert claim.resume_from == (store.root / "step_000003").resolve() and claim.resume_from.is_dir()


def test_one_goes_back_to_a_superseded_checkpoint(tmp_path, capsys):
    run = train(config(tmp_path), 3, 5)
    for source, step, later in ((run / "checkpoints" / "step_000003", 3, ["step_000005"]), (None, 5, [])):
        source = source or run / "checkpoints" / "superseded" / "step_000005"
        cfg = config(tmp_path, f"runner.resume={source}")
        with claim_run(cfg) as claim:
            assert claim.log_dir == run and claim.resume_from == source.resolve()
            begin_run(cfg, claim.log_dir, CheckpointStore(claim.checkpoint_dir, 5), step, 10)
        assert find_checkpoint(run).name == "step_000003"
        assert ("superseded" in capsys.readouterr().out.replace(str(source), "")) == bool(later)


def test_evaluations_of_steps_that_are_done_again_are_those_of_no_later_checkpoint(tmp_path, capsys):
    elsewhere = f"actor.checkpoint_save_path={tmp_path / 'elsewhere'}"
    cfg = config(tmp_path, elsewhere)
    run = train(cfg, 3, 5)
    checkpoints = tmp_path / "elsewhere" / run.name / "checkpoints"
    names = {run / "eval": "step_{}.json step_{}.gif step_{}.answers.jsonl", run: "eval_step_{}-2.json"}
    names |= {checkpoints.parent: "eval_step_{}.json eval_step_{}_changed.gif"}
    (run / "eval").mkdir()
    for directory, wanted in names.items():
        for name in [name.format(step) for name in wanted.split() for step in ("000003", "000005")]:
            (directory / name).write_text("")

    def resume(source, step):
        with claim_run(config(tmp_path, elsewhere, f"runner.resume={source}")) as claim:
            begin_run(cfg, run, CheckpointStore(claim.checkpoint_dir, 5), step, 10, claim.resume_from)

    def files(directory):
        return sorted(path.name for path in directory.glob("*step_*"))

    resume(checkpoints / "step_000003", 3)
    for directory, wanted in names.items():
        assert files(directory) == sorted(wanted.replace("{}", "000003").split())
        assert files(directory / "superseded") == sorted(wanted.replace("{}", "000005").split())
    places = [checkpoints.parent / "superseded", checkpoints / "superseded", run / "eval" / "superseded"]
    said = ", ".join(sorted(map(str, [*places, run / "superseded"])))
    assert f"checkpoints and evaluations of the steps after 3 are now in {said}\n" in capsys.readouterr().out

    save(cfg, checkpoints.parent, 5)  # with other weights than the checkpoint that the run goes back to
    (run / "eval" / "step_000005.json").write_text("")
    resume(checkpoints / "superseded" / "step_000005", 5)
    assert files(run / "eval") == ["step_000003.answers.jsonl", "step_000003.gif", "step_000003.json"]


def test_a_copy_of_a_run_does_not_undo_steps_of_the_original(tmp_path, capsys):
    cfg = config(tmp_path / "results")
    run = train(cfg, 2)
    backup = Path(shutil.copytree(run, tmp_path / "backup" / run.name, symlinks=True))
    alone = shutil.copytree(run / "checkpoints" / "step_000002", tmp_path / "best")
    save(cfg, run, 6)
    before = sorted(tmp_path.rglob("*"))
    for source, advice in ((backup, f"log_path={tmp_path}/backup .*, or another "), (alone, "checkpoint: runner")):
        said = rf"{source}.* step 2, does not lie in the run {run}, .* step 6 .* runner\.resume={run}\. .*{advice}"
        with pytest.raises(CheckpointError, match=said):
            claim_run(config(tmp_path / "results", f"runner.resume={source}"))
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").write_text('{"step": 2}\n{"step": 3}\n{"st')
    with pytest.raises(CheckpointError, match="come to step 3"):
        claim_run(config(tmp_path / "results", f"runner.resume={backup}"))
    gone = {path for path in before if path.is_relative_to(run / "checkpoints")}
    assert set(tmp_path.rglob("*")) == set(before) - gone | {run / "metrics.jsonl"}

    capsys.readouterr()
    for root in ("backup", "new"):  # its own place, and a place without a run of this name
        moved = config(tmp_path / root, f"runner.resume={backup}")
        with claim_run(moved) as claim:
            assert claim.log_dir == claim.checkpoint_dir == tmp_path / root / run.name
            begin_run(moved, claim.log_dir, CheckpointStore(claim.checkpoint_dir, 5), 2, 10, claim.resume_from)
        assert "changed" not in capsys.readouterr().out
        assert yaml.safe_load((claim.log_dir / "config.yaml").read_text())["runner"]["logger"]["log_path"] == str(
            tmp_path / root
        )
    assert not list(tmp_path.rglob("config.1.yaml"))


def test_a_superseded_checkpoint_lies_in_its_run_whatever_that_is_called_now(tmp_path):
    run = train(config(tmp_path), 3, 5)
    CheckpointStore(run, 5).go_on_from(3)
    renamed = run.rename(tmp_path / "renamed")
    checkpoint = renamed / "checkpoints" / "superseded" / "step_000005"
    with claim_run(config(tmp_path, f"runner.resume={checkpoint}")) as claim:
        assert (claim.log_dir, claim.resume_from) == (renamed, checkpoint)


def test_a_run_that_was_copied_without_links_goes_on(tmp_path):
    cfg = config(tmp_path / "results")
    run = train(cfg, 2, 4)
    copy = Path(shutil.copytree(run, tmp_path / "copy" / run.name))
    last = copy / "checkpoints" / "last"
    assert not last.is_symlink()
    for source in (last, copy):
        with claim_run(config(tmp_path / "copy", f"runner.resume={source}")) as claim:
            assert claim.resume_from == copy / "checkpoints" / "step_000004" == last.resolve()
    assert save(cfg, copy, 6) == last.resolve()


def test_resumes_need_a_whole_checkpoint(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        claim_run(config(tmp_path, f"runner.resume={tmp_path / 'empty'}"))
    assert [path.name for path in Path(tmp_path).iterdir()] == ["empty"]
