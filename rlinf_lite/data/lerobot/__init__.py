"""LeRobotDataset v3.0 written and read, and v2.1 read, with pyarrow and PyAV alone (the extra `data`).

    layout.py       info.json, features, paths
    video.py        AV1 files: an encoder in a process of its own, frames by time
    statistics.py   exact statistics, of numbers and of pictures
    writer.py       episodes into parts, parts into one dataset
    reader.py       a folder, checked, and its frames as a stream
    frames.py       its frames by number, from files that are mapped into memory

A frame is an env step: what is seen before the action, and the action.
"""
