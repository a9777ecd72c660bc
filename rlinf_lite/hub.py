"""Datasets on the Hugging Face Hub, where a config names one: `hf://datasets/ORG/NAME[@REVISION][/FILE]`.

They are downloaded once, when a run is prepared, into the Hub's own cache; runs download nothing else. A slash in a
revision is written %2F. Without a revision, each run takes the newest.
"""

from __future__ import annotations

import glob
import re
from pathlib import Path
from urllib.parse import unquote

HUB = "hf://"
FORM = "hf://datasets/ORG/NAME[@REVISION][/FILE]"
_PARTS = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.+))?")


class HubError(ValueError):
    """A dataset or file that a config names on the Hub, and that cannot be downloaded."""


def on_hub(path: str | None) -> bool:
    return path is not None and path.startswith(HUB)


def hub_problem(path: str, needs_file: bool) -> str | None:
    """What is wrong with how `path` is written; None: nothing. Whether it exists is found out by downloading it."""
    found = _PARTS.fullmatch(path)
    if found is None or ".." in path.split("/"):
        return f"{path!r} is not written {FORM}"
    if needs_file != bool(found[3]):
        return f"{path!r} names {'no file of the dataset' if needs_file else 'a file, and a whole dataset is read'}"
    return None


def local_path(path: str) -> str:
    """The file or dataset on this machine, after downloading what the Hub's cache lacks. A `path` that is not on the
    Hub is returned as it is. Raises HubError."""
    if not on_hub(path):
        return path
    from huggingface_hub import snapshot_download

    found = _PARTS.fullmatch(path)
    if found is None or ".." in path.split("/"):
        raise HubError(f"{path!r} is not written {FORM}")
    name, revision, file = found.groups()
    pattern = glob.escape(file) if file else None
    try:
        directory = snapshot_download(
            name, repo_type="dataset", revision=unquote(revision) if revision else None, allow_patterns=pattern
        )
    except Exception as error:  # of the Hub, or of the libraries below its client
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise HubError(
            f"{path} could not be had from the Hub ({reason}). Correct it, log in (`hf auth login`) where it is "
            "private or gated, or name a local path"
        ) from error
    local = Path(directory, file or "")
    if file and not local.is_file():
        raise HubError(f"{path}: the dataset {name} has no file {file}. `hf datasets ls {name}` lists its files")
    return str(local)
