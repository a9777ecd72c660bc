"""The configuration of a run that trains a language model on problems with known answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from rlinf_lite.cards import Float, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, UnitFloat
from rlinf_lite.config.schema import (
    BaseAlgorithmConfig,
    BaseConfig,
    ClusterConfig,
    OptimConfig,
    PlacementSpec,
    TrainConfig,
)
from rlinf_lite.registry import ENGINES, language_card

TopP = Annotated[float, Field(gt=0, le=1)]


def _model_options(given: Any) -> Any:
    return language_card().options(given)


class RolesConfig(ClusterConfig):
    component_placement: dict[str, str | int | PlacementSpec] = {"actor,rollout,reference,critic,reward": "all"}
    """Which slots each role runs on, one line each; `auto` as in runs in simulators."""


class KLConfig(Section):
    """The distance to the reference policy, which is the one that the run began with."""

    place: Literal["none", "reward", "loss"] = "none"
    """Where it counts: nowhere, subtracted from each token's reward, or added to the loss."""
    kind: Literal["k1", "abs", "k2", "k3"] = "k3"
    """Its estimate per token."""
    coef: NonNegativeFloat = 0.001
    """Its weight."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """In the reward: the weight stays, or is steered towards `target`."""
    target: PositiveFloat = 0.1
    """adaptive: the KL per token to hold."""
    horizon: PositiveFloat = 10_000.0
    """adaptive: responses over which the weight may change by a fifth."""


class OverlongConfig(Section):
    """DAPO's soft penalty on long responses, a part of the reward."""

    buffer_length: NonNegativeInt = 0
    """Tokens before `rollout.max_response_length` over which it grows from 0 to `factor`; 0: none."""
    factor: PositiveFloat = 1.0
    """What comes off the reward of a response that fills `rollout.max_response_length`."""


class ReasoningAlgorithmConfig(BaseAlgorithmConfig):
    """The algorithm of a reasoning run; positions are tokens, and an episode is a response."""

    gamma: UnitFloat = 1.0
    """Discount per token."""
    gae_lambda: UnitFloat = 1.0
    """Lambda of generalised advantage estimation, per token."""
    kl: KLConfig = KLConfig()
    overlong: OverlongConfig = OverlongConfig()
    max_refills: NonNegativeInt = 3
    """filter_groups: times that a step draws more prompts in place of the groups that were dropped. What it has then
    is what it trains on."""


class ArithmeticConfig(Section):
    """Problems to generate where `data.train_files` names none."""

    num_train: PositiveInt = 20_000
    """Problems to train on."""
    num_val: PositiveInt = 500
    """Others, to evaluate on."""
    num_terms: PositiveInt = 4
    """Numbers in a sum."""
    max_number: PositiveInt = 9
    """The largest of them."""
    terse_frac: UnitFloat = 0.0
    """Share of the solutions that are the answer alone; supervised training learns from them to guess."""


class PromptsConfig(Section):
    train_files: list[str] = []
    """JSONL or Parquet files of rows `{data_source, prompt, reward_model: {ground_truth}, extra_info}`, here or on the
    Hub, hf://datasets/ORG/NAME[@REVISION]/FILE; []: generated arithmetic."""
    val_files: list[str] = []
    """Files to evaluate on; []: the generated arithmetic's, or no evaluation."""
    prompt_key: str = "prompt"
    """The column of prompts."""
    max_prompt_length: PositiveInt = 512
    """Tokens of a prompt."""
    filter_overlong: bool = True
    """Leave longer prompts out, and say how many; false: they are an error."""
    num_prompts: PositiveInt = 32
    """Prompts per step, each answered `algorithm.group_size` times."""
    max_val_prompts: PositiveInt | None = None
    """Evaluate on the first so many; null: all."""
    arithmetic: ArithmeticConfig = ArithmeticConfig()


class GenerationConfig(Section):
    model_dir: str | None = None
    """Language model to start from, a directory in transformers' layout; null: random weights."""
    max_response_length: PositiveInt = 512
    """Tokens of a response."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature, used alike when generating and when training."""
    top_k: NonNegativeInt = 0
    """Draw from the k likeliest tokens; 0: from all, which corrections and dppo_tv need."""
    top_p: TopP = 1.0
    """Draw from the fewest likeliest tokens whose probabilities sum to this; 1: from all, which corrections and dppo_tv
    need."""
    engine: str = ENGINES.default
    """What generates: transformers (the actor's own model class, by a loop of ours), or `pkg.module:Class`."""
    max_batch_size: PositiveInt = 256
    """Sequences that a rollout worker generates at a time."""
    max_prefill_tokens: PositiveInt = 16_384
    """Prompt tokens of one forward pass."""
    pipeline_stage_num: PositiveInt = 1
    """Parts that a rollout worker hands on as their groups are finished, to be scored while it generates the others."""
    partial_rollouts: bool = False
    """With runner.mode: async, take newer weights between two tokens of a response, each of which has the version that
    drew it (and a correction weighs it by that); false: once the responses under way have ended."""
    num_threads: PositiveInt = 1
    """torch threads of a rollout worker."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Type of a rollout worker's own parameters (buffers keep theirs), and with bf16 of its passes; null: on GPUs
    `actor.precision`, else fp32."""
    offload: bool = False
    """Have parameters in the GPU's memory only while generating, so that an actor beside them has it while it
    trains."""
    cuda_graphs: bool = True
    """On GPUs, record the passes of one token for each sequence, and launch each as a whole (transformers engine).
    false: operation by operation, with less of the GPU's memory."""


class TokenizerConfig(Section):
    tokenizer_model: str | None = None
    """Directory of the tokenizer; null: the model's."""


class LanguageActorConfig(TrainConfig):
    """The actor of a reasoning run; samples are responses."""

    max_tokens_per_micro_batch: PositiveInt = 8192
    """Largest number of tokens, padding included, per forward pass and rank."""
    tensor_model_parallel_size: PositiveInt = 1
    """strategy: tensor_parallel: ranks that compute a layer together, on the same rows; a divisor of the model's heads
    of keys and values, and of the ranks of actor, critic and reference."""
    tokenizer: TokenizerConfig = TokenizerConfig()


class CriticConfig(Section):
    model_dir: str | None = None
    """Model to start from, a critic's or a policy's; null: the actor's own beginning."""
    optim: OptimConfig = OptimConfig()


class RewardWeights(Section):
    """A response's score is the sum of what scores it, each times its weight."""

    rule: Float = 1.0
    """Weight of the rule; 0: no rule is used."""
    model: Float = 1.0
    """Weight of the reward model."""


class RewardConfig(Section):
    fn: str | None = None
    """`pkg.module:function`, called as `(solution, ground_truth, extra_info)`; null: the rule of each row's
    data_source."""
    timeout_s: PositiveFloat = 5.0
    """Limit per response; one that takes longer scores 0."""
    model: str | None = None
    """Directory of a reward model: a sequence classifier in transformers' layout, with its own tokenizer, which reads
    prompt and response; null: rules alone."""
    label: str | None = None
    """The label of the classifier whose logit is the score; null: it has one label."""
    max_length: PositiveInt | None = None
    """Tokens of prompt and response that the reward model reads, the last ones; null: as many as it has positions."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Type of the reward model's parameters and of its passes."""
    weights: RewardWeights = RewardWeights()


class SupervisedConfig(Section):
    """Training on worked solutions (`extra_info.solution` of each row) before the first step."""

    num_steps: NonNegativeInt = 0
    """Optimizer updates; 0: none."""
    batch_size: PositiveInt = 32
    """Rows per update, over all actor ranks."""
    optim: OptimConfig = OptimConfig()


class ReasoningConfig(BaseConfig):
    """A whole run of `runner.task_type: reasoning`."""

    cluster: RolesConfig = RolesConfig()
    algorithm: ReasoningAlgorithmConfig = ReasoningAlgorithmConfig()
    data: PromptsConfig = PromptsConfig()
    model: Annotated[Any, AfterValidator(_model_options)] = Field({}, validate_default=True)
    """The settings of the language model, which its card lists."""
    rollout: GenerationConfig = GenerationConfig()
    actor: LanguageActorConfig = LanguageActorConfig()
    critic: CriticConfig = CriticConfig()
    reward: RewardConfig = RewardConfig()
    sft: SupervisedConfig = SupervisedConfig()
