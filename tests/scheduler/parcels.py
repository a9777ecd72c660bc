"""Makes the parcel of a message."""

from typing import Any

from rlinf_lite.scheduler.segments import Parcel, encode, store


def pack(obj: Any, directory: str, inbox: str = "") -> Parcel:
    """A parcel with large buffers in shared memory under `directory`, for the reader of `inbox` ("": any reader)."""
    return store(*encode(obj), directory, inbox)
