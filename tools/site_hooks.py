"""Hooks of mkdocs that add to the pages of docs/: the README as first page, and all files to which pages link.

Pages link to files outside `docs/` as on a code host (`../rlinf_lite/...`). The site has a copy of each, so that it
needs no other server. For a link to a missing file mkdocs prints a warning, which is an error in `make docs`.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

REPO = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()(?![a-z]+://|#|mailto:)([^)\s#]+)(#[^)\s]*)?(\))")
DOCS = REPO / "docs"
_SHOWN = {".png", ".svg", ".gif"}


def page_of(path: Path) -> str:
    """The name on the site of a file of the repository."""
    name = path.relative_to(REPO).as_posix()
    if name == "README.md":
        return "index.md"
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return f"source/{name}" + ("" if path.suffix in _SHOWN else ".txt")  # browsers show text, and download .py


def rewritten(markdown: str, page: Path) -> tuple[str, set[Path]]:
    """The text of a page with the site's links, and the files that it links to."""
    found: set[Path] = set()
    folder = posixpath.dirname(page_of(page)) or "."

    def of_site(link: re.Match[str]) -> str:
        path = (page.parent / link[2]).resolve()
        if not (path.is_file() and path.is_relative_to(REPO)):
            return link[0]  # mkdocs reports that it is missing
        found.add(path)
        return f"{link[1]}{posixpath.relpath(page_of(path), folder)}{link[3] or ''}{link[4]}"

    return LINK.sub(of_site, markdown), found


def on_files(files: Files, *, config: Any) -> Files:
    """Add the README and the files to which pages link."""
    readme = REPO / "README.md"
    text, linked = rewritten(readme.read_text(), readme)
    files.append(File.generated(config, page_of(readme), content=text))
    for page in sorted(DOCS.rglob("*.md")):
        linked |= rewritten(page.read_text(), page)[1]
    for path in sorted(linked):
        if page_of(path).startswith("source/"):
            files.append(File.generated(config, page_of(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    return markdown if page.file.generated_by else rewritten(markdown, DOCS / page.file.src_uri)[0]
