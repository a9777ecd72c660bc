"""Memory that is available to new processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf_lite.machine import free_host_bytes

MIB = 2**20


@pytest.mark.parametrize(
    ("limit", "current", "cached", "free"),
    [("600", 500, (200, 100), 400), ("600", 600, (0, 550), 550), ("max", 500, (0, 0), None)],
)
def test_cached_files_of_a_container_are_available(
    limit: str, current: int, cached: tuple[int, int], free: int | None, tmp_path: Path
) -> None:
    (tmp_path / "memory.max").write_text(limit if limit == "max" else str(int(limit) * MIB))
    (tmp_path / "memory.current").write_text(str(current * MIB))
    (tmp_path / "memory.stat").write_text(f"anon 1\nactive_file {cached[0] * MIB}\ninactive_file {cached[1] * MIB}\n")
    assert free_host_bytes(tmp_path) == free * MIB if free else free_host_bytes(tmp_path) > 600 * MIB
