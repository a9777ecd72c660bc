"""What crosses the network in one step of an embodied run, before it starts: bytes by what they are, from node to node.

Messages follow `workers.layout`, as the workers do; sizes are those of `preview.memory`. What Ray adds was measured
(benchmarks/nodes_bench.py). Not counted: evaluations, checkpoints, the first transfer of weights (of all parameters,
where only some train), and what is sent whether the run does anything or not (about 6 kB/s between two nodes).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rlinf_lite.config.names import fused_roles, recomputed_logprobs, rollout_dtype
from rlinf_lite.config.plan import Plan, episode_steps, observed, slots
from rlinf_lite.preview.memory import Estimate
from rlinf_lite.workers.layout import Layout

Link = tuple[int, int]
"""The node that sends and the one that receives."""

MESSAGE_BYTES = 2_000
"""A message or a call besides its content: half of it there, half of it back."""
STORED_MESSAGE_BYTES = 10_000
"""The same of a message that goes through Ray's object store."""
_STORED_FROM_BYTES = 100_000  # what is smaller travels in the call itself
_SPAN_BYTES, _STATE_BYTES = 80, 150  # of a timer, and of an environment's state besides its actions


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step that cross the network."""

    links: dict[str, Counter[Link]] = field(default_factory=dict)
    """By what they are: observations (with the results of the last actions), actions, trajectories, weights, gradients
    (and gathered parameters), control (messages' own, the driver's calls)."""
    messages: Counter[Link] = field(default_factory=Counter)
    """How many of the first four."""

    def total(self, kind: str) -> int:
        """Over all links."""
        return sum(self.links.get(kind, Counter()).values())

    def of_link(self, link: Link) -> int:
        """Of every kind."""
        return sum(found[link] for found in self.links.values())

    def busiest(self, *kinds: str) -> int:
        """The most that a node sends or receives, of some kinds or of all."""
        ends: Counter[tuple[str, int]] = Counter()
        for kind, found in self.links.items():
            for (source, target), count in found.items() if not kinds or kind in kinds else ():
                ends["sends", source] += count
                ends["receives", target] += count
        return max(ends.values(), default=0)

    def add(self, kind: str, source: int, target: int, num_bytes: float, messages: int = 1) -> None:
        """`messages` of together `num_bytes` of content."""
        if source == target or not messages:
            return
        self.links.setdefault(kind, Counter())[source, target] += round(num_bytes)
        if kind == "gradients":
            return
        own = STORED_MESSAGE_BYTES if num_bytes / messages >= _STORED_FROM_BYTES else MESSAGE_BYTES
        control = self.links.setdefault("control", Counter())
        control[source, target] += messages * own // 2
        control[target, source] += messages * own // 2
        if kind != "control":
            self.messages[source, target] += messages


def traffic(plan: Plan, found: Estimate) -> Traffic:
    """Of a config that has passed its checks. `found`: what `preview.memory.estimate` says of it, or of one that
    differs in its placement only. The driver is on node 0.

    Raises ValueError where sizes are not known before the environment is built.
    """
    config, seen = plan.config, observed(plan.config)
    if seen is None or plan.num_chunks is None or "policy" not in found.models:
        raise ValueError(f"what {config.env.task} sends is known once it is built: {'; '.join(found.unknown)}")
    num_envs, per_node = config.env.train.num_envs, slots(config.cluster)[1]
    env_nodes, rollout_nodes, actor_nodes = (
        tuple(process.slots[0] // per_node for process in plan.placements[name]) for name in ("env", "rollout", "actor")
    )
    layout = Layout(num_envs, len(env_nodes), config.rollout.pipeline_stage_num, rollout_nodes, actor_nodes)
    chunk, num_decisions = config.model.num_action_chunks, plan.num_chunks
    obs_bytes = 4 * seen.state_dim + sum(3 * height * width for height, width in seen.cameras.values()) + 8
    result_bytes = chunk * (4 + 1 + 1 + 1)
    limit = episode_steps(config, config.env.train)
    ended = num_decisions * chunk / limit if limit else 0.0  # episodes in a step, by their time limit
    step = Traffic()

    for piece in layout.pieces():
        env, rollout = env_nodes[piece.env_rank], rollout_nodes[piece.rollout_rank]
        rows = piece.stop - piece.start
        sent = rows * ((num_decisions + 1 + ended) * obs_bytes + num_decisions * result_bytes)
        step.add("observations", env, rollout, sent, num_decisions + 1)
        acted = rows * num_decisions * chunk * seen.action_dim * 4
        step.add("actions", rollout, env, acted, num_decisions)
        env_ids = layout.env_ids(piece.env_rank, piece.stage)[piece.start : piece.stop]
        for rank, owned in layout.actor_slices(env_ids):
            played = (owned.stop - owned.start) * num_decisions * found.sample_bytes
            step.add("trajectories", rollout, actor_nodes[rank], played)

    counts = found.models["policy"]
    element = 2 if rollout_dtype(config, slots(config.cluster)[0]) == "bf16" else 4
    synced = element * counts.trained + counts.buffer_bytes
    is_fused = {"actor", "rollout"} <= set(fused_roles(config))
    if not is_fused:
        senders = [actor_nodes[layout.weight_routes.sender(rank)] for rank in range(len(rollout_nodes))]
        for source, target in set(zip(senders, rollout_nodes, strict=True)):  # a node gets them once
            step.add("weights", source, target, synced, -(-synced // config.weight_sync.bucket_bytes))

    # collectives go around the ranks; what crosses is on the edges between nodes
    ranks, batch = len(actor_nodes), config.actor.global_batch_size
    updates = config.algorithm.update_epochs * -(-num_envs * num_decisions // batch)
    around = updates * 2 * 4 * counts.trained  # all-reduce
    if config.actor.strategy == "fsdp":
        element = 2 if config.actor.precision == "bf16" else 4
        passes = -(-batch // ranks // config.actor.micro_batch_size)
        # of every micro-batch parameters for both passes (those of the root stay between them), and gradients in fp32
        around = updates * passes * (element * (2 * counts.parameters - counts.root) + 4 * counts.trained)
        if recomputed_logprobs(config)[0]:
            scored = -(-num_envs * num_decisions // ranks // config.actor.micro_batch_size)
            around += scored * element * counts.parameters
        around += 4 * (counts.parameters if is_fused else counts.trained)  # whole tensors, for rollout workers
    for rank in range(ranks if ranks > 1 else 0):
        source, target = actor_nodes[rank], actor_nodes[(rank + 1) % ranks]
        step.add("gradients", source, target, around * (ranks - 1) / ranks)

    # what workers answer to the driver: what took how long, and where environments are, to go back there
    spans = layout.num_stages * num_decisions * _SPAN_BYTES
    history = min(num_decisions * chunk, limit or num_decisions * chunk) / 2 * seen.action_dim * 4 + _STATE_BYTES
    states = num_envs / len(env_nodes) * history * config.env.train.auto_reset
    for of_role, answer, calls in ((env_nodes, spans + states, 1), (rollout_nodes, spans, 2), (actor_nodes, 0, 4)):
        for node in of_role:
            step.add("control", node, 0, answer, calls)
    return step
