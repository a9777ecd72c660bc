"""The configuration's sections and keys: one class per section, one line of help under each key.

Importable without torch or ray. Values are checked one by one here; what must hold between keys is in `rules/`.
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
from rlinf_lite.registry import ENVIRONMENTS, ESTIMATORS, LOSSES, POLICIES, STRATEGIES, PartError, env_card, policy_card

Decay = Annotated[Float, Field(ge=0, lt=1)]
Seed = Annotated[Int, Field(ge=0, lt=2**63)]  # what every generator takes
Interval = Annotated[Int, Field(ge=-1)]  # a number of steps; -1 or 0: never


def _options_of(card_of: Callable[[str], Card]) -> AfterValidator:
    """A validator that reads `options` as the Options of the part that `id` names. Where there is no such part, they
    stay as they are, and a rule reports the name. pydantic reports errors within under the names of our keys."""

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
"""In place of slots: the training run chooses them."""


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
    """What a slot is. auto: cuda where every node has GPUs, else cpu."""
    component_placement: dict[str, str | int | PlacementSpec] = {"actor,rollout,env": "all"}
    """Which slots each component runs on, one line each; `auto`, as a whole or as the slots of a line, has the run try
    placements and keep the fastest (docs/placement.md)."""
    fuse: str | None = None
    """Roles that share processes, such as `actor,rollout`, and have the same placement: weights then stay where they
    are. null: each role has processes of its own. With `component_placement: auto` one of several that are tried."""
    node_groups: list[NodeGroup] = []
    """Named sets of nodes."""
    runtime: Literal["ray", "local"] = "ray"
    """What runs the workers. ray: processes, on any number of machines. local: threads of this process, one of which
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
    """Besides JSONL, which is always written."""
    project_name: str = "rlinf_lite"
    """Project in Weights & Biases."""


class RunnerConfig(Section):
    task_type: Literal["embodied", "sft", "eval", "reasoning"] = "embodied"
    """Reinforcement learning in simulators, supervised training on demonstrations (see `data`), no training but
    evaluations by `rlinf-lite eval` (sizes of training are not looked at), or reinforcement learning of language models
    on problems with known answers, which has a schema of its own."""
    run_name: str | None = None
    """Name of the run; null: the config's name. Its directory has task, seed and start time in its name besides."""
    seed: Seed = 0
    """Seed of everything: weights, environments, sampling, shuffles."""
    max_epochs: PositiveInt = 1000
    """Upper limit of reinforcement learning: passes over the prompts; in an embodied run an epoch is one step."""
    mode: Literal["sync", "async"] = "sync"
    """sync: rollouts and updates take turns. async: the next steps are played while one is trained on, by weights of at
    most max_staleness versions before (docs/async.md)."""
    max_staleness: NonNegativeInt = 1
    """With mode: async, versions (one per step) by which the weights that acted may be older than those that train; 0
    gives the very numbers of mode: sync."""
    max_steps: Interval = -1
    """Runner steps to train, in an sft run optimizer updates; -1: until max_epochs."""
    val_check_interval: Interval = -1
    """Evaluate every so many steps, before the first and after the last; -1: never."""
    save_interval: Interval = -1
    """Checkpoint every so many steps, and after the last; -1: never."""
    keep_checkpoints: PositiveInt = 3
    """Checkpoints kept on disk; older ones are deleted."""
    resume: str = "never"
    """never, auto (the newest checkpoint of this name, task and seed; a new run where there is none), or the path of a
    run or checkpoint."""
    allow_changes: list[str] = []
    """Keys or sections that may differ from the resumed run's although they are its seed, environment, data, model or
    sizes, such as `env.train.num_envs`."""
    timeline: bool = False
    """Write a Chrome trace of one step (the third, or the last where there are fewer)."""
    report: bool = True
    """Write report.html, one page about the run, at its end."""
    deterministic: bool = False
    """On GPUs, compute only with operations that give the same bits every time, so that a run repeats and recovers bit
    for bit, as on CPUs. One that has no such way is an error."""
    phase_timeout_s: PositiveFloat = 1800.0
    """Longest wait for any phase of a step, any message between workers, and room on a full disk."""
    logger: LoggerConfig = LoggerConfig()


CORRECTION_BOUNDS: dict[str, tuple[float | None, float | None]] = {
    "none": (None, None),
    "decoupled": (None, None),
    "tis": (None, 2.0),
    "icepop": (0.5, 5.0),
    "reject": (None, 5.0),
}
"""`low` and `high` of each kind of correction, where the config has null."""


class CorrectionConfig(Section):
    """For actions of another policy than the one that trains: an earlier version, or an engine whose probabilities
    differ. A weight is w = p / b, of the probabilities that the trained policy (p, before the step's updates) and the
    one that acted (b) give to an action."""

    kind: Literal["none", "decoupled", "tis", "icepop", "reject"] = "none"
    """What each position's loss is multiplied by. none: 1. decoupled: w, of decoupled PPO. tis: min(w, high). icepop: w
    in [low, high], else 0. reject: w where its `metric` is in [low, high], else 0."""
    level: Literal["token", "sequence"] = "token"
    """tis: the w of each position, or that of the row, which is their product. reject: each position is judged, or the
    row as a whole."""
    metric: Literal["ratio", "k1", "k2", "k3"] = "ratio"
    """reject: what is judged. ratio: w, k1: log w, k2: (log w)^2 / 2, k3: w - log w - 1; of a row their mean, of ratio
    the geometric one."""
    low: Float | None = None
    """Lower bound; null: 0.5 for icepop, else none."""
    high: Float | None = None
    """Upper bound; null: 2 for tis, 5 for icepop and for reject by ratio, none for decoupled, which with one drops what
    is above."""
    proximal: Literal["recompute", "interpolate"] = "recompute"
    """Where p comes from. recompute: a forward pass before the updates. interpolate: between b and the policy in
    training, by their versions; at a staleness of 1 it is b, and the loss plain PPO, so that runner.max_staleness has
    to be 2 or more."""

    def with_bounds(self) -> CorrectionConfig:
        """The same with the kind's own bounds where `low` or `high` is null."""
        low, high = CORRECTION_BOUNDS[self.kind] if self.metric == "ratio" else (None, None)
        given = {"low": low if self.low is None else self.low, "high": high if self.high is None else self.high}
        return self.model_copy(update=given)


class BaseAlgorithmConfig(Section):
    """What estimators and losses read."""

    adv_type: str = ESTIMATORS.default
    """Advantage estimator, or `pkg.module:function`."""
    loss_type: str = LOSSES.default
    """Policy loss, or `pkg.module:function`."""
    group_size: PositiveInt = 1
    """Episodes from the same initial state, or responses to the same prompt (grpo, rloo, opo,
    reinforce_plus_plus_baseline)."""
    gamma: UnitFloat = 0.99
    """Discount per position (per chunk, or per action where reward_type is action_level)."""
    gae_lambda: UnitFloat = 0.95
    """Lambda of generalised advantage estimation."""
    recompute_logprobs: bool | Literal["auto"] = "auto"
    """Have the actor compute the log-probabilities of what was done before a step's updates, for ratios that begin at
    exactly 1. auto: where they may differ from those of acting, which the run says in a line."""
    clip_ratio_low: NonNegativeFloat = 0.2
    """Ratios are clipped below 1 - this; 1 or more, never: for cispo, which its paper clips above only."""
    clip_ratio_high: NonNegativeFloat = 0.2
    """Ratios are clipped above 1 + this."""
    clip_ratio_c: Float | None = None
    """ppo: dual clip for negative advantages, > 1; null: off."""
    value_clip: NonNegativeFloat | None = None
    """Clip range of the value loss around the old values; null: off."""
    critic_warmup_steps: NonNegativeInt = 0
    """First runner steps in which only the value head, or the critic, trains."""
    entropy_coef: Float = 0.0
    """Weight of the entropy bonus."""
    normalize_advantages: bool | None = None
    """Whiten advantages over the global batch; null: where a critic is their baseline (gae), as PPO does. The
    reinforce_plus_plus estimators whiten by themselves."""
    group_std_normalize: bool = True
    """grpo: divide by the group's standard deviation."""
    filter_groups: bool = False
    """Drop groups whose members all score the same before training."""
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
    """What follows an episode's end in gae. standard: V(final observation) after a time limit, 0 after a termination;
    always: V(final observation) after both, so that ending early by success costs nothing under dense rewards; never:
    0 after both, so that an episode that ran out of time has failed."""
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
    """Rewards are multiplied by this before advantages; logged returns are not."""


class EnvSplitConfig(Section):
    num_envs: PositiveInt = 16
    """Environments over all env workers and stages, equally many in each; evaluations add what that takes."""
    max_episode_steps: PositiveInt | None = None
    """Time limit in env steps; null: the task's own."""
    auto_reset: bool = True
    """Start the next episode at the end of the chunk in which one ends."""


class TrainSplitConfig(EnvSplitConfig):
    ignore_terminations: bool = False
    """Play on to the time limit after success or failure."""


class EvalSplitConfig(EnvSplitConfig):
    auto_reset: bool = False
    """Always false: each episode is played once."""
    ignore_terminations: bool | None = None
    """Play on to the time limit after success or failure. null: where the simulator reports success at every step,
    so that success at the end can be told from success at some time; elsewhere episodes end where the environment
    terminates them."""
    num_episodes: PositiveInt = 100
    """Seeded episodes per evaluation; the same ones every time."""
    seed: Seed = 10_000
    """Seed of the evaluation episodes; another one than that of training episodes (runner.seed) or demonstrations
    (data.seed)."""
    mode: Literal["greedy", "sampled"] = "greedy"
    """Take the policy's mode, or sample from it."""
    num_videos: NonNegativeInt = 8
    """Episodes recorded per evaluation (the first ones, where observations have images): eval/*.gif and the report."""


class EnvConfig(Section):
    id: str = ENVIRONMENTS.default
    """A registered environment, or `pkg.module:make_env`, or that of a card."""
    task: Annotated[str, AfterValidator(_first_task)] = Field("", validate_default=True)
    """Task of that simulator; empty: the first that its card lists."""
    options: Annotated[Any, _options_of(env_card)] = Field({}, validate_default=True)
    """The environment's own settings, which its card lists; without a card names to any values."""
    num_threads: PositiveInt = 1
    """torch threads of an env worker, while it simulates."""
    train: TrainSplitConfig = TrainSplitConfig()
    eval: EvalSplitConfig = EvalSplitConfig()


class ModelConfig(Section):
    id: str = POLICIES.default
    """A registered policy, or `pkg.module:Class`, or that of a card."""
    num_action_chunks: PositiveInt = 1
    """C: actions per decision."""
    value_type: Literal["chunk_level", "action_level"] = "chunk_level"
    """One value per chunk, or per action."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature, used alike when acting and when training."""
    options: Annotated[Any, _options_of(policy_card)] = Field({}, validate_default=True)
    """The policy's own settings, which its card lists; without a card names to any values."""


class KeysConfig(Section):
    """Which feature of a LeRobotDataset is what the environment shows."""

    cameras: dict[str, str] = {}
    """Feature by camera of the environment; of cameras that are not named observation.images.<camera>."""
    state: str | None = "observation.state"
    """Feature of the state, where the environment shows one."""
    action: str = "action"
    """Feature of the actions, in the environment's units."""
    match_names: bool = True
    """Columns of state and action are put in the environment's order where both name them; false: they are taken in
    the dataset's order, without regard to names."""
    instruction: Literal["task", "subtask"] = "task"
    """Which sentence a frame has: of its task, or the subtask that LeRobot's annotations (language_persistent) have at
    its time."""


class DataConfig(Section):
    demos_dir: str | None = None
    """LeRobotDataset with the demonstrations, or where to write one, seen by all nodes; null: demos/ in the run's
    directory. With `source: folder` also one on the Hub, hf://datasets/ORG/NAME[@REVISION]."""
    source: Literal["expert", "folder"] = "expert"
    """expert: what this run's expert plays; where it is there already, it must have been made so. folder: the
    LeRobotDataset (v3.0, v2.1) in demos_dir, if its sizes fit; other tasks are noted."""
    keys: KeysConfig = KeysConfig()
    stride: PositiveInt | None = None
    """Env steps from where one chunk begins to where the next does; null: num_action_chunks, so that each action is in
    one chunk, or with `source: folder` 1, so that a chunk begins at every frame."""
    cache_dir: str | None = None
    """Where decoded frames are kept, seen by all nodes; null: .frames/ in the dataset's folder."""
    pictures: Literal["image", "video"] = "image"
    """How pictures are written: image (PNG, lossless), or video (AV1, a fraction of the size, not quite the same)."""
    fps: PositiveInt | None = None
    """Env steps per second, as datasets that are written say; null: those of the simulation, as its card or its
    metadata say, 10 where it has no clock."""
    num_episodes: PositiveInt = 400
    """Episodes that the expert plays; those that succeed become demonstrations."""
    keep_failures: bool = False
    """Keep the episodes without success as well."""
    action_noise: NonNegativeFloat = 0.0
    """Standard deviation of noise on the expert's actions, where 1 is half the action range; labels stay clean."""
    teacher_dir: str | None = None
    """A trained policy that acts as the expert; null: the environment's own expert."""
    seed: Seed = 0
    """Seed of the demonstrations: initial states and noise."""


class RolloutConfig(Section):
    model_dir: str | None = None
    """Pretrained policy to start from (a directory that `from_pretrained` reads); null: random weights."""
    pipeline_stage_num: PositiveInt = 1
    """Slices of each env worker's environments that take turns with the policy."""
    num_chunks: PositiveInt | None = None
    """T: decisions per environment and step; null: one whole episode."""
    num_threads: PositiveInt = 1
    """torch threads of a rollout worker, while it acts."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of a rollout worker's own parameters (buffers keep theirs), and with bf16 of its passes."""
    offload: bool = False
    """Have parameters in the GPU's memory only while acting, so that an actor beside them has it while it trains."""
    cuda_graphs: bool = True
    """On GPUs, record what a VLA policy computes when it acts, once for each number of rows, and launch it as a whole.
    false: operation by operation, with less of the GPU's memory."""


class OptimConfig(Section):
    lr: NonNegativeFloat = 3e-4
    """Learning rate; at 0 nothing trains, and acting and training must agree."""
    value_lr: NonNegativeFloat | None = None
    """Learning rate of the value head's parameters; null: lr."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule over max_steps."""
    min_lr_ratio: UnitFloat = 0.0
    """Where linear and cosine schedules end, as a fraction of lr."""
    warmup_steps: NonNegativeInt = 0
    """Runner steps of linear warm-up, from the first in which it trains: the policy after
    algorithm.critic_warmup_steps."""
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
    """Parameter and compute type of forward and backward; the optimizer's copy is fp32."""
    strategy: str = STRATEGIES.default
    """How a model that trains lies over several ranks: fsdp (in shards), replicated (whole on each, quickest for small
    models), tensor_parallel (layers of a language model over several ranks each), or `pkg.module:Class`; of language
    models the critic and the reference too."""
    num_threads: PositiveInt | None = None
    """torch threads of an actor while it trains and scores; null: all cores, divided among a node's actors."""
    offload: bool = False
    """Have parameters and the optimizer's state in the GPU's memory only from scoring and training until the weights
    are sent, so that rollout workers beside have it while they act. A critic stays."""
    optim: OptimConfig = OptimConfig()


class PolicyTokenizerConfig(Section):
    tokenizer_model: str | None = None
    """Directory of a tokenizer, for a policy whose own directory has none."""


class ActorConfig(TrainConfig):
    """The actor of a run in a simulator."""

    micro_batch_size: PositiveInt = 1024
    """Largest number of samples per forward pass and rank."""
    frozen_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of parameters that do not train, such as those under adapters, and of what checkpoints have of them; bf16
    needs `precision: bf16`. Buffers keep theirs."""
    tokenizer: PolicyTokenizerConfig = PolicyTokenizerConfig()


class WeightSyncConfig(Section):
    bucket_bytes: PositiveInt = 256 * 1024 * 1024
    """Largest extra memory of one weight transfer."""
    cuda_ipc: bool = True
    """From process to process on one GPU directly; false: through host memory, as between GPUs."""


class ControlConfig(Section):
    enabled: Literal["auto"] | bool = "auto"
    """Keep a training run alive: start again what crashes or hangs. Imitation and evaluation do without.
    auto: true, and false with `cluster.runtime: local`."""
    max_restarts: NonNegativeInt = 3
    """Restarts of one worker within `restart_window_s`; the next failure ends the run."""
    max_role_restarts: NonNegativeInt = 10
    """Restarts of all workers of a component together, within `restart_window_s`."""
    max_job_restarts: NonNegativeInt = 20
    """Restarts of all workers together, within `restart_window_s`."""
    restart_window_s: PositiveFloat = 3600.0
    """Older failures do not count."""
    backoff_s: NonNegativeFloat = 1.0
    """Before the second restart of a worker; doubled with every further one."""
    max_backoff_s: NonNegativeFloat = 30.0
    """Longest wait before a restart."""
    hang_timeout_s: PositiveFloat = 300.0
    """A worker that makes no progress for so long, or does not answer, is ended and replaced."""
    slow_factor: PositiveFloat = 2.0
    """A rank that computes so many times longer than the others of its group is reported as slow."""
    snapshot_interval: NonNegativeInt | Literal["auto"] = "auto"
    """Steps between copies of the actor's state in shared memory, from which it is rebuilt, and saved when the run is
    stopped in the middle of an update; auto: as often as costs at most 1% of the time, and always where updates are
    long; 0: never, the last checkpoint is all there is."""
    backend: str = "kv"
    """Where the job's state is kept: kv (in Ray), or a directory."""
    max_bad_updates: PositiveInt = 5
    """Stop after this many non-finite updates in a row."""


class BaseConfig(Section):
    """Sections that all runs have."""

    cluster: ClusterConfig = ClusterConfig()
    runner: RunnerConfig = RunnerConfig()
    actor: TrainConfig = TrainConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    control: ControlConfig = ControlConfig()


class Config(BaseConfig):
    """A whole embodied run, or one of supervised training."""

    actor: ActorConfig = ActorConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    env: EnvConfig = Field(default_factory=EnvConfig)
    rollout: RolloutConfig = RolloutConfig()
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = DataConfig()
