"""The cards of pi0, pi0.5 and SmolVLA: their options, and the checks of a run's config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from rlinf_lite.cards import (
    NO_STATE,
    Float,
    NonNegativeFloat,
    NonNegativeInt,
    Observed,
    PolicyCard,
    PositiveFloat,
    PositiveInt,
    Problem,
    ProblemError,
)
from rlinf_lite.config.resources import policy_config, tokenizer_dirs
from rlinf_lite.config.rules.cards import imitates_no_state, long_prompt, task_sentences
from rlinf_lite.models.conditions import conditioned
from rlinf_lite.models.flow.config import (
    LeRobotRules,
    changed_settings,
    lerobot_differences,
    present_slots,
    with_run_settings,
)
from rlinf_lite.models.lora import LoraOptions, other_adapters
from rlinf_lite.models.training_options import TrainingOptions

if TYPE_CHECKING:
    from rlinf_lite.config import Config
    from rlinf_lite.config.schema import ModelConfig
    from rlinf_lite.models.flow.config import FlowConfig

Method = Literal["flow_sde", "flow_noise", "flow_cps"]
Joint = Literal["sum", "mean"]


class FlowOptions(TrainingOptions):
    size: Literal["tiny", "published"] = "tiny"
    """From random weights: about 0.8 M parameters, or as published. A checkpoint brings its own."""
    num_steps: PositiveInt | None = None
    """K: steps from noise to actions. Evaluate a policy with the K that it was trained with. null: the checkpoint's;
    4."""
    method: Method | None = None
    """How training explores. flow_sde: one random step of each decision is sampled around the ODE's; flow_noise: all
    steps are, with learned standard deviations; flow_cps: one step is, by another formula. Evaluations follow the ODE.
    null: the checkpoint's; flow_sde."""
    noise_level: Annotated[Float, Field(gt=0, le=1)] | None = None
    """a: how far flow_sde and flow_cps explore. null: the checkpoint's; 0.5."""
    noise_range: tuple[PositiveFloat, PositiveFloat] | None = None
    """Smallest and largest standard deviation of flow_noise. null: the checkpoint's; [0.08, 0.16]."""
    ignore_last: bool | None = None
    """flow_sde never samples the last step (flow_cps never does, as its last step has no noise). null: the
    checkpoint's; false."""
    joint: Joint | None = None
    """sum: the K log-probabilities of flow_noise are added. mean: they and that of the first noise are averaged, as in
    RLinf; log-ratios are then K + 1 times smaller, so that clip range and KL are that much wider. null: the
    checkpoint's; sum."""
    horizon: PositiveInt | None = None
    """H: actions that the policy computes, of which num_action_chunks are executed. null: the checkpoint's, or
    num_action_chunks. In imitation, copies of the last action fill a longer horizon."""
    cameras: dict[str, str] | None = None
    """The environment's camera for each camera of the policy; cameras left out are masked. null: cameras of the same
    names."""
    action_dim: PositiveInt | None = None
    """Action dimensions of the robot, if the checkpoint's statistics have more (padding). null: all of them."""
    state_dim: NonNegativeInt | None = None
    """State numbers of the robot, if the checkpoint's statistics have more (padding). null: all of them."""
    asset_id: str | None = None
    """Name of the statistics that normalise states and actions. null: the checkpoint's, if it has just one."""
    delta_dims: NonNegativeInt | None = None
    """Number of leading action dimensions that are relative to the state at the beginning of the chunk; published
    checkpoints do not say. null: 0."""
    state_in_prompt: bool | None = None
    """pi05: the state is part of the prompt, in 256 bins; false: no state is read. null: the checkpoint's; true."""
    lerobot_preprocessing: LeRobotRules | None = None
    """pi0 and pi05 in LeRobot's layout: the release whose prompts and pictures they were trained on. v0.4: all of 0.4,
    which wrote the state's padding into the prompt too, and padded pictures with -3. v0.5: 0.5 and later, and openpi.
    null: the release named in the checkpoint's files; v0.5."""
    max_prompt_length: PositiveInt | None = None
    """Number of tokens that every prompt is padded to. null: the checkpoint's."""
    long_prompts: Literal["error", "cut"] = "error"
    """Prompts longer than max_prompt_length: error, or cut, which drops the end silently, as in the published code."""
    guidance: NonNegativeFloat | None = None
    """w: prompts have RECAP's condition, and the policy acts with the positive one and the velocity
    (1 - w) v_plain + w v_conditioned; 1 takes one pass, other values two. null: the checkpoint's; no condition."""
    trainable: Literal["all", "expert"] = "all"
    """expert: the vision-language model keeps its weights."""
    keep_prefix: bool = False
    """With trainable: expert, keep the vision-language model's results for each observation over the epochs of a step,
    instead of computing them in every epoch: 18 MB of the actor's host memory per decision at pi0's published size in
    bf16. SmolVLA's state token trains, so it is computed in every epoch. Not for imitation, where a step is one
    update."""
    lora: LoraOptions = LoraOptions()
    """Adapters in the modules that train, in place of their own weights; the projections of states, actions and times,
    and the heads, train without adapters."""
    value_hidden_sizes: list[PositiveInt] | None = None
    """Widths of the value head's hidden layers. null: the checkpoint's; [512, 256, 128]."""


class Flow(PolicyCard):
    """The common base of the three families' cards."""

    Options = FlowOptions
    reads_condition = True
    free_options = ("gradient_checkpointing", "compile", "long_prompts")

    def recognises(self, directory: Path, config: Mapping[str, Any]) -> bool:
        from rlinf_lite.models.flow.published import published_family

        return published_family(directory, config) == self.name

    def problems(self, config: Config, seen: Observed | None) -> Iterator[Problem]:
        model = config.model
        if model.temperature != 1:
            yield Problem(
                "model.temperature",
                f"is {model.temperature}, and flows have none. Set it to 1; model.options.noise_level or noise_range "
                "says how far they explore",
            )
        low, high = model.options.noise_range or (0.0, 1.0)
        if low >= high:
            yield Problem("model.options.noise_range", f"from {low} to {high} is no range. Put the smaller one first")
        if model.options.keep_prefix and config.runner.task_type == "sft":
            text = "is true, but a step of imitation is one update, which reads each observation once. Set it to false"
            yield Problem("model.options.keep_prefix", text)
        elif model.options.keep_prefix and model.options.trainable == "all":
            text = (
                "is true, but every update changes the prefix. Set model.options.trainable to expert, or this to false"
            )
            yield Problem("model.options.keep_prefix", text)
        if seen is None:
            return
        if not seen.cameras:
            yield Problem("model.id", f"{model.id} looks at images, and {config.env.task} shows none")
            return
        from rlinf_lite.models.flow.published import flow_config

        try:
            cfg = flow_config(config, seen)
        except ProblemError as error:
            yield error.problem
            return
        wanted = {**model.options.lora.model_dump(), "trainable": model.options.trainable}
        yield from other_adapters(cfg.lora, wanted, "FlowPolicy")
        if config.data.recap.rounds and cfg.guidance is None:
            text = "is null, and RECAP trains prompts with a condition. Set it to 1, to act with the positive one"
            yield Problem("model.options.guidance", text)
        if cfg.long_prompts == "error":
            yield from self._long_prompts(config, cfg)
        if cfg.state_dim and (cfg.state_in_prompt or cfg.family != "pi05") and imitates_no_state(config):
            yield Problem("data.keys.state", NO_STATE)

    def _long_prompts(self, config: Config, cfg: FlowConfig) -> Iterator[Problem]:
        """Prompts of the tasks that are too long. A state in the prompt is counted at its shortest, so prompts may
        still turn out too long while acting."""
        if not task_sentences(config):
            return
        import numpy as np

        from rlinf_lite.models.flow.inputs import PromptEncoder, TokenizerError, find_tokenizer, prompt_text

        try:
            found = [place for place in tokenizer_dirs(config) if find_tokenizer(place, cfg)]
            encoder = PromptEncoder.from_directory(found[0], cfg) if found else None
        except TokenizerError:  # loading the policy raises it
            return
        if encoder is not None:
            state = -np.ones(cfg.state_dim)

            def count(sentence: str) -> int:
                [text] = [sentence] if cfg.guidance is None else conditioned([sentence])
                return len(encoder.ids(*prompt_text(text, state, cfg)))

            yield from long_prompt(config, cfg.max_prompt_length, count)

    def notes(self, directory: Path, model: ModelConfig | None, seen: Observed | None = None) -> Iterator[str]:
        from rlinf_lite.models.flow.lerobot import picture_sizes
        from rlinf_lite.models.flow.published import read_config

        said = policy_config(directory)
        before = after = read_config(directory, None if model is None else model.options.asset_id, said)
        if model is not None:
            after = with_run_settings(before, model)
            if changed := list(changed_settings(before, after, "rlinf_lite" not in said)):
                yield f"settings differ from those of the policy in {directory}: {'; '.join(changed)}"
        if before.lerobot_preprocessing is None and (model is None or model.options.lerobot_preprocessing is None):
            sizes = picture_sizes(said)
            if seen is not None:
                sizes = [seen.cameras[name] for name in present_slots(after, seen.cameras).values()]
            if differences := lerobot_differences(after, sizes):
                yield (
                    f"no file of {directory} says which release of LeRobot trained it; inputs are processed as in 0.5 "
                    f"and later. LeRobot 0.4 {' and '.join(differences)}. If that release trained it, set "
                    "model.options.lerobot_preprocessing to v0.4, else to v0.5"
                )


class Pi0(Flow):
    """pi0: PaliGemma, and an expert that reads the state as a token."""

    policy = "rlinf_lite.models.flow.policy:Pi0Policy"


class Pi05(Flow):
    """pi0.5: PaliGemma with the state in the prompt; time enters the expert through its norms."""

    policy = "rlinf_lite.models.flow.policy:Pi05Policy"


class SmolVLA(Flow):
    """SmolVLA: half of SmolVLM2's layers, and an expert; in every other layer its actions attend only to the prefix."""

    policy = "rlinf_lite.models.flow.policy:SmolVLAPolicy"
