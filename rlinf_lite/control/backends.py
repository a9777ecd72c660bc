"""Where the contexts of jobs are kept: in Ray's own key-value store, or as files in a directory."""

from __future__ import annotations

import os
from pathlib import Path

from ray.experimental import internal_kv

from rlinf_lite.control.context import ContextError, JobContext

_PREFIX = "rlinf_lite/jobs/"


class KVBackend:
    """Ray's key-value store; lasts as long as the Ray cluster."""

    def save(self, job: str, text: str) -> None:
        internal_kv._internal_kv_put(_PREFIX + job, text.encode(), overwrite=True)

    def load(self, job: str) -> str | None:
        found: bytes | None = internal_kv._internal_kv_get(_PREFIX + job)
        return None if found is None else found.decode(errors="replace")

    def jobs(self) -> list[str]:
        return sorted(key.decode()[len(_PREFIX) :] for key in internal_kv._internal_kv_list(_PREFIX))


class DirectoryBackend:
    """One file per job; outlives Ray."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)

    def save(self, job: str, text: str) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        partial = self._directory / f".{job}.json.partial"
        partial.write_text(text)
        os.replace(partial, self._directory / f"{job}.json")

    def load(self, job: str) -> str | None:
        path = self._directory / f"{job}.json"
        return path.read_text(errors="replace") if path.exists() else None

    def jobs(self) -> list[str]:
        return sorted(path.stem for path in self._directory.glob("*.json"))


ContextBackend = KVBackend | DirectoryBackend
"""Texts by job; a save replaces what was there, whole or not at all."""


def open_backend(where: str) -> ContextBackend:
    """`kv`, or a directory."""
    return KVBackend() if where == "kv" else DirectoryBackend(where)


def load_context(backend: ContextBackend, job: str) -> JobContext | None:
    """What a backend has of a job. Raises ContextError where that is damaged."""
    text = backend.load(job)
    if text is None:
        return None
    try:
        return JobContext.from_json(text)
    except ContextError as error:
        raise ContextError(f"the persisted context of the job {job!r} is damaged ({error})") from error
