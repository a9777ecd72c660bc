"""Weights arrive whole, in the right version, by shared memory and by buckets."""

import gc
import os
from pathlib import Path

import pytest
import torch

from rlinf_lite.scheduler import SchedulerError, Worker, WorkerError, wait_all
from rlinf_lite.training.precision import cast_parameters
from rlinf_lite.weights import WeightReceiver, WeightRoutes, WeightSender, segment, sync, transports
from rlinf_lite.weights.segment import Entry, Segment


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    """Processes, which are what is tested here."""
    return ray_cluster


NODES = {"buckets": (1, 1)}  # of the receivers; the sender is on node 0
FIXED_AT_FIRST = "0.weight"  # it does not train


def make_module():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 60_000))  # 5 MB
    module[0].weight.requires_grad_(False)
    return module


def pretend_gpu(kind, rank):
    """Where tensors are to be lent: that parameters are on a GPU, of which rank 0 of both groups has the same one.
    torch lends tensors in host memory by the same function, once it shares them by a file's name."""
    if "lent" in kind:
        torch.multiprocessing.set_sharing_strategy("file_system")
        torch.set_num_threads(1)
        sync._gpu = lambda module: f"card {rank}"
    if "cannot be opened" in kind:
        transports.reduce_tensor = lambda tensor: (refuse, ())
    if "cannot be lent" in kind:
        transports.reduce_tensor = refuse


def refuse(*_):
    raise RuntimeError("CUDA error: invalid device context")


class Sending(Worker):
    def init(self, bucket_bytes, kind):
        self.module = make_module()
        routes = WeightRoutes(rollout_nodes=NODES.get(kind, (0, 0)), actor_nodes=(0,))
        lends = "lent" in kind
        self.sender = WeightSender(self, "rollout", routes, bucket_bytes, timeout_s=20, num_threads=2, cuda_ipc=lends)
        pretend_gpu(kind, self.rank)

    def shorten(self):
        self.module[1].running_mean = self.module[1].running_mean[:1]

    def change_and_send(self, version, frozen=()):
        """`frozen`: what does not train any more after this change, or not yet, besides what never does."""
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                if name not in frozen or parameter.requires_grad:
                    parameter.add_(version + 1)
                parameter.requires_grad_(name not in (FIXED_AT_FIRST, *frozen))
            self.module[1].running_mean.add_(version + 1)
            self.module[1].num_batches_tracked.add_(1)
            self.module[1].running_var = self.module[1].running_var * 2  # another tensor, as many modules do it
        self.sender.send(version, self.module)
        return {name: tensor.clone() for name, tensor in self.module.state_dict().items()}


class Receiving(Worker):
    def init(self, kind):
        self.module = make_module().requires_grad_(False)
        if "bf16" in kind or (kind == "two types" and self.rank):
            cast_parameters(self.module, torch.bfloat16)
        self.receiver = WeightReceiver(self, "actor", 0, self.module, timeout_s=20)
        pretend_gpu(kind, self.rank)
        self.num_lent, copy_lent = 0, self.receiver._copy_lent

        def count(lent):
            self.num_lent += len(lent.tensors)
            copy_lent(lent)

        self.receiver._copy_lent = count
        if "copied" in kind or "lent" in kind:  # as for a policy on another device
            sync.in_host_memory = lambda tensor: False

    def receive(self, version):
        self.receiver.receive(version)
        return {name: tensor.clone() for name, tensor in self.module.state_dict().items()}

    def replace(self):
        """As who loads weights by themselves may do."""
        self.module.load_state_dict({name: x.clone() for name, x in self.module.state_dict().items()}, assign=True)

    def use(self):
        """As a pass may change statistics: in place, and by another tensor. Returns them."""
        norm = self.module[1]
        norm.running_mean += 100 * (self.rank + 1)
        norm.running_var = norm.running_var + 1
        return norm.running_mean, norm.running_var

    def lent(self):
        return self.num_lent

    def mapped_file(self):
        """The file that the first weight's memory is mapped from."""
        address = self.module[2].weight.data_ptr()
        for line in Path("/proc/self/maps").read_text().splitlines():
            start, _, stop = line.split()[0].partition("-")
            if int(start, 16) <= address < int(stop, 16):
                return line.split(maxsplit=5)[5].strip() if len(line.split()) > 5 else ""
        return ""


@pytest.fixture
def groups(cluster, request):
    actor = Sending.create_group().launch(cluster, "0", name="actor")
    rollout = Receiving.create_group().launch(cluster, "0:0-1", name="rollout")
    wait_all(actor.init(1000, request.param), rollout.init(request.param), timeout_s=60)
    yield actor, rollout
    actor.shutdown()
    rollout.shutdown()


KINDS = ["views", "copied", "buckets", "bf16 views", "bf16 copied", "lent", "bf16 lent"]


@pytest.mark.parametrize("groups", KINDS, indirect=True, ids=KINDS)
def test_everything_first_then_what_trains_and_statistics(groups, request):
    actor, rollout = groups
    low = "bf16" in request.node.callspec.id
    frozen = make_module().state_dict()[FIXED_AT_FIRST] + 1  # as of version 0
    for version in (0, 1, 2):
        received, sent = wait_all(rollout.receive(version), actor.change_and_send(version), timeout_s=60)
        is_parameter = dict(make_module().named_parameters())
        for weights in received:
            assert weights.keys() == sent[0].keys()
            for name, tensor in sent[0].items():
                expected = frozen if name == FIXED_AT_FIRST else tensor
                if low and name in is_parameter:  # statistics keep their type
                    expected = expected.bfloat16()
                assert weights[name].dtype == expected.dtype and torch.equal(weights[name], expected), name
        for rank, (mean, variance) in enumerate(rollout.use().wait()):  # nobody else's, until the next weights come
            assert torch.equal(mean, sent[0]["1.running_mean"] + 100 * (rank + 1))
            assert torch.equal(variance, sent[0]["1.running_var"] + 1)


@pytest.mark.parametrize("groups", ["views", "copied", "buckets"], indirect=True)
def test_what_is_frozen_between_two_transfers_arrives_as_it_was_then(groups):
    """As where a backbone trains for some steps only: its last update comes before its `requires_grad_(False)`."""
    actor, rollout = groups
    for version, frozen in ((0, []), (1, ["2.bias"]), (2, ["2.bias"]), (3, [])):
        received, sent = wait_all(rollout.receive(version), actor.change_and_send(version, frozen), timeout_s=60)
        for weights in received:
            for name in sent[0].keys() - {FIXED_AT_FIRST}:
                assert torch.equal(weights[name], sent[0][name]), (version, name)


@pytest.mark.parametrize("groups", ["views", "copied", "buckets"], indirect=True)
def test_weights_that_were_made_anew_are_followed(groups):
    actor, rollout = groups
    for version in (0, 1, 2):
        received, sent = wait_all(rollout.receive(version), actor.change_and_send(version), timeout_s=60)
        assert all(torch.equal(weights["2.weight"], sent[0]["2.weight"]) for weights in received), version
        rollout.replace().wait()


@pytest.mark.parametrize("groups", ["views", "copied", "buckets"], indirect=True)
def test_another_shape_is_refused(groups):
    actor, rollout = groups
    wait_all(rollout.receive(0), actor.change_and_send(0), timeout_s=60)
    actor.shorten().wait()
    with pytest.raises(WorkerError, match=r"1.running_mean was \[20\].*and is \[1\]"):
        wait_all(rollout.receive(1), actor.change_and_send(1), timeout_s=60)


@pytest.mark.parametrize("groups", ["views", "copied"], indirect=True)
def test_receivers_on_the_node_map_one_copy(groups, request):
    actor, rollout = groups
    wait_all(rollout.receive(0), actor.change_and_send(0), timeout_s=60)
    first, second = rollout.mapped_file().wait()
    if "copied" in request.node.callspec.id:
        assert "weights-actor-0" not in first + second
    else:
        assert first == second and "weights-actor-0" in first and first.endswith("(deleted)")


@pytest.mark.parametrize("groups", ["lent"], indirect=True)
def test_only_a_receiver_on_the_senders_gpu_is_lent_tensors(groups):
    actor, rollout = groups
    for version, expected in ((0, 9), (1, 8)):  # parameters and statistics; the first weight does not train
        before = rollout.lent().wait()
        wait_all(rollout.receive(version), actor.change_and_send(version), timeout_s=60)
        assert [now - then for now, then in zip(rollout.lent().wait(), before, strict=True)] == [expected, 0]


@pytest.mark.parametrize("groups", ["lent, and cannot be opened", "lent, and cannot be lent"], indirect=True)
def test_a_gpu_whose_memory_cannot_be_shared_says_what_to_set(groups):
    actor, rollout = groups
    with pytest.raises(WorkerError, match=r"invalid device context.*Set weight_sync\.cuda_ipc=false"):
        wait_all(rollout.receive(0), actor.change_and_send(0), timeout_s=60)


@pytest.mark.parametrize("groups", ["views"], indirect=True)
def test_another_version_is_refused(groups):
    actor, rollout = groups
    with pytest.raises(WorkerError, match="expects weights 7, actor sent 3"):
        wait_all(rollout.receive(7), actor.change_and_send(3), timeout_s=60)


@pytest.mark.parametrize("groups", ["two types"], indirect=True)
def test_receivers_of_two_types_are_refused(groups):
    actor, rollout = groups
    with pytest.raises(WorkerError, match="workers of rollout have parameters of different types"):
        wait_all(rollout.receive(0), actor.change_and_send(0), timeout_s=60)


class FakeRuntime:
    """Of CUDA's runtime, what locks pages."""

    def __init__(self, code):
        self.code, self.locked, self.mapped_when_unlocked = code, {}, []

    def cudaHostRegister(self, address, num_bytes, flags):
        self.locked[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address):
        del self.locked[address]
        self.mapped_when_unlocked.append(f"{address:x}-" in Path("/proc/self/maps").read_text())


ENTRIES = [Entry("one", (3, 5), torch.float32, 0), Entry("two", (2**18,), torch.bfloat16, 64)]


@pytest.fixture
def runtime(request, monkeypatch):
    found = FakeRuntime(getattr(request, "param", 0))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    return found


def test_pages_are_locked_until_nothing_views_them(runtime, tmp_path):
    memory = Segment(str(tmp_path / "weights"), ENTRIES, create=True, lock=True)
    view = memory.tensors["two"][5:]
    assert list(runtime.locked.values()) == [64 + 2 * 2**18]
    del memory
    gc.collect()
    assert runtime.locked and view.sum() == 0
    del view
    gc.collect()
    assert not runtime.locked and runtime.mapped_when_unlocked == [True]


@pytest.mark.parametrize("runtime", [2], indirect=True)
def test_pages_that_cannot_be_locked_are_copied_all_the_same(runtime, monkeypatch, tmp_path, caplog):
    def raises_what_failed_before(*_, **__):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "zeros", raises_what_failed_before)
    memory = Segment(str(tmp_path / "weights"), ENTRIES, create=True, lock=True)
    assert "cannot be page-locked (CUDA error 2)" in caplog.text
    assert set(memory.tensors) == {"one", "two"}
    del memory
    gc.collect()
    assert runtime.locked, "what was not locked is not unlocked"


def test_gpus_write_into_the_segment_and_are_waited_for(monkeypatch, tmp_path):
    """Of two tensors, the second stands for one on a GPU."""
    memory = Segment(str(tmp_path / "weights"), ENTRIES, create=True, lock=False)
    bucket = {"one": torch.rand(3, 5), "two": torch.rand(2**18).bfloat16()}
    waited = []
    monkeypatch.setattr(segment, "in_host_memory", lambda tensor: tensor is not bucket["two"])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(memory.tensors["two"].clone()))
    memory.write(bucket)
    assert all(torch.equal(memory.tensors[name], tensor) for name, tensor in bucket.items())
    assert len(waited) == 1 and torch.equal(waited[0], bucket["two"])


def test_shared_memory_that_is_full_is_named(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    entries = [Entry("weight", (2**20,), torch.float32, 0)]
    with pytest.raises(
        SchedulerError, match=rf"{tmp_path}/weights-0 .*needs 4\.0 MiB, and .* MiB are free.*--shm-size"
    ):
        Segment(str(tmp_path / "weights-0"), entries, create=True, lock=False)
    assert not list(tmp_path.iterdir())
