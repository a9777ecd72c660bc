"""Tests of processes."""

import pytest


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    """Processes, which are what is tested here."""
    return ray_cluster
