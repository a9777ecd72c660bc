"""The cluster of the scheduler's tests."""

import pytest


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    """A cluster on processes, since they are tested here."""
    return ray_cluster
