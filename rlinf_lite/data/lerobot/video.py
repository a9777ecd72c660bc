"""Videos: pictures into an AV1 file, and out of whatever FFmpeg decodes."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import av
import av.error
import numpy as np
from av.codec.context import ThreadType
from numpy.typing import NDArray

from rlinf_lite.data.lerobot.layout import Feature, LeRobotError

TIMEOUT_S = 120.0
"""Longest wait for the encoder to take in a picture, and for it to finish a file."""
TOLERANCE_S = 1e-4
"""How far a picture's time may be from the one that is asked for, as in LeRobot."""


class VideoWriter:
    """One AV1 file; `encoder.py` writes it in a process of its own."""

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
        """Of the file so far; the encoder is a few pictures behind."""
        return self.file.stat().st_size if self.file.exists() else 0

    def add(self, pictures: NDArray[np.uint8]) -> None:
        """uint8 [n, H, W, 3]. Raises LeRobotError where the encoder fails or does not come back."""
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
        """Finish the file. Raises as `add`."""
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
        """End the encoder; the file is of no use."""
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
    """The number of pictures in the file. Raises LeRobotError where it cannot be opened, or is not what `feature`
    says."""
    with _open(file) as container:
        stream = container.streams.video[0]
        info, found = feature.info, stream.codec_context
        codec, rate = found.codec.canonical_name, stream.average_rate
        num_pictures = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
        pairs = [
            ("size", f"{feature.size[0]} x {feature.size[1]}", f"{found.height} x {found.width}"),
            ("rate", f"{float(fps):g} pictures/s", f"{float(rate or fps):g} pictures/s"),
        ]
        of_file = {"video.codec": codec, "video.pix_fmt": found.pix_fmt, "video.fps": float(rate or fps)}
        of_file |= {"video.height": found.height, "video.width": found.width}
        pairs += [(name, _shown(info[name]), _shown(got)) for name, got in of_file.items() if info.get(name)]
    wrong = [f"{what} is {got} there and {said} in info.json" for what, said, got in pairs if said != got]
    if wrong:
        raise LeRobotError(f"{file}: of {key} the {'; the '.join(wrong)}")
    if info.get("is_depth_map") or info.get("video.is_depth_map"):
        raise LeRobotError(f"{file}: {key} is a depth map in info.json, and colours are read")
    return num_pictures


def pictures_at(file: Path, times_s: Sequence[float], num_threads: int = 0) -> Iterator[NDArray[np.uint8]]:
    """The pictures uint8 [H, W, 3] at these ascending times, in one pass over the file from the first of them.

    `num_threads` 0: as many as there are cores. Raises LeRobotError where one is missing or the file is damaged, as far
    as the codec shows it: videos have no checksums, and a changed byte may give another picture that is as good.
    """
    num_given = 0
    try:
        for picture in _decoded(file, times_s, num_threads, from_start=times_s[0] <= 1):
            yield picture
            num_given += 1
    except LeRobotError:
        if num_given or times_s[0] <= 1:
            raise
        yield from _decoded(file, times_s, num_threads, from_start=True)  # pictures may need some before the key frame


def _decoded(file: Path, times_s: Sequence[float], num_threads: int, from_start: bool) -> Iterator[NDArray[np.uint8]]:
    with _open(file) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = num_threads
        stream.codec_context.thread_type = ThreadType.FRAME  # between threads for slices H.264 loses errors
        stream.codec_context.options = {"err_detect": "explode"}  # else H.264 makes up for what it cannot decode
        assert stream.time_base is not None
        if not from_start:  # at a key frame, before what is asked for
            container.seek(int((times_s[0] - TOLERANCE_S) / stream.time_base), stream=stream)
        wanted, shown = 0, 0.0
        try:
            for frame in container.decode(stream):
                assert frame.pts is not None
                shown = float(frame.pts * stream.time_base)
                if shown < times_s[wanted] - TOLERANCE_S:
                    continue
                if shown > times_s[wanted] + TOLERANCE_S:
                    raise LeRobotError(
                        f"{file} has no picture at {times_s[wanted]:.4f} s, the next is at {shown:.4f} s"
                    )
                if frame.is_corrupt:
                    raise LeRobotError(f"{file} is damaged: the picture at {shown:.2f} s could not be decoded whole")
                picture = np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)
                while wanted < len(times_s) and abs(times_s[wanted] - shown) <= TOLERANCE_S:
                    yield picture
                    wanted += 1
                if wanted == len(times_s):
                    return
        except av.error.FFmpegError as error:
            raise LeRobotError(f"{file} is damaged after {shown:.2f} s: {error}") from error
    raise LeRobotError(
        f"{file} ends at {shown:.2f} s, and the dataset has a frame at {times_s[wanted]:.2f} s: is it truncated?"
    )


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _open(file: Path) -> av.container.InputContainer:
    if not file.is_file():
        raise LeRobotError(f"{file} is missing, and the dataset's tables name it")
    try:
        container = av.open(str(file))
    except av.error.FFmpegError as error:
        raise LeRobotError(f"{file} cannot be read: {error}. Is it truncated?") from error
    if not container.streams.video:
        container.close()
        raise LeRobotError(f"{file} holds no video that could be read: is it truncated?")
    return container
