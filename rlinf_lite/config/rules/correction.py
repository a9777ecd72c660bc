"""Rules for asynchronous runs, and for corrections of actions of another policy than the one that trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlinf_lite.cards import Problem
from rlinf_lite.config.names import loss_needs_of, max_staleness
from rlinf_lite.config.plan import Plan
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.rules import REINFORCED, rule
from rlinf_lite.config.schema import BaseConfig, Config, CorrectionConfig

_BOUND = {"k1": 0.7, "k2": 0.25, "k3": 0.3}  # of a weight of about 2
_TAKES = {
    "none": (),
    "decoupled": ("high", "proximal"),
    "tis": ("high", "level", "proximal"),
    "icepop": ("low", "high", "proximal"),
    "reject": ("low", "high", "level", "metric", "proximal"),
}
"""The keys that each kind of correction reads."""


@rule("runner.mode", "runner.task_type")
def _imitation_is_synchronous(config: BaseConfig, plan: Any) -> Iterator[Problem]:
    if config.runner.mode == "async" and config.runner.task_type == "sft":
        yield Problem("runner.mode", "is async, and imitation has no rollouts to overlap with. Set it to sync")


@rule("runner.mode", "rollout.partial_rollouts", kinds=("reasoning",))
def _partial_rollouts_are_asynchronous(config: ReasoningConfig, plan: Any) -> Iterator[Problem]:
    if config.rollout.partial_rollouts and config.runner.mode == "sync":
        text = "is true, and with runner.mode: sync no weights arrive while responses are under way. Set that to async"
        yield Problem("rollout.partial_rollouts", text)


@rule("runner.mode", "runner.max_staleness", "algorithm.correction", "algorithm.loss_type", kinds=REINFORCED)
def _stale_data_is_corrected(config: Any, plan: Any) -> Iterator[Problem]:
    if max_staleness(config) and config.algorithm.correction.kind == "none" and not loss_needs_of(config).behaviour:
        yield Problem(
            "algorithm.correction.kind",
            f"is none, and with runner.mode: async a step trains on what weights up to {config.runner.max_staleness} "
            "versions older did, which biases the gradient. Choose one (docs/async.md), decoupled for example, or "
            "runner.max_staleness=0",
        )


@rule("algorithm.recompute_logprobs", "algorithm.correction", kinds=REINFORCED)
def _correction_has_something_to_compare(config: Any, plan: Any) -> Iterator[Problem]:
    kind, proximal = config.algorithm.correction.kind, config.algorithm.correction.proximal
    if kind != "none" and proximal == "recompute" and config.algorithm.recompute_logprobs is False:
        text = f"is false, and algorithm.correction.kind: {kind} compares the actor with who acted. Set it to auto"
        if max_staleness(config) > 1:
            text += ", or algorithm.correction.proximal to interpolate"
        yield Problem("algorithm.recompute_logprobs", text)


@rule("algorithm.correction", "runner.mode", "runner.max_staleness", kinds=REINFORCED)
def _interpolates_between_versions(config: Any, plan: Any) -> Iterator[Problem]:
    correction, most = config.algorithm.correction, max_staleness(config)
    if correction.kind != "none" and correction.proximal == "interpolate" and most < 2:
        data = f"runner.max_staleness: {most}" if config.runner.mode == "async" else "runner.mode: sync"
        yield Problem(
            "algorithm.correction.proximal",
            f"is interpolate, and with {data} no version lies between the one that acted and the one that trains: p "
            f"would be b, all weights 1, and {correction.kind} would change nothing. Set it to recompute",
        )


@rule("algorithm.target_kl", "algorithm.correction", "algorithm.loss_type", "runner.mode", kinds=("embodied",))
def _target_kl_counts_one_step(config: Config, plan: Plan) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.target_kl is None:
        return
    if algorithm.correction.proximal == "interpolate":
        with_, way_out = "algorithm.correction.proximal: interpolate", ", or proximal to recompute"
    elif max_staleness(config) and loss_needs_of(config).behaviour:
        with_, way_out = f"{algorithm.loss_type} in an asynchronous run", ""
    else:
        return
    yield Problem(
        "algorithm.target_kl",
        f"is {algorithm.target_kl:g}, and with {with_} the KL of an update counts what changed before the step too. "
        f"Set it to null{way_out}",
    )


@rule("rollout.top_p", "rollout.top_k", "algorithm.correction.kind", "algorithm.loss_type", kinds=("reasoning",))
def _behaviour_is_the_whole_vocabulary(config: ReasoningConfig, plan: Any) -> Iterator[Problem]:
    kind, loss = config.algorithm.correction.kind, config.algorithm.loss_type
    reader = f"algorithm.correction.kind: {kind}" if kind != "none" else f"algorithm.loss_type: {loss}"
    if kind == "none" and not loss_needs_of(config).behaviour:
        return
    for name, usual in (("top_p", 1.0), ("top_k", 0)):
        value = getattr(config.rollout, name)
        if value != usual:
            yield Problem(
                f"rollout.{name}",
                f"is {value:g}, and {reader} weighs tokens by the probability that they were drawn with. Those on "
                "record, as those that train, are of the whole vocabulary: what is left of it is drawn more often than "
                f"they say. Set it to {usual:g}",
            )


@rule("algorithm.loss_type", "algorithm.correction.kind", kinds=REINFORCED)
def _corrected_once(config: Any, plan: Any) -> Iterator[Problem]:
    loss, kind = config.algorithm.loss_type, config.algorithm.correction.kind
    if kind != "none" and loss_needs_of(config).behaviour:
        text = f"is {kind}, and {loss} forms its ratios against the policy that acted already. Set it to none"
        yield Problem("algorithm.correction.kind", text)


@rule("algorithm.correction", kinds=REINFORCED)
def _correction(config: Any, plan: Any) -> Iterator[Problem]:
    yield from correction_problems(config.algorithm.correction)


def correction_problems(correction: CorrectionConfig) -> Iterator[Problem]:
    """Problems inside `algorithm.correction`: keys that its kind does not use, and bounds that do not fit."""
    key, kind, metric = "algorithm.correction", correction.kind, correction.metric
    unused = False
    for name, field in CorrectionConfig.model_fields.items():
        value = getattr(correction, name)
        if name != "kind" and value != field.default and name not in _TAKES[kind]:
            unused = True
            with_it = " or ".join(other for other, takes in _TAKES.items() if name in takes)
            usual = "null" if field.default is None else field.default
            text = f"is {value}, and kind: {kind} has no {name}. Set it to {usual}, or the kind to {with_it}"
            yield Problem(f"{key}.{name}", text)
    if unused:
        return
    bounds = correction.with_bounds()
    low, high, of_equals = bounds.low, bounds.high, 1 if metric == "ratio" else 0
    if kind == "reject" and low is None and high is None:
        text = f"is null, as is low, and {metric} has no usual bound. Set it, for example to {_BOUND[metric]}"
        yield Problem(f"{key}.high", text)
    elif low is not None and high is not None and low >= high:
        text = f"is {high:g}, not above low ({low:g}), so that nothing is in bounds. Raise it, or lower low"
        yield Problem(f"{key}.high", text)
    elif (low is not None and low > of_equals) or (high is not None and high < of_equals):
        name, bound = ("low", low) if high is None or high >= of_equals else ("high", high)
        text = f"is {bound:g}, which shuts out what has not changed: where both policies agree, {metric} is {of_equals}"
        yield Problem(f"{key}.{name}", f"{text}. Use {of_equals} or {'less' if name == 'low' else 'more'}")
