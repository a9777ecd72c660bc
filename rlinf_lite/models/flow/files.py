"""Finds and reads the files of a published directory (safetensors and JSON), without torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"


class UnsupportedFlowError(ValueError):
    """A published directory with an unsupported part, or with missing or damaged files."""


def own_files(directory: Path, *patterns: str) -> list[Path]:
    """Files of a checkpoint and of its folders that match the patterns; without checkpoints in folders of their own."""
    others = {file.parent for name in (WEIGHTS, INDEX) for file in directory.rglob(name)} - {directory}
    found = {file for pattern in patterns for file in directory.rglob(pattern) if file.is_file()}
    return sorted(file for file in found if others.isdisjoint(file.parents))


def weight_files(directory: Path) -> list[Path]:
    """Files of the weights: `model.safetensors` if it exists, as in published loaders; else all shards of the index.

    Raises UnsupportedFlowError if a shard is missing, or the index names none.
    """
    single, index = directory / WEIGHTS, directory / INDEX
    if single.is_file() or not index.is_file():
        return [single] if single.is_file() else []
    found = [directory / name for name in sorted(set(read_json(index).get("weight_map", {}).values()))]
    missing = [file.name for file in found if not file.is_file()]
    if missing or not found:
        text = f"{', '.join(missing)}, which is not there" if missing else "no file"
        raise UnsupportedFlowError(f"{index} names {text}. Download it again")
    return found


def read_json(file: Path, content: bytes | None = None) -> Any:
    """The content of a JSON file, or of `content`, a part of `file`. Raises UnsupportedFlowError."""
    try:
        return json.loads(file.read_bytes() if content is None else content)
    except ValueError as error:
        raise UnsupportedFlowError(f"{file} is no JSON: {error}. Download it again") from error


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The header's entry for each tensor of a safetensors file, and the offset at which the tensors' bytes begin."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = 8 + int.from_bytes(stream.read(8), "little")
        header: dict[str, Any] = read_json(file, stream.read(start - 8)) if 8 < start <= size else {}
    header.pop("__metadata__", None)
    if not header or size < start + max(entry["data_offsets"][1] for entry in header.values()):
        text = f"has {size} bytes, and they are no whole safetensors file: it is cut off, or a git-lfs pointer"
        raise UnsupportedFlowError(f"{file} {text}. Download it again (git lfs pull)")
    return header, start


def read_numbers(file: Path, beginnings: tuple[str, ...]) -> dict[str, list[float]]:
    """The floating-point tensors of a safetensors file whose names begin with one of `beginnings`."""
    (header, start), found = _header(file), {}
    with file.open("rb") as stream:
        for name, entry in header.items():
            letter = {"F16": "e", "BF16": "f", "F32": "f", "F64": "d"}.get(entry["dtype"])
            if letter is not None and name.startswith(beginnings):
                first, last = entry["data_offsets"]
                stream.seek(start + first)
                content = stream.read(last - first)
                if entry["dtype"] == "BF16":  # the upper half of a float32
                    content = b"".join(b"\0\0" + content[n : n + 2] for n in range(0, len(content), 2))
                found[name] = list(struct.unpack(f"<{len(content) // struct.calcsize(letter)}{letter}", content))
    return found


def read_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights in a directory, from the headers of its files; empty if it has no weights."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(directory):
        shapes |= {name: tuple(entry["shape"]) for name, entry in _header(file)[0].items()}
    return shapes
