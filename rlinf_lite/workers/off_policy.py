"""The workers of off-policy runs: rollout workers that send transitions, and an actor that learns from a replay buffer.

The order of a step in the actor, top to bottom:

    recv_rollout_batch    the step's decisions of this actor's environments
    store_transitions     into the replay buffer
    run_training          `off_policy.updates_per_step` times: a batch by (seed, step, number); an update of the critics
                          and the temperature; one of the policy; the target critics follow
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_lite.algorithms.off_policy import ActorInputs, CriticInputs, OffPolicyLosses, temperature_loss
from rlinf_lite.copies import to_device
from rlinf_lite.envs import EnvSpec
from rlinf_lite.envs.observations import take_rows
from rlinf_lite.models import Policy
from rlinf_lite.models.critics import Critics, chosen_shape
from rlinf_lite.models.sampling import noise_keys, normal_noise, uniform_noise
from rlinf_lite.registry import OFF_POLICY, off_policy_needs
from rlinf_lite.training.learner import Learner
from rlinf_lite.training.metrics import MetricSums
from rlinf_lite.training.replay import (
    DemonstratedTransitions,
    ReplayBuffer,
    ReplayError,
    Transitions,
    concat,
    drawn,
    flags_of,
)
from rlinf_lite.workers.actor import EmbodiedFSDPActor
from rlinf_lite.workers.layout import Layout
from rlinf_lite.workers.messages import ActionMessage, ObsMessage
from rlinf_lite.workers.rollout import MultiStepRolloutWorker
from rlinf_lite.workers.transitions import Played, TransitionBuilder

DEMONSTRATIONS = "demonstrations.json"
"""The file in the replay buffer's directory that names the decoded frames of the demonstrations."""
_STATE = "replay.json"
_IMITATED = ("demonstrations", "successes")


class ReplayRolloutWorker(MultiStepRolloutWorker):
    """Acts as its base does, and sends the actors observations and actions instead of likelihoods and values."""

    spec: EnvSpec

    def init(self, layout: Layout, spec: EnvSpec) -> Any:
        self.spec = spec
        return super().init(layout, spec)

    def _builder(self, env_ids: np.ndarray) -> TransitionBuilder:
        return TransitionBuilder(env_ids)

    def _serve(self, env_rank: int, builder: TransitionBuilder, message: ObsMessage) -> None:
        result = message.result
        if result is not None:
            builder.add_result(result)
            if result.final_obs is not None:
                builder.add_following(result.final_rows, self.policy.sft_inputs(result.final_obs))
        if not message.last:
            actions = self._decide(env_rank, message)
            builder.add_decision(self.policy.sft_inputs(message.obs), actions, self.version)
            return
        running = builder.running_rows()
        builder.add_following(running, self.policy.sft_inputs(take_rows(message.obs, running)))
        played, step = builder.finish(), (message.decision - message.t) // self.num_chunks
        for actor_rank, rows in self.layout.actor_slices(builder.env_ids):
            self.send(played.rows(rows), "actor", actor_rank, tag=step)

    def _decide(self, env_rank: int, message: ObsMessage) -> Tensor:
        """Answer with actions of the policy, or with uniform ones in the first steps. Returns what was chosen,
        [B, C, D] or [B, 1, chosen_dim]."""
        step = (message.decision - message.t) // self.num_chunks
        if step >= self.cfg.off_policy.random_steps:
            output = self._answer(env_rank, message, self.cfg.runner.seed, "train")
            chosen = output.actions if self.policy.chosen_dim is None else output.forward_inputs["chosen"]
            return chosen.float().cpu()
        low, high = np.array(self.spec.action_low), np.array(self.spec.action_high)
        keys = noise_keys(self.cfg.runner.seed, message.noise_ids, message.decision)
        uniform = uniform_noise(keys, self.policy.num_action_chunks * len(low)).reshape(len(keys), -1, len(low))
        actions = (low + (high - low) * uniform).astype(np.float32)
        self.send(ActionMessage(message.stage, message.start, actions), "env", env_rank)
        return torch.from_numpy(actions)


class OffPolicyActor(EmbodiedFSDPActor):
    """Trains the policy and its critics on transitions. Each rank holds those of its own environments, and reads its
    share of the demonstrations; batches, noise and losses do not depend on the number of ranks."""

    replay: ReplayBuffer
    critics: Critics
    critic_learner: Learner
    demonstrated: DemonstratedTransitions | None
    received: list[Played]
    """Decisions of this rank's environments that are not in the buffer yet."""

    def init(self, layout: Layout, spec: EnvSpec, total_steps: int, directory: str = "") -> int:
        """Build policy, critics, optimizers and the replay buffer in `directory`; returns the number of parameters."""
        cfg, own = self.cfg, self.cfg.off_policy
        num_parameters = super().init(layout, spec, total_steps)
        self._chosen = chosen_shape(self.policy)
        self.critics = Critics.of(self.policy, own)
        self.critics.log_temperature.requires_grad_(own.learn_temperature)
        self.critic_learner = Learner(self, self.critics, cfg, "critic")
        lr = cfg.actor.optim.lr if cfg.actor.optim.value_lr is None else cfg.actor.optim.value_lr
        self.critic_learner.start_training(cfg.actor.optim.model_copy(update={"lr": lr}), total_steps)
        self.losses: OffPolicyLosses = OFF_POLICY.get(own.algorithm)
        self.needs = off_policy_needs(own.algorithm)
        self.target_entropy = -float(math.prod(self._chosen)) if own.target_entropy is None else own.target_entropy
        low, high = torch.tensor(spec.action_low), torch.tensor(spec.action_high)
        if self.policy.chosen_dim is not None:  # in -1 to 1 already
            low, high = -torch.ones_like(low[:1]), torch.ones_like(high[:1])
        self._offset, self._scale = ((high + low) / 2).to(self.device), ((high - low) / 2).to(self.device)
        num_chunks = cfg.rollout.num_chunks or -(-spec.max_episode_steps // cfg.model.num_action_chunks)
        rows = slice(self.rank * layout.rows_per_actor, (self.rank + 1) * layout.rows_per_actor)
        self.replay = ReplayBuffer(Path(directory), layout.num_envs, rows, num_chunks, cfg.replay.capacity, own.gamma)
        self.demonstrated = None
        return num_parameters + self.critic_learner.num_parameters

    def recv_rollout_batch(self, step: int | None = None) -> None:
        """Receive the decisions of `step` of this actor's environments."""
        assert step is not None, "an off-policy actor needs the number of the step"
        self.received = []
        while sum(len(part.env_ids) for part in self.received) < self.layout.rows_per_actor:
            _, part = self.recv_any("rollout", self.cfg.runner.phase_timeout_s, step)
            self.received.append(part)

    def store_transitions(self, step: int) -> dict[str, float]:
        """Put the decisions of `step` into the replay buffer. Returns metrics, the same on every rank."""
        with self.timer("store transitions"):
            block, versions = Played.concat(self.received), torch.cat([part.versions for part in self.received])
            self.received = []
            if not self.cfg.env.train.auto_reset:  # the next step begins new episodes: no outcome of theirs is of these
                block.ended[:, -1] = True
            flags = self._all_gather(torch.from_numpy(flags_of(block))).numpy()
            rewards = self._all_gather(block.rewards)[self._all_gather(block.mask)]
            metrics = {"rollout/rewards": float(rewards.double().mean())} if len(rewards) else {}
            if self.cfg.runner.mode == "async":
                age = (self.version - self._all_gather(versions)).double()
                metrics |= {"async/staleness_mean": float(age.mean()), "async/staleness_max": float(age.max())}
            self.replay.add(step, block, flags)  # last, as one rank's disk may be full
        return metrics

    def run_training(self, step: int | None = None) -> dict[str, Any]:
        """Train `updates_per_step` times on batches from the replay buffer. Returns `train/*` and `replay/*` metrics,
        the same on every rank, and spans."""
        step, own, sums = self.version if step is None else step, self.cfg.off_policy, MetricSums()
        pools, shares = self._pool_sizes(), self.cfg.replay.shares
        # a buffer that is full has held more
        enough = pools["online"] >= self.cfg.replay.min_size or self.replay.first > 0
        enough = enough and step >= own.random_steps and any(pools[name] for name, share in shares.items() if share)
        self.learner.to_device(with_optimizer=True)  # critics' updates act with it
        with self.timer("train"):
            for learner in (self.learner, self.critic_learner):
                learner.set_learning_rate(step)
            for number in range(own.updates_per_step) if enough else ():
                self._update(step, number, pools, sums)
        self.version += 1
        found = self.learner.result(sums)
        found["metrics"] |= {f"replay/{name}": float(size) for name, size in pools.items()}
        found["metrics"]["train/actor/temperature"] = float(self.critics.log_temperature.detach().exp())
        return found

    def forget_replay(self, before: int) -> None:
        """Delete transitions of steps before `before`, which no checkpoint goes back to."""
        self.replay.forget(before)

    def save_checkpoint(self, directory: str) -> None:
        super().save_checkpoint(directory)
        training = Path(directory) / "training_state"
        self.critic_learner.save(training / "critics" / "model", training / "critics")
        state = self.replay.state(self.version)
        sums = torch.tensor([state["checksum"][str(row)] for row in self._own_rows()], dtype=torch.int64)
        state["checksum"] = dict(
            zip(map(str, range(self.layout.num_envs)), self._all_gather(sums).tolist(), strict=True)
        )
        if self.rank == 0:
            (training / _STATE).write_text(json.dumps(state))

    def load_checkpoint(self, directory: str, version: int) -> None:
        super().load_checkpoint(directory, version)
        training = Path(directory) / "training_state"
        self.critic_learner.load(training / "critics" / "model", training / "critics")
        try:
            state = json.loads((training / _STATE).read_text())
        except OSError as error:
            raise ReplayError(f"{directory} has no {_STATE}: it is of no off-policy run") from error
        flags = torch.from_numpy(self.replay.load(state)).swapaxes(0, 1)  # [B, steps, T]
        if flags.shape[1]:  # ranks exchange no empty tensors
            flags = self._all_gather(flags)
        self.replay.go_back(int(state["first"]), flags.swapaxes(0, 1).numpy())

    def _own_rows(self) -> range:
        return range(self.rank * self.layout.rows_per_actor, (self.rank + 1) * self.layout.rows_per_actor)

    def _pool_sizes(self) -> dict[str, int]:
        """The number of transitions in each pool that batches draw from, and of all that were played."""
        shares = self.cfg.replay.shares
        wanted = list(dict.fromkeys(["online", *(name for name, share in shares.items() if share)]))
        sizes: dict[str, int] = {name: len(self.replay.pool(name)) for name in wanted if name != "demonstrations"}
        if "demonstrations" in wanted:
            if self.demonstrated is None:
                frames = json.loads((self.replay.directory / DEMONSTRATIONS).read_text())["frames"]
                ignores = self.cfg.env.train.ignore_terminations
                chunk, gamma = self.cfg.model.num_action_chunks, self.cfg.off_policy.gamma
                self.demonstrated = DemonstratedTransitions(Path(frames), chunk, gamma, self.policy, ignores)
            sizes["demonstrations"] = len(self.demonstrated)
        return sizes

    def _update(self, step: int, number: int, pools: dict[str, int], sums: MetricSums) -> None:
        """One update of critics and temperature, and, every `actor_interval`, one of the policy."""
        own, cfg = self.cfg.off_policy, self.cfg
        counted = step * own.updates_per_step + number
        shares = {str(name): share for name, share in cfg.replay.shares.items()}
        chosen = drawn(pools, cfg.actor.global_batch_size, shares, [cfg.runner.seed, step, number])
        batch, places, counts = self._read(chosen)
        subset = np.random.default_rng([cfg.runner.seed, step, number, 1]).permutation(own.num_critics)
        acts = counted % own.actor_interval == 0
        temperature = self.critics.log_temperature.detach().exp()
        noise = [self._noise(counted, places, which) for which in (0, 1)]
        if acts and self.needs.imitation:
            imitated = self._imitated(chosen, batch, places)
            num_imitated = self.learner.over_ranks(imitated.sum().double()[None] * counts).clamp(min=1)
        where = f"step {step}, update {number}"
        parts = self._parts(len(places))

        def samples() -> str:
            return f"transitions {np.concatenate(list(chosen.values())).tolist()}"

        def critic_loss(critics: Critics, part: np.ndarray, found: MetricSums) -> Tensor:
            some, index = self._to_device(batch, part), torch.from_numpy(part)
            with self.critic_learner.autocast():
                with torch.no_grad():
                    following, next_logprobs = self._sampled(some.next_inputs, noise[1][index])
                    next_q = critics.target_values(some.next_inputs, following, subset[: own.target_subset].tolist())
                q = critics(some.inputs, self._normalized(some.actions), self._seen(some.mask))

            def q_policy() -> Tensor:
                with self.critic_learner.autocast():
                    with torch.no_grad():
                        now, _ = self._sampled(some.inputs, noise[0][index])
                    return critics(some.inputs, now, self._all_executed(now)).float()

            of_next = next_q.float(), next_logprobs
            inputs = CriticInputs(q.float(), some.rewards, some.discounts, *of_next, temperature, q_policy)
            loss, metrics = self.losses.critic(inputs, own)
            if acts and own.learn_temperature:
                with torch.no_grad(), self.critic_learner.autocast():
                    _, logprobs = self._sampled(some.inputs, noise[0][index])
                loss = loss + temperature_loss(critics.log_temperature, logprobs, self.target_entropy)
            found.add({f"train/critic/{name}": x.mean() for name, x in metrics.items()}, weight=len(part) * counts)
            return self._mean(loss) * counts

        def actor_loss(policy: Policy, part: np.ndarray, found: MetricSums) -> Tensor:
            some, index = self._to_device(batch, part), torch.from_numpy(part)
            with self.learner.autocast():
                actions, logprobs = self._sampled(some.inputs, noise[0][index])
                q = self.critics(some.inputs, actions, self._all_executed(actions)).float()
                imitation = None
                if self.needs.imitation:
                    mask = imitated[index]
                    imitation = policy.sft_loss({**some.inputs, "actions": some.actions, "mask": mask.to(self.device)})
                    # the mean over this part's actions, with the weight that they have among those of the whole batch
                    imitation = imitation * float(mask.sum() / num_imitated * cfg.actor.global_batch_size / len(part))
            loss, metrics = self.losses.actor(ActorInputs(logprobs, q, temperature, imitation), own)
            found.add({f"train/actor/{name}": x.mean() for name, x in metrics.items()}, weight=len(part) * counts)
            return self._mean(loss) * counts

        self.critic_learner.update(parts, critic_loss, sums, where, samples)
        if acts:
            trained = [parameter for parameter in self.critics.parameters() if parameter.requires_grad]
            for parameter in trained:
                parameter.requires_grad_(False)
            try:
                self.learner.update(parts, actor_loss, sums, where, samples)
            finally:
                for parameter in trained:
                    parameter.requires_grad_(True)
        self.critics.follow(own.tau)

    def _imitated(self, chosen: dict[str, Any], batch: Transitions, places: np.ndarray) -> Tensor:
        """The actions [b, C] of this rank's transitions that are imitated: executed ones of demonstrations and of
        successes; of all where batches draw from neither pool."""
        good = np.concatenate([np.full(len(x), name in _IMITATED) for name, x in chosen.items()])[places]
        return batch.mask & torch.from_numpy(good if set(chosen) & set(_IMITATED) else np.ones_like(good))[:, None]

    def _read(self, chosen: dict[str, Any]) -> tuple[Transitions, np.ndarray, int]:
        """This rank's transitions of a batch, their places in it, and whether they count: 0 where a rank has none, so
        that it takes part with a decision that does not."""
        parts, places, before = list[Transitions](), list[np.ndarray](), 0
        for name, positions in chosen.items():
            in_batch = before + np.arange(len(positions))
            if name == "demonstrations":
                assert self.demonstrated is not None
                mine = in_batch % self.world_size == self.rank
                found = self.demonstrated.read(positions[mine]) if mine.any() else None
            else:
                at = self.replay.pool(name)[positions]
                mine = self.replay.owned(at)
                found = self.replay.read(at[mine]) if mine.any() else None
            if found is not None:
                parts.append(found)
                places.append(in_batch[mine])
            before += len(positions)
        if not parts:
            own = ((self.replay.end - 1) * self.layout.num_envs + self._own_rows().start) * self.replay.num_decisions
            return self.replay.read(np.array([own])), np.zeros(1, np.int64), 0
        return concat(parts), np.concatenate(places), 1

    def _parts(self, num_own: int) -> list[np.ndarray]:
        return np.array_split(np.arange(num_own), -(-num_own // self.cfg.actor.micro_batch_size))

    def _mean(self, loss: Tensor) -> Tensor:
        """This part's share of the mean over the batch, times the ranks that gradients are averaged over."""
        return loss.sum() * (self.world_size / self.cfg.actor.global_batch_size)

    def _noise(self, update: int, places: np.ndarray, which: int) -> Tensor:
        """Standard normal noise [b, C, D] for the transitions at these places of the batch of an update."""
        keys = noise_keys(self.cfg.runner.seed + 1, places * 2 + which, update)
        return torch.from_numpy(normal_noise(keys, math.prod(self._chosen))).view(-1, *self._chosen)

    def _sampled(self, inputs: dict[str, Tensor], noise: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised actions [b, C, D] of the policy, and their log-probabilities [b]."""
        actions, logprobs = self.policy.sample_with_logprob(inputs, noise.to(self.device))
        return actions, logprobs.flatten(1).sum(1)

    def _seen(self, mask: Tensor) -> Tensor:
        """The mask [b, C] of what critics see: of a decision's choice as a whole, if that is not its actions."""
        return mask if self.policy.chosen_dim is None else torch.ones_like(mask[:, :1])

    def _normalized(self, actions: Tensor) -> Tensor:
        return ((actions - self._offset) / self._scale).clamp(-1.0, 1.0)

    def _all_executed(self, actions: Tensor) -> Tensor:
        return torch.ones(actions.shape[:2], dtype=torch.bool, device=actions.device)

    def _to_device(self, batch: Transitions, part: np.ndarray) -> Transitions:
        index = torch.from_numpy(part)

        def moved(x: Tensor) -> Tensor:
            return to_device(x[index], self.device)

        return Transitions(
            inputs={name: moved(x) for name, x in batch.inputs.items()},
            actions=moved(batch.actions),
            mask=moved(batch.mask),
            rewards=moved(batch.rewards),
            discounts=moved(batch.discounts),
            next_inputs={name: moved(x) for name, x in batch.next_inputs.items()},
        )
