"""A rollout worker that reports its policy's config."""

from __future__ import annotations

from typing import Any

from rlinf_lite.workers import MultiStepRolloutWorker


class Saying(MultiStepRolloutWorker):
    def said(self) -> dict[str, Any]:
        return self.policy.config_dict()
