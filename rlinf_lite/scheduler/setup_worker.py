"""What Ray starts in place of python for a forked worker: asks the warm process of its node for a fork (forked.py).

Ray calls it in two ways: on a Ray of our own in the place of its own script of this name, which imports Ray at first
and is left out where a worker has no runtime environment; on any other as the worker's `py_executable`, with the path
of the socket. Its time is part of every worker's start: it imports little, and nothing of the package.
"""

from __future__ import annotations

import os
import sys

PLAIN = "RLINF_LITE_PLAIN_WORKER"  # tells a worker that was to be forked, and could not be, why
ANSWER_S = 30.0
"""How long the warm process may take: at first it imports torch. Ray gives up a worker that is not there in 60 s."""
STILL_THERE = b"?"  # what the warm process asks before it forks, and goes on where any byte is the answer
_CONTEXT = "--serialized-runtime-env-context="
_LANGUAGE = "--language="


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments[0].endswith(".sock"):
        import json

        contexts = [argument[len(_CONTEXT) :] for argument in arguments if argument.startswith(_CONTEXT)]
        context = json.loads(contexts[0]) if contexts else {}
        python = context.pop("py_executable", "")
        socket = python.rpartition(" ")[2]
        if not socket.endswith(".sock") or __file__ not in python or any(context.values()):
            import importlib.util  # this worker is none of ours, or has more to it: run as Ray does

            found = importlib.util.find_spec("ray")
            assert found is not None and found.origin is not None, "Ray has started this"
            script = os.path.join(os.path.dirname(found.origin), "_private", "workers", "setup_worker.py")
            os.execv(sys.executable, [sys.executable, script, *arguments])
        arguments = [socket, *(item for item in arguments if not item.startswith((_CONTEXT, _LANGUAGE)))]
    raylet = os.getppid()
    reason = ask_for_fork(arguments[0], arguments[1:])
    if os.getppid() != raylet:
        os._exit(0)  # Ray has ended, and the warm process with it: a worker would look for its node for 30 s
    os.environ[PLAIN] = reason
    os.execv(sys.executable, [sys.executable, *arguments[1:]])


def ask_for_fork(path: str, arguments: list[str]) -> str:
    """Ends this process once a fork runs Ray's worker with these arguments; else returns why none does."""
    import marshal
    import resource
    import signal
    import socket

    if not arguments or arguments[0].startswith("-"):
        return f"Ray starts its workers with {arguments[:1]}"
    limits = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
    umask = os.umask(0o077)
    os.umask(umask)
    with open("/proc/self/oom_score_adj") as file:
        oom_score_adj = file.read()
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "own_group": os.getpgrp() == os.getpid(),
        "umask": umask,
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "ignored": [int(number) for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN],
        "limits": {kind: resource.getrlimit(kind) for kind in limits.values()},
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "oom_score_adj": oom_score_adj,
    }
    data, answer = marshal.dumps(request), b""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_S)
            connection.connect(path)
            socket.send_fds(connection, [len(data).to_bytes(8, "little")], [0, 1, 2])
            connection.sendall(data)
            answer = connection.recv(4096)
            if answer == STILL_THERE:
                connection.sendall(b"!")
                answer += connection.recv(4096)
    except TimeoutError:
        if answer == STILL_THERE:
            os._exit(0)  # it is being forked; where it is not, Ray starts another worker once this one does not appear
        return f"the warm process did not answer within {ANSWER_S:g} s"
    except OSError as error:
        return f"the warm process has ended ({error.strerror or error})"
    if answer == STILL_THERE + b"forked":
        os._exit(0)  # Ray knows its workers by the process id that they tell it
    return answer.removeprefix(STILL_THERE).decode() or "the warm process has ended"


if __name__ == "__main__":
    main()
