"""Reading and writing LeRobotDataset v3.0, and reading v2.1, with only pyarrow and PyAV (the extra `data`).

    layout.py       info.json, features, paths
    video.py        AV1 files: an encoder in its own process, frames by time
    statistics.py   exact statistics of numbers and pictures
    writer.py       writes episodes into parts, and merges parts into one dataset
    reader.py       checks a folder, and reads its frames as a stream
    frames.py       reads frames by number, from files that are mapped into memory

A frame is an env step: the observation before the action, and the action.
"""
