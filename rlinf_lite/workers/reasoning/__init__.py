"""The worker classes of reinforcement learning for language models, one per role."""

from __future__ import annotations

from rlinf_lite.config.names import roles_of
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.scheduler import Cluster, HybridComponentPlacement, Worker, WorkerGroup
from rlinf_lite.workers.reasoning.actor import LanguageActor, LanguageReference
from rlinf_lite.workers.reasoning.critic import LanguageCritic
from rlinf_lite.workers.reasoning.reward import RewardWorker
from rlinf_lite.workers.reasoning.rollout import LanguageRollout

__all__ = ["LanguageActor", "LanguageCritic", "LanguageReference", "LanguageRollout", "RewardWorker", "launch_roles"]
CLASSES: dict[str, type[Worker]] = {
    "actor": LanguageActor,
    "rollout": LanguageRollout,
    "reward": RewardWorker,
    "reference": LanguageReference,
    "critic": LanguageCritic,
}


def launch_roles(cfg: ReasoningConfig, cluster: Cluster, placement: HybridComponentPlacement) -> dict[str, WorkerGroup]:
    """Start the groups actor, rollout and reward, and reference and critic if the algorithm needs them. Returns them by
    role.

    Roles that `cluster.fuse` names share processes.
    """
    return cluster.launch(placement, **{role: CLASSES[role].create_group(cfg) for role in roles_of(cfg)})
