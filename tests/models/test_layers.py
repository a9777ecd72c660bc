"""Layers that are recomputed, compiled or both: the same results and gradients, one graph for each kind of layer."""

from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from rlinf_lite.envs import EnvSpec
from rlinf_lite.models.check import random_obs
from rlinf_lite.models.flow.policy import Pi0Policy, Pi05Policy, SmolVLAPolicy
from rlinf_lite.models.text.causal_lm import CausalLM
from rlinf_lite.models.text.presets import preset
from rlinf_lite.models.training_options import Recompute, TrainingOptions
from rlinf_lite.models.vla.policy import OpenVLAPolicy
from rlinf_lite.preview.fake import Meter
from tests.compilers import compiling_by
from tests.models.settings import openvla
from tests.models.test_flow_policy import settings as flow_settings

SPEC = EnvSpec(3, 4, {"front": (64, 64)}, [-1.0] * 3, [1.0] * 3, 24, True)
Made = tuple[Any, Callable[[int], Tensor]]


def made(name: str, **options: Any) -> Made:
    """A model, and a function of the number of rows that scores them."""
    torch.manual_seed(0)
    if name == "language":
        model = CausalLM.from_config(preset("tiny"))
        model.prepare(TrainingOptions(**options))
        ids = torch.arange(6 * 20).reshape(6, 20) % 60
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[0, :3] = False
        return model, lambda rows: model(ids[:rows], mask[:rows], 8).logprobs
    policy: Any
    if name.startswith("openvla"):
        more: dict[str, Any] = {
            "openvla, tokens in turn": {"parallel_decoding": False},
            "openvla, adapters": {"lora": {"rank": 4}},
        }
        given = {"size": "tiny", "num_action_chunks": 2, **more.get(name, {}), **options}
        policy = OpenVLAPolicy.from_config(openvla(**given), SPEC)
    else:
        cls = {"pi0": Pi0Policy, "pi05": Pi05Policy, "smolvla": SmolVLAPolicy}[name]
        policy = cls.from_config(flow_settings(cls, **options), SPEC)
    with torch.no_grad():
        inputs = policy.train().predict_action_batch(random_obs(SPEC, rows=6)).forward_inputs
    return policy, lambda rows: policy({key: x[:rows].clone() for key, x in inputs.items()}).logprobs


KINDS = {"openvla, tokens in turn": 2, "openvla, adapters": 2, "pi0": 3, "pi05": 3, "smolvla": 6, "language": 1}
"""Kinds of layers: of a picture's tower and of a language model; of pi0's expert too; and SmolVLA's of either kind of
attention."""
CASES = [*((name, "selective") for name in KINDS), ("openvla, adapters", "none"), ("openvla, adapters", "full")]


@pytest.fixture
def graphs() -> Iterator[list[int]]:
    """The numbers of operations of the graphs that torch compiles, by a compiler that changes nothing."""
    found: list[int] = []

    def compiler(graph: Any, _: Any) -> Any:
        found.append(len(graph.graph.nodes))
        return graph

    with compiling_by(compiler):
        yield found


def gradients(model: nn.Module, scored: Tensor) -> dict[str, Tensor]:
    weights = torch.linspace(0.5, 1.5, scored.numel()).view_as(scored)
    (scored * weights).mean().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def check_equal(found: dict[str, Tensor], wanted: dict[str, Tensor], rtol: float) -> None:
    assert found.keys() == wanted.keys()
    for key, gradient in wanted.items():
        torch.testing.assert_close(found[key], gradient, atol=1e-6, rtol=rtol, msg=f"gradient of {key}")


@pytest.mark.parametrize(("name", "recompute"), CASES)
def test_compiled_layers_give_the_same_gradients_by_a_graph_for_each_kind(
    name: str, recompute: Recompute, graphs: list[int]
) -> None:
    plain, plain_scores = made(name)
    model, scores = made(name, gradient_checkpointing=recompute, compile=True)
    with torch.no_grad():
        scores(6)
    assert not graphs, "acting is not compiled"
    with torch.set_grad_enabled(model.compiles_layers):  # as `Learner.scoring`
        scores(6)
    assert len(graphs) == KINDS[name]
    expected, scored = plain_scores(6), scores(6)
    torch.testing.assert_close(scored, expected, atol=1e-5, rtol=0)
    wanted, found = gradients(plain, expected), gradients(model, scored)
    check_equal(found, wanted, rtol=1e-4)
    assert len(graphs) == KINDS[name] < len(model.fsdp_units())
    for rows in (4, 3, 5, 2):
        gradients(model, scores(rows))
    # one more graph each for any number of rows; and another where that number equals one of the other sizes
    assert 2 * KINDS[name] <= len(graphs) <= 2 * KINDS[name] + 1


@pytest.mark.parametrize("name", ["openvla, adapters", "pi0", "language"])
def test_recomputed_layers_keep_less_and_give_the_same_gradients(name: str) -> None:
    peaks, found = {}, {}
    for recompute in get_args(Recompute):
        with Meter() as meter:
            model, scores = made(name, gradient_checkpointing=recompute)
            peaks[recompute] = meter.activations(model, lambda scores=scores: scores(6).sum())
        found[recompute] = gradients(model, scores(6))
    for recompute, of_mode in found.items():
        for key, gradient in found["none"].items():
            assert torch.equal(of_mode[key], gradient), (recompute, key)
    assert peaks["full"] == peaks["auto"] < peaks["selective"] < peaks["none"], peaks


@pytest.mark.slow
def test_torchs_own_compiler_gives_the_same_gradients() -> None:
    plain, plain_scores = made("openvla, adapters")
    model, scores = made("openvla, adapters", gradient_checkpointing="selective", compile=True)
    with torch.set_grad_enabled(model.compiles_layers):
        before = scores(6).detach()
    expected, scored = plain_scores(6), scores(6)
    assert torch.equal(scored, before), "ratios begin at 1"
    torch.testing.assert_close(scored, expected, atol=1e-5, rtol=0)
    wanted, found = gradients(plain, expected), gradients(model, scored)
    check_equal(found, wanted, rtol=1e-3)
