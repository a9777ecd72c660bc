"""The reference: the policy that the run began with."""

from __future__ import annotations

from rlinf_lite.data import DataProto
from rlinf_lite.scheduler import Dispatch, register
from rlinf_lite.workers.reasoning.base import LanguageModelWorker, build_model


class LanguageReference(LanguageModelWorker):
    """Scores responses under weights that never change."""

    def init(self, directory: str) -> None:
        """Load the policy in `directory`."""
        model = build_model(self.cfg, directory, self.cfg.model.attn_implementation)
        self._take(model.requires_grad_(False), "reference")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """`ref_logprobs` [B, R] of the responses."""
        with self.timer("log-probs"):
            columns = self._columns(data, lambda rows: {"ref_logprobs": self._score(rows)[0]})
        return DataProto(columns, meta_info={"metrics": [{"spans": self.pop_spans()}]})
