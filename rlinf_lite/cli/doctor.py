"""`rlinf-lite doctor`: check this machine by measurements, and print the command that fixes each failure.

A check that may crash or hang is a probe: it runs in its own process, which is killed with its children at a time
limit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlinf_lite.cards import EnvCard, Probe
from rlinf_lite.cli.info import requirements
from rlinf_lite.cli.parse import config_and_overrides
from rlinf_lite.config import ConfigError, load_config
from rlinf_lite.config.checks import possible
from rlinf_lite.config.plan import plan_of
from rlinf_lite.machine import byte_text, free_host_bytes
from rlinf_lite.registry import ENVIRONMENTS, env_card, pip_command

_GIB = 2**30
_PROCESS_BYTES = _GIB // 2  # memory of torch and Ray in each worker, if no config is named
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Finding:
    """One line of the report. `fix` is a command, empty where there is nothing to fix."""

    status: Literal["ok", "warn", "fail"]
    value: str
    fix: str = ""


@dataclass(frozen=True)
class Needs:
    """What a config needs from the machine; bytes are 0 where they are not known."""

    log_path: str = "results"
    num_processes: int = 4
    host_bytes: int = 0
    shared_bytes: int = 0


def doctor(arguments: Sequence[str]) -> int:
    """Print the findings. Returns the exit code: 1 where something failed, 2 where the config is wrong."""
    parser = argparse.ArgumentParser(prog="rlinf-lite doctor", description="Check this machine; name the fixes.")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.add_argument("--config-name", "-cn", metavar="NAME", help="also check that this config fits; or NAME alone")
    parser.add_argument("words", nargs="*", metavar="NAME key=value", help="that config, and overrides of it")
    options = parser.parse_intermixed_args(arguments)
    name, overrides = config_and_overrides(options.words, options.config_name)
    try:
        # elsewhere: what this machine lacks is found by the checks
        config = None if name is None else load_config(name, overrides, elsewhere=True)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    needs = Needs()
    if config is not None:
        from rlinf_lite.preview.memory import estimate  # imports torch, which a machine may lack

        plan = plan_of(possible(config)[0])
        found = estimate(plan)
        needs = Needs(
            log_path=config.runner.logger.log_path,
            num_processes=sum(len(processes) for processes in plan.placements.values()),
            host_bytes=found.node_host_bytes,
            shared_bytes=found.shared_bytes,
        )
    with Console(stderr=True).status("running the checks; this takes a minute or two"):
        findings = examine(needs)
    if options.json:
        print(json.dumps([{"check": name, **asdict(finding)} for name, finding in findings.items()], indent=2))
    else:
        table = Table(box=None, pad_edge=False, show_header=False)
        for name, finding in findings.items():
            text = Text(finding.value)
            if finding.fix:
                text.append(f"\n$ {finding.fix}", style="cyan")
            table.add_row(Text(finding.status, style=_COLOURS[finding.status]), name, text)
        Console(width=None if sys.stdout.isatty() else 140).print(table)
    return 1 if any(finding.status == "fail" for finding in findings.values()) else 0


def examine(needs: Needs) -> dict[str, Finding]:
    """Run all checks, two at a time. Returns the findings by name, in the order of the report."""
    clash = [name for name in ("torchvision", "timm") if find_spec(name) is not None]
    fix_transformers = f"pip uninstall -y {' '.join(clash)}" if clash else "pip install 'transformers>=5'"
    fix_ray = "ray stop --force && pip install --force-reinstall --no-deps 'ray>=2.60'"
    if address := os.environ.get("RAY_ADDRESS"):
        fix_ray = f"unset RAY_ADDRESS  (or start Ray at {address})"
    checks: dict[str, Callable[[], Finding]] = {
        "Python": _python,
        "torch": partial(probe, "torch", "pip install 'torch>=2.13'"),
        "transformers": partial(probe, "transformers", fix_transformers),
        "accelerators": partial(probe, "accelerators", "pip install --force-reinstall 'torch>=2.13'"),
        "CPU cores": _cores,
        "memory": partial(_memory, needs),
        "shared memory": partial(_shared_memory, needs),
        "disk": partial(_disk, needs),
        "Ray": partial(probe, "ray", fix_ray),
    }
    for card in map(env_card, ENVIRONMENTS.names()):
        checks |= {name: partial(_environment, card, name, tried) for name, tried in card.probes().items()}
    with ThreadPoolExecutor(max_workers=2) as pool:
        running = {name: pool.submit(check) for name, check in checks.items()}
        return {name: future.result() for name, future in running.items()}


def probe(name: str, fix: str) -> Finding:
    """Run a probe of `probes.py`. Returns what it found, or why it failed with `fix`."""
    return try_out([sys.executable, "-W", "ignore", "-m", "rlinf_lite.cli.probes", name], fix, _TIMEOUT_S)


def try_out(command: Sequence[str], fix: str, timeout_s: float) -> Finding:
    """Run a command; kill it with its children at the time limit. Returns the last line that it printed, or why it
    failed with `fix`."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return Finding("fail", f"no answer within {timeout_s:g} s", fix)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode == 0:
        return Finding("ok", out.strip().splitlines()[-1])
    if process.returncode < 0:
        return Finding("fail", f"crashed ({signal.Signals(-process.returncode).name})", fix)
    reason = (err.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    return Finding("fail", re.sub(r"^[\w.]*\.(?=\w+: )", "", reason), fix)


def _python() -> Finding:
    """The interpreter, and whether the packages that rlinf_lite requires are installed."""
    core = requirements()[""]
    wrong = []
    for one in core:
        try:
            is_met = one.specifier.contains(metadata.version(one.name), prereleases=True)
        except metadata.PackageNotFoundError:
            is_met = False
        wrong += [] if is_met else [f"{one}"]
    version = f"{platform.python_version()} in {sys.prefix}"
    if wrong:
        return Finding("fail", f"{version}, without {', '.join(wrong)}", f"pip install {shlex.join(wrong)}")
    torch = find_spec("torch")
    if sys.dont_write_bytecode and torch and torch.origin and not os.path.exists(cache_from_source(torch.origin)):
        value = f"{version}; PYTHONDONTWRITEBYTECODE is set: every process compiles again what it imports, for seconds"
        return Finding("warn", value, "unset PYTHONDONTWRITEBYTECODE")
    return Finding("ok", f"{version}, {len(core)} packages as required")


def _cores() -> Finding:
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file() and not quota.read_text().startswith("max"):
        used, period = map(int, quota.read_text().split())
        cores = min(cores, max(used // period, 1))
    value = f"{cores}, load {load:.1f}"
    if load > cores:
        return Finding("warn", f"{value}: other processes keep all of them busy", "top -o %CPU")
    return Finding("ok", value)


def _memory(needs: Needs) -> Finding:
    free = free_host_bytes()
    wanted = needs.host_bytes or needs.num_processes * _PROCESS_BYTES
    value = f"{byte_text(free)} available, {byte_text(wanted)} needed by {needs.num_processes} worker processes"
    if free < wanted:
        return Finding("fail", value, "rlinf-lite train NAME --dry-run  (shows what needs it)")
    return Finding("ok", value)


def _shared_memory(needs: Needs) -> Finding:
    fix = "mount -o remount,size=8g /dev/shm  (Docker: docker run --shm-size=8g ...)"
    if not os.path.isdir("/dev/shm"):
        return Finding("fail", "there is no /dev/shm", "mount -t tmpfs -o size=8g tmpfs /dev/shm")
    free = shutil.disk_usage("/dev/shm").free
    value = f"{byte_text(free)} free in /dev/shm"
    if needs.shared_bytes:
        value += f", up to {byte_text(needs.shared_bytes)} needed"
        return Finding("fail", value, fix) if free < needs.shared_bytes else Finding("ok", value)
    if free < _GIB:
        return Finding("warn", f"{value}: enough for states and small policies", fix)
    return Finding("ok", value)


def _disk(needs: Needs) -> Finding:
    path = Path(needs.log_path).absolute()
    while not path.exists():
        path = path.parent
    free = {str(place): shutil.disk_usage(place).free for place in (path, Path(tempfile.gettempdir()))}
    value = ", ".join(f"{byte_text(count)} free in {place}" for place, count in free.items())
    if min(free.values()) < _GIB:
        return Finding("fail", value, "rlinf-lite train NAME runner.logger.log_path=...")
    return Finding("warn" if min(free.values()) < 5 * _GIB else "ok", value)


def _environment(card: EnvCard, name: str, tried: Probe) -> Finding:
    """Run a probe of an environment's card."""
    if card.package is not None and find_spec(card.package) is None:
        if tried.unless:
            return Finding("ok", f"not checked: only {card.name} needs it, and that is not installed")
        return Finding("ok", "not installed", pip_command(card.extra) if card.extra else f"pip install {card.package}")
    found = probe(name, tried.fix)
    if found.status == "ok":
        return found
    fix = next((fix for text, fix in tried.fixes.items() if text in found.value), found.fix)
    if tried.unless:
        return Finding("warn", f"no {tried.unless}: {found.value.split('. ')[0]}", fix)
    return Finding("fail", found.value, fix)
