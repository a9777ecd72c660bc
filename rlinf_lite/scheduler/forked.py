"""Forked workers: a process on every node imports once what workers need, and forks one for each that Ray starts.

Ray starts `setup_worker.py` in a worker's place, which hands its arguments, environment and files to the warm process
(warm.py) and ends. The child then runs Ray's own worker script, and tells Ray its process id, so that Ray watches,
names and kills it as any other. It needs the warm process no more, which ends with whoever started it, and with its Ray
node.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import ray
from ray._private import ray_constants

from rlinf_lite.scheduler import warm
from rlinf_lite.scheduler.context import get_context
from rlinf_lite.threads import THREADS

SETUP_SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "setup_worker.py")
_TITLE_LENGTH = 4096  # room for what Ray calls a worker in `ps`: it writes that over the arguments
_START_S = 30.0


class ForkedWorkers:
    """The warm processes of a cluster: one for each node and each set of variables that workers there have."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._own: list[WarmProcess] | None = None  # those in this process's care
        self._environment: dict[str, str] = {}  # of our own Ray
        self._executables: dict[tuple[str, frozenset[tuple[str, str]]], Any] = {}

    def start_own(self, variables: Mapping[str, str]) -> None:
        """For a Ray of our own, before that starts. This process has the environment of its workers."""
        self._environment = dict(os.environ)
        self._own = [WarmProcess(self._directory, self._environment, variables, _driver_import_path())]
        self._executables[self._key("", variables)] = self._own[0].py_executable

    def ray_is_up(self) -> None:
        """What was started before Ray can now import it."""
        for process in self._own or ():
            process.tell(_of_our_ray())

    def start(self, node_id: str, variables: Mapping[str, str]) -> None:
        """Start a node's process for workers that will set these variables, unless it has one. Does not wait."""
        key = self._key(node_id, variables)
        if key in self._executables:
            return
        if self._own is None:
            self._executables[key] = cast(Any, get_context().network).start_on(
                node_id, _start_beside_agent, dict(key[1])
            )
        else:
            environment = self._environment | _of_our_ray()
            self._own.append(WarmProcess(self._directory, environment, dict(key[1]), _driver_import_path()))
            self._executables[key] = self._own[-1].py_executable

    def runtime_env(self, node_id: str, variables: Mapping[str, str]) -> dict[str, str]:
        """Of a Ray actor that is to be forked there."""
        self.start(node_id, variables)
        key = self._key(node_id, variables)
        if not isinstance(self._executables[key], str):
            self._executables[key] = ray.get(self._executables[key], timeout=_START_S)
        return {"py_executable": self._executables[key]}

    def end(self) -> None:
        """End those in this process's care; the others end with their agents."""
        for process in self._own or ():
            process.end()

    def _key(self, node_id: str, variables: Mapping[str, str]) -> tuple[str, frozenset[tuple[str, str]]]:
        read_at_import = {name: value for name, value in variables.items() if name not in warm.OF_ONE_WORKER}
        return node_id if self._own is None else "", frozenset(read_at_import.items())


class WarmProcess:
    """Starts one, which ends with this process, however that ends.

    `environment`: of Ray's workers; without RAY_RAYLET_PID where Ray is not up yet (`tell`). `variables`: what our
    workers add to it before they import anything. `import_path`: what they look through before the directories of this
    Python.
    """

    def __init__(
        self, directory: str, environment: Mapping[str, str], variables: Mapping[str, str], import_path: Sequence[str]
    ) -> None:
        name = os.path.join(directory, f"warm{secrets.token_hex(2)}")
        self.socket = f"{name}.sock"
        variables = THREADS | dict(variables)
        inherited = {name: value for name, value in environment.items() if name not in warm.OF_ONE_WORKER}
        with socket.socket(socket.AF_UNIX) as listener, open(f"{name}.log", "wb") as output:
            listener.bind(self.socket)
            listener.listen(128)
            settings = {"listener": listener.fileno(), "variables": list(variables), "import_path": list(import_path)}
            self._process = subprocess.Popen(
                [sys.executable, warm.__file__, json.dumps(settings), " " * _TITLE_LENGTH],
                env=inherited | variables,
                stdin=subprocess.PIPE,  # its other end closes with this process
                stdout=output,
                stderr=output,
                pass_fds=[listener.fileno()],
                process_group=0,  # a signal to all of the driver's is not for it
            )

    @property
    def py_executable(self) -> str:
        """What Ray starts in place of python."""
        return shlex.join([sys.executable, "-IS", SETUP_SCRIPT, self.socket])

    def tell(self, of_ray: Mapping[str, str]) -> None:
        """Ray is up, and its workers have these variables."""
        assert self._process.stdin is not None, "it is a pipe"
        with suppress(BrokenPipeError):  # whoever asks it for a fork says that it has ended
            self._process.stdin.write(json.dumps(dict(of_ray)).encode())
            self._process.stdin.flush()

    def end(self) -> None:
        """Kill it. What it has forked lives on."""
        self._process.kill()
        self._process.communicate()


_beside_agent: list[WarmProcess] = []


def _start_beside_agent(variables: Mapping[str, str]) -> str:
    """In a node's agent, which Ray has started as it starts workers there."""
    environment = os.environ | {"RAY_JOB_ID": ray.get_runtime_context().get_job_id()}
    _beside_agent.append(WarmProcess(get_context().temp_dir, environment, variables, sys.path))
    return _beside_agent[-1].py_executable


def _of_our_ray() -> dict[str, str]:
    node: Any = ray._private.worker._global_node
    raylet = node.all_processes[ray_constants.PROCESS_TYPE_RAYLET][0].process
    return {"RAY_JOB_ID": ray.get_runtime_context().get_job_id(), "RAY_RAYLET_PID": str(raylet.pid)}


def _driver_import_path() -> list[str]:
    """What Ray has its workers look through first: where this program runs, and where its script is."""
    script = os.path.dirname(os.path.realpath(sys.argv[0]))
    return [os.getcwd(), *([script] if script in sys.path else [])]
