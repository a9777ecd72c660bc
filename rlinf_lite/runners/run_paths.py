"""The directories of a run, and the checkpoint that it resumes from. A file lock, released when its process ends,
allows one process at a time to write a run's directory."""

from __future__ import annotations

import errno
import json
import logging
import os
import platform
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from rlinf_lite.config.names import as_file_name
from rlinf_lite.config.schema import BaseConfig
from rlinf_lite.runners.checkpoints import (
    CHECKSUMS,
    SUPERSEDED,
    CheckpointError,
    CheckpointStore,
    find_checkpoint,
    newest_checkpoint,
    read_state,
    run_of,
    step_number,
    verify,
)
from rlinf_lite.runners.protocol import commit, gpu_names, versions
from rlinf_lite.runners.run_config import CONFIG, changes_since, read_config, write_run_config

log = logging.getLogger(__name__)

LOCK = ".lock"
_MAX_NAMES = 20
_MAX_PART = 80  # bytes of each part; a file name may have 255


class RunInUseError(CheckpointError):
    """Another process is writing this run."""


def _locked(directory: Path) -> FileLock:
    """Acquire a lock on `<directory>/.lock`; the file's text names the holder. Child processes do not inherit it.

    Raises:
        RunInUseError: if another holder lives, in this process or another, on this machine or on one that shares the
            file system.
        CheckpointError: if the file cannot be written.
    """
    file = directory / LOCK
    lock = FileLock(file, timeout=0, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout as error:
        holder = file.read_text().strip() or "another process"
        raise RunInUseError(
            f"{directory} is in use: {holder} writes it. Wait for its end, stop it (Ctrl-C there, or `rlinf-lite "
            "stop`), or start a run beside it with runner.resume=never"
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise CheckpointError(f"{file} cannot be written: {error.strerror}") from error
        log.warning("%s: no locks on this file system; take care that no other process writes this run", file)
    file.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    return lock


class RunClaim:
    """The directories of a run and the checkpoint to resume from: `<log_path>/<run>` for metrics and
    `<checkpoint_save_path>/<run>/checkpoints`.

    While the claim is held, no other process writes these directories. It ends with `release`, and with the process.
    """

    def __init__(self, log_dir: Path, checkpoint_dir: Path, resume_from: Path | None = None) -> None:
        self.log_dir, self.checkpoint_dir, self.resume_from = log_dir, checkpoint_dir, resume_from
        self.begun = False  # whether the owner has begun the run, so that files in its directory are its own
        self._to_create = resume_from is None
        self._created: list[Path] = []
        self._locks: list[FileLock] = []

    def hold(self) -> None:
        """Create the directories and lock them, unless that was done already.

        Raises:
            RunInUseError: if another process writes them, or a new run's directories exist already.
            CheckpointError: if they cannot be written.
        """
        if self._locks:
            return
        try:
            for directory in (self.log_dir, self.checkpoint_dir):
                if any(directory.resolve() == Path(lock.lock_file).parent.resolve() for lock in self._locks):
                    continue
                created = [] if directory.exists() else [directory]
                directory.mkdir(parents=True, exist_ok=not self._to_create)
                self._created += created
                self._locks.append(_locked(directory))
        except (OSError, CheckpointError) as error:
            self.release()
            if isinstance(error, FileExistsError):
                raise RunInUseError(f"{error.filename} is there already: a new run takes a name of its own") from error
            if isinstance(error, OSError):
                where = error.filename or self.log_dir
                raise CheckpointError(f"{where} cannot be written: {error.strerror}") from error
            raise
        self._to_create = False

    def release(self) -> None:
        """Release the run, so that other processes can resume it. Directories of a new run without files are
        removed."""
        for directory in self._created:
            if directory.is_dir() and [path.name for path in directory.iterdir()] == [LOCK]:
                (directory / LOCK).unlink()
                directory.rmdir()
                self._to_create = self.resume_from is None
        for lock in self._locks:
            with suppress(OSError):  # the file may be gone with its directory; otherwise it stays, and is empty
                os.truncate(lock.lock_file, 0)
            lock.release()
        self._locks, self._created = [], []

    def __enter__(self) -> Self:
        self.hold()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def claim_run(cfg: BaseConfig) -> RunClaim:
    """Claim the run that a config means, and hold it. Call it before anything is started, and pass it to the Runner.

    Raises:
        RunInUseError: if another process writes the run to resume.
        CheckpointError: if `runner.resume` names no complete and undamaged checkpoint, or one of another seed,
            environment, model or size that `runner.allow_changes` does not allow.
    """
    for _ in range(_MAX_NAMES):
        claim = find_run(cfg)
        with suppress(RunInUseError):  # another run that began in the same second has this name
            claim.hold()
            return claim
    raise RunInUseError(f"{claim.log_dir} and {_MAX_NAMES - 1} other names are there already")


def find_run(cfg: BaseConfig) -> RunClaim:
    """As `claim_run`, but a new run is held only when it begins: an evaluation needs no directory."""
    source = _resume_source(cfg)
    if source is None:
        # <config>-<task>-seed<seed>-<start>-<random>, in characters that file systems and shells accept
        name, _, seed, task = _identity(cfg.model_dump(mode="json"))
        parts = [as_file_name(part, _MAX_PART) or "run" for part in (name, task) if part is not None]
        start, random = time.strftime("%Y%m%d-%H%M%S"), secrets.token_hex(2)
        return _claim(cfg, "-".join([*parts, f"seed{seed}", start, random]))
    checkpoint = find_checkpoint(source)
    claim = run_to_resume(cfg, checkpoint)
    claim.hold()
    try:
        store = CheckpointStore(claim.checkpoint_dir, cfg.runner.keep_checkpoints)
        if checkpoint.parent == store.root.resolve():
            store.tidy()
            claim.resume_from = checkpoint = find_checkpoint(source)  # its last owner may have written a newer one
        changes = changes_since(checkpoint, cfg)
        verify(checkpoint)
        steps = read_state(checkpoint)["completed_steps"]
    except BaseException:  # Ctrl-C too: nothing else would release it
        claim.release()
        raise
    lines = [f"resuming {checkpoint}: {steps} steps are done", *(f"  changed: {change}" for change in changes or [])]
    if changes is None:
        lines.append("  it has no config to compare this one with")
    print("\n".join(lines), flush=True)
    return claim


def run_to_resume(cfg: BaseConfig, checkpoint: Path) -> RunClaim:
    """The claim, not held yet, of the run that goes on from `checkpoint`.

    Raises:
        CheckpointError: if that run does not contain the checkpoint and would lose steps of its own.
    """
    run, state = run_of(checkpoint), read_state(checkpoint)
    claim, steps = _claim(cfg, state["run"] if run is None else run.name, checkpoint), int(state["completed_steps"])
    roots = [directory / "checkpoints" for directory in (claim.checkpoint_dir, claim.log_dir)]
    lies_in_it = [checkpoint.is_relative_to(root.resolve()) for root in roots]
    kept = [] if lies_in_it[0] else CheckpointStore(claim.checkpoint_dir, 1).steps()
    later = [step for step in map(step_number, kept) if step >= steps]
    metrics = claim.log_dir / "metrics.jsonl"
    if not any(lies_in_it) and metrics.exists():
        with metrics.open() as lines:
            logged = (json.loads(line)["step"] for line in lines if line.endswith("\n"))
            later += [step for step in logged if step > steps]
    if later:
        from rlinf_lite.config.loading import as_override  # loads Hydra

        where = f"runner.logger.log_path where no {claim.log_dir.name} is"
        if run is not None:
            root = shlex.quote(as_override("runner.logger.log_path", str(run.parent)))
            where = f"{root} actor.checkpoint_save_path=null, or another {where}"
        resume = shlex.quote(as_override("runner.resume", str(claim.checkpoint_dir)))
        raise CheckpointError(
            f"{checkpoint}, of step {steps}, does not lie in the run {claim.checkpoint_dir}, which has come to step "
            f"{max(later)} and would lose what it has from there on. To go on with that run: "
            f"{resume}. To go on from this checkpoint: {where}"
        )
    return claim


def begin_run(
    cfg: BaseConfig,
    run_dir: Path,
    store: CheckpointStore,
    completed_steps: int,
    total_steps: int,
    resumed: Path | None = None,
) -> None:
    """Write the config, the command, the planned steps, and the versions of packages into a run's directory, which must
    be held. Checkpoints and evaluations of steps that are done again are moved to `superseded/`; an earlier config that
    differs is kept under another name."""
    run_dir.mkdir(parents=True, exist_ok=True)
    moved = store.go_on_from(completed_steps, resumed)
    is_of_run = resumed is None or resumed.parent.resolve() == store.root.resolve()
    moved += _set_evaluations_aside({run_dir, store.root.parent}, completed_steps + is_of_run)
    kept = write_run_config(cfg, run_dir, completed_steps)
    if moved:
        what, where = f"steps after {completed_steps}", ", ".join(sorted({str(path.parent) for path in moved}))
        print(f"checkpoints and evaluations of the {what} are now in {where}", flush=True)
    if kept is not None:
        print(f"the config of the steps until {completed_steps} is now {kept}", flush=True)
    program = os.path.relpath(sys.argv[0]) if os.path.isabs(sys.argv[0]) else sys.argv[0]
    program = program if program.startswith("rlinf-lite ") else shlex.quote(program)  # `rlinf-lite train`: two words
    command = f"{program} {shlex.join(sys.argv[1:])}".strip()
    found = {"command": command, "steps": str(total_steps), "seed": str(cfg.runner.seed)}
    found |= {"commit": commit() or "of no clone", **versions()}
    found["machine"] = ", ".join([platform.platform(), f"{os.cpu_count()} CPU cores", *gpu_names()])
    (run_dir / "versions.json").write_text(json.dumps(found, indent=1) + "\n")


def _set_evaluations_aside(run_dirs: Iterable[Path], first_step: int) -> list[Path]:
    """Move evaluations of `first_step` and later steps, by the run or by `rlinf-lite eval`, to `superseded/`, so that
    they are not taken for those of the new checkpoints. Returns the new paths."""
    moved = []
    for run in run_dirs:
        for path in (*run.glob("eval/step_*"), *run.glob("eval_step_*")):
            if step_number(path) >= first_step:
                target = path.parent / SUPERSEDED / path.name
                target.parent.mkdir(exist_ok=True)
                moved.append(path.replace(target))
    return moved


def _claim(cfg: BaseConfig, run: str, checkpoint: Path | None = None) -> RunClaim:
    return RunClaim(Path(cfg.runner.logger.log_path) / run, _checkpoint_root(cfg) / run, checkpoint)


def _identity(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """The name, kind, seed and task (or None) of a run, by which `runner.resume: auto` finds it."""
    runner, env = config.get("runner") or {}, config.get("env") or {}
    return runner.get("run_name") or "run", runner.get("task_type"), runner.get("seed"), env.get("task")


def _checkpoint_root(cfg: BaseConfig) -> Path:
    """The parent directory of all runs' checkpoint directories."""
    return Path(cfg.actor.checkpoint_save_path or cfg.runner.logger.log_path)


def _resume_source(cfg: BaseConfig) -> Path | None:
    if cfg.runner.resume == "never":
        return None
    if cfg.runner.resume != "auto":
        return Path(cfg.runner.resume)
    root, wanted = _checkpoint_root(cfg), _identity(cfg.model_dump(mode="json"))
    found = [newest_checkpoint(directory) for directory in root.glob("*/checkpoints")]
    checkpoints = [checkpoint for checkpoint in found if checkpoint is not None]
    untrained: Path | None = None
    for checkpoint in sorted(checkpoints, key=lambda one: (one / CHECKSUMS).stat().st_mtime_ns, reverse=True):
        saved = read_config(checkpoint / "training_state" / CONFIG)
        if saved is None or _identity(saved) != wanted:
            continue
        state, run = read_state(checkpoint), checkpoint.parent.parent
        if state["completed_steps"] > 0 or state.get("supervised_updates", 0) > 0:
            return run
        untrained = untrained or run
    if untrained is not None:
        return untrained
    name, _, seed, task = wanted
    of_task = "" if task is None else f", task {task}"
    print(f"runner.resume=auto: no checkpoint of {name}{of_task}, seed {seed} in {root}: a new run begins", flush=True)
    return None
