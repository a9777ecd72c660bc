"""The configuration of a language run: a language model trains on problems with known answers."""

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
    TeacherConfig,
    TrainConfig,
)
from rlinf_lite.registry import ENGINES, language_card

TopP = Annotated[float, Field(gt=0, le=1)]


def _model_options(given: Any) -> Any:
    return language_card().options(given)


class RolesConfig(ClusterConfig):
    component_placement: dict[str, str | int | PlacementSpec] = {"actor,rollout,reference,critic,reward": "all"}
    """Slots of each role, one line each; `auto` as in runs in simulators."""


class KLConfig(Section):
    """The penalty on the KL divergence from the reference, the policy that the run began with."""

    place: Literal["none", "reward", "loss"] = "none"
    """none: no penalty. reward: subtracted from each token's reward. loss: added to the loss."""
    kind: Literal["k1", "abs", "k2", "k3"] = "k3"
    """Estimator of the KL per token."""
    coef: NonNegativeFloat = 0.001
    """Weight of the penalty."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """With `place: reward`: fixed keeps the weight, adaptive adjusts it towards `target`."""
    target: PositiveFloat = 0.1
    """adaptive: the wanted KL per token."""
    horizon: PositiveFloat = 10_000.0
    """adaptive: number of responses over which the weight may change by a fifth."""


class OverlongConfig(Section):
    """DAPO's soft penalty on long responses, as a part of the reward."""

    buffer_length: NonNegativeInt = 0
    """Number of tokens before `rollout.max_response_length` over which the penalty grows from 0 to `factor`; 0: no
    penalty."""
    factor: PositiveFloat = 1.0
    """Penalty on a response that fills `rollout.max_response_length`."""


class ReasoningAlgorithmConfig(BaseAlgorithmConfig):
    """The algorithm of a reasoning run; positions are tokens, and an episode is a response."""

    gamma: UnitFloat = 1.0
    """Discount per token."""
    gae_lambda: UnitFloat = 1.0
    """Lambda of generalised advantage estimation, per token."""
    kl: KLConfig = KLConfig()
    overlong: OverlongConfig = OverlongConfig()
    max_refills: NonNegativeInt = 3
    """filter_groups: how often a step draws more prompts to replace dropped groups. After that it trains on what it
    has."""


class ArithmeticConfig(Section):
    """Generated problems, used if `data.train_files` is empty."""

    num_train: PositiveInt = 20_000
    """Number of problems to train on."""
    num_val: PositiveInt = 500
    """Number of other problems, to evaluate on."""
    num_terms: PositiveInt = 4
    """Number of terms in a sum."""
    max_number: PositiveInt = 9
    """Largest term."""
    terse_frac: UnitFloat = 0.0
    """Share of the solutions that have only the answer; supervised training learns from them to guess."""


class PromptsConfig(Section):
    train_files: list[str] = []
    """JSONL or Parquet files with rows `{data_source, prompt, reward_model: {ground_truth}, extra_info}`, local or on
    the Hub, hf://datasets/ORG/NAME[@REVISION]/FILE; []: generated arithmetic."""
    val_files: list[str] = []
    """Files to evaluate on; []: those of the generated arithmetic, or no evaluation."""
    prompt_key: str = "prompt"
    """Name of the column with prompts."""
    max_prompt_length: PositiveInt = 512
    """Most tokens of a prompt."""
    filter_overlong: bool = True
    """Leave longer prompts out and report their number; false: they are an error."""
    num_prompts: PositiveInt = 32
    """Prompts per step, each with `algorithm.group_size` responses."""
    max_val_prompts: PositiveInt | None = None
    """Number of first problems to evaluate on; null: all."""
    arithmetic: ArithmeticConfig = ArithmeticConfig()


class GenerationConfig(Section):
    model_dir: str | None = None
    """Directory of the language model to start from, in transformers' layout; null: random weights."""
    max_response_length: PositiveInt = 512
    """Most tokens of a response."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature, the same for generating and training."""
    top_k: NonNegativeInt = 0
    """Draw from the k most likely tokens; 0: from all, as corrections and dppo_tv require."""
    top_p: TopP = 1.0
    """Draw from the smallest set of most likely tokens whose probabilities sum to this; 1: from all, as corrections and
    dppo_tv require."""
    engine: str = ENGINES.default
    """Generation engine: transformers (the actor's own model class, in our own loop), or `pkg.module:Class`."""
    max_batch_size: PositiveInt = 256
    """Most sequences that a rollout worker generates at a time."""
    max_prefill_tokens: PositiveInt = 16_384
    """Most prompt tokens of one forward pass."""
    pipeline_stage_num: PositiveInt = 1
    """Number of parts in which a rollout worker passes on complete groups, which are scored while it generates the
    rest."""
    partial_rollouts: bool = False
    """With runner.mode: async, take newer weights between two tokens of a response; each token keeps the version that
    drew it, which corrections use. false: take them after the running responses have ended."""
    num_threads: PositiveInt = 1
    """torch threads of a rollout worker."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Data type of a rollout worker's own parameters (buffers keep theirs), and with bf16 of its forward passes; null:
    on GPUs `actor.precision`, else fp32."""
    offload: bool = False
    """Keep parameters in GPU memory only while generating, so that an actor on the same GPU can use the memory."""
    cuda_graphs: bool = True
    """On GPUs, record the forward passes of one token per sequence as CUDA graphs (transformers engine). false: run
    operation by operation, with less GPU memory."""


class TokenizerConfig(Section):
    tokenizer_model: str | None = None
    """Directory of the tokenizer; null: the model's."""


class LanguageActorConfig(TrainConfig):
    """The actor of a reasoning run; samples are responses."""

    max_tokens_per_micro_batch: PositiveInt = 8192
    """Most tokens, padding included, per forward pass and rank."""
    tensor_model_parallel_size: PositiveInt = 1
    """strategy: tensor_parallel: number of ranks that compute a layer together, on the same rows. It must divide the
    model's number of key-value heads, and the ranks of actor, critic and reference."""
    tokenizer: TokenizerConfig = TokenizerConfig()


class CriticConfig(Section):
    model_dir: str | None = None
    """Directory of the model to start from, a critic or a policy; null: the model that the actor starts from."""
    optim: OptimConfig = OptimConfig()


class RewardWeights(Section):
    """The weights of the rule's score and of the reward model's score; a response's score is the weighted sum."""

    rule: Float = 1.0
    """Weight of the rule's score; 0: no rule is used."""
    model: Float = 1.0
    """Weight of the reward model's score."""


class RewardConfig(Section):
    fn: str | None = None
    """`pkg.module:function`, called as `(solution, ground_truth, extra_info)`; null: the rule of each row's
    data_source."""
    timeout_s: PositiveFloat = 5.0
    """Time limit per response; one that takes longer scores 0."""
    model: str | None = None
    """Directory of a reward model: a sequence classifier in transformers' layout, with its own tokenizer, which reads
    prompt and response; null: only rules score."""
    label: str | None = None
    """Label of the classifier whose logit is the score; null: it has only one label."""
    max_length: PositiveInt | None = None
    """Number of last tokens of prompt and response that the reward model reads; null: its number of positions."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Data type of the reward model's parameters and forward passes."""
    weights: RewardWeights = RewardWeights()


class SupervisedConfig(Section):
    """Supervised training on worked solutions (`extra_info.solution` of each row) before the first step."""

    num_steps: NonNegativeInt = 0
    """Number of optimizer updates; 0: no supervised training."""
    batch_size: PositiveInt = 32
    """Rows per update, over all actor ranks."""
    optim: OptimConfig = OptimConfig()


class ReasoningConfig(BaseConfig):
    """The config of a run with `runner.task_type: reasoning`."""

    cluster: RolesConfig = RolesConfig()
    algorithm: ReasoningAlgorithmConfig = ReasoningAlgorithmConfig()
    data: PromptsConfig = PromptsConfig()
    model: Annotated[Any, AfterValidator(_model_options)] = Field({}, validate_default=True)
    """The language model's own settings, listed by its card."""
    rollout: GenerationConfig = GenerationConfig()
    actor: LanguageActorConfig = LanguageActorConfig()
    critic: CriticConfig = CriticConfig()
    reward: RewardConfig = RewardConfig()
    teacher: TeacherConfig = TeacherConfig()
    sft: SupervisedConfig = SupervisedConfig()
