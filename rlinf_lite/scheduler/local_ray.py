"""A Ray that this process starts and owns: bound to loopback, no dashboard, with a secret token.

Its address and token are in a file that only this user can read, so that `rlinf-lite job` finds it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import ray

from rlinf_lite.scheduler.errors import ClusterError
from rlinf_lite.scheduler.ray_private import read_environment_again
from rlinf_lite.scheduler.scratch import living_temp_dirs

log = logging.getLogger(__name__)

SLOT_RESOURCE = "rlinf_lite_slot"
_FILE = "ray.json"
_PROGRAM = str(Path(__file__).with_name("ray_head.py"))
_ANSWER_S = 3.0
_START_S = 300.0
"""Time limit for starting Ray, all attempts together."""
_MAX_STARTS = 5
"""Most attempts to start Ray. A raylet waits 15 s for its agents and then exits; on a busy machine their imports alone
take that long, and no documented setting of Ray changes this limit."""
_SAY_AFTER_S = 15.0
_own: _Head | None = None
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""The bytes with which a gRPC client begins, and an empty settings frame, which the server answers with its own."""


@dataclass(frozen=True)
class KnownRay:
    """The address of a Ray that this process can join."""

    address: str
    token: str | None = field(default=None, repr=False)
    """The authentication token; None: the one in the environment."""


@contextmanager
def local_ray(temp_dir: str, num_slots: int, num_gpus: int | None, log_to_driver: bool) -> Iterator[None]:
    """Start a Ray of this process and connect to it; the end of the block ends it.

    Ray 2.60 reads its authentication token from the environment before `~/.ray/auth_token`, so a file that another
    program left, valid or not, is never read. Raises ClusterError if Ray does not start in time.
    """
    global _own
    token = secrets.token_hex(32)
    variables = {
        **_private(token),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_task_events_shutdown_flush_timeout_ms": "500",  # unused; if Ray is dead, shutdown waits this long
        "RAY_prestart_worker_first_driver": "0",  # otherwise Ray starts two processes that are never used
        "RAY_worker_niceness": "0",  # 15 otherwise: training would yield to everything else on the machine
    }
    with _environment(variables, cluster_mode=False):
        _own = _start(temp_dir, num_slots, num_gpus)
        try:
            with keeping_sigterm():
                ray.init(address=_own.address, log_to_driver=log_to_driver, logging_level=logging.WARNING)
            path, known = os.path.join(temp_dir, _FILE), KnownRay(_own.address, token)
            with open(os.open(f"{path}.partial", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
                json.dump(asdict(known), file)
            os.replace(f"{path}.partial", path)
            yield
        finally:
            ray.shutdown()
            _own.end()
            _own = None


def find_local_rays() -> list[KnownRay]:
    """The Rays that `local_ray` runs for this user on this machine now."""
    found = []
    for directory in living_temp_dirs():
        try:
            found.append(KnownRay(**json.loads(Path(directory, _FILE).read_text())))
        except (OSError, TypeError, ValueError):  # it is starting or ending
            continue
    return found


@contextmanager
def joined_ray(known: KnownRay) -> Iterator[None]:
    """Connect this process to a Ray, without log output, until the end of the block. Raises ClusterError if no Ray
    answers."""
    variables = {} if known.token is None else _private(known.token)
    with _environment(variables, cluster_mode=None if known.token is None else False):
        try:
            check_ray_answers(known.address)
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


def check_ray_answers(address: str) -> None:
    """Raise ConnectionError if no Ray answers at `address`.

    Ray itself takes 20 s to find that the port is closed, and minutes if the program there sends nothing; no signal
    interrupts that.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return  # not an address; Ray reports that
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return  # the exchange is encrypted; an open port has to do
            connection.sendall(_HTTP2_HELLO)
            answer = b""
            while len(answer) < 4 and (more := connection.recv(4 - len(answer))):
                answer += more
    except TimeoutError as error:
        raise ConnectionError(f"the program that listens there sent nothing for {_ANSWER_S:g} s") from error
    except OSError as error:
        raise ConnectionError(error.strerror or error) from error
    if answer[3:] != b"\4":
        raise ConnectionError("the program that listens there is not Ray")


def local_ray_has_ended() -> bool:
    """Whether the Ray that this process started is dead. Makes no calls to Ray, which would wait for a minute."""
    return _own is not None and not _own.lives()


def owns_ray() -> bool:
    """Whether this process is connected to a Ray that it started itself, and that ends with it."""
    return _own is not None


@contextmanager
def keeping_sigterm() -> Iterator[None]:
    """Delay SIGTERM inside the block, and then restore the program's handler. For `ray.init`, which replaces signal
    handlers, at first by one that aborts."""
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


class _Head:
    """The process that runs `ray_head.py`. It has a session of its own, so that signals of a terminal or of `timeout`
    do not reach it, and blocks SIGTERM, which SLURM sends to every process of a job: on SIGTERM this process saves its
    work and then ends Ray. All of Ray's processes end with it, and it ends with this process, in whatever way that
    ends."""

    def __init__(self, temp_dir: str, num_slots: int, num_gpus: int | None) -> None:
        self._ports: list[int] = []
        self._files = [os.path.join(temp_dir, name) for name in ("ray_head.out", "ray_head.err")]
        arguments = json.dumps({"num_gpus": num_gpus, "resources": {SLOT_RESOURCE: num_slots}})
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # children inherit the mask
        try:
            with open(self._files[0], "wb") as out, open(self._files[1], "wb") as err:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", _PROGRAM, arguments],
                    stdin=subprocess.PIPE,  # its other end closes with this process
                    stdout=out,
                    stderr=err,
                    env=os.environ | {"RAY_TMPDIR": temp_dir},  # private: Ray lets all users read its files
                    start_new_session=True,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._ports[0]}"

    def lives(self) -> bool:
        return self._process.poll() is None and not any(map(_is_refused, self._ports))

    def wait(self, deadline: float) -> str:
        """Wait until Ray is up, and log now and then. Returns "" then, else why it ended or is late."""
        started, say_at = time.monotonic(), _SAY_AFTER_S
        while not (ports := Path(self._files[0]).read_text()).endswith("\n"):
            if (code := self._process.poll()) is not None:
                said = Path(self._files[1]).read_text(errors="replace").strip().splitlines() or [f"exit code {code}"]
                return said[-1]
            if time.monotonic() > deadline:
                return f"it is not up after {_START_S:g} s"
            if (waited_s := time.monotonic() - started) >= say_at:
                say_at = 2 * waited_s
                log.warning("Ray is starting on this machine: %.0f s so far (limit: %g s)", waited_s, _START_S)
            time.sleep(0.05)
        self._ports = json.loads(ports)
        return ""

    def end(self) -> None:
        """Kill Ray and all of its processes."""
        assert self._process.stdin is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.stdin.close()
        self._process.wait()


def _start(temp_dir: str, num_slots: int, num_gpus: int | None) -> _Head:
    """Start Ray and wait until it is up. Tries again if it fails: on a busy machine its raylet may exit."""
    deadline = time.monotonic() + _START_S
    for attempt in range(1, _MAX_STARTS + 1):
        head = _Head(temp_dir, num_slots, num_gpus)
        try:
            why = head.wait(deadline)
        except BaseException:
            head.end()
            raise
        if not why:
            return head
        head.end()
        what = f"Ray did not start on this machine ({why})"
        if attempt == _MAX_STARTS or time.monotonic() > deadline:
            break
        log.warning("%s; trying again", what)
    raise ClusterError(f"{what}, tried {attempt} times. Start the run again once the machine is less busy.")


def _is_refused(port: int) -> bool:
    """Whether no process listens on this local port."""
    with socket.socket() as connection:
        connection.settimeout(_ANSWER_S)
        return connection.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


@contextmanager
def _environment(variables: dict[str, str], cluster_mode: bool | None) -> Iterator[None]:
    """Set variables that Ray reads, until the end of the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    mode_before = read_environment_again(cluster_mode)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})
        read_environment_again(mode_before)
