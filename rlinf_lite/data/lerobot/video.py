"""Videos: writing pictures into an AV1 file, and reading pictures from any video that FFmpeg decodes."""

from __future__ import annotations

import math
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import av
import av.error
import numpy as np
from av.codec.context import ThreadType
from numpy.typing import NDArray

from rlinf_lite.data.lerobot.layout import Feature, LeRobotError

TIMEOUT_S = 120.0
"""Longest wait for the encoder to accept data, and to finish a file."""
TOLERANCE_S = 1e-4
"""Largest difference between the times of a picture and its frame that gives no note, as in LeRobot."""
DRIFT_S = 4e-3
"""Largest allowed difference: in videos that LeRobot has joined, times drift by up to 3 ms."""
_SHARE_OF_PERIOD = 0.4
"""Largest difference as a share of the time between two frames, so that no neighbouring picture is taken."""
RATE_TOLERANCE = 1e-2
"""Largest relative difference between a video's mean rate and info.json's: drifting times change it a little."""


class VideoWriter:
    """Writes one AV1 file, with `encoder.py` in a process of its own."""

    def __init__(self, file: Path, height: int, width: int, fps: int) -> None:
        if height % 2 or width % 2:
            raise LeRobotError(
                f"{file}: AV1 has pictures of even height and width, and these have {height} x {width}. "
                "Store them losslessly (data.pictures=image), or render another size"
            )
        self.file, self.num_frames = file, 0
        file.parent.mkdir(parents=True, exist_ok=True)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (open until the encoder ends)
        encoder = Path(__file__).with_name("encoder.py")
        program = [sys.executable, *map(str, (encoder, width, height, fps, file))]
        self._process = subprocess.Popen(program, stdin=subprocess.PIPE, stderr=self._errors)
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)
        self._ready = selectors.DefaultSelector()
        self._ready.register(self._pipe, selectors.EVENT_WRITE)

    @property
    def num_bytes(self) -> int:
        """The bytes of the file so far; the last few pictures are still in the encoder."""
        return self.file.stat().st_size if self.file.exists() else 0

    def add(self, pictures: NDArray[np.uint8]) -> None:
        """Add pictures uint8 [n, H, W, 3]. Raises LeRobotError if the encoder fails or hangs."""
        left = np.ascontiguousarray(pictures).data.cast("B")
        while left:
            if not self._ready.select(TIMEOUT_S):
                self._give_up(f"has taken in nothing for {TIMEOUT_S:.0f} s")
            try:
                left = left[os.write(self._pipe, left[: 1 << 20]) :]
            except BrokenPipeError:
                self._give_up("has ended")
        self.num_frames += len(pictures)

    def close(self) -> None:
        """Finish the file. Raises as `add` does."""
        self._ready.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            code = self._process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._give_up(f"has not finished within {TIMEOUT_S:.0f} s")
        if code:
            self._give_up(f"has ended with exit code {code}")
        self._errors.close()

    def abandon(self) -> None:
        """Kill the encoder; the file is unusable."""
        self._process.kill()
        self._process.wait()

    def _give_up(self, what: str) -> None:
        self.abandon()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        raise LeRobotError(
            f"{self.file}: the AV1 encoder {what}{': ' + said[-1] if said else ''}. Try again, or store pictures "
            "losslessly (data.pictures=image)"
        )


def check_video(file: Path, key: str, feature: Feature, fps: float) -> int:
    """The number of pictures in the file. Raises LeRobotError if it cannot be opened, or does not agree with
    `feature`."""
    with _open(file) as container:
        stream = container.streams.video[0]
        info, found = feature.info, stream.codec_context
        codec, rate = found.codec.canonical_name, stream.average_rate
        num_pictures = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
        pairs = [
            ("size", f"{feature.size[0]} x {feature.size[1]}", f"{found.height} x {found.width}"),
        ]
        got_fps = float(rate or fps)
        if not math.isclose(got_fps, fps, rel_tol=RATE_TOLERANCE):
            pairs.append(("rate", f"{float(fps):g} pictures/s", f"{got_fps:g} pictures/s"))
        of_file: dict[str, object] = {"video.codec": codec, "video.pix_fmt": found.pix_fmt}
        said_fps = info.get("video.fps")
        if not (isinstance(said_fps, int | float) and _is_rate(said_fps, got_fps)):
            of_file["video.fps"] = got_fps
        of_file |= {"video.height": found.height, "video.width": found.width}
        pairs += [(name, _shown(info[name]), _shown(got)) for name, got in of_file.items() if info.get(name)]
    wrong = [f"{what} is {got} there and {said} in info.json" for what, said, got in pairs if said != got]
    if wrong:
        raise LeRobotError(f"{file}: of {key} the {'; the '.join(wrong)}")
    if info.get("is_depth_map") or info.get("video.is_depth_map"):
        raise LeRobotError(f"{file}: {key} is a depth map in info.json, and colours are read")
    return num_pictures


def pictures_at(
    file: Path, times_s: Sequence[float], num_threads: int = 0, deviates: Callable[[float], None] = lambda _: None
) -> Iterator[NDArray[np.uint8]]:
    """The pictures uint8 [H, W, 3] nearest to these ascending times, in one pass over the file from the first of them.

    `num_threads=0`: one per core. `deviates` is called with each picture's time difference in seconds. Raises
    LeRobotError if a picture is missing or the file is damaged, as far as the codec detects it: videos have no
    checksums, and a changed byte may give a different valid picture.
    """
    num_given = 0
    try:
        for picture, distance_s in _decoded(file, times_s, num_threads, from_start=times_s[0] <= 1):
            deviates(distance_s)
            yield picture
            num_given += 1
    except LeRobotError:
        if num_given or times_s[0] <= 1:
            raise
        for picture, distance_s in _decoded(file, times_s, num_threads, from_start=True):
            deviates(distance_s)  # pictures may depend on some before the key frame
            yield picture


def _decoded(
    file: Path, times_s: Sequence[float], num_threads: int, from_start: bool
) -> Iterator[tuple[NDArray[np.uint8], float]]:
    """The decoded pictures, each with its difference from the wanted time in seconds."""
    with _open(file) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = num_threads
        stream.codec_context.thread_type = ThreadType.FRAME  # with slice threads, H.264 loses errors
        stream.codec_context.options = {"err_detect": "explode"}  # else H.264 conceals what it cannot decode
        assert stream.time_base is not None
        if not from_start:  # go to a key frame before the first wanted picture
            container.seek(int((times_s[0] - DRIFT_S) / stream.time_base), stream=stream)
        period_s = np.median(np.diff(times_s)) if len(times_s) > 1 else math.inf
        drift_s = min(DRIFT_S, _SHARE_OF_PERIOD * period_s) if period_s > 0 else DRIFT_S
        wanted, shown = 0, 0.0
        last: av.VideoFrame | None = None
        try:
            for frame in chain(container.decode(stream), (None,)):  # None: after the last picture
                before, shown = shown, shown if frame is None else float((frame.pts or 0) * stream.time_base)
                while frame is None or times_s[wanted] <= shown + TOLERANCE_S:  # between `last` and `frame`
                    late = frame is not None and (last is None or shown - times_s[wanted] < times_s[wanted] - before)
                    nearest, distance_s = frame if late else last, abs(times_s[wanted] - (shown if late else before))
                    if nearest is None or distance_s > max(drift_s, TOLERANCE_S):
                        if frame is None:
                            break
                        raise LeRobotError(
                            f"{file} has no picture at {times_s[wanted]:.4f} s, the next is at {shown:.4f} s: "
                            "is it damaged, or another dataset's?"
                        )
                    if nearest.is_corrupt:
                        at = f"the picture at {shown if late else before:.2f} s"
                        raise LeRobotError(f"{file} is damaged: {at} could not be decoded whole")
                    yield np.asarray(nearest.to_ndarray(format="rgb24"), np.uint8), distance_s
                    wanted += 1
                    if wanted == len(times_s):
                        return
                last = frame
        except av.error.FFmpegError as error:
            raise LeRobotError(f"{file} is damaged after {shown:.2f} s: {error}") from error
    raise LeRobotError(
        f"{file} ends at {shown:.2f} s, and the dataset has a frame at {times_s[wanted]:.2f} s: is it truncated?"
    )


def _is_rate(said: float, found: float) -> bool:
    """Whether two rates agree. Stated rates may be cut to whole numbers: 29 for 29.97."""
    return math.isclose(said, found, rel_tol=RATE_TOLERANCE) or said == int(found)


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _open(file: Path) -> av.container.InputContainer:
    if not file.is_file():
        raise LeRobotError(f"{file} is missing, and the dataset's tables name it")
    try:
        container = av.open(f"file:{file}")  # else FFmpeg reads text before a colon as a protocol
    except av.error.FFmpegError as error:
        raise LeRobotError(f"{file} cannot be read: {error}. Is it truncated?") from error
    if not container.streams.video:
        container.close()
        raise LeRobotError(f"{file} holds no video that could be read: is it truncated?")
    return container
