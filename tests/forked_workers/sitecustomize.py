"""Python imports this at its start where this folder is in PYTHONPATH. A worker of Ray then hands its command line,
variables and files to the process that has imported what it needs (server.py), which forks, and waits for the fork."""

import os
import sys


def _hand_over():
    path, words = os.environ.get("RLINF_LITE_FORK_SOCKET"), sys.orig_argv[1:]
    if path is None or not words or not words[0].endswith("/ray/_private/workers/default_worker.py"):
        return
    import json
    import signal
    import socket

    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(path)
        except OSError:  # there is no such process (any more): the worker starts as it always does
            return
        blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
        request = {"words": words, "variables": dict(os.environ), "directory": os.getcwd(), "blocked": blocked}
        message = json.dumps(request).encode()
        socket.send_fds(connection, [len(message).to_bytes(8, "big")], [0, 1, 2])
        connection.sendall(message)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # it ends with the fork
        connection.recv(1)
    os._exit(0)


_hand_over()
