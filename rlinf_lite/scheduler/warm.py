"""The warm process of forked workers, a script: imports what workers need, and becomes one of them in every fork.

Needs nothing of the package, so that whatever it imports is found as a worker finds it.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # the directory of this file, whose names are not for importing

import gc
import importlib
import json
import marshal
import os
import resource
import runpy
import select
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

NEEDED = ("numpy", "torch")
"""Imported first. No module here may start a thread or use a GPU, and all are what a worker would import anyway."""
NEEDED_WITH_RAY = (
    "ray._private.workers.default_worker",
    "rlinf_lite.scheduler.host",
    "rlinf_lite.scheduler.ray_host",
    "rlinf_lite.workers.actor",
    "rlinf_lite.workers.env",
    "rlinf_lite.workers.rollout",
)
"""Imported before the first fork, once Ray is up: Ray reads its environment when it is imported."""
USEFUL = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.siglip.modeling_siglip",
    "transformers.models.dinov2_with_registers.modeling_dinov2_with_registers",
    "gymnasium",
)
"""Imported while there is nothing else to do: what many workers import. A fork before that imports it by itself."""
USEFUL_WITH_RAY = (
    "rlinf_lite.models.mlp.policy",
    "rlinf_lite.envs.tabletop.simulator",
    "rlinf_lite.models.vla.policy",
    "rlinf_lite.models.text.causal_lm",
)

OF_ONE_WORKER = frozenset(
    {"CUDA_VISIBLE_DEVICES", "PYTHONBREAKPOINT", "RAY_LD_PRELOAD_ON_WORKERS", "SPT_NOENV"}
    | {"_", "OLDPWD", "PWD", "SHLVL"}
)
"""Variables that differ from one worker to the next, or that Ray sets itself in each."""
_LOCKS_GO_S = 0.2  # how long the kernel may take to close the other files of a process that is killed
_REQUEST_S = 5.0  # how long a worker's start may take to say what it wants; others wait meanwhile


class _Warm:
    """The warm process: imports, and answers requests."""

    def __init__(self, listener: socket.socket, variables: Sequence[str], import_path: Sequence[str]) -> None:
        self._listener, self._own_path = listener, list(sys.path)
        sys.path[:] = [*import_path, *sys.path]
        self._import_path = set(import_path)
        self._apart, self._environment = {*OF_ONE_WORKER, *variables}, dict(os.environ)
        self._refusal = ""
        self._poll = select.poll()
        self._poll.register(sys.stdin.fileno(), select.POLLIN)
        self._raylet: int | None = None

    def serve(self) -> dict[str, Any]:
        """Returns in forks only, each with what was asked for."""
        needed, useful = list(NEEDED), list(USEFUL)
        while True:
            if "RAY_RAYLET_PID" in os.environ and self._raylet is None:
                self._environment |= {name: os.environ[name] for name in os.environ if name.startswith("RAY_")}
                self._raylet = os.pidfd_open(int(os.environ["RAY_RAYLET_PID"]))
                self._poll.register(self._raylet, select.POLLIN)
                needed, useful = [*needed, *NEEDED_WITH_RAY], [*useful, *USEFUL_WITH_RAY]
            while needed and not self._refusal:
                self._import(needed.pop(0))
            if self._raylet is not None:
                self._poll.register(self._listener.fileno(), select.POLLIN)
            if useful and not self._refusal:
                self._import(useful.pop(0))
            busy = bool(useful) and not self._refusal
            for file, _ in self._poll.poll(0 if busy else None):
                if file == self._listener.fileno():
                    request = self._answer()
                    if request is not None:
                        return request
                elif file == self._raylet or not (told := os.read(file, 65536)):
                    _clean_up()
                    os._exit(0)  # the Ray node has ended, or whoever has started this
                else:
                    os.environ.update(json.loads(told))

    def _import(self, name: str) -> None:
        try:
            importlib.import_module(name)
        except BaseException as error:  # whatever it is, plain Python meets it again, where the user sees it
            self._refusal = f"importing {name} raised {type(error).__name__}: {error}"
            return
        self._refusal = _obstacle(f"once {name} is imported")

    def _answer(self) -> dict[str, Any] | None:
        """Fork one worker: the parent gets None, the child what was asked for."""
        connection, _ = self._listener.accept()
        with connection:
            try:
                connection.settimeout(_REQUEST_S)
                header, files, _, _ = socket.recv_fds(connection, 8, 3)
                request = _read(connection, int.from_bytes(header, "little"))
            except (OSError, EOFError):  # it was killed
                return None
            refusal = self._refusal
            differing = {name for name, _ in request["environment"].items() ^ self._environment.items()} - self._apart
            if not refusal and differing:  # modules were imported in another
                refusal = f"its environment differs in {', '.join(sorted(differing))}"
            if not refusal and not _is_waited_for(connection):  # plain Python has started that worker by now
                for file in files:
                    os.close(file)
                return None
            if not refusal:
                gc.freeze()  # what is there by now stays: looking through it would copy its pages
                if os.fork() == 0:
                    self._listener.close()
                    if self._raylet is not None:
                        os.close(self._raylet)
                    for number, file in enumerate(files):
                        os.dup2(file, number)
                    for file in files:
                        os.close(file)
                    added = [path for path in sys.path if path not in {*self._own_path, *self._import_path}]
                    sys.path[:] = [*added, os.path.dirname(request["arguments"][0]), *self._own_path]
                    set_by_imports = dict(os.environ.items() - self._environment.items())
                    return request | {"environment": request["environment"] | set_by_imports}
            for file in files:
                os.close(file)
            with suppress(OSError):
                connection.sendall(refusal.encode() or b"forked")
        return None


def _clean_up() -> None:
    """Remove what a killed driver has left in shared memory, as the next start would."""
    scratch = sys.modules.get("rlinf_lite.scheduler.scratch")
    if scratch is not None:
        time.sleep(_LOCKS_GO_S)
        scratch.remove_stale(scratch.SHM_ROOT)


def _read(connection: socket.socket, length: int) -> dict[str, Any]:
    data = b""
    while len(data) < length:
        more = connection.recv(length - len(data))
        if not more:
            raise EOFError
        data += more
    request: dict[str, Any] = marshal.loads(data)
    return request


def _is_waited_for(connection: socket.socket) -> bool:
    """Whether who asked has not given up meanwhile: Ray must not get a worker twice."""
    try:
        connection.sendall(b"?")  # setup_worker.STILL_THERE
        return bool(connection.recv(1))
    except OSError:
        return False


def _obstacle(when: str) -> str:
    """Why this process may not be forked."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"{threads - 1} threads run {when}"
    for file in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{file}").startswith("/dev/nvidia"):
                return f"a GPU is in use {when}"
    return ""


def _become(request: dict[str, Any]) -> None:
    """Make this process the one that Ray has started, as far as a process can tell."""
    if request["own_group"]:
        os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    os.umask(request["umask"])
    for kind, limits in request["limits"].items():
        if resource.getrlimit(kind) != limits:
            resource.setrlimit(kind, limits)
    os.setpriority(os.PRIO_PROCESS, 0, max(request["nice"], os.getpriority(os.PRIO_PROCESS, 0)))
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(request["oom_score_adj"])
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    sys.argv, sys.orig_argv = request["arguments"], [sys.executable, *request["arguments"]]
    # what draws from the system's entropy when it is imported draws again, as `random` does by itself
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()
    gc.enable()


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # for the driver alone, which saves its work and ends this
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for children
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # rather this than a worker
    gc.disable()
    settings = json.loads(sys.argv[1])
    listener = socket.socket(fileno=settings["listener"])
    listener.set_inheritable(False)
    request = _Warm(listener, settings["variables"], settings["import_path"]).serve()
    _become(request)
    runpy.run_path(request["arguments"][0], run_name="__main__")


if __name__ == "__main__":
    main()
