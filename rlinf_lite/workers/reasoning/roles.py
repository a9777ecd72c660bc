"""The groups of a reasoning run."""

from __future__ import annotations

from rlinf_lite.algorithms import needs_values
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.roles import fused_roles
from rlinf_lite.scheduler import Cluster, HybridComponentPlacement, Worker, WorkerGroup, fuse
from rlinf_lite.workers.reasoning.actor import LanguageActor
from rlinf_lite.workers.reasoning.critic import LanguageCritic
from rlinf_lite.workers.reasoning.reference import LanguageReference
from rlinf_lite.workers.reasoning.reward import RewardWorker
from rlinf_lite.workers.reasoning.rollout import LanguageRollout


def launch_roles(cfg: ReasoningConfig, cluster: Cluster, placement: HybridComponentPlacement) -> dict[str, WorkerGroup]:
    """Start actor, rollout and reward, and reference and critic where the algorithm needs them; by role.

    Roles that `cluster.fuse` names share processes.
    """
    classes: dict[str, type[Worker]] = {"actor": LanguageActor, "rollout": LanguageRollout, "reward": RewardWorker}
    if cfg.algorithm.kl.place != "none":
        classes["reference"] = LanguageReference
    if needs_values(cfg.algorithm.adv_type):
        classes["critic"] = LanguageCritic
    groups = {role: cls.create_group(cfg) for role, cls in classes.items()}
    together = [role for role in classes if role in fused_roles(cfg)]  # the actor first
    with cluster.launching():
        if together:
            fuse(**{role: groups[role] for role in together}).launch(cluster, placement.get_strategy(together[0]))
        for role, group in groups.items():
            if role not in together:
                group.launch(cluster, placement_strategy=placement.get_strategy(role), name=role)
    return groups
