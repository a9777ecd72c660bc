"""Checks on the rewards of a language run: whether responses can be scored, and which scorings failed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.data import DataProto
from rlinf_lite.data.problems import Problems
from rlinf_lite.data.prompts import PromptDataset
from rlinf_lite.metrics import Span
from rlinf_lite.rewards import RewardError, RewardScorer, UnknownSourceError
from rlinf_lite.rewards.scorer import Scoring

log = logging.getLogger(__name__)


class ScoringLog:
    """Collects the workers' reports on the columns that they computed: time spans, failed rewards, cut texts."""

    spans: list[Span]

    def __init__(self) -> None:
        self.spans, self._warned = [], False
        self.forget()

    def forget(self) -> None:
        """Reset the counts of rewards to 0."""
        self._num_failed = self._num_cut = 0

    def metrics(self, has_model: bool) -> dict[str, float]:
        """`rollout/*` metrics of the rewards so far. `has_model`: whether a reward model scores, which may cut
        texts."""
        cut = {"rollout/cut_rewards": float(self._num_cut)} if has_model else {}
        return {"rollout/failed_rewards": float(self._num_failed), **cut}

    def take(self, *results: DataProto) -> list[dict[str, Scoring]]:
        """Take the reports in the meta_info of these results. Returns their scorings, each by scorer."""
        scorings = []
        for result in results:
            for metrics in result.meta_info.pop("metrics", []):
                self.spans += metrics["spans"]
                self._num_cut += metrics.get("num_cut", 0)
                scorings.append(metrics.get("scorings", {}))
                for scoring in scorings[-1].values():
                    self._num_failed += scoring.num_failed
                    if scoring.num_failed and not self._warned:
                        log.warning("a reward could not be computed and is 0; the first of them:\n%s", scoring.why)
                        self._warned = True
        return scorings


def check_scored(scorings: Sequence[Mapping[str, Scoring]], problems: PromptDataset) -> None:
    """Raise RewardError if the rules, or the reward model, failed on every response of a batch that they had to score.
    `scorings`: of all parts of the batch, each by scorer."""
    for key in dict.fromkeys(key for part in scorings for key in part):
        parts = [part[key] for part in scorings if key in part]
        num_scored = sum(part.num_scored for part in parts)
        if num_scored and num_scored == sum(part.num_failed for part in parts):
            first = next(part for part in parts if part.num_failed)
            text = f"no response of a batch could be scored ({num_scored} of {num_scored} failed)"
            raise RewardError(f"{text}. The first, to {problems.place(first.row)}:\n{first.why}", key)


def check_rewards(cfg: ReasoningConfig, problems: Problems) -> None:
    """Raise RewardError or TokenizerError if responses could not be scored. Call it before anything is started."""
    scorer = RewardScorer(cfg.reward.fn, cfg.reward.timeout_s)
    try:
        for name, dataset in (("data.train_files", problems.train), ("data.val_files", problems.val)):
            if dataset is None:
                continue
            for source, row in dataset.data_sources.items() if cfg.reward.weights.rule else ():
                try:
                    scorer.check_sources([source])
                except UnknownSourceError as error:
                    raise UnknownSourceError(f"{row}: {error.text}", name) from None
            if cfg.reward.model is None and dataset.num_without_truth:
                what = f"{dataset.num_without_truth} rows have reward_model.style: model, and reward.model is null"
                raise RewardError(f"{what}. Name a reward model, or give the rows a ground truth", name)
    finally:
        scorer.close()
    if cfg.reward.model is not None:
        # imported here because it loads transformers, which is not needed yet without a reward model
        from rlinf_lite.workers.reasoning.reward_model import check_reward_model

        check_reward_model(cfg.reward)
