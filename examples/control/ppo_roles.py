"""The roles of ppo_job.py: those of language runs, and a trainer that passes them to a runner."""

from __future__ import annotations

from typing import Any

from rlinf_lite.config import ReasoningConfig
from rlinf_lite.jobs import BaseTrainer
from rlinf_lite.workers.reasoning import LanguageActor, LanguageCritic, LanguageReference, LanguageRollout, RewardWorker


class FromMapping:
    """Base that makes a ReasoningConfig of the mapping that a job gives to its roles."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(ReasoningConfig.model_validate(config))  # type: ignore[call-arg]  # of the other base


class Actor(FromMapping, LanguageActor): ...


class Rollout(FromMapping, LanguageRollout): ...


class Reward(FromMapping, RewardWorker): ...


class Reference(FromMapping, LanguageReference): ...


class Critic(FromMapping, LanguageCritic): ...


class Trainer(BaseTrainer):
    """Trains. A dead worker is handled as in every training run; a trainer that was started again continues from the
    newest checkpoint."""

    def init(self) -> None:
        resume = "auto" if self.restart_count else self.config["runner"]["resume"]
        runner = self.config["runner"] | {"resume": resume}
        self.cfg = ReasoningConfig.model_validate(self.config | {"runner": runner})

    def fit(self) -> None:
        from rlinf_lite.data.problems import open_problems
        from rlinf_lite.runners import AsyncReasoningRunner, ReasoningRunner, check_rewards, claim_run

        roles: dict[str, Any] = {role: group.workers for role, group in self.groups.items()}
        with claim_run(self.cfg) as claim:
            problems = open_problems(self.cfg)
            check_rewards(self.cfg, problems)
            runner_class = AsyncReasoningRunner if self.cfg.runner.mode == "async" else ReasoningRunner
            runner = runner_class(self.cfg, problems, **roles, supervisor=self.supervisor, claim=claim)
            runner.init_workers()
            result = runner.run()
        self.report_progress(result.completed_steps)
        print(result.describe(), flush=True)  # `rlinf-lite job logs NAME --role trainer`
