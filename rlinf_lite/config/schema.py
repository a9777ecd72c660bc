"""The sections and keys of the configuration: one class per section, with the help under each key.

Importable without torch or ray. Single values are checked here; the checks between keys are in `rules/`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from rlinf_lite.cards import (
    Card,
    Float,
    Int,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    UnitFloat,
)
from rlinf_lite.config.off_policy import OffPolicyConfig, ReplayConfig
from rlinf_lite.config.rounds import DaggerConfig, RecapConfig, RoundsConfig
from rlinf_lite.registry import (
    ENVIRONMENTS,
    ESTIMATORS,
    LOSSES,
    POLICIES,
    STRATEGIES,
    PartError,
    env_card,
    policy_card,
)

Decay = Annotated[Float, Field(ge=0, lt=1)]
Seed = Annotated[Int, Field(ge=0, lt=2**63)]  # the range that every random generator accepts
Interval = Annotated[Int, Field(ge=-1)]  # a number of steps; -1 or 0: never


def _options_of(card_of: Callable[[str], Card]) -> AfterValidator:
    """A validator that parses `options` with the Options class of the part that `id` names. If there is no such part,
    they stay unchanged, and a rule reports the name. pydantic reports errors inside them under the names of our
    keys."""

    def validate(given: Any, info: ValidationInfo) -> Any:
        try:
            card = card_of(info.data["id"])
        except (KeyError, PartError):
            return given
        return card.options(given)

    return AfterValidator(validate)


def _first_task(task: str, info: ValidationInfo) -> str:
    try:
        return task or next(iter(env_card(info.data["id"]).tasks), "")
    except (KeyError, PartError):
        return task


AUTO = "auto"
"""The value in place of slots that lets the training run choose them."""


class PlacementSpec(Section):
    placement: str | int
    """Slots and processes, for example `0-3` or `0-3:0-7`."""
    node_group: str | None = None
    """Label of a `cluster.node_groups` entry; slots are then numbered within that group."""


class NodeGroup(Section):
    label: str
    """Name that `component_placement` entries refer to."""
    nodes: str | int
    """Node ranks, for example `2-3`."""
    env_vars: dict[str, str] = {}
    """Environment variables of every worker on these nodes."""


class ClusterConfig(Section):
    num_nodes: PositiveInt = 1
    """Nodes to wait for; 1 starts a local Ray unless RAY_ADDRESS is set."""
    num_gpus_per_node: PositiveInt | None = None
    """Slots per node: accelerators, or virtual slots on a CPU cluster. null: the accelerators found, or 1."""
    accelerator: Literal["auto", "cuda", "cpu"] = "auto"
    """Kind of a slot. auto: cuda if every node has GPUs, else cpu."""
    component_placement: dict[str, str | int | PlacementSpec] = {"actor,rollout,env": "all"}
    """Slots of each component, one line each. `auto`, for the whole section or for the slots of a line: the run tries
    several placements and keeps the fastest (docs/placement.md)."""
    fuse: str | None = None
    """Roles that share processes, such as `actor,rollout`. They must have the same placement, and need no transfer of
    weights. null: each role has its own processes. With `component_placement: auto` this value is one of those
    tried."""
    node_groups: list[NodeGroup] = []
    """Named sets of nodes."""
    runtime: Literal["ray", "local"] = "ray"
    """How workers run. ray: as processes, on any number of machines. local: as threads of this process, of which one
    computes at a time, for breakpoints and tests; the results are the same (docs/debugging.md)."""
    start_timeout_s: PositiveFloat = 120.0
    """Longest wait for nodes to join and workers to be constructed."""

    @field_validator("component_placement", mode="before")
    @classmethod
    def _every_role(cls, lines: Any) -> Any:
        usual = cls.model_fields["component_placement"].default
        if lines == AUTO:
            return dict.fromkeys(usual, AUTO)
        if not isinstance(lines, dict):
            raise ValueError(f"must be {AUTO}, or a section of lines such as {next(iter(usual))}: all")
        return lines


class LoggerConfig(Section):
    log_path: str = "results"
    """Root of run directories: metrics, timeline and evaluations go to <log_path>/<run>, and checkpoints, unless
    actor.checkpoint_save_path is set."""
    backends: list[Literal["tensorboard", "wandb"]] = ["tensorboard"]
    """Loggers besides JSONL, which is always written."""
    project_name: str = "rlinf_lite"
    """Project in Weights & Biases."""


class RunnerConfig(Section):
    task_type: Literal["embodied", "off_policy", "sft", "eval", "reasoning"] = "embodied"
    """Kind of run. embodied: reinforcement learning in simulators on what was just played. off_policy: the same from a
    replay buffer and demonstrations (see `off_policy`, `replay`). sft: supervised training on demonstrations (see
    `data`). eval: no training, only evaluations by `rlinf-lite eval` (training sizes are ignored). reasoning:
    reinforcement learning of language models on problems with known answers, with a schema of its own."""
    run_name: str | None = None
    """Name of the run; null: the config's name. The name of its directory also has task, seed and start time."""
    seed: Seed = 0
    """Seed of weights, environments, sampling and shuffles."""
    max_epochs: PositiveInt = 1000
    """Most epochs of reinforcement learning: passes over the prompts; in an embodied run one epoch is one step."""
    mode: Literal["sync", "async"] = "sync"
    """sync: rollouts and updates take turns. async: the next steps are played while one step trains, with weights that
    are at most max_staleness versions old (docs/async.md)."""
    max_staleness: NonNegativeInt = 1
    """With mode: async, the number of versions (one per step) by which the acting weights may be older than the
    training weights; 0 gives exactly the results of mode: sync."""
    max_steps: Interval = -1
    """Runner steps to train (in an sft run, optimizer updates); -1: until max_epochs."""
    val_check_interval: Interval = -1
    """Steps between evaluations; also before the first step and after the last; -1: never."""
    save_interval: Interval = -1
    """Steps between checkpoints; also after the last step; -1: never."""
    keep_checkpoints: PositiveInt = 3
    """Number of checkpoints kept on disk; older ones are deleted."""
    resume: str = "never"
    """never, auto (the newest checkpoint with this name, task and seed; a new run if there is none), or the path of a
    run or checkpoint."""
    allow_changes: list[str] = []
    """Keys or sections that may differ from the resumed run although they belong to its seed, environment, data, model
    or sizes, such as `env.train.num_envs`."""
    timeline: bool = False
    """Write a Chrome trace of one step (the third, or the last if there are fewer)."""
    report: bool = True
    """Write report.html, one page about the run, at its end."""
    deterministic: bool = False
    """On GPUs, use only operations that give the same bits every time, so that a run repeats and recovers bit for bit,
    as on CPUs. An operation without such a version raises an error."""
    phase_timeout_s: PositiveFloat = 1800.0
    """Longest wait for any phase of a step, for a wave of demonstrations, for a message between workers, and for room
    on a full disk. An evaluation may take so long for each of its waves."""
    logger: LoggerConfig = LoggerConfig()


CORRECTION_BOUNDS: dict[str, tuple[float | None, float | None]] = {
    "none": (None, None),
    "decoupled": (None, None),
    "tis": (None, 2.0),
    "icepop": (0.5, 5.0),
    "reject": (None, 5.0),
}
"""Default `low` and `high` of each kind of correction, used if the config has null."""


class CorrectionConfig(Section):
    """Correction for actions that another policy took than the one that trains: an earlier version, or an engine with
    different probabilities. The weight of an action is w = p / b, with p its probability under the trained policy
    (before the step's updates) and b its probability under the policy that acted."""

    kind: Literal["none", "decoupled", "tis", "icepop", "reject"] = "none"
    """Factor of each position's loss. none: 1. decoupled: w, as in decoupled PPO. tis: min(w, high). icepop: w if it is
    in [low, high], else 0. reject: w if its `metric` is in [low, high], else 0."""
    level: Literal["token", "sequence"] = "token"
    """tis: use the w of each position, or that of the row, the product over its positions. reject: judge each position,
    or the row as a whole."""
    metric: Literal["ratio", "k1", "k2", "k3"] = "ratio"
    """reject: the number that is judged. ratio: w, k1: log w, k2: (log w)^2 / 2, k3: w - log w - 1; for a row their
    mean (for ratio the geometric mean)."""
    low: Float | None = None
    """Lower bound; null: 0.5 for icepop, else none."""
    high: Float | None = None
    """Upper bound; null: 2 for tis, 5 for icepop and for reject by ratio, none for decoupled (with a bound, it drops
    positions above it)."""
    proximal: Literal["recompute", "interpolate"] = "recompute"
    """How p is computed. recompute: by a forward pass before the updates. interpolate: between b and the policy in
    training, by their versions; at a staleness of 1 it equals b and the loss is plain PPO, so runner.max_staleness must
    be 2 or more."""

    def with_bounds(self) -> CorrectionConfig:
        """The same section, with the default bounds of its kind in place of null."""
        low, high = CORRECTION_BOUNDS[self.kind] if self.metric == "ratio" else (None, None)
        given = {"low": low if self.low is None else self.low, "high": high if self.high is None else self.high}
        return self.model_copy(update=given)


class BaseAlgorithmConfig(Section):
    """Keys that estimators and losses read."""

    adv_type: str = ESTIMATORS.default
    """Advantage estimator, or `pkg.module:function`."""
    loss_type: str = LOSSES.default
    """Policy loss, or `pkg.module:function`."""
    group_size: PositiveInt = 1
    """Episodes from the same initial state, or responses to the same prompt (grpo, rloo, opo,
    reinforce_plus_plus_baseline)."""
    gamma: UnitFloat = 0.99
    """Discount per position (per chunk, or per action if reward_type is action_level)."""
    gae_lambda: UnitFloat = 0.95
    """Lambda of generalised advantage estimation."""
    recompute_logprobs: bool | Literal["auto"] = "auto"
    """The actor computes the log-probabilities of a step's actions again before its updates, so that ratios begin at
    exactly 1. auto: if they may differ from those of acting; the run prints its choice."""
    clip_ratio_low: NonNegativeFloat = 0.2
    """Ratios are clipped below 1 minus this; never if this is 1 or more, as for cispo, whose paper clips only above."""
    clip_ratio_high: NonNegativeFloat = 0.2
    """Ratios are clipped above 1 plus this."""
    clip_ratio_c: Float | None = None
    """ppo: dual clip for negative advantages, > 1; null: off."""
    value_clip: NonNegativeFloat | None = None
    """Clip range of the value loss around the old values; null: off."""
    critic_warmup_steps: NonNegativeInt = 0
    """Number of first runner steps in which only the value head, or the critic, trains."""
    entropy_coef: Float = 0.0
    """Weight of the entropy bonus."""
    normalize_advantages: bool | None = None
    """Whiten advantages over the global batch; null: only if a critic is their baseline (gae), as in PPO. The
    reinforce_plus_plus estimators always whiten."""
    group_std_normalize: bool = True
    """grpo: divide by the group's standard deviation."""
    filter_groups: bool = False
    """Before training, drop groups whose members all have the same score."""
    update_epochs: PositiveInt = 1
    """Passes over each batch."""
    loss_agg_mode: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """How per-position losses become one number."""
    correction: CorrectionConfig = CorrectionConfig()
    behaviour_kl_coef: NonNegativeFloat = 1e-3
    """dppo_tv: weight of the squared log-ratio to the policy that acted."""


class AlgorithmConfig(BaseAlgorithmConfig):
    """The algorithm of an embodied run."""

    bootstrap_type: Literal["standard", "always", "never"] = "standard"
    """Value after an episode's end in gae. standard: V(final observation) after a time limit, 0 after a termination.
    always: V(final observation) after both, so that early success costs nothing under dense rewards. never: 0 after
    both, so that reaching the time limit counts as failure."""
    value_coef: NonNegativeFloat = 0.5
    """Weight of the value loss."""
    target_kl: PositiveFloat | None = None
    """Stop a step's remaining updates once a minibatch's approximate KL passes this; null: never."""
    reward_type: Literal["chunk_level", "action_level"] = "chunk_level"
    """One reward and advantage per chunk, or per action."""
    logprob_type: Literal["chunk_level", "action_level", "token_level"] = "chunk_level"
    """Level at which probability ratios are formed."""
    entropy_type: Literal["chunk_level", "action_level", "token_level"] = "chunk_level"
    """Level at which the entropy bonus is averaged."""
    reward_scale: PositiveFloat = 1.0
    """Factor of rewards before advantages are computed; logged returns are not scaled."""


class EnvSplitConfig(Section):
    num_envs: PositiveInt = 16
    """Environments over all env workers and stages, the same number in each; an evaluation rounds it up to that."""
    max_episode_steps: PositiveInt | None = None
    """Time limit in env steps; null: the task's own."""
    auto_reset: bool = True
    """Start the next episode at the end of the chunk in which an episode ends."""


class StepRewardConfig(Section):
    """Rewards of training by a function of observations, once per chunk, at its last executed env step
    (docs/off_policy.md)."""

    id: str | None = None
    """The function: success_classifier, or `pkg.module:function`; null: the environment's own rewards."""
    model_dir: str | None = None
    """Folder of the success classifier, which `rlinf-lite reward` has written."""
    threshold: UnitFloat = 0.5
    """success_classifier: its value is 1 if the probability of success is at least this, else 0."""
    relative: bool = True
    """The reward is the function's value after the chunk minus that before it, so that an episode's rewards add up to
    its last value minus its first, and it does not pay to stay in a success or to repeat it. false: the value after the
    chunk."""


class TrainSplitConfig(EnvSplitConfig):
    ignore_terminations: bool = False
    """Play on to the time limit after success or failure."""
    reward: StepRewardConfig = StepRewardConfig()


class EvalSplitConfig(EnvSplitConfig):
    auto_reset: bool = False
    """Always false: each episode is played once."""
    ignore_terminations: bool | None = None
    """Play on to the time limit after success or failure. null: only if the simulator reports success at every step, so
    that success at the end can be distinguished from success at any time; otherwise episodes end when the environment
    terminates them."""
    num_episodes: PositiveInt = 100
    """Seeded episodes per evaluation; the same ones every time."""
    seed: Seed = 10_000
    """Seed of the evaluation episodes; it must differ from that of training episodes (runner.seed) and demonstrations
    (data.seed)."""
    mode: Literal["greedy", "sampled"] = "greedy"
    """Take the policy's mode, or sample from it."""
    num_videos: NonNegativeInt = 8
    """Number of first episodes recorded per evaluation, if observations have images: eval/*.gif and the report."""


class EnvConfig(Section):
    id: str = ENVIRONMENTS.default
    """Name of a registered environment, or `pkg.module:make_env`, or `pkg.module:Card` for a card."""
    task: Annotated[str, AfterValidator(_first_task)] = Field("", validate_default=True)
    """Task of the environment; empty: the first task that its card lists."""
    options: Annotated[Any, _options_of(env_card)] = Field({}, validate_default=True)
    """The environment's own settings, listed by its card; without a card, any names and values."""
    num_threads: PositiveInt = 1
    """torch threads of an env worker while it simulates."""
    train: TrainSplitConfig = TrainSplitConfig()
    eval: EvalSplitConfig = EvalSplitConfig()


class ModelConfig(Section):
    id: str = POLICIES.default
    """Name of a registered policy, or `pkg.module:Class`, or `pkg.module:Card` for a card."""
    num_action_chunks: PositiveInt = 1
    """C: actions per decision."""
    value_type: Literal["chunk_level", "action_level"] = "chunk_level"
    """One value per chunk, or per action."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature, the same for acting and training."""
    options: Annotated[Any, _options_of(policy_card)] = Field({}, validate_default=True)
    """The policy's own settings, listed by its card; without a card, any names and values."""


class KeysConfig(Section):
    """The features of a LeRobotDataset that correspond to the environment's observations and actions."""

    cameras: dict[str, str] = {}
    """Feature of each camera of the environment; default: observation.images.<camera>."""
    state: str | None = "observation.state"
    """Feature of the state, if the environment has one."""
    action: str = "action"
    """Feature of the actions, in the environment's units."""
    match_names: bool = True
    """Put columns of state and action into the environment's order if both have names; false: use the dataset's order,
    without regard to names."""
    instruction: Literal["task", "subtask"] = "task"
    """Instruction of a frame: its task, or the subtask at its time in LeRobot's annotations (language_persistent)."""


class DataConfig(Section):
    demos_dir: str | None = None
    """Folder of the LeRobotDataset with the demonstrations, read or written, on a file system that all nodes share;
    null: demos/ in the run's directory. With `source: folder` also a dataset on the Hub,
    hf://datasets/ORG/NAME[@REVISION]."""
    source: Literal["expert", "folder"] = "expert"
    """expert: demonstrations that this run's expert plays; existing ones must have been made with the same settings.
    folder: the LeRobotDataset (v3.0, v2.1) in demos_dir, if its sizes fit; different tasks give a note."""
    keys: KeysConfig = KeysConfig()
    stride: PositiveInt | None = None
    """Env steps from the beginning of a chunk to that of the next one; null: num_action_chunks, so that each action is
    in one chunk, or with `source: folder` 1, so that a chunk begins at every frame."""
    cache_dir: str | None = None
    """Folder of decoded frames, on a file system that all nodes share; null: .frames/ in the dataset's folder."""
    pictures: Literal["image", "video"] = "image"
    """Format of written pictures: image (PNG, lossless), or video (AV1, a fraction of the size, with small losses)."""
    fps: PositiveInt | None = None
    """Env steps per second that written datasets state; null: those of the simulation, by its card or metadata, or 10
    if it has no clock."""
    num_episodes: PositiveInt = 400
    """Episodes that the expert plays; those that succeed become demonstrations."""
    keep_failures: bool = False
    """Keep the episodes without success as well."""
    action_noise: NonNegativeFloat = 0.0
    """Standard deviation of noise on the expert's actions, in units of half the action range; labels have no noise."""
    teacher_dir: str | None = None
    """A trained policy that acts as the expert; null: the environment's own expert."""
    teacher_mode: Literal["greedy", "sampled"] = "greedy"
    """How `teacher_dir` acts: its best action, or as it explores in evaluations, which gives logged play variety."""
    seed: Seed = 0
    """Seed of the demonstrations: initial states and noise."""
    dagger: DaggerConfig = DaggerConfig()
    recap: RecapConfig = RecapConfig()

    @property
    def rounds(self) -> RoundsConfig:
        """The section of the rounds in which the student plays."""
        return self.recap if self.recap.rounds else self.dagger


class RolloutConfig(Section):
    model_dir: str | None = None
    """Pretrained policy to start from (a directory that `from_pretrained` reads); null: random weights."""
    pipeline_stage_num: PositiveInt = 1
    """Number of slices of each env worker's environments; they take turns with the policy."""
    num_chunks: PositiveInt | None = None
    """T: decisions per environment and step; null: one whole episode."""
    num_threads: PositiveInt = 1
    """torch threads of a rollout worker while it acts."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of a rollout worker's own parameters (buffers keep theirs), and with bf16 of its forward passes."""
    offload: bool = False
    """Keep parameters in GPU memory only while acting, so that an actor on the same GPU can use the memory."""
    cuda_graphs: bool = True
    """On GPUs, record the operations of a VLA policy's decision as a CUDA graph, once for each number of rows. false:
    run operation by operation, with less GPU memory."""


class OptimConfig(Section):
    lr: NonNegativeFloat = 3e-4
    """Learning rate; at 0 nothing changes, which tests whether acting and training agree."""
    value_lr: NonNegativeFloat | None = None
    """Learning rate of the value head's parameters; null: lr."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule over max_steps."""
    min_lr_ratio: UnitFloat = 0.0
    """End of linear and cosine schedules, as a fraction of lr."""
    warmup_steps: NonNegativeInt = 0
    """Runner steps of linear warm-up, from the first step in which the parameters train (for the policy: after
    algorithm.critic_warmup_steps)."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's moment decays."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    clip_grad: PositiveFloat = 1.0
    """Largest gradient norm."""


class TrainConfig(Section):
    """Keys of the actor in runs of every kind."""

    checkpoint_load_path: str | None = None
    """Policy directory or checkpoint to start from; overrides rollout.model_dir. Evaluation reads it too."""
    checkpoint_save_path: str | None = None
    """Checkpoints go to <checkpoint_save_path>/<run>/checkpoints; null: runner.logger.log_path."""
    global_batch_size: PositiveInt = 1024
    """Samples (decisions) per optimizer update, over all actor ranks."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Data type of parameters and of forward and backward passes; the optimizer's copy is fp32."""
    strategy: str = STRATEGIES.default
    """How a training model is spread over ranks: fsdp (in shards), replicated (a copy on each, fastest for small
    models), tensor_parallel (each layer of a language model over several ranks), or `pkg.module:Class`. In language
    runs it also applies to critic and reference."""
    fsdp_size: PositiveInt | None = None
    """strategy: fsdp: number of consecutive ranks that divide a model, of which several such groups have copies each
    (HSDP): the ranks of a node, so that parameters are gathered within it. It must divide the number of ranks. null:
    all ranks divide one model."""
    num_threads: PositiveInt | None = None
    """torch threads of an actor while it trains and scores; null: all cores, divided among a node's actors."""
    offload: bool = False
    """Keep parameters and optimizer state in GPU memory only from scoring and training until the weights are sent, so
    that rollout workers on the same GPU can use the memory. A critic stays."""
    optim: OptimConfig = OptimConfig()


class PolicyTokenizerConfig(Section):
    tokenizer_model: str | None = None
    """Directory of a tokenizer, for a policy without one in its own directory."""


class ActorConfig(TrainConfig):
    """The actor of a run in a simulator."""

    micro_batch_size: PositiveInt = 1024
    """Largest number of samples per forward pass and rank."""
    frozen_dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of parameters that do not train, such as those under adapters, in memory and in checkpoints; bf16 needs
    `precision: bf16`. Buffers keep theirs."""
    tokenizer: PolicyTokenizerConfig = PolicyTokenizerConfig()


class TeacherConfig(Section):
    """A frozen policy that scores the student's actions (`algorithm.loss_type: opd`)."""

    model_dir: str | None = None
    """Directory of a policy with the same inputs, chunks and tokens as the student's: a checkpoint, a run, or a policy
    directory; in reasoning runs, of a language model with the same tokenizer, which is the role `reference`."""


class WeightSyncConfig(Section):
    bucket_bytes: PositiveInt = 256 * 1024 * 1024
    """Largest extra memory of one weight transfer, in bytes."""
    cuda_ipc: bool = True
    """Send weights between processes on one GPU directly; false: through host memory, as between GPUs."""


class ControlConfig(Section):
    enabled: Literal["auto"] | bool = "auto"
    """Keep a training run alive: restart workers that crash or hang. Not used in imitation and evaluation. auto: true,
    but false with `cluster.runtime: local`."""
    max_restarts: NonNegativeInt = 3
    """Restarts of one worker within `restart_window_s`; the next failure ends the run."""
    max_role_restarts: NonNegativeInt = 10
    """Restarts of all workers of a component together, within `restart_window_s`."""
    max_job_restarts: NonNegativeInt = 20
    """Restarts of all workers together, within `restart_window_s`."""
    restart_window_s: PositiveFloat = 3600.0
    """Seconds after which a failure no longer counts."""
    backoff_s: NonNegativeFloat = 1.0
    """Wait before the second restart of a worker; doubled with every further restart."""
    max_backoff_s: NonNegativeFloat = 30.0
    """Longest wait before a restart."""
    hang_timeout_s: PositiveFloat = 300.0
    """A worker that makes no progress, or does not answer, for this long is ended and replaced."""
    slow_factor: PositiveFloat = 2.0
    """A rank that computes this many times longer than the others of its group is reported as slow."""
    snapshot_interval: NonNegativeInt | Literal["auto"] = "auto"
    """Steps between snapshots: copies of the actor's state in shared memory, used to rebuild it, and to save it if the
    run is stopped during an update. auto: as often as possible at a cost of at most 1% of the time, and every step if
    updates are long. 0: never; only checkpoints are left."""
    backend: str = "kv"
    """Place of the job's state: kv (in Ray), or a directory."""
    max_bad_updates: PositiveInt = 5
    """Number of non-finite updates in a row after which the run stops."""


class BaseConfig(Section):
    """The sections of every kind of run."""

    cluster: ClusterConfig = ClusterConfig()
    runner: RunnerConfig = RunnerConfig()
    actor: TrainConfig = TrainConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    control: ControlConfig = ControlConfig()


class Config(BaseConfig):
    """The config of a run in a simulator: reinforcement learning, imitation or evaluation."""

    actor: ActorConfig = ActorConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    env: EnvConfig = Field(default_factory=EnvConfig)
    rollout: RolloutConfig = RolloutConfig()
    model: ModelConfig = Field(default_factory=ModelConfig)
    teacher: TeacherConfig = TeacherConfig()
    off_policy: OffPolicyConfig = OffPolicyConfig()
    replay: ReplayConfig = ReplayConfig()
    data: DataConfig = DataConfig()
