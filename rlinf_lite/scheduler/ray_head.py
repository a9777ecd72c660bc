"""A program that runs Ray on this machine until its standard input closes (local_ray.py starts it).

Its argument is JSON: keyword arguments of `ray.init`. Once Ray is up it prints one line of JSON: the ports of Ray's GCS
and raylet. When standard input closes, for any reason, it kills its whole process group.
"""

import json
import logging
import os
import signal
import sys
import threading

import ray


def _end_with_stdin() -> None:
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    threading.Thread(target=_end_with_stdin).start()
    try:
        settings = json.loads(sys.argv[1])
        ray.init("local", include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING, **settings)
        gcs_port = ray.get_runtime_context().gcs_address.rpartition(":")[2]
        [node] = ray.nodes()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)
    print(json.dumps([int(gcs_port), node["NodeManagerPort"]]), flush=True)


if __name__ == "__main__":
    main()
