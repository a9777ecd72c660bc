"""A Ray of our own on this machine: bound to loopback, no dashboard, with a token that no other program knows.

Its address and token lie in a file that only this user can read, so that `rlinf-lite job` finds it.
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
"""Within which Ray is to be up, all starts together."""
_STARTS = 5
"""At the most. A raylet waits 15 s for its agents to come up, and then ends: beside other work they take as long to
import what they need, and nothing that Ray documents changes that limit."""
_SAY_AFTER_S = 15.0
_own: _Head | None = None
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""What a gRPC client begins with, and an empty frame of settings, which the server answers with its own."""


@dataclass(frozen=True)
class KnownRay:
    """A Ray that can be joined."""

    address: str
    token: str | None = field(default=None, repr=False)
    """None: whatever the environment says."""


@contextmanager
def local_ray(temp_dir: str, num_slots: int, num_gpus: int | None, log_to_driver: bool) -> Iterator[None]:
    """A Ray of this process, which is connected to it, for as long as the block.

    Ray 2.60 reads its authentication token from the environment before `~/.ray/auth_token`, so a file that another
    program left, valid or not, is never looked at. Raises ClusterError where Ray does not start in time.
    """
    global _own
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
    with _environment(variables, cluster_mode=None if known.token is None else False):
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
    """Whether this process has started a Ray that is dead by now. Asks no Ray: calls to it would wait for a minute."""
    return _own is not None and not _own.lives()


def owns_ray() -> bool:
    """Whether this process is connected to a Ray that it has started, which ends with it."""
    return _own is not None


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


class _Head:
    """`ray_head.py` in a session of its own, where no signal of a terminal or of `timeout` reaches it, and deaf to
    SIGTERM, which SLURM sends to every process of a job: this process saves its work then, and ends Ray. All of Ray's
    processes end with it, and it ends with this process, however that ends."""

    def __init__(self, temp_dir: str, num_slots: int, num_gpus: int | None) -> None:
        self._ports: list[int] = []
        self._files = [os.path.join(temp_dir, name) for name in ("ray_head.out", "ray_head.err")]
        arguments = json.dumps({"num_gpus": num_gpus, "resources": {SLOT_RESOURCE: num_slots}})
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # which children inherit
        try:
            with open(self._files[0], "wb") as out, open(self._files[1], "wb") as err:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", _PROGRAM, arguments],
                    stdin=subprocess.PIPE,  # its other end closes with this process
                    stdout=out,
                    stderr=err,
                    env=os.environ | {"RAY_TMPDIR": temp_dir},  # Ray opens what it makes there to all users
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
        """Wait until it is up, with a line now and then; returns why it is not, where it has ended or is late."""
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
        """End it with all that it started."""
        assert self._process.stdin is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.stdin.close()
        self._process.wait()


def _start(temp_dir: str, num_slots: int, num_gpus: int | None) -> _Head:
    """A Ray that is up. Where one does not come up another is tried: on a busy machine its raylet ends by itself."""
    deadline = time.monotonic() + _START_S
    for attempt in range(1, _STARTS + 1):
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
        if attempt == _STARTS or time.monotonic() > deadline:
            break
        log.warning("%s; trying again", what)
    raise ClusterError(f"{what}, tried {attempt} times. Start the run again once the machine is less busy.")


def _is_refused(port: int) -> bool:
    """Whether nobody listens there any more."""
    with socket.socket() as connection:
        connection.settimeout(_ANSWER_S)
        return connection.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


@contextmanager
def _environment(variables: dict[str, str], cluster_mode: bool | None) -> Iterator[None]:
    """Variables that Ray reads, set for as long as it is used."""
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
