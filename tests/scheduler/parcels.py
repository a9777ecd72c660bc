"""What a message of one object is on its way."""

from typing import Any

from rlinf_lite.scheduler.segments import Parcel, encode, store


def pack(obj: Any, directory: str, inbox: str = "") -> Parcel:
    """With its bulk in shared memory under `directory`, for who reads `inbox` ("": anyone)."""
    return store(*encode(obj), directory, inbox)
