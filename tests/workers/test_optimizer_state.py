"""Optimizer and random states as files: every rank writes and reads its own parts, and any number of ranks goes on."""

import errno

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from rlinf_lite.config import load_config
from rlinf_lite.config.schema import OptimConfig
from rlinf_lite.models import MLPGaussianPolicy
from rlinf_lite.runners.full_disk import has_no_room
from rlinf_lite.scheduler import Worker
from rlinf_lite.training import sharding
from rlinf_lite.training.learner import Learner
from rlinf_lite.training.strategies import FSDP, init_process_group
from tests.ranks import spawn

OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1)


def make():
    torch.manual_seed(0)
    policy = MLPGaussianPolicy(4, [-1.0, 0.0], [1.0, 2.0], hidden_sizes=(8,))
    return policy, sharding.build_optimizer(policy, OPTIM)


def test_a_rate_of_zero_for_the_value_is_one():
    policy, _ = make()
    for value_lr, expected in ((None, 1e-2), (0.0, 0.0), (1e-3, 1e-3)):
        groups = sharding.build_optimizer(policy, OptimConfig(lr=1e-2, value_lr=value_lr)).param_groups
        assert [group["base_lr"] for group in groups] == [1e-2, expected]


def imitate(policy, optimizer, step):
    generator = torch.Generator().manual_seed(step)
    batch = {"state": torch.randn(6, 4, generator=generator), "actions": torch.rand(6, 1, 2, generator=generator)}
    policy.sft_loss({**batch, "mask": torch.ones(6, 1, dtype=torch.bool)}).backward()
    if step >= 3:  # the value comes later
        policy.predict_values({"state": batch["state"]}).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def full_moments(policy, optimizer):
    """The moments of every parameter, by `<parameter>/<moment>`, on rank 0; on other ranks none. All ranks call."""
    if not optimizer.state:
        return {}
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(policy, optimizer, options=options).get("state", {})
    return {f"{name}/{key}": value for name, values in state.items() for key, value in values.items()}


def check_same(found, expected):
    assert found.keys() == expected.keys() and found
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_training_goes_on_as_if_nothing_had_happened(tmp_path, recwarn, monkeypatch):
    monkeypatch.setattr(sharding, "FILE_BYTES", 100)
    for start in (0, 2):
        policy, optimizer = make()
        for step in range(start):
            imitate(policy, optimizer, step)
        random = {"random/0": torch.arange(3)}
        sharding.save_training(policy, optimizer, random, tmp_path / str(start), 1)
        other, other_optimizer = make()
        other.load_state_dict(policy.state_dict())
        read, unsaved = torch.zeros(3, dtype=torch.int64), torch.ones(2)
        others = {"random/0": read, "random/1": unsaved}
        sharding.load_training(other, other_optimizer, others, tmp_path / str(start), 1)
        assert torch.equal(read, torch.arange(3)) and torch.equal(unsaved, torch.ones(2))
        assert len(other_optimizer.state) == len(optimizer.state)
        for step in range(start, 6):
            imitate(policy, optimizer, step)
            imitate(other, other_optimizer, step)
        assert all(torch.equal(x, y) for x, y in zip(policy.parameters(), other.parameters(), strict=True))
    assert not recwarn.list
    files = [*(tmp_path / "2").iterdir()]
    assert len(files) > 3, "what several files hold is read from all of them"


def test_a_state_from_before_the_first_update_leaves_none(tmp_path):
    policy, optimizer = make()
    sharding.save_training(policy, optimizer, {}, tmp_path / "state", 1)
    imitate(policy, optimizer, 0)
    assert optimizer.state
    sharding.load_training(policy, optimizer, {}, tmp_path / "state", 1)
    assert not optimizer.state


def test_parameters_that_are_not_contiguous_come_back_as_they_were(tmp_path):
    def transposed():
        module = torch.nn.Linear(3, 4)
        module.weight = torch.nn.Parameter(torch.randn(3, 4).T)
        return module, sharding.build_optimizer(module, OptimConfig())

    module, optimizer = transposed()
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    sharding.save_training(module, optimizer, {}, tmp_path / "state", 1)
    other, other_optimizer = transposed()
    sharding.load_training(other, other_optimizer, {}, tmp_path / "state", 1)
    check_same(full_moments(other, other_optimizer), full_moments(module, optimizer))


def test_a_rank_goes_on_with_its_own_random_numbers(tmp_path):
    """As dropout draws them in training."""

    def make_learner(rank):
        worker, cfg = Worker(), load_config("embodiment/gym_pendulum_ppo_mlp", [])
        worker.rank = rank
        learner = Learner(worker, make()[0], cfg, "actor")
        learner.start_training(cfg.actor.optim, 5)
        return learner

    first, second, where = make_learner(0), make_learner(1), (tmp_path / "policy", tmp_path / "training_state")
    torch.manual_seed(3)
    first.save(*where)
    expected = torch.rand(3)
    torch.manual_seed(4)
    first.load(*where)
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(4)
    own = torch.rand(3)
    torch.manual_seed(4)
    second.load(*where)  # in which rank 0 alone has written
    assert torch.equal(torch.rand(3), own)


def rank_main(rank, port, directory, expected):
    torch.set_num_threads(1)
    init_process_group(rank, 3, "127.0.0.1", port, "cpu", 60)

    def load(start, sharded):
        policy, optimizer = make()
        if sharded:  # 3 ranks divide neither 4 inputs, 8 hidden numbers nor 2 actions
            FSDP().prepare(policy, 3, "cpu", "fp32")
            optimizer = sharding.build_optimizer(policy, OPTIM)
        random = torch.zeros(2)
        sharding.load_training(policy, optimizer, {f"random/{rank}": random}, directory / start, 3)
        found = full_moments(policy, optimizer)
        if rank == 0:
            check_same(found, expected)
        return policy, optimizer, random

    for sharded in (True, False):
        name = "in shards" if sharded else "replicated"
        policy, optimizer, random = load("whole", sharded)
        assert random.tolist() == ([7.0, 7.0] if rank == 0 else [0.0, 0.0])  # one rank has written
        random = {f"random/{rank}": torch.full((2,), float(rank))}
        sharding.save_training(policy, optimizer, random, directory / name, 3)
        files = [load_file(file).values() for file in (directory / name).iterdir()]
        sizes = [sum(tensor.numel() for tensor in tensors) for tensors in files]
        whole = sum(tensor.numel() for tensor in expected.values()) + 3 * 2
        assert len(sizes) == 3 and max(sizes) < whole / 2, "nothing is gathered"
        assert sum(sizes) == whole, "nothing is written twice"
        *_, random = load(name, sharded)
        assert random.tolist() == [float(rank)] * 2

    # one rank cannot write its file
    if rank == 0:
        (directory / "blocked" / "shard-00002-model-00000-of-00000.safetensors").mkdir(parents=True)
    dist.barrier()
    with pytest.raises(IsADirectoryError, match="shard-00002"):
        sharding.save_training(policy, optimizer, {}, directory / "blocked", 3)
    dist.destroy_process_group()


def test_any_number_of_ranks_goes_on_from_what_others_wrote(tmp_path):
    policy, optimizer = make()
    for step in range(2):  # the value has no moments yet
        imitate(policy, optimizer, step)
    expected = full_moments(policy, optimizer)
    sharding.save_training(policy, optimizer, {"random/0": torch.full((2,), 7.0)}, tmp_path / "whole", 1)
    spawn(rank_main, 3, tmp_path, expected)
    for name in ("in shards", "replicated"):
        assert {file.suffix for file in (tmp_path / name).iterdir()} == {".safetensors"}, "nothing is pickled"
        other, other_optimizer = make()
        random = {f"random/{rank}": torch.zeros(2) for rank in range(3)}
        sharding.load_training(other, other_optimizer, random, tmp_path / name, 1)
        check_same(full_moments(other, other_optimizer), expected)
        assert [x.tolist() for x in random.values()] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


def test_a_disk_that_is_full_is_said_to_be(tmp_path, monkeypatch):
    """torch's own CheckpointException is no Exception, and would end a worker."""
    policy, optimizer = make()
    error = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("safetensors.torch.save", lambda *args, **kwargs: (_ for _ in ()).throw(error))
    with pytest.raises(OSError, match="No space left on device") as caught:
        sharding.save_training(policy, optimizer, {"random/0": torch.zeros(2)}, tmp_path / "state", 1)
    assert has_no_room(caught.value)


def test_imitation_counts_executed_actions_in_normalised_units():
    policy, _ = make()
    state = torch.randn(3, 4)
    mean = policy._mean(state).detach()
    actions = torch.tensor([[[1.0, 2.0]], [[-1.0, 5.0]], [[9.0, 9.0]]])  # normalised: 1, 1; -1, 1 (clipped); masked
    mask = torch.tensor([[True], [True], [False]])
    expected = (mean[:2, 0] - torch.tensor([[1.0, 1.0], [-1.0, 1.0]])).square().mean()
    loss = policy.sft_loss({"state": state, "actions": actions, "mask": mask})
    torch.testing.assert_close(loss, expected)
