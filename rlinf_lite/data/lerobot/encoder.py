"""A program that encodes raw pictures from standard input into one AV1 file: `encoder.py WIDTH HEIGHT FPS FILE`.

`video.VideoWriter` starts it as a process, which it can end if the encoder hangs; inside a worker that would be
impossible. It imports nothing from the package.
"""

import os
import sys

import av
import numpy as np

CRF, PRESET, GOP = "30", "12", "2"  # as in LeRobot; a key frame every other picture makes every picture fast to find


def main() -> None:
    width, height, fps = map(int, sys.argv[1:4])
    size = width * height * 3
    with av.open(sys.argv[4], "w", format="mp4") as container:
        stream = container.add_stream("libsvtav1", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {"crf": CRF, "preset": PRESET, "g": GOP}
        while picture := sys.stdin.buffer.read(size):
            frame = av.VideoFrame.from_ndarray(np.frombuffer(picture, np.uint8).reshape(height, width, 3), "rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


if __name__ == "__main__":
    os.environ["SVT_LOG"] = "1"  # errors only
    main()
