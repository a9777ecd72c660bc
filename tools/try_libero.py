"""Build LIBERO tasks on the installed meshes, one after the other, and say which cannot be played.

python tools/try_libero.py                    # all 130, some ten seconds each
python tools/try_libero.py libero_10          # a suite, or a task
"""

from __future__ import annotations

import sys
import time

import numpy as np

from rlinf_lite.config import EnvConfig
from rlinf_lite.envs import ChunkedEnv
from rlinf_lite.envs.libero.simulator import LiberoSimulator
from rlinf_lite.envs.libero.tasks import NUM_INITIAL_STATES, SUITES, suite_and_name, tasks_of


def main(names: list[str]) -> int:
    """Reset each task to its first and its last published initial state, step and draw. Returns the exit code."""
    tasks = [task for name in names or SUITES for task in tasks_of(name)]
    failed = 0
    for number, task in enumerate(tasks, 1):
        started = time.monotonic()
        cfg = EnvConfig.model_validate({"id": "libero", "task": task, "options": {"camera_size": [64, 64]}})
        env = ChunkedEnv(LiberoSimulator(1, cfg))
        try:
            for state in (0, NUM_INITIAL_STATES - 1):
                images = env.reset([state])["images"]
                env.chunk_step(np.zeros((1, 4, 7), np.float32))
                assert all(image.std() > 5 for image in images.values()), "a picture is blank"
            said = "fine"
        except Exception as error:  # any error of one task; the others are tried all the same
            failed += 1
            said = f"{type(error).__name__}: {error}"
        finally:
            env.close()
        print(
            f"{number}/{len(tasks)} {suite_and_name(task)[0]} {task}: {said}, {time.monotonic() - started:.1f} s",
            flush=True,
        )
    print(f"{len(tasks) - failed} of {len(tasks)} tasks can be played")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
