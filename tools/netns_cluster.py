"""A Ray cluster of several nodes on one machine, with a slow network between them that can be cut.

    sudo .venv/bin/python tools/netns_cluster.py --nodes 2 -- \\
        .venv/bin/rlinf-lite train gym_pendulum_ppo_mlp cluster.num_nodes=2

A node consists of network, mount, process and host name spaces. It has its own address, /dev/shm, /tmp and process ids,
so that code fails here if it uses paths that machines do not share. Each node has one interface, a TUN device. A thread
of this process holds the other end and passes packets on, at a rate and with a delay (not all kernels have netem). The
command runs on the first node, with Ray's address. All nodes share the directory `shared`.

All processes and devices end with this process, however it ends; only the directory `shared` remains after a kill. The
kernel kills the processes of a process name space together with its first process, and that one together with the
process that made it. It removes the devices when their descriptors are closed.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import os
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

RATE_BITS_PER_S = 1e9
DELAY_S = 0.01
"""Delay from one node to another; a round trip takes twice as long."""
REPO = Path(__file__).resolve().parents[1]

_NETWORK = "10.77.0"
_MTU = 32_000  # few large packets: they pass through Python
_PORT = 6379
_START_S = 90.0
_STARTS = 2
_STORE_BYTES = 256 * 2**20
_RAY = [sys.executable, "-m", "ray.scripts.scripts"]
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_PR_SET_PDEATHSIG = 1
# the first process of a process name space becomes the parent of orphans; the shell's `wait` reaps them
_FIRST_PROCESS = """
{keep} mount -t tmpfs -o mode=1777,size={shm} tmpfs /dev/shm && mount -t tmpfs -o mode=1777 tmpfs /tmp && {put_back}
mount --bind {hosts} /etc/hosts && hostname {name} && ip link set lo up && echo ready || exit
sleep infinity & wait
"""


class NetnsError(RuntimeError):
    """A node did not start, or this machine does not support nodes."""


def missing() -> str:
    """The reason why this machine does not support nodes; empty if it does."""
    if os.geteuid() != 0:
        return "needs root, to make name spaces"
    for program in ("ip", "unshare", "nsenter", "mount"):
        if shutil.which(program) is None:
            return f"needs the program {program} (packages iproute2, util-linux)"
    if not os.path.exists("/dev/net/tun"):
        return "needs /dev/net/tun (modprobe tun; in a container: --device /dev/net/tun --privileged)"
    made = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True)
    return f"may not make name spaces: {made.stderr.strip()}" if made.returncode else ""


class Network:
    """Nodes without Ray, and the wires between them. Raises NetnsError."""

    def __init__(
        self,
        num_nodes: int,
        rate_bits_per_s: float = RATE_BITS_PER_S,
        delay_s: float = DELAY_S,
        shm_bytes: int = 2**30,
    ) -> None:
        if problem := missing():
            raise NetnsError(problem)
        self.num_nodes, self.rate_bits_per_s, self.delay_s = num_nodes, rate_bits_per_s, delay_s
        self.addresses = [f"{_NETWORK}.{node + 1}" for node in range(num_nodes)]
        self.sent_bytes = [[0] * num_nodes for _ in range(num_nodes)]
        """Bytes that node i has sent to node j, with headers and repeated packets."""
        self._cut: set[int] = set()
        self._first: list[int] = []  # process ids
        self._tuns: list[int] = []
        self._undo = ExitStack()
        try:
            shared = tempfile.mkdtemp(prefix="netns-", dir="/var/tmp")  # not below /tmp, because each node has its own
            self._undo.callback(shutil.rmtree, shared, ignore_errors=True)
            self.shared = Path(shared)
            names = [f"{address} node{node}" for node, address in enumerate(self.addresses)]
            (self.shared / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
            for node in range(num_nodes):
                self._make(node, shm_bytes)
            self._stop, waker = os.pipe()
            self._undo.callback(os.close, self._stop)
            relay = threading.Thread(target=self._relay, name="relay", daemon=True)
            relay.start()
            self._undo.callback(relay.join)
            self._undo.callback(os.close, waker)
        except BaseException:
            self._undo.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def start(
        self, node: int, command: Sequence[str], env: Mapping[str, str] | None = None, **popen: Any
    ) -> subprocess.Popen[str]:
        """Start a command on a node; it is killed when the node ends. `env`: variables in addition to this
        process's."""
        enter = [
            "nsenter",
            "--target",
            str(self._first[node]),
            "--net",
            "--mount",
            "--pid",
            "--uts",
            f"--wdns={os.getcwd()}",
            "--",
        ]
        variables = {**os.environ, **(env or {})}
        return subprocess.Popen([*enter, *command], env=variables, preexec_fn=_die_with_parent, text=True, **popen)

    def run(
        self, node: int, command: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """Run a command on a node; returns its exit code and output. After the timeout it is killed, and
        subprocess.TimeoutExpired is raised."""
        with self.start(node, command, env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            try:
                output = process.communicate(timeout=timeout_s)[0]
            except BaseException:
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                for pid in (*map(int, children), process.pid):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                raise
        return process.returncode, output

    def cut(self, node: int) -> None:
        """Drop all packets from and to a node, as if its cable were pulled."""
        self._cut.add(node)

    def end(self, node: int) -> None:
        """Kill everything on a node, as if its power failed."""
        os.kill(self._first[node], signal.SIGKILL)

    def _make(self, node: int, shm_bytes: int) -> None:
        # the project and its Python must be visible on the node, even if they are below /tmp
        seen = {str(path): self.shared / f"seen-{i}" for i, path in enumerate({REPO, Path(sys.prefix), Path.cwd()})}
        moves = [(shlex.quote(path), keep) for path, keep in sorted(seen.items()) if path.startswith("/tmp/")]
        script = _FIRST_PROCESS.format(
            keep="".join(f"mkdir -p {keep} && mount --bind {path} {keep} && " for path, keep in moves),
            put_back="".join(f"mkdir -p {path} && mount --bind {keep} {path} && " for path, keep in moves),
            shm=shm_bytes,
            name=f"node{node}",
            hosts=self.shared / "hosts",
        )
        spaces = ["--net", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]
        maker = subprocess.Popen(
            ["unshare", *spaces, "sh", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=_die_with_parent,
        )
        self._undo.callback(_kill, maker)
        assert maker.stdout is not None, "it is a pipe"
        line = maker.stdout.readline()
        if line.strip() != "ready":
            raise NetnsError(f"node {node} did not start: {line}{maker.stdout.read()}")
        self._first.append(int(Path(f"/proc/{maker.pid}/task/{maker.pid}/children").read_text()))
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._undo.callback(os.close, tun)
        name = f"rl{os.getpid()}-{node}"
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
        self._tuns.append(tun)
        _check(["ip", "link", "set", name, "netns", str(self._first[node])])
        address = f"{self.addresses[node]}/24"
        setting = f"ip link set {name} name eth0 mtu {_MTU} txqueuelen 20000 && ip address add {address} dev eth0"
        inside = ["nsenter", "--target", str(self._first[node]), "--net", "--"]
        _check([*inside, "sh", "-c", f"{setting} && ip link set eth0 up"])

    def _relay(self) -> None:
        """Pass packets between nodes, as a switch with a wire to every node; each wire is limited to the rate."""
        with suppress(PermissionError):  # priority of this thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -10)
        leaving, reaching = [0.0] * self.num_nodes, [0.0] * self.num_nodes  # when each wire is free
        under_way: list[tuple[float, int, int, bytes]] = []
        count, alive = 0, [*self._tuns]
        while True:
            wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
            ready = select.select([*alive, self._stop], [], [], wait_s)[0]
            if self._stop in ready:
                return
            for tun in ready:
                source = self._tuns.index(tun)
                for _ in range(64):
                    try:
                        packet = os.read(tun, 65_536)
                    except BlockingIOError:  # no more packets
                        break
                    except OSError:  # the node has ended
                        alive.remove(tun)
                        break
                    target = packet[19] - 1 if packet[0] >> 4 == 4 else -1  # the last byte of an IPv4 target
                    if not 0 <= target < self.num_nodes:
                        continue
                    self.sent_bytes[source][target] += len(packet)
                    took_s = 8 * len(packet) / self.rate_bits_per_s
                    leaving[source] = max(time.monotonic(), leaving[source]) + took_s
                    reaching[target] = max(leaving[source], reaching[target] + took_s)
                    heapq.heappush(under_way, (reaching[target] + self.delay_s, count, source, packet))
                    count += 1
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, source, packet = heapq.heappop(under_way)
                target = packet[19] - 1
                if not {source, target} & self._cut:
                    with suppress(OSError):
                        os.write(self._tuns[target], packet)


class NetnsCluster(Network):
    """Nodes with Ray, started as described in docs/placement.md. `environment`: variables for a driver on a node.

    Nodes from number `num_joined` on have no Ray until `join` is called for them.
    """

    def __init__(self, num_nodes: int, num_joined: int | None = None, **network: Any) -> None:
        super().__init__(num_nodes, **network)
        self.environment = {
            "RAY_ADDRESS": f"{self.addresses[0]}:{_PORT}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": os.urandom(32).hex(),
            "RAY_worker_niceness": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": "/tmp",
            "PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "PYTHONUNBUFFERED": "1",
        }
        try:
            self.join(0)
            self.join(*range(1, num_nodes if num_joined is None else num_joined))
        except BaseException:
            self._undo.close()
            raise

    def join(self, *nodes: int) -> None:
        """Start Ray on nodes, all at the same time. Where it fails (its own time limits are too short for a busy
        machine), it is started once more."""
        for attempt in range(_STARTS):
            started = [(node, self._start_ray(node)) for node in nodes]
            deadline = time.monotonic() + _START_S
            nodes = tuple(node for node, process in started if not _succeeded(process, deadline))
            if not nodes:
                return
            for node in nodes if attempt + 1 < _STARTS else ():
                self.run(node, [*_RAY, "stop", "--force"], _START_S)
        logs = "\n".join(self._log(node).read_text() for node in nodes)
        raise NetnsError(f"Ray did not start on nodes {nodes} in {_STARTS} attempts of {_START_S:g} s: {logs}")

    def _start_ray(self, node: int) -> subprocess.Popen[str]:
        where = [f"--address={self.environment['RAY_ADDRESS']}"]
        if node == 0:
            where = ["--head", f"--port={_PORT}", "--include-dashboard=false"]
        options = [f"--node-ip-address={self.addresses[node]}", "--num-cpus=1", "--num-gpus=0", "--disable-usage-stats"]
        options += [f"--object-store-memory={_STORE_BYTES}"]
        environment = {name: value for name, value in self.environment.items() if name != "RAY_ADDRESS"}
        with self._log(node).open("w") as log:
            return self.start(node, [*_RAY, "start", *where, *options], environment, stdout=log, stderr=log)

    def _log(self, node: int) -> Path:
        return self.shared / f"ray-{node}.log"


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _succeeded(process: subprocess.Popen[str], deadline: float) -> bool:
    with suppress(subprocess.TimeoutExpired):
        return process.wait(max(0.0, deadline - time.monotonic())) == 0
    _kill(process)
    return False


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _check(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NetnsError(f"{' '.join(command)}: {done.stderr.strip()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--mbit", type=float, default=RATE_BITS_PER_S / 1e6, help="rate of each node's wire, both ways")
    parser.add_argument("--delay-ms", type=float, default=1e3 * DELAY_S, help="delay of a packet, one way")
    parser.add_argument("--timeout-s", type=float, default=3600)
    parser.add_argument("command", nargs="+", help="command to run on the first node")
    args = parser.parse_args()
    with NetnsCluster(args.nodes, rate_bits_per_s=args.mbit * 1e6, delay_s=args.delay_ms / 1e3) as cluster:
        with cluster.start(0, args.command, cluster.environment) as process:
            code = process.wait(args.timeout_s)
        for source in range(args.nodes):
            print(f"node {source} sent, MB: {[round(count / 1e6, 2) for count in cluster.sent_bytes[source]]}")
    return code


if __name__ == "__main__":
    sys.exit(main())
