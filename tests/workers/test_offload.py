"""Memory that is given back between phases changes no number: parameters, shards, ties, optimizer states, segments.

On a CPU nothing moves. What a move does is seen here where `moved` copies, and destroys what was there before; and
where the other side is the meta device, which has no memory.
"""

from __future__ import annotations

import mmap
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rlinf_lite.config import ConfigError, load_config
from rlinf_lite.data.problems import open_problems
from rlinf_lite.training import offload
from rlinf_lite.training.offload import ActingWeights
from rlinf_lite.training.sharding import full_policy_state
from rlinf_lite.workers import EmbodiedFSDPActor, MultiStepRolloutWorker
from rlinf_lite.workers.layout import Layout
from tests.ranks import spawn
from tests.workers.test_language_rows import make_cfg, make_rollouts
from tests.workers.test_optimizer_state import full_moments
from tests.workers.test_strategies import CONFIGS, NUM_ENVS, OPTIM, trajectories


def local(tensor):
    """This rank's part of a shard."""
    return getattr(tensor, "_local_tensor", tensor)


def moved_and_destroyed(tensor, device, host=None, key=None):
    """To memory of its own, as on another device; who still reads the old one computes NaN."""
    with torch.no_grad():
        copy = tensor.detach().clone() if host is None else host.hold(key, tensor)
        if local(copy).data_ptr() == local(tensor).data_ptr():
            return tensor  # it is there: nothing has come back since
        if tensor.is_floating_point():
            tensor.detach().fill_(float("nan"))
    moved_and_destroyed.count += 1
    return copy


moved_and_destroyed.count = 0


class Nobody:
    """Takes weights, and sees which."""

    def __init__(self):
        self.sent = []

    def send(self, version, module, number):
        state = full_policy_state(module)
        self.sent.append({name: tensor.clone() for name, tensor in state.items()})


def make_actor(offloads, rank=0, world_size=1, port=0):
    config, overrides, spec = CONFIGS["ppo"]
    more = [f"actor.offload={offloads}", "actor.strategy=fsdp", "actor.num_threads=1", OPTIM]
    more.append("model.options.hidden_sizes=[15]")  # which two ranks do not divide
    cfg = load_config(f"embodiment/{config}", [*overrides, *more])
    actor = EmbodiedFSDPActor(cfg)
    actor.rank, actor.world_size, actor.local_world_size, actor.master_port = rank, world_size, world_size, port
    actor.init(Layout(NUM_ENVS, 1, 1, rollout_nodes=(0,), actor_nodes=(0,) * world_size), spec, total_steps=5)
    actor.sender = Nobody()
    share = NUM_ENVS // world_size
    actor.rows = trajectories(cfg, spec).rows(slice(rank * share, (rank + 1) * share))
    return actor


def step(actor, number):
    actor.sync_model_to_rollout()
    actor.trajectories = actor.rows
    metrics = actor.compute_advantages_and_returns() | actor.run_training(number)["metrics"]
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def history(actor, directory):
    """Three steps, with a checkpoint that is loaded before the third, after a transfer and before any."""
    metrics = [step(actor, 0)]
    actor.sync_model_to_rollout()
    actor.save_checkpoint(str(directory))
    metrics.append(step(actor, 1))
    actor.load_checkpoint(str(directory), 1)
    actor.sync_model_to_rollout()
    metrics.append(step(actor, 1))
    assert metrics[1] == metrics[2]
    state = full_policy_state(actor.policy), full_moments(actor.policy, actor.learner.optimizer)
    return metrics, actor.sender.sent, *state


def check_equal(found, expected):
    assert found[0] == expected[0]  # metrics
    for ours, theirs in zip([*found[1], *found[2:]], [*expected[1], *expected[2:]], strict=True):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert all(tensor.isfinite().all() for tensor in ours.values())


def test_training_is_the_same_bit_for_bit(tmp_path, monkeypatch):
    expected = history(make_actor(False), tmp_path / "without")
    monkeypatch.setattr(offload, "moved", moved_and_destroyed)
    moved_and_destroyed.count = 0
    actor = make_actor(True)
    parameters = list(actor.policy.parameters())
    check_equal(history(actor, tmp_path / "with"), expected)
    assert moved_and_destroyed.count > 4 * len(parameters)
    assert all(x is y for x, y in zip(actor.policy.parameters(), parameters, strict=True))


def test_host_memory_is_kept_until_a_checkpoint_needs_room(tmp_path, monkeypatch):
    monkeypatch.setattr(offload, "moved", moved_and_destroyed)
    actor, rooms = make_actor(True), []
    for number in range(3):
        step(actor, number)
        if number == 2:
            actor.save_checkpoint(str(tmp_path))
            assert not actor.learner._host._rooms
        actor.sync_model_to_rollout()
        assert actor.learner._host._rooms
        rooms.append({key: room.data_ptr() for key, room in actor.learner._host._rooms.items()})
        moments = [x for state in actor.learner.optimizer.state.values() for x in state.values()]
        places = [tensor.data_ptr() for tensor in (*moments, *actor.policy.parameters())]
        assert len(places) == len(set(places)) and set(places) == set(rooms[number].values())
    assert rooms[0].items() <= rooms[1].items()
    actor.learner.save_model(tmp_path)
    assert not actor.learner._host._rooms, "behind the moments, which are away still"
    expected = step(actor, 3)
    actor.load_checkpoint(str(tmp_path), 3)
    assert not actor.learner._host._rooms
    assert step(actor, 3) == expected


class OnAGPU(SimpleNamespace):
    shape, dtype, is_cuda = torch.Size((512, 1024)), torch.bfloat16, True

    def numel(self):
        return self.shape.numel()

    def element_size(self):
        return 2

    def is_contiguous(self):
        return True


@pytest.mark.parametrize("works", [True, False])
def test_its_pages_are_locked(monkeypatch, works):
    """Where that fails once it is not tried, and said, for each of hundreds of tensors."""
    memory, locked = offload.HostMemory(), []

    def lock(pages, what):
        locked.append((pages.ctypes.data, pages.nbytes))
        return works

    monkeypatch.setattr(offload, "lock_pages", lock)
    assert memory._room_for(torch.ones(2**19)).sum() == 0 and not locked, "on a CPU"
    rooms = [memory._room_for(OnAGPU()) for _ in range(3)]
    assert locked == [(room.data_ptr(), 2**20) for room in (rooms if works else rooms[:1])]
    assert all(room.data_ptr() % mmap.PAGESIZE == 0 for room in rooms)
    assert all((room.shape, room.dtype, room.device.type) == (OnAGPU.shape, OnAGPU.dtype, "cpu") for room in rooms)


@pytest.mark.parametrize("shape", [(3, 5), (1024, 512), (0, 4), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_it_has_the_same_values_in_the_same_layout(monkeypatch, shape, dtype):
    """Once it is returned: a copy that need not be there by then would not have begun."""
    copy = torch.Tensor.copy_
    late = lambda self, source, non_blocking=False: self if non_blocking else copy(self, source)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "copy_", late)
    memory, values = offload.HostMemory(), (torch.randn(shape) * 100).to(dtype)
    for tensor in (values, values + 1, values.T if values.ndim == 2 else values, values.to(torch.float64)):
        held = memory.hold("a key", tensor)
        assert torch.equal(held, tensor) and (held.dtype, held.stride()) == (tensor.dtype, tensor.stride())
        assert held.data_ptr() != tensor.data_ptr() or not tensor.numel()


def rank_main(rank, port, directory):
    torch.set_num_threads(1)
    expected = history(make_actor(False, rank, 2, port), directory / "without")
    check_equal(history(make_actor(True, rank, 2, port), directory / "on a CPU"), expected)  # nothing moves
    offload.moved = moved_and_destroyed
    actor = make_actor(True, rank, 2, port)
    check_equal(history(actor, directory / "with"), expected)
    assert moved_and_destroyed.count > 0
    shards = {id(x): x.to_local() for x in actor.policy.parameters()}
    padded = {key for key, shard in shards.items() if shard.untyped_storage().nbytes() > shard.nbytes}
    assert bool(padded) == (rank == 1)
    assert actor.learner._host._rooms.keys() & shards.keys() == shards.keys() - padded
    dist.destroy_process_group()


def test_so_it_is_in_shards(tmp_path):
    spawn(rank_main, 2, tmp_path)


@pytest.mark.parametrize("shares", [False, True])
def test_nothing_stays_behind(monkeypatch, shares):
    """Where rollout workers act with the actor's own parameters, those do."""
    actor = make_actor(True)
    step(actor, 0)
    monkeypatch.setattr(offload, "moved", lambda tensor, *_: tensor.to("meta"))
    if shares:
        rollout = MultiStepRolloutWorker(actor.cfg)
        rollout.policy = actor.policy
        actor.fused = {"actor": actor, "rollout": rollout}
    actor.sync_model_to_rollout()
    moments = [x for state in actor.learner.optimizer.state.values() for x in state.values()]
    assert moments and all(tensor.is_meta for tensor in moments)
    assert all(tensor.is_meta != shares and tensor.grad is None for tensor in actor.policy.parameters())


def test_an_actor_that_was_broken_off_in_a_move_is_brought_back(tmp_path, monkeypatch):
    actor = make_actor(True)
    step(actor, 0)
    actor.save_checkpoint(str(tmp_path))
    expected = step(actor, 1)
    actor.load_checkpoint(str(tmp_path), 1)
    left = 5

    def fails(tensor, device, *_):
        nonlocal left
        left -= 1
        if left == 0:
            raise MemoryError
        return tensor.to(device, copy=True)

    monkeypatch.setattr(offload, "moved", fails)
    with pytest.raises(MemoryError):
        actor.sync_model_to_rollout()
    actor.load_checkpoint(str(tmp_path), 1)
    assert step(actor, 1) == expected


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.ones(2))


@pytest.mark.parametrize("fails", [False, True])
def test_acting_weights_come_and_go(monkeypatch, fails):
    monkeypatch.setattr(offload, "moved", lambda tensor, device, *_: tensor.to(device, copy=True))
    module = Tied().requires_grad_(False)
    before, buffer = {name: tensor.clone() for name, tensor in module.state_dict().items()}, module.seen.data_ptr()
    weights = ActingWeights(module, "cpu", enabled=True)
    host = [parameter.data_ptr() for parameter in module.parameters()]
    for _ in range(2):
        try:
            with weights.loaded():
                assert not {parameter.data_ptr() for parameter in module.parameters()} & {*host}
                assert module.second.weight is module.first.weight and module.seen.data_ptr() == buffer
                assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
                module.first.weight.zero_()  # the device's: the host's is what remains
                if fails:
                    raise KeyError
        except KeyError:
            assert fails
        assert [parameter.data_ptr() for parameter in module.parameters()] == host  # nothing was copied
        assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    room = [torch.zeros(3, 3)]  # for one of them
    with monkeypatch.context() as patched:
        patched.setattr(offload, "moved", lambda tensor, device, *_: room.pop())
        with pytest.raises(IndexError), weights.loaded():
            raise AssertionError
    assert [parameter.data_ptr() for parameter in module.parameters()] == host
    module.first.weight.data = torch.zeros(3, 3)  # as new weights come, in another segment
    with weights.loaded():
        pass
    assert (module.second.weight == 0).all()


@pytest.mark.parametrize("phase", ["generate", "evaluate"])
@pytest.mark.parametrize(("fused", "offloads"), [(False, True), (True, False), (False, False)])
def test_what_acting_keeps_is_given_back_before_its_weights_are(phase, fused, offloads):
    """Where the actor is to have the memory."""
    config, overrides, _ = CONFIGS["ppo"]
    events = []

    @contextmanager
    def loaded():
        yield
        events.append("weights are unloaded")

    rollout = MultiStepRolloutWorker(
        load_config(f"embodiment/{config}", [*overrides, f"rollout.offload={offloads}".lower()])
    )
    rollout.rank = 1  # serves nobody
    rollout.layout = Layout(NUM_ENVS, 1, 1, rollout_nodes=(0,), actor_nodes=(0,))
    rollout.weights, rollout.num_chunks = SimpleNamespace(loaded=loaded), 1
    rollout.actor = SimpleNamespace() if fused else None
    rollout.policy = SimpleNamespace(release=lambda: events.append("released"), config_dict=dict)
    getattr(rollout, phase)()
    assert events == ["released"] * (fused or offloads) + ["weights are unloaded"]


def test_what_is_not_asked_for_does_not_move(monkeypatch):
    monkeypatch.setattr(offload, "moved", None)
    with ActingWeights(Tied(), "cpu", enabled=False).loaded():
        pass
    step(make_actor(False), 0)
    monkeypatch.undo()
    with ActingWeights(torch.nn.Module(), "cpu", enabled=True).loaded():  # without parameters
        pass


def test_generation_is_the_same_also_after_one_that_was_broken_off(tmp_path, monkeypatch):
    monkeypatch.setattr(offload, "moved", lambda tensor, device, *_: tensor.to(device, copy=True))
    found = []
    for offloads in ("false", "true"):
        stages = ["cluster.fuse=null", "rollout.pipeline_stage_num=2", f"rollout.offload={offloads}"]
        cfg = make_cfg(tmp_path, *stages)
        (worker,) = make_rollouts(cfg, 1)
        worker.receiver = SimpleNamespace(receive=lambda version, number: version)
        prompts = open_problems(cfg).train.batch(np.arange(3))
        prompts.batch["group"], prompts.meta_info = torch.arange(3), {"seed": 5}
        weight = next(worker.model.parameters())
        host = weight.data_ptr()
        worker.start_generation(prompts)
        worker.next_sequences()
        assert (weight.data_ptr() != host) == (offloads == "true")
        worker.sync_model_from_actor(1)
        assert weight.data_ptr() == host
        found.append(worker.generate_sequences(prompts).batch)
        assert weight.data_ptr() == host
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(column, found[1][name]) for name, column in found[0].items())


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["actor.offload=true", "runner.mode=async"], "actor.offload: is true, and with runner.mode: async"),
        (["rollout.offload=true", "runner.mode=async"], "rollout.offload: is true, and with runner.mode: async"),
        (["rollout.offload=true", "cluster.fuse='actor,rollout'"], "rollout.offload: is true, and with cluster.fuse"),
        (["rollout.dtype=bf16", "cluster.fuse='actor,rollout'"], "rollout.dtype: is bf16, and with cluster.fuse"),
        (["actor.frozen_dtype=bf16"], "actor.frozen_dtype: is bf16, and actor.precision: fp32"),
    ],
)
def test_what_cannot_be_is_refused(overrides, problem):
    together = "cluster.component_placement={actor: '0', rollout: '0', env: '0'}"
    with pytest.raises(ConfigError, match=problem):
        load_config("tabletop_ppo_vla", [together, "algorithm.correction.kind=decoupled", *overrides])
