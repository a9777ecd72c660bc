"""check_policy passes what is good and names each of a set of mistakes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.embodiment.custom_policy import SquashedGaussianPolicy
from rlinf_lite.config.schema import ModelConfig
from rlinf_lite.envs import EnvSpec
from rlinf_lite.models import MLPGaussianPolicy, PolicyOutput, check_policy

SPEC = EnvSpec(2, 3, {}, [-2.0, 0.0], [2.0, 1.0], 10, False)
TWO_CAMERAS = replace(SPEC, state_dim=None, cameras={"left": (40, 32), "right": (40, 32)})
CHUNKS = ModelConfig(num_action_chunks=3, value_type="action_level", temperature=1.3)


@pytest.mark.parametrize("policy", [MLPGaussianPolicy, SquashedGaussianPolicy])
def test_good_policies_pass(policy: Any) -> None:
    chunks = ModelConfig(id=f"{policy.__module__}:{policy.__name__}", **CHUNKS.model_dump(exclude={"id", "options"}))
    assert check_policy(policy, SPEC) == []
    assert check_policy(policy, SPEC, chunks) == []
    assert check_policy(policy.from_config(chunks, SPEC), SPEC, chunks) == []


def test_a_policy_on_images_passes() -> None:
    assert check_policy(SquashedGaussianPolicy, TWO_CAMERAS) == []


@pytest.mark.parametrize(("name", "kind"), [("policy", "SquashedGaussianPolicy"), ("network", "StatePolicy")])
def test_the_examples_check_themselves(name: str, kind: str, repo: Path, tmp_path: Path) -> None:
    text = (repo / f"examples/embodiment/custom_{name}.py").read_text()
    spoilt = tmp_path / "spoilt.py"
    spoilt.write_text(text.replace("self.actor(hidden)", "self.actor(hidden) * float('nan')"))
    for script, code in ((repo / f"examples/embodiment/custom_{name}.py", 0), (spoilt, 1)):
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout == f"{kind} keeps the contract\n") == (code, code == 0), done.stderr


class Good(MLPGaussianPolicy):
    pass


class ForgetsTemperature(Good):
    def forward(self, forward_inputs: dict[str, Tensor]) -> PolicyOutput:
        scored = super().forward(forward_inputs)
        return replace(scored, logprobs=scored.logprobs * 1.1)


class Dropout(Good):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dropout = nn.Dropout(0.5)

    def _mean(self, state: Tensor) -> Tensor:
        return super()._mean(self.dropout(state))


class Normalised(Good):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.norm = nn.BatchNorm1d(3)

    def _mean(self, state: Tensor) -> Tensor:
        return super()._mean(self.norm(state))


class DropoutInTheCritic(Good):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.critic.append(nn.Dropout(0.5))


class Frozen(Good):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.requires_grad_(False)


class FrozenActor(Good):
    """Its standard deviations train."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.actor.requires_grad_(False)


class FunctionalDropout(Good):
    def forward(self, forward_inputs: dict[str, Tensor]) -> PolicyOutput:
        scored = super().forward(forward_inputs)
        return replace(scored, values=nn.functional.dropout(scored.values, 0.5, self.training))


class NormalisedCritic(Good):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.critic.insert(1, nn.BatchNorm1d(256))


class OtherValuesInForward(Good):
    def forward(self, forward_inputs: dict[str, Tensor]) -> PolicyOutput:
        scored = super().forward(forward_inputs)
        return replace(scored, values=scored.values + 1)


class MixesRows(Good):
    def _mean(self, state: Tensor) -> Tensor:
        return super()._mean(state - state.mean(0))


class SumsActions(Good):
    def forward(self, forward_inputs: dict[str, Tensor]) -> PolicyOutput:
        scored = super().forward(forward_inputs)
        return replace(scored, logprobs=scored.logprobs.sum(-1))


class Detached(Good):
    @torch.no_grad()
    def forward(self, forward_inputs: dict[str, Tensor]) -> PolicyOutput:
        return super().forward(forward_inputs)


class UnusedLayer(Good):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.spare = nn.Linear(2, 2)


class OtherValues(Good):
    def predict_values(self, obs: Any) -> Tensor:
        return super().predict_values(obs) + 1


class NormalisedActions(Good):
    def predict_action_batch(self, obs: Any, mode: Any = "train") -> Any:
        acted = super().predict_action_batch(obs, mode)
        return replace(acted, actions=acted.actions * 9)


class GlobalNoise(Good):
    def predict_action_batch(self, obs: Any, mode: Any = "train") -> Any:
        return super().predict_action_batch({name: x for name, x in obs.items() if name != "noise_key"}, mode)


class NeverExplores(Good):
    def predict_action_batch(self, obs: Any, mode: Any = "train") -> Any:
        return super().predict_action_batch({**obs, "noise_key": obs["noise_key"] * 0}, mode)


class HiddenState(Good):
    """Its scale is neither a parameter nor in the config."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.factor = torch.rand(())

    def _mean(self, state: Tensor) -> Tensor:
        return super()._mean(state) + self.factor


class HiddenStatistics(Good):
    """What it takes of demonstrations is not in the config."""

    def take_statistics(self, statistics: Any) -> None:
        self.spread = torch.tensor(statistics["state"]["std"])

    def _mean(self, state: Tensor) -> Tensor:
        return super()._mean(state / getattr(self, "spread", 1.0))


class TupleConfig(Good):
    def config_dict(self) -> dict[str, Any]:
        return {**super().config_dict(), "hidden_sizes": (256, 256, 256)}


class NoInputs(Good):
    def predict_action_batch(self, obs: Any, mode: Any = "train") -> Any:
        return replace(super().predict_action_batch(obs, mode), forward_inputs={})


class PlainTuple(Good):
    def forward(self, forward_inputs: dict[str, Tensor]) -> Any:
        scored = super().forward(forward_inputs)
        return scored.logprobs, scored.values


class NeedsImages(Good):
    def predict_values(self, obs: Any) -> Tensor:
        return torch.tensor(obs["images"])


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (ForgetsTemperature, "off those of predict_action_batch at equal weights; put the sample itself"),
        (
            Dropout,
            "in train mode, in which it is called; leave out dropout and batch normalisation: dropout (Dropout).",
        ),
        (Normalised, "leave out dropout and batch normalisation: norm (BatchNorm1d)."),
        (DropoutInTheCritic, "leave out dropout and batch normalisation: critic.7 (Dropout)."),
        (NormalisedCritic, "leave out dropout and batch normalisation: critic.1 (BatchNorm1d)."),
        (FunctionalDropout, "forward's values are "),
        (OtherValuesInForward, "forward's values differ from those of predict_action_batch at equal weights; compute"),
        (Frozen, "no parameter requires gradients, so that nothing would train"),
        (FrozenActor, "sft_loss has no gradients: no parameter that it depends on requires them"),
        (MixesRows, "a row must depend on itself alone"),
        (SumsActions, "logprobs from forward is float32 of shape (5, 1); return floats of shape (5, 1, 2)"),
        (Detached, "forward's outputs have no gradients"),
        (UnusedLayer, "spare.weight, spare.bias: no gradient comes from"),
        (OtherValues, "predict_values differs from the values of predict_action_batch"),
        (NormalisedActions, "actions leave the environment's bounds"),
        (GlobalNoise, "gave other actions the second time; take all noise from obs['noise_key']"),
        (NeverExplores, "other noise keys gave the same actions"),
        (HiddenState, "a saved and loaded policy acts differently; register every tensor"),
        (HiddenStatistics, "after take_statistics a saved and loaded policy acts differently"),
        (TupleConfig, "config_dict changes on its way through JSON"),
        (NoInputs, "forward_inputs holds nothing in mode train"),
        (PlainTuple, "forward returns a builtins.tuple; return a rlinf_lite.models.PolicyOutput"),
        (NeedsImages, "acting and scoring raised KeyError: 'images'"),
    ],
)
def test_each_mistake_is_named(broken: Any, sentence: str) -> None:
    problems = check_policy(broken, SPEC)
    assert any(sentence in problem for problem in problems), problems


def test_sizes_that_do_not_fit_the_run_are_named() -> None:
    [problem] = check_policy(MLPGaussianPolicy.from_config(ModelConfig(), SPEC), SPEC, CHUNKS)
    assert problem == "num_action_chunks is 1; this run needs 3, set it in __init__."
    [problem] = check_policy(MLPGaussianPolicy, TWO_CAMERAS)
    assert problem.startswith("from_config raised ValueError: model.id: mlp_gaussian acts on state")
    with pytest.raises(TypeError, match=r"got 'mlp_gaussian'\. Give a policy, or its class"):
        check_policy("mlp_gaussian", SPEC)
