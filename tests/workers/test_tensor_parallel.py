"""Layers split over ranks compute, learn and are saved as whole ones: gloo, two and four processes."""

from __future__ import annotations

import itertools
import socket
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from rlinf_lite.config import ConfigError, load_config
from rlinf_lite.config.plan import plan_of
from rlinf_lite.data import DataProto
from rlinf_lite.models.text.causal_lm import CausalLM, CausalValueModel, UnsupportedModelError
from rlinf_lite.preview.memory import estimate
from rlinf_lite.runners import experience
from rlinf_lite.scheduler import Worker
from rlinf_lite.training.sharding import full_policy_state
from rlinf_lite.training.strategies import init_process_group
from rlinf_lite.training.tensor_parallel import split_layers
from rlinf_lite.weights import WeightRoutes
from rlinf_lite.weights.sync import copy_weights
from rlinf_lite.workers.reasoning import LanguageActor, LanguageCritic
from tests.runners.conftest import placed
from tests.workers.test_language_ranks import OVERRIDES, make_rows
from tests.workers.test_optimizer_state import full_moments

SMALL: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
}
SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.1}
LAYOUTS = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "llama with biases": {"model_type": "llama", "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": False},
}
SIZES = (5, 1, 0, 3)
COLUMNS = ["old_logprobs", "rollout_logprobs", "acted_versions", "ref_logprobs", "advantages", "values", "returns"]


def spawn(function, num_ranks, *arguments):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    mp.spawn(function, (num_ranks, port, *arguments), nprocs=num_ranks)


def build(kind, layout):
    torch.manual_seed(0)
    model = kind.from_config(SMALL | LAYOUTS[layout])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:  # ones and zeros would hide where they are left out
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def workers(directory, size=1, rank=0, num_ranks=1, port=0):
    strategy = "tensor_parallel" if size > 1 else "replicated"
    split = [f"actor.strategy={strategy}", f"actor.tensor_model_parallel_size={size}"]
    start = [f"rollout.model_dir={directory}", placed(f"'0:0-{num_ranks - 1}'", rollout="'0'"), *split]
    cfg = load_config("math/math_arithmetic_ppo", [*OVERRIDES, *start])
    actor, critic = LanguageActor(cfg), LanguageCritic(cfg)
    for worker in (actor, critic):
        worker.rank, worker.world_size, worker.local_world_size = rank, num_ranks, num_ranks
        worker.master_port, worker.fused = port, {"rollout": Worker()}  # nobody to send weights to
    actor.init(str(directory), WeightRoutes([0], [0] * num_ranks), 10)
    critic.init(str(directory), 10)
    return actor, critic


def train(actor, critic, sizes=SIZES):
    """Of every update, what its rows scored and its metrics."""
    found = []
    for num_rows in sizes:
        batch = experience.for_ranks(make_rows(num_rows), COLUMNS, actor.learner.dp_size)
        own = batch.chunk(actor.learner.dp_size)[actor.learner.dp_rank]
        scored = DataProto.concat([actor.compute_log_prob(own).union(critic.compute_values(own))])
        metrics = actor.update_actor(own)["metrics"] | critic.update_critic(own)["metrics"]
        found.append((batch.non_tensor_batch["row"], scored, metrics))
    return found


def states(*found):
    return [copied(full_policy_state(worker.learner.model)) for worker in found]


def copied(state):
    return {name: tensor.clone() for name, tensor in state.items()}


def check_rows(actor, found, expected):
    for (order, whole, wanted), (rows, scored, metrics) in zip(expected, found, strict=True):
        where = np.argsort(order)[np.array_split(rows, actor.learner.dp_size)[actor.learner.dp_rank]]
        for name, column in scored.batch.items():
            torch.testing.assert_close(column, whole.batch[name][where], atol=1e-5, rtol=0)
        assert metrics.keys() == wanted.keys()
        for name in metrics:
            np.testing.assert_allclose(metrics[name], wanted[name], rtol=1e-4, atol=1e-5, err_msg=name)


def check_states(got, expected):
    for state, want in zip(got, expected, strict=True):
        assert state.keys() == want.keys()
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, want[name], atol=1e-5, rtol=0, msg=name)


def rank_main(rank, num_ranks, port, sizes, directory, expected):
    torch.set_num_threads(1)
    for size in sizes:
        for layout, wanted in expected.items():
            train_in_parts(directory / layout, wanted, size, rank, num_ranks, port)
    dist.destroy_process_group()


def train_in_parts(directory, expected, size, rank, num_ranks, port):
    actor, critic = workers(directory / "start", size, rank, num_ranks, port)
    check_rows(actor, train(actor, critic), expected["rows"])
    got = states(actor, critic)
    moments = full_moments(actor.learner.model, actor.learner.optimizer)
    if rank == 0:
        check_states(got, expected["states"])
        check_states([moments], [expected["moments"]])
    whole = CausalLM.from_pretrained(directory / "start")
    copy_weights(actor.learner.model, whole)  # as a rollout worker gets them
    check_states([whole.state_dict()], expected["states"][:1])

    # what was written whole loads into parts, and goes on; what is written of parts goes on whole (in the test)
    actor.load_checkpoint(str(directory / "whole"), 1)
    critic.load_checkpoint(str(directory / "whole" / "training_state"))
    train(actor, critic, SIZES[:2])
    actor.save_checkpoint(str(directory / f"of {num_ranks}, {size}"))
    got = states(actor, critic)
    if rank == 0:
        check_states(got, expected["later"])


def train_whole(directory, layout):
    """The actor, and what it and a critic made of rows, were saved as, and became later."""
    build(CausalLM, layout).save_pretrained(directory / "start")
    actor, critic = workers(directory / "start")
    expected = {"rows": train(actor, critic), "states": states(actor, critic)}
    expected["moments"] = copied(full_moments(actor.learner.model, actor.learner.optimizer))
    actor.save_checkpoint(str(directory / "whole"))
    critic.save_checkpoint(str(directory / "whole" / "training_state"))
    train(actor, critic, SIZES[:2])
    expected["later"] = states(actor, critic)
    assert not torch.equal(*(expected[name][0]["language_model.model.norm.weight"] for name in ("states", "later")))
    return actor, expected


@pytest.mark.slow
def test_ranks_that_share_layers_train_as_one_does(tmp_path):
    layouts = ["llama with biases", "qwen2", "qwen3"]  # which have all that llama has, besides
    whole = {layout: train_whole(tmp_path / layout, layout) for layout in layouts}
    expected = {layout: found for layout, (_, found) in whole.items()}
    spawn(rank_main, 4, [2, 4], tmp_path, expected)  # two groups of two, and four; two alone: tests/runners
    for layout, size in itertools.product(expected, [2, 4]):
        actor = whole[layout][0]
        actor.load_checkpoint(str(tmp_path / layout / f"of 4, {size}"), 2)
        check_states(states(actor), expected[layout]["later"][:1])


def gradients(model, ids):
    """Of log-probabilities of tokens, each weighted differently, by parameter."""
    logprobs = torch.log_softmax(model.language_model(input_ids=ids).logits[:, :-1], -1)
    chosen = logprobs.gather(-1, ids[:, 1:, None])
    (chosen * torch.linspace(-1, 1, chosen.numel(), dtype=chosen.dtype).view_as(chosen)).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    return {name: (g.full_tensor() if isinstance(g, DTensor) else g).double() for name, g in found.items()}


def error_of(got, exact):
    """The largest among parameters, relative to the norm of a parameter's gradient."""
    return max(((got[name] - want).norm() / want.norm()).item() for name, want in exact.items())


def forward_main(rank, num_ranks, port, path):
    torch.set_num_threads(1)
    init_process_group(rank, num_ranks, "127.0.0.1", port, "cpu", 60)
    mesh = init_device_mesh("cpu", (num_ranks,))
    ids = torch.arange(4, 40).view(3, 12)
    for layout in LAYOUTS:
        for kind in (CausalLM, CausalValueModel):
            model = build(kind, layout)
            want = model.language_model(input_ids=ids).logits
            num_whole = sum(p.numel() for p in model.parameters())
            split_layers(model, mesh)
            got = model.language_model(input_ids=ids).logits
            torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
            assert all(isinstance(p, DTensor) for p in model.parameters())
            assert sum(p.numel() for p in model.parameters()) == num_whole  # what was tied still is
            in_layers = [unit.self_attn.q_proj.weight for unit in model.fsdp_units()]
            assert all(p.to_local().shape[0] == p.shape[0] // num_ranks for p in in_layers)
            if kind is CausalLM:
                exact = gradients(build(kind, layout).double(), ids)
                errors = {"whole": error_of(gradients(build(kind, layout), ids), exact)}
                errors["split"] = error_of(gradients(model, ids), exact)
                assert errors["split"] < min(1e-5, 5 * errors["whole"]), errors
    refused = {
        r"cannot split models of type 'gpt2': transformers has no plan": {"model_type": "gpt2", "n_embd": 32},
        r"2 ranks do not divide num_key_value_heads = 3 of the model \(3 / 2 = 1\.5\)": {
            **{"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
        },
    }
    for message, settings in refused.items():
        with pytest.raises(UnsupportedModelError, match=message):
            split_layers(CausalLM.from_config(SMALL | settings), mesh)
    dist.destroy_process_group()


def test_logits_and_gradients_are_those_of_the_whole_model(tmp_path):
    spawn(forward_main, 2, tmp_path)


def load(*overrides):
    start = [placed("'0:0-3'", rollout="'0'"), "actor.strategy=tensor_parallel"]
    return load_config("math/math_arithmetic_ppo", [*start, *overrides])


SPLIT = partial("actor.tensor_model_parallel_size={}".format)


@pytest.mark.parametrize(
    ("said", "overrides"),
    [
        ("actor.tensor_model_parallel_size: 1 splits nothing", []),
        ("actor.tensor_model_parallel_size: 4 ranks do not divide num_key_value_heads = 2 of the model", [SPLIT(4)]),
        (
            "actor.tensor_model_parallel_size: 2 ranks share layers with actor.strategy",
            [SPLIT(2), "actor.strategy=fsdp"],
        ),
        (
            "actor.tensor_model_parallel_size: 3 ranks of actor form no whole number of models of 2 (3 / 2 = 1.5)",
            [SPLIT(2), "cluster.component_placement.actor='0:0-2'"],
        ),
    ],
)
def test_what_cannot_be_split_is_said_before_anything_starts(said, overrides):
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    assert len(caught.value.problems) == 1 and caught.value.problems[0].startswith(said), caught.value.problems
    with pytest.raises(ConfigError, match=r"actor\.strategy: tensor_parallel splits layers of language models only"):
        load_config("embodiment/gym_pendulum_ppo_mlp", ["actor.strategy=tensor_parallel"])


def test_a_preview_counts_what_a_rank_has(tmp_path: Path):
    whole, split = (estimate(plan_of(load(*o))) for o in ([SPLIT(1), "actor.strategy=replicated"], [SPLIT(2)]))
    counts = whole.models["model"]
    of_rank = (counts.root + (counts.parameters - counts.root) / 2) * 4
    assert split.ranks["actor"].held["AdamW"] == pytest.approx(2 * of_rank, rel=1e-6)
    assert whole.ranks["actor"].held["AdamW"] == 8 * counts.parameters
