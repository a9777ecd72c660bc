"""`rlinf-lite collect`: play episodes with an expert or a trained policy and write them as a LeRobotDataset v3.0."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlinf_lite.cli.parse import config_and_overrides, positive
from rlinf_lite.config import Config, ConfigError, load_config
from rlinf_lite.config.loading import config_names
from rlinf_lite.config.resources import chunk_of, policy_config, policy_directory

_DEFAULT = "embodiment/tabletop_sft_vla"
PRINT_INTERVAL_S = 2.0
_ANY_ENVIRONMENT = "embodiment/base/run"
_AS_SFT = ["runner.task_type=sft", "runner.max_steps=1000", "runner.val_check_interval=200", "runner.save_interval=200"]
_ALONE = ["runner.mode=sync", "cluster.fuse=null"]
"""Overrides that make a config fit for imitation if it runs rollouts during training, or in the actor's processes."""


def collect(arguments: Sequence[str]) -> int:
    """Play and write the episodes. Returns the exit code: 0, 1 after an error, or 2 where the config is wrong."""
    given = _given(arguments)
    try:
        cfg = requested(arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2

    # imported only now, because they take seconds
    from rlinf_lite.data.lerobot.layout import LeRobotError
    from rlinf_lite.data.lerobot.writer import PARTS, begin
    from rlinf_lite.envs.errors import EnvError
    from rlinf_lite.registry import PartError

    is_new = not given.out.exists()
    try:
        begin(given.out, "--out")
        _play(cfg, given.out, given.processes)
    except (LeRobotError, EnvError, PartError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        with suppress(OSError):  # raised by rmdir for a directory with content
            for empty in (given.out / PARTS, given.out) if is_new else ():
                empty.rmdir()
        return 1
    print(f"  imitate it: {_imitating(given, cfg.env.task)}")
    return 0


def _imitating(given: argparse.Namespace, task: str) -> str:
    """The command that trains on the written dataset: with the same config, changed to imitation if necessary, or with
    a config of rlinf_lite for the same environment."""
    from rlinf_lite.data.demonstrations import check_demonstrations
    from rlinf_lite.data.lerobot.layout import LeRobotError

    task = given.task or (task if given.env else "")
    values = {"data.demos_dir": str(given.out), "env.id": given.env, "env.task": task}
    words = ["data.source=folder", *(f"{key}={_quoted_if_odd(value)}" for key, value in values.items() if value)]
    words += [text for text in given.overrides if text.startswith("env.options")]
    if name := given.config_name or (None if given.env else _DEFAULT):
        candidates = [(name, more) for more in ([], _AS_SFT, [*_AS_SFT, *_ALONE])]
    else:
        ours = sorted((one for one in config_names() if "_sft_" in one), key=lambda one: ("_vla" not in one, len(one)))
        candidates = [(one, []) for one in ours if load_config(one, elsewhere=True).env.id == given.env]
    for name, more in candidates:
        with suppress(ConfigError, LeRobotError):
            cfg = load_config(name, [*more, *words])
            check_demonstrations(cfg)
            if cfg.runner.task_type == "sft":
                return " ".join(["rlinf-lite train", shlex.quote(name), *more, *map(_for_a_shell, words)])
    return f"an sft config with {' '.join(words)}"


def requested(arguments: Sequence[str]) -> Config:
    """The config that a command line asks for. Raises ConfigError."""
    given = _given(arguments)
    policy = {} if given.policy is None else _policy_config(given.policy)
    model_id = None if given.config_name or not given.env else policy.get("policy_id")
    name = given.config_name or (_ANY_ENVIRONMENT if given.env else _DEFAULT)
    # the config's model is not used, so episodes that it could not read may be collected
    unused = [] if model_id else ["model.options"]
    overrides = _overrides(given, model_id, chunk_of(policy))
    cfg = load_config(name, overrides, elsewhere=True, unused=unused)
    if cfg.env.train.num_envs > cfg.data.num_episodes:
        overrides.append(f"env.train.num_envs={cfg.data.num_episodes}")
    cfg = load_config(name, overrides, unused=unused)
    assert isinstance(cfg, Config)
    return cfg


def _given(arguments: Sequence[str]) -> argparse.Namespace:
    given = _parser().parse_intermixed_args(arguments)
    given.config_name, given.overrides = config_and_overrides(given.words, given.config_name)
    if given.policy is not None and not given.config_name and not given.env:
        given.config_name = _config_of(given.policy)
    return given


def _config_of(policy: str) -> str | None:
    """The config of the run that a policy belongs to; None if it is neither a run's nor a checkpoint's."""
    files = [folder / "config.yaml" for folder in (Path(policy), policy_directory(policy).parent / "training_state")]
    return next((str(file) for file in files if file.is_file()), None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rlinf-lite collect", description=__doc__, allow_abbrev=False)
    parser.add_argument("words", nargs="*", metavar="NAME key=value", help="a config, and overrides in Hydra's grammar")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where the dataset is written")
    parser.add_argument(
        "--config-name",
        "-cn",
        metavar="NAME",
        help=f"a config (default: the config of the run in --policy, else {_DEFAULT}; none with --env); or NAME alone",
    )
    parser.add_argument("--env", metavar="ID", help="environment (env.id)")
    parser.add_argument("--task", help="task of the environment (env.task)")
    parser.add_argument("--episodes", type=int, metavar="N", help="episodes to play (data.num_episodes)")
    parser.add_argument(
        "--policy",
        metavar="DIR",
        help="the run, checkpoint or policy that plays (data.teacher_dir; default: the environment's expert)",
    )
    parser.add_argument("--seed", type=int, help="seed of initial states and noise (data.seed)")
    parser.add_argument("--noise", type=float, help="noise added to the executed actions (data.action_noise)")
    parser.add_argument("--num-envs", type=int, metavar="N", help="environments played at a time (env.train.num_envs)")
    parser.add_argument(
        "--processes",
        type=positive,
        default=1,
        metavar="N",
        help="processes that share the environments, each at its own pace (default 1); an expert's are the same",
    )
    parser.add_argument(
        "--pictures", choices=["image", "video"], help="image: PNG, lossless; video: AV1, small (data.pictures)"
    )
    parser.add_argument(
        "--fps", type=int, help="env steps per second, written to the dataset (data.fps; default: the simulation's)"
    )
    parser.add_argument(
        "--keep-failures", action="store_true", help="also write episodes without success (data.keep_failures)"
    )
    return parser


def _overrides(given: argparse.Namespace, model_id: str | None, chunk: int | None) -> list[str]:
    """Overrides for the options of the command line, followed by the overrides that were given."""
    short = {
        "model.id": model_id,  # its checks compare what the policy reads
        "env.id": given.env,
        "env.task": given.task,
        "env.train.num_envs": given.num_envs,
        "data.num_episodes": given.episodes,
        "data.teacher_dir": given.policy,
        "data.seed": given.seed,
        "data.action_noise": given.noise,
        "data.pictures": given.pictures,
        "data.fps": given.fps,
        "data.keep_failures": True if given.keep_failures else None,
        "model.num_action_chunks": chunk,
    }
    own = ["runner.task_type=sft", "runner.max_steps=1", "runner.val_check_interval=-1", "env.train.auto_reset=false"]
    own += ["rollout.pipeline_stage_num=1"]  # --processes says how many play, however many workers the config has
    own += [*_ALONE, "cluster.component_placement={env: '0', rollout: '0', actor: '0'}"]
    return [*own, *(f"{key}={_quoted(value)}" for key, value in short.items() if value is not None), *given.overrides]


def _quoted(value: object) -> object:
    """A text in Hydra's quotes, because a list of tasks has commas and a path may have any character."""
    return "'" + value.replace("'", "\\'") + "'" if isinstance(value, str) else value


def _quoted_if_odd(value: str) -> object:
    return value if re.fullmatch(r"[\w./:@+-]+", value) else _quoted(value)


def _for_a_shell(word: str) -> str:
    """A word quoted for a shell: in double quotes where possible, because `shlex.quote` would split Hydra's single
    quotes."""
    return f'"{word}"' if "'" in word and re.fullmatch(r"[\w./:@+=', -]+", word) else shlex.quote(word)


def _policy_config(policy: str) -> dict[str, Any]:
    """`policy_config` of a saved policy; empty where there is none, which the checks report."""
    try:
        return policy_config(policy_directory(policy))
    except (OSError, ValueError):
        return {}


def _play(cfg: Config, out: Path, num_processes: int) -> None:
    import numpy as np

    from rlinf_lite.workers.collecting import complete, play_part
    from rlinf_lite.workers.collecting_child import play_parts

    data, started, shown = cfg.data, time.monotonic(), time.monotonic()
    num_envs = cfg.env.train.num_envs
    num_processes = min(num_processes, num_envs)
    by = f"the policy in {data.teacher_dir}" if data.teacher_dir else f"the expert of {cfg.env.id}"
    where = f" in {num_processes} processes" if num_processes > 1 else ""
    print(
        f"{data.num_episodes} episodes of {cfg.env.id} {cfg.env.task} by {by}, {num_envs} at a time{where}", flush=True
    )

    def report(played: int, succeeded: int, num_env_steps: int) -> None:
        nonlocal shown
        if (now := time.monotonic()) - shown >= PRINT_INTERVAL_S:
            shown, rate = now, num_env_steps / (now - started)
            print(f"  {played} of {data.num_episodes}, {succeeded} successes, {rate:.0f} env steps/s", flush=True)

    if num_processes == 1:
        parts = [play_part(cfg, out, 0, np.arange(num_envs), num_envs, report)]
    else:
        parts = play_parts(cfg, out, np.array_split(np.arange(num_envs), num_processes), report)
    counts = complete(cfg, out, parts[0][1], [found for found, _ in parts], time.monotonic() - started)
    kind = "failures too" if data.keep_failures else "successes"
    print(
        f"{counts['num_episodes']} of {counts['num_played']} episodes ({kind}), {counts['num_env_steps']:,} env steps"
    )
    print(f"written to {out}, in {time.monotonic() - started:.1f} s")
