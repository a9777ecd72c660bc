"""RECAP's labels on disk: a table of all frames of the pool, and columns of the datasets that the run itself made."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rlinf_lite.data.demonstrations import DemonstrationError

LABELS = "advantages.parquet"
"""The table in the folder of a round: `dataset` (0: the first, n: that of round n), `index` (the frame's number in it),
`advantage` (float32, NaN before the first round), `positive` (bool)."""


def write_labels(
    file: Path, sizes: Sequence[int], advantages: NDArray[np.float32], positive: NDArray[np.bool_]
) -> None:
    """Write the table of the frames of all datasets, whose numbers of frames are `sizes`; the file is there as a whole
    or not at all."""
    columns = {
        "dataset": np.repeat(np.arange(len(sizes)), sizes),
        "index": np.concatenate([np.arange(size) for size in sizes]),
        "advantage": advantages,
        "positive": positive,
    }
    file.parent.mkdir(exist_ok=True)
    partial = file.with_suffix(".partial")
    pq.write_table(pa.table(columns), partial)
    os.replace(partial, file)


def read_positive(file: Path, num_frames: int) -> NDArray[np.bool_]:
    """The labels of all frames, [F]. Raises DemonstrationError if the table cannot be read, or is of other frames."""
    try:
        with pq.ParquetFile(file) as table:
            found = table.read(columns=["positive"])["positive"].to_numpy()
    except (OSError, pa.ArrowException) as error:
        raise DemonstrationError(f"{file} cannot be read: {error}. Delete it to have it made again") from error
    if len(found) != num_frames:
        text = f"{file} labels {len(found)} frames, and the datasets have {num_frames}"
        raise DemonstrationError(f"{text}. Delete it to have it made again")
    positive: NDArray[np.bool_] = found
    return positive
