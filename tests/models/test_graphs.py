"""What can be recorded, and what is done with recordings; graphs are emulated."""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import embedding, linear, one_hot

from rlinf_lite.models import graphs
from rlinf_lite.models.graphs import Recordings, record
from tests.models.emulated_graphs import emulation as emulation

X = torch.arange(6.0).view(2, 3)
MASK = X > 2


def fill(mask, values):
    x = X.clone()
    x[mask] = values
    return x


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("work", "waits"),
    [
        (lambda: linear(X, X[[1, 0]]) + embedding(torch.tensor([1]), X).sum(), False),
        (lambda: fill(MASK, 0.0), False),
        (lambda: X.double().clone(), False),
        (lambda: X * float(X.sum()), True),
        (lambda: X[MASK], True),
        (lambda: fill(MASK, torch.ones(3)), True),
        (lambda: MASK.nonzero(), True),
        (lambda: one_hot(X.long()), True),
        (lambda: X if X.max() > 9 else X + 1, True),
        (lambda: X.to("meta"), True),
        (lambda: torch.empty(2, 3, device="meta").copy_(X), True),
    ],
)
def test_what_waits_for_the_gpu_is_launched(emulation, caplog, work, waits, inference):
    with torch.inference_mode(inference):
        recorded = record(work)
        assert (recorded is work) == waits == ("waits for the GPU" in caplog.text)
        if not waits:
            torch.testing.assert_close(recorded(), work())


def test_a_recording_reads_what_is_there_and_does_as_it_did(emulation):
    x, times = torch.ones(3), [2]
    recorded = record(lambda: x * times[0])
    x.fill_(4)
    times[0] = 5
    first = recorded()
    assert first.tolist() == [8, 8, 8]
    x.fill_(1)
    assert recorded() is first and first.tolist() == [2, 2, 2]


def test_passes_are_recorded_once_and_again_where_weights_moved(emulation):
    weight = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    recordings = Recordings()

    def run():
        return [recordings.run(times, partial(weight.mul, times), [weight]).tolist() for times in (2, 3, 2)]

    assert run() == run() == [[2] * 3, [3] * 3, [2] * 3] and emulation.recorded == 2
    weight.fill_(2)
    assert run() == [[4] * 3, [6] * 3, [4] * 3] and emulation.recorded == 2
    before, weight.data = weight.data, torch.zeros(3)
    assert run() == [[0] * 3] * 3 and emulation.recorded == 4 and len(before) == 3


def test_passes_that_were_recorded_before_one_that_cannot_be_stay(emulation):
    recordings = Recordings()
    recordings.run("good", lambda: X + 1, [])
    emulation.breaks = True
    for _ in range(2):
        assert torch.equal(recordings.run("bad", lambda: X + 2, []), X + 2)
    assert torch.equal(recordings.run("good", lambda: X, []), X + 1)
    emulation.breaks = False
    recordings.run("another", lambda: X, [])
    assert emulation.recorded == 1, "one that failed is enough"


@pytest.mark.parametrize("underway", [True, False])
def test_a_recording_that_breaks_off_leaves_nothing_behind(monkeypatch, caplog, underway):
    """torch leaves its stream current and its memory's pool open then, which breaks `empty_cache` later."""
    graphs._warn.cache_clear()
    before, cuda, said = SimpleNamespace(device_index=3), SimpleNamespace(stream=None), []

    @contextmanager
    def graph(graph, pool, capture_error_mode):
        cuda.stream = "a side stream"
        yield

    def end(device, pool):
        said.append(("end", device, pool))
        if not underway:
            raise RuntimeError("not currently recording to it")

    for name, value in {
        "CUDAGraph": object,
        "graph": graph,
        "graph_pool_handle": lambda: (0, 7),
        "current_stream": lambda: before,
        "set_stream": lambda stream: setattr(cuda, "stream", stream),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *args: said.append(("release", *args)))

    def work():
        if cuda.stream:
            raise RuntimeError("an operation is not permitted")
        return X

    assert record(work) is work and "an operation is not permitted" in caplog.text
    assert cuda.stream is before
    assert said == [("end", 3, (0, 7)), ("release", 3, (0, 7))][: 1 + underway]


def test_the_key_is_of_the_process(monkeypatch):
    monkeypatch.setattr(graphs, "enabled", True)
    assert graphs.can_record(torch.device("cuda", 0)) and not graphs.can_record(torch.device("cpu"))
    monkeypatch.setattr(graphs, "enabled", False)
    assert not graphs.can_record(torch.device("cuda", 0))
