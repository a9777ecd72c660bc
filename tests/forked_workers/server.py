"""Forks workers of Ray for the tests, from a process that has imported torch and transformers: a start then takes a
fraction of a second of a core, not twenty.

A fork ends with the process that Ray started (sitecustomize.py), and the server with its stdin. Ray reads variables
when it is imported, so each Ray has a nursery, a fork of the server, which has imported it with them.
"""

import fcntl
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import traceback


def main(path):
    os.setsid()
    import_what_workers_need()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(64)
        print("ready", flush=True)
        nursery, of_ray = None, None
        while sys.stdin not in select.select([server, sys.stdin], [], [])[0]:
            connection, _ = server.accept()
            message, files = receive(connection)
            variables = json.loads(message)["variables"]
            if nursery is None or of_ray != variables.get("RAY_AUTH_TOKEN"):
                of_ray = variables.get("RAY_AUTH_TOKEN")
                nursery = open_nursery(nursery, server, variables)
            send(nursery, message, [*files, connection.detach()])


def import_what_workers_need():
    import numpy  # noqa: F401
    import torch
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401
    import transformers.modeling_utils  # noqa: F401


def open_nursery(last, server, variables):
    """Fork a process that imports Ray with these variables and forks workers until the socket that is returned ends."""
    if last is not None:
        last.close()
    ours, its = socket.socketpair()
    if not fork():
        its.close()
        return ours
    ours.close()
    server.close()
    os.environ.update(variables)
    import ray._private.node
    import ray.actor  # noqa: F401

    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
    while (received := receive(its)) is not None:
        if fork():
            its.close()
            become_worker(*received)
        for file in received[1]:
            os.close(file)
    os._exit(0)


def fork():
    """Whether this is the new process. It is in no group of processes with others: it may be ended by its group."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    if os.fork():
        return False
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return True


def become_worker(message, files):
    request, connection = json.loads(message), files.pop()
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETSIG, signal.SIGKILL)  # when its other end closes
    fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["variables"])
    random.seed()
    words, paths = request["words"], os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [os.path.dirname(words[0]), *(path for path in paths if path and path not in sys.path)]
    sys.argv[:] = words
    status = 1
    try:
        runpy.run_path(words[0], run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def send(channel, message, files):
    socket.send_fds(channel, [len(message).to_bytes(8, "big")], files)
    for file in files:
        os.close(file)
    channel.sendall(message)


def receive(channel):
    """A message and its files; None at the channel's end."""
    length, files, _, _ = socket.recv_fds(channel, 8, 4)
    if not length:
        return None
    message = b""
    while len(message) < int.from_bytes(length, "big"):
        message += channel.recv(int.from_bytes(length, "big") - len(message))
    return message, files


if __name__ == "__main__":
    main(sys.argv[1])
