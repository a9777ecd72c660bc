"""`check_policy`: the ways in which a policy breaks the contract of `Policy`, in sentences that say how to fix them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rlinf_lite.cards import PolicyCard
from rlinf_lite.envs.check import Sentences, kind_of
from rlinf_lite.envs.observations import take_rows
from rlinf_lite.models.base import NOISE_KEY, ActionOutput, Policy, PolicyOutput

if TYPE_CHECKING:
    from rlinf_lite.config.schema import ModelConfig
    from rlinf_lite.envs import EnvSpec

_ROWS = 5
_TOLERANCE = 1e-5  # between acting and training, fp32
_LOOSE = 1e-4  # between batches of different sizes, which sum in another order
_RANDOM_OR_OF_THE_BATCH = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def check_policy(policy: Policy | type[Policy], spec: EnvSpec, cfg: ModelConfig | None = None) -> list[str]:
    """All problems of a policy, one sentence each; an empty list if there are none.

    `policy`: a policy for environments of `spec`, or a class, which is built by `from_config(cfg, spec)`. It acts on
    random observations, scores its actions, and is saved and loaded, on the CPU in fp32. Its weights do not change.
    """
    from rlinf_lite.config.schema import ModelConfig

    kind = policy if isinstance(policy, type) else type(policy)
    if not issubclass(kind, Policy):
        raise TypeError(
            f"check_policy got {policy!r}. Give a policy, or its class, a subclass of rlinf_lite.models.Policy"
        )
    problems = Sentences()
    cfg = cfg or ModelConfig()
    card = PolicyCard.of(kind, "the policy")
    if card.Options is not None and not isinstance(cfg.options, card.Options):  # the options of another policy
        cfg = cfg.model_copy(update={"options": card.options({})})
    if isinstance(policy, type):
        with problems.of("from_config"):
            policy = policy.from_config(cfg, spec)
        if isinstance(policy, type):
            return problems
        if policy is None:
            return ["from_config returned None: return the policy"]
    if not hasattr(policy, "policy_id"):  # as `model.id: pkg.module:Class` sets it
        policy.policy_id = f"{type(policy).__module__}:{type(policy).__qualname__}"
    checks = {
        "acting and scoring": _contract_problems,
        "sampling": _noise_problems,
        "saving and loading": _file_problems,
        "sft_loss": _imitation_problems,
    }
    for what, check in checks.items():
        if not problems:
            with problems.of(what):
                problems.extend(check(policy, spec, cfg))
    return problems


def random_obs(spec: EnvSpec, seed: int = 0, rows: int = _ROWS) -> dict[str, Any]:
    """A random observation of `rows` rows, with noise keys, as an environment of `spec` could give it."""
    rng = np.random.default_rng(seed)
    obs: dict[str, Any] = {
        "instruction": ["push the red block" if spec.has_instruction else ""] * rows,
        NOISE_KEY: rng.integers(0, 2**62, rows).astype(np.uint64),
    }
    if spec.cameras:
        obs["images"] = {
            name: rng.integers(0, 256, (rows, *size, 3), dtype=np.uint8) for name, size in spec.cameras.items()
        }
    if spec.state_dim is not None:
        obs["state"] = rng.normal(size=(rows, spec.state_dim)).astype(np.float32)
    return obs


def _contract_problems(policy: Policy, spec: EnvSpec, cfg: ModelConfig) -> Iterator[str]:
    """Problems of shapes, types and gradients, and scores that differ between acting and training."""
    policy.check_env_spec(spec)
    for name, wanted in (("num_action_chunks", cfg.num_action_chunks), ("action_dim", spec.action_dim)):
        if getattr(policy, name, None) != wanted:
            yield f"{name} is {getattr(policy, name, None)!r}; this run needs {wanted}, set it in __init__."
            return
    obs = random_obs(spec)
    policy.eval()  # as the rollout worker does
    with torch.inference_mode():
        acted = policy.predict_action_batch(obs)
        values = policy.predict_values(obs)
    problems = list(_output_problems(acted, ActionOutput, "predict_action_batch", spec, cfg))
    if not problems:
        inputs = {name: tensor.clone() for name, tensor in acted.forward_inputs.items()}  # leave inference mode
        scored = policy.train()(inputs)  # as the actor does
        problems = list(_output_problems(scored, PolicyOutput, "forward", spec, cfg))
    if problems:
        yield from problems
        return
    yield from _disagreements(policy, inputs, acted, scored)
    if values.shape != acted.values.shape or _gap(values, acted.values) > _LOOSE:
        yield "predict_values differs from the values of predict_action_batch on the same observation."
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    if not trained:
        yield "no parameter requires gradients, so that nothing would train; leave some unfrozen."
        return
    loss = scored.logprobs.sum() + scored.entropy.sum() + scored.values.sum()
    if not loss.requires_grad:
        yield "forward's outputs have no gradients; leave out no_grad and detach there."
        return
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    unused = [name for name, gradient in zip(trained, gradients, strict=True) if gradient is None]
    if unused:
        yield (
            f"{', '.join(unused[:5])}{' and others' if len(unused) > 5 else ''}: no gradient comes from "
            "log-probabilities, entropy and values; drop these parameters, or set requires_grad to False."
        )


def _output_problems(output: Any, kind: type, where: str, spec: EnvSpec, cfg: ModelConfig) -> Iterator[str]:
    if not isinstance(output, kind):
        yield f"{where} returns {kind_of(output)}; return a rlinf_lite.models.{kind.__name__}."
        return
    per_action = (_ROWS, cfg.num_action_chunks, spec.action_dim)
    shapes = {
        "logprobs": per_action,
        "values": (_ROWS, 1 if cfg.value_type == "chunk_level" else cfg.num_action_chunks),
        **({"actions": per_action} if kind is ActionOutput else {"entropy": per_action}),
    }
    for name, shape in shapes.items():
        tensor = getattr(output, name)
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tuple(tensor.shape) != shape:
            yield f"{name} from {where} is {kind_of(tensor)}; return floats of shape {shape}."
        elif not torch.isfinite(tensor).all():
            yield f"{name} from {where} is not finite on random observations; look for a division or logarithm of 0."
    if not isinstance(output, ActionOutput):
        return
    if isinstance(output.actions, Tensor) and output.actions.shape[-1] == spec.action_dim:
        low, high = torch.tensor(spec.action_low), torch.tensor(spec.action_high)
        if ((output.actions < low - _TOLERANCE) | (output.actions > high + _TOLERANCE)).any():
            yield "actions leave the environment's bounds; map and clip them to spec.action_low and spec.action_high."
    inputs = output.forward_inputs
    wrong = [
        f"{name} ({kind_of(x)})" for name, x in inputs.items() if not isinstance(x, Tensor) or x.shape[:1] != (_ROWS,)
    ]
    if wrong or not inputs:
        yield (
            f"forward_inputs holds {', '.join(wrong) or 'nothing'} in mode train; it needs tensors with one row per "
            "environment, from which forward scores the same actions again."
        )


def _disagreements(
    policy: Policy, inputs: dict[str, Tensor], acted: ActionOutput, scored: PolicyOutput
) -> Iterator[str]:
    """Scores that differ between acting and training at equal weights, or between batches of different size."""
    gap = _gap(acted.logprobs, scored.logprobs)
    if gap > _TOLERANCE:
        in_eval = _gap(acted.logprobs, _scored_in_eval(policy, inputs).logprobs)
        named = _random_or_of_the_batch(policy)
        if in_eval <= _TOLERANCE or named:  # train mode has changed batch normalisation's statistics
            yield (
                f"forward's log-probabilities are {gap:.2g} off those of predict_action_batch in train mode, in which "
                f"it is called; leave out dropout and batch normalisation{named}."
            )
        else:
            yield (
                f"forward's log-probabilities are {gap:.2g} off those of predict_action_batch at equal weights; put "
                "the sample itself that was scored into forward_inputs (before clipping and squashing), and use the "
                "same temperature in both."
            )
        return
    gap = _gap(acted.values, scored.values)
    if gap > _LOOSE:
        in_eval, named = _gap(acted.values, _scored_in_eval(policy, inputs).values), _random_or_of_the_batch(policy)
        if in_eval <= _LOOSE or named:
            yield (
                f"forward's values are {gap:.2g} off those of predict_action_batch in train mode, in which it is "
                f"called; leave out dropout and batch normalisation{named}."
            )
        else:
            yield "forward's values differ from those of predict_action_batch at equal weights; compute them alike."
    with torch.no_grad():
        alone = policy({name: tensor[:2] for name, tensor in inputs.items()}).logprobs
    if _gap(alone, scored.logprobs[:2]) > _LOOSE:
        yield (
            "forward scores a row differently when fewer rows are in the batch; a row must depend on itself "
            f"alone{_random_or_of_the_batch(policy)}."
        )


def _scored_in_eval(policy: Policy, inputs: dict[str, Tensor]) -> PolicyOutput:
    with torch.no_grad():
        scored: PolicyOutput = policy.eval()(inputs)
    policy.train()
    return scored


def _random_or_of_the_batch(policy: Policy) -> str:
    """`: name (Class)` of the modules that draw noise or mix rows in train mode."""
    found = [
        f"{name} ({type(one).__name__})"
        for name, one in policy.named_modules()
        if isinstance(one, _RANDOM_OR_OF_THE_BATCH) and one.training
    ]
    return f": {', '.join(found[:5])}" if found else ""


def _noise_problems(policy: Policy, spec: EnvSpec, cfg: ModelConfig) -> Iterator[str]:
    """Problems of sampling, which must depend on nothing but the row's observation and noise key."""
    policy.eval()
    obs = random_obs(spec)

    def actions(obs: Mapping[str, Any], mode: Any = "train") -> Tensor:
        with torch.inference_mode():
            return policy.predict_action_batch(obs, mode).actions

    first = actions(obs)
    advice = f"take all noise from obs[{NOISE_KEY!r}] (rlinf_lite.models.sampling: normal_noise, uniform_noise)."
    if not torch.equal(first, actions(obs)):
        yield f"the same observation and noise keys gave other actions the second time; {advice}"
        return
    if _gap(actions(take_rows(obs, slice(2, 4))), first[2:4]) > _LOOSE:
        yield f"a row acts differently when other rows share its batch; {advice}"
    other_keys = {**obs, NOISE_KEY: random_obs(spec, seed=1)[NOISE_KEY]}
    if torch.equal(actions(other_keys), first):
        yield f"other noise keys gave the same actions, so that nothing is explored; {advice}"
    if not torch.equal(actions(obs, "greedy"), actions(other_keys, "greedy")):
        yield "greedy actions depend on the noise keys; take the mode of the distribution there."


def _file_problems(policy: Policy, spec: EnvSpec, cfg: ModelConfig) -> Iterator[str]:
    """Differences between a policy and the same one after saving and loading."""
    config = policy.config_dict()
    if json.loads(json.dumps(config)) != config:
        yield "config_dict changes on its way through JSON; return lists, dicts with text keys, numbers and text."
    with tempfile.TemporaryDirectory() as directory:
        policy.save_pretrained(directory)
        loaded = type(policy).from_pretrained(directory)
    if loaded.config_dict() != config:
        yield "config_dict changed between save_pretrained and from_pretrained; let from_config_dict read all of it."
    obs = random_obs(spec)
    with torch.inference_mode():
        before, after = (one.eval().predict_action_batch(obs) for one in (policy, loaded))
    if not torch.equal(before.actions, after.actions) or not torch.equal(before.logprobs, after.logprobs):
        yield (
            "a saved and loaded policy acts differently; register every tensor that matters as a parameter or buffer, "
            "or keep it in config_dict."
        )
    if type(policy).take_statistics is Policy.take_statistics:
        return
    loaded.take_statistics(_statistics(spec))
    with tempfile.TemporaryDirectory() as directory:
        loaded.save_pretrained(directory)
        again = type(policy).from_pretrained(directory)
    with torch.inference_mode():
        acted = [one.eval().predict_action_batch(obs).actions for one in (loaded, again)]
    if not torch.equal(*acted):
        yield "after take_statistics a saved and loaded policy acts differently; keep what it takes in config_dict."


def _statistics(spec: EnvSpec) -> dict[str, dict[str, list[float]]]:
    """Statistics that demonstrations could have, within the environment's bounds."""
    low, high = np.array(spec.action_low), np.array(spec.action_high)
    ranges = {"action": (low + (high - low) / 4, high)}
    if spec.state_dim is not None:
        ranges["state"] = (np.full(spec.state_dim, -1.0), np.full(spec.state_dim, 2.0))
    named = {"min": 0.0, "q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99, "max": 1.0, "mean": 0.6}
    return {
        name: {key: (least + (most - least) * part).tolist() for key, part in named.items()}
        | {"std": ((most - least) / 4).tolist()}
        for name, (least, most) in ranges.items()
    }


def _imitation_problems(policy: Policy, spec: EnvSpec, cfg: ModelConfig) -> Iterator[str]:
    """Problems of `sft_loss`; none for a policy that has no such method of its own."""
    if type(policy).sft_loss is Policy.sft_loss:
        return
    low, high = torch.tensor(spec.action_low), torch.tensor(spec.action_high)
    actions = low + (high - low) * torch.rand(_ROWS, cfg.num_action_chunks, spec.action_dim)
    mask = torch.ones(_ROWS, cfg.num_action_chunks, dtype=torch.bool)
    loss = policy.train().sft_loss({**policy.sft_inputs(random_obs(spec)), "actions": actions, "mask": mask})
    if loss.shape != () or not torch.isfinite(loss):
        yield f"sft_loss gives {kind_of(loss)}; return a finite scalar with gradients."
    elif not loss.requires_grad:
        yield (
            "sft_loss has no gradients: no parameter that it depends on requires them; unfreeze those that should "
            "train, and leave out no_grad and detach there."
        )


def _gap(one: Tensor, other: Tensor) -> float:
    return float((one.detach().float() - other.detach().float()).abs().max())
