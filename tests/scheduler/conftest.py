from collections.abc import Iterator

import pytest

from rlinf_lite.scheduler import Cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Four virtual slots on a Ray of our own."""
    with Cluster(num_gpus_per_node=4, accelerator="cpu", log_to_driver=False) as running:
        yield running
