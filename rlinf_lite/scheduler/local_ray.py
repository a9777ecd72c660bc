"""A Ray of our own on this machine: bound to loopback, no dashboard, with a token that no other program knows.

Its address and token lie in a file that only this user can read, so that `rlinf-lite job` finds it.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import _raylet
from ray._private import ray_constants, services

from rlinf_lite.scheduler.errors import ClusterError
from rlinf_lite.scheduler.forked import SETUP_SCRIPT
from rlinf_lite.scheduler.scratch import living_temp_dirs

log = logging.getLogger(__name__)

SLOT_RESOURCE = "rlinf_lite_slot"
_FILE = "ray.json"
_ANSWER_S = 3.0
_START_S = 300.0
"""Within which Ray is to be up, all starts together: beside two training runs on two cores one takes 40 to 60 s."""
_STARTS = 5
"""At the most: on such a machine its raylet ends by itself about every second time, as it waits for its agents, which
import much, for 15 s only."""
_NEEDED = ("gcs_server", "raylet")
"""Of Ray's processes, those without which there is no node."""
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""What a gRPC client begins with, and an empty frame of settings, which the server answers with its own."""


@dataclass(frozen=True)
class KnownRay:
    """A Ray that can be joined."""

    address: str
    token: str | None = field(default=None, repr=False)
    """None: whatever the environment says."""


@contextmanager
def local_ray(
    temp_dir: str,
    num_slots: int,
    num_gpus: int | None,
    log_to_driver: bool,
    meanwhile: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Runs for as long as the block. `meanwhile`: starts what takes long and needs the environment of Ray's workers.

    Ray 2.60 reads its authentication token from the environment before `~/.ray/auth_token`, so a file left by another
    program, valid or not, is never looked at. Raises ClusterError where Ray does not start in time.
    """
    token = secrets.token_hex(32)
    variables = {
        **_private(token),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_task_events_shutdown_flush_timeout_ms": "500",  # nobody reads them; where Ray is dead, this is waited for
        "RAY_prestart_worker_first_driver": "0",  # two processes that nobody asked for
        "RAY_worker_niceness": "0",  # 15 otherwise: training would yield to everything else on the machine
    }
    with _environment(variables, cluster_mode=False):
        try:
            meanwhile()
            deadline = time.monotonic() + _START_S
            for attempt in range(1, _STARTS + 1):
                with _out_of_reach(deadline) as daemons, keeping_sigterm(), _in_time(daemons, attempt, deadline):
                    ray.init(
                        address="local",
                        num_gpus=num_gpus,
                        resources={SLOT_RESOURCE: num_slots},
                        include_dashboard=False,
                        log_to_driver=log_to_driver,
                        logging_level=logging.WARNING,
                        _temp_dir=os.path.join(temp_dir, "r"),  # which Ray opens to all users; that above is ours alone
                        _node_ip_address="127.0.0.1",
                    )
                    break
            path, known = os.path.join(temp_dir, _FILE), KnownRay(ray.get_runtime_context().gcs_address, token)
            with open(os.open(f"{path}.partial", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
                json.dump(asdict(known), file)
            os.replace(f"{path}.partial", path)
            yield
        finally:
            ray.shutdown()


def find_local_rays() -> list[KnownRay]:
    """Those that `local_ray` runs for this user on this machine at the moment."""
    found = []
    for directory in living_temp_dirs():
        try:
            found.append(KnownRay(**json.loads(Path(directory, _FILE).read_text())))
        except (OSError, TypeError, ValueError):  # it is only just starting, or ends
            continue
    return found


@contextmanager
def joined_ray(known: KnownRay) -> Iterator[None]:
    """This process belongs to a Ray for as long as the block, quietly. Raises ClusterError where none answers."""
    variables = {} if known.token is None else _private(known.token)
    with _environment(variables, cluster_mode=ray_constants.ENABLE_RAY_CLUSTER and known.token is None):
        try:
            knock(known.address)
            with keeping_sigterm():
                ray.init(address=known.address, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise ClusterError(f"no Ray answers at {known.address}, or it has another token ({error})") from error
        try:
            yield
        finally:
            ray.shutdown()


def _private(token: str) -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the switch by which Ray binds to 127.0.0.1
    }


def knock(address: str) -> None:
    """Ray itself takes 20 s to find that nobody is there, and minutes where whoever is there says nothing; no signal
    ends that. Raises ConnectionError."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return  # not an address; Ray says so
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return  # what is said there is encrypted; that somebody listens has to do
            connection.sendall(_HTTP2_HELLO)
            answer = b""
            while len(answer) < 4 and (more := connection.recv(4 - len(answer))):
                answer += more
    except TimeoutError as error:
        raise ConnectionError(f"whoever listens there has said nothing for {_ANSWER_S:g} s") from error
    except OSError as error:
        raise ConnectionError(error.strerror or error) from error
    if answer[3:] != b"\4":
        raise ConnectionError("what listens there is no Ray")


def local_ray_has_ended() -> bool:
    """Whether this process has started a Ray that is dead by now. Asks nobody: calls to it would wait for a minute."""
    node: Any = ray._private.worker._global_node
    vital = (ray_constants.PROCESS_TYPE_GCS_SERVER, ray_constants.PROCESS_TYPE_RAYLET)
    return node is not None and any(kind in vital for kind, _ in node.dead_processes())


def owns_ray() -> bool:
    """Whether this process is connected to a Ray that it has started, which ends with it."""
    node: Any = ray._private.worker._global_node
    return ray.is_initialized() and node is not None and bool(node.is_head())


@contextmanager
def keeping_sigterm() -> Iterator[None]:
    """For `ray.init`, which puts handlers of its own in the place of a program's, and at first one that aborts: SIGTERM
    waits inside the block, and is then the program's again."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler, mask = signal.getsignal(signal.SIGTERM), signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        if callable(handler):
            signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class _Daemon(services.ConsolePopen):
    """One of Ray's processes, which signals do not reach that are meant for this one: in a process group of its own
    (timeout, a terminal), and deaf to SIGTERM (SLURM, which sends it to every process of a job). This process saves its
    work on SIGTERM, and ends them then."""

    def __init__(self, started: list[_Daemon], *args: Any, preexec_fn: Callable[[], None], **kwargs: Any) -> None:
        def prepare() -> None:
            preexec_fn()
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

        kwargs |= {"preexec_fn": prepare, "process_group": 0}
        super().__init__(*args, **kwargs)
        self.program = Path(args[0][0]).name
        started.append(self)

    def terminate(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # with the agents that it started


@contextmanager
def _in_time(daemons: list[_Daemon], attempt: int, deadline: float) -> Iterator[None]:
    """Where Ray's processes do not come up, they are ended, so that it can be tried again; the last time raises."""
    try:
        yield
    except BaseException as error:
        for daemon in daemons:
            daemon.terminate()
        if type(error) is not Exception:  # which is how Ray says so
            raise
        what = f"Ray did not start on this machine ({error})"
        if attempt == _STARTS or time.monotonic() > deadline:
            text = f"{what}, tried {attempt} times. Start the run again once the machine is less busy."
            raise ClusterError(text) from error
        log.warning("%s; trying again", what)


@contextmanager
def _out_of_reach(deadline: float) -> Iterator[list[_Daemon]]:
    """Ray's processes that are started inside the block are `_Daemon`s, are waited for until `deadline`, and start
    forked workers without a detour over a Python that imports Ray."""
    started: list[_Daemon] = []
    popen, script, get_node = services.ConsolePopen, ray_constants.SETUP_WORKER_FILENAME, services.get_node

    def wait_for_node(*args: Any) -> Any:
        """Ray asks for its node for 30 s, also where that has ended."""
        while True:
            try:
                return get_node(*args)
            except RuntimeError as error:  # it is not there yet
                if ended := [one for one in started if one.program in _NEEDED and one.poll() is not None]:
                    raise Exception(f"its {ended[0].program} has ended") from error
                if time.monotonic() > deadline:
                    raise Exception(f"its node is not there after {_START_S:g} s") from error
                time.sleep(0.1)

    vars(services).update(ConsolePopen=partial(_Daemon, started), get_node=wait_for_node)
    ray_constants.SETUP_WORKER_FILENAME = SETUP_SCRIPT
    try:
        yield started
    finally:
        vars(services).update(ConsolePopen=popen, get_node=get_node)
        ray_constants.SETUP_WORKER_FILENAME = script


@contextmanager
def _environment(variables: dict[str, str], cluster_mode: bool) -> Iterator[None]:
    """Variables that Ray reads, set for as long as it is used."""

    def look_again(mode: bool) -> None:  # which Ray does once, when it is imported
        ray_constants.ENABLE_RAY_CLUSTER = mode
        _raylet.Config.initialize("")  # type: ignore[attr-defined]
        _raylet.AuthenticationTokenLoader.instance().reset_cache()  # type: ignore[attr-defined]

    before = {name: os.environ.get(name) for name in variables}
    mode_before: bool = ray_constants.ENABLE_RAY_CLUSTER
    os.environ.update(variables)
    look_again(cluster_mode)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})
        look_again(mode_before)
