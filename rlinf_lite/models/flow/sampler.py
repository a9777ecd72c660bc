"""From noise to actions in K steps, and the likelihood of each step, for the ODE and the methods that explore.

At time t the network's velocity v gives estimates of the actions, x0 = x - t v, and of the noise, x1 = x + (1 - t) v. A
step to the earlier time s is a Gaussian whose mean is between the two:

    ODE          mean = (1 - s) x0 + s x1 = x - (t - s) v                              std = 0
    flow_sde     mean = (1 - s) x0 + (s - sigma^2 (t - s) / 2t) x1                     std = sigma sqrt(t - s)
                 sigma = a sqrt(t / (1 - t)): keeps the ODE's marginals as K grows     (1 - t is 1 - t_1 where t = 1)
    flow_cps     mean = (1 - s) x0 + s cos(pi a / 2) x1                                std = s sin(pi a / 2)
    flow_noise   mean as of the ODE                                                    std is the network's

Sources: piRL (arXiv 2510.25889) and ReinFlow (arXiv 2505.22094). Everything is float32: the noise of late steps is too
small compared with x for bf16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from rlinf_lite.models.flow.config import FlowConfig
from rlinf_lite.models.pictures import kept
from rlinf_lite.models.sampling import normal_noise, uniform_noise

if TYPE_CHECKING:
    from rlinf_lite.models.base import Mode

Velocity = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""A function of x [B, H, D] and t [B] that returns the velocity and the noise head's standard deviations, or None."""


@partial(kept, most=None)
def times(num_steps: int, clock: Literal["openpi", "lerobot"], device: torch.device | str = "cpu") -> Tensor:
    """Times float32 [K + 1] from 1 to 0. openpi's clock adds -1/K K times; time embeddings have periods down to 0.004,
    so its rounding matters."""
    if clock == "lerobot":
        return torch.tensor([1.0 - k / num_steps for k in range(num_steps + 1)], dtype=torch.float32, device=device)
    step, found = np.float32(-1.0 / num_steps), [np.float32(1.0)]
    for _ in range(num_steps - 1):
        found.append(np.float32(found[-1] + step))
    return torch.tensor(np.array([*found, 0.0], dtype=np.float32), device=device)


def step_moments(
    method: str, x: Tensor, v: Tensor, t: Tensor, s: Tensor, level: Tensor, second: Tensor, std: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, both [B, H, D], of the step of `x` [B, H, D] from `t` [B] to `s` [B].

    `level` [B] is a in the formulas; 0 gives the ODE's step. `second` is t_1. `std`: for flow_noise, the network's.
    """
    t, s, level = (part[:, None, None] for part in (t, s, level))
    step, x0, x1 = t - s, x - t * v, x + (1 - t) * v
    if method == "flow_noise":
        assert std is not None
        # equal to x - step v, but rounded as in RLinf; otherwise log-probabilities differ from RLinf's by 3e-6
        return (1 - s) * x0 + s * x1, std * (level > 0)
    if method == "flow_cps":
        angle = 0.5 * math.pi * level
        return (1 - s) * x0 + s * angle.cos() * x1, (s * angle.sin()).expand_as(x)
    assert method == "flow_sde", method
    variance = level.square() * t / (1 - torch.where(t == 1, second, t))  # sigma squared
    mean = x - step * v - variance * step / (2 * t) * x1
    return mean, (variance * step).sqrt().expand_as(x)


def log_density(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log density of each element; 0, with gradients 0, where `std` is 0."""
    certain = std == 0
    safe = torch.where(certain, 1.0, std)
    density = -0.5 * ((x - mean) / safe).square() - safe.log() - 0.5 * math.log(2 * math.pi)
    return torch.where(certain, 0.0, density)


def entropy_of(std: Tensor) -> Tensor:
    """Entropy of each element; 0 where `std` is 0."""
    certain = std == 0
    return torch.where(certain, 0.0, 0.5 * math.log(2 * math.pi * math.e) + torch.where(certain, 1.0, std).log())


def velocity_error(velocity: Velocity, actions: Tensor, noise: Tensor, time: Tensor) -> Tensor:
    """Loss of imitation, [B, H, D]: (v - (noise - actions))^2, where v is the velocity at time `time` [B]."""
    t = time[:, None, None]
    v, _ = velocity(t * noise + (1 - t) * actions, time)
    return (v - (noise - actions)).square()


def head_std(raw: Tensor, low: float, high: float) -> Tensor:
    """Standard deviations in [low, high] from the noise head's output, whose tanh interpolates the log variance."""
    bounds = 2 * math.log(low), 2 * math.log(high)
    logvar = bounds[0] + (bounds[1] - bounds[0]) * (torch.tanh(raw) + 1) / 2
    return torch.exp(0.5 * logvar)


@dataclass
class Chain:
    """The result of acting, batch first; `visited` and `step` are for training."""

    actions: Tensor  # [B, H, D]: x at t = 0
    visited: Tensor  # [B, 2, H, D]: x_k and x_(k + 1); flow_noise: [B, K + 1, H, D], all
    step: Tensor  # int64 [B]: k; flow_noise: 0
    logprobs: Tensor  # [B, H, D]


@dataclass(frozen=True)
class Sampler:
    """The steps of one policy. Velocities are evaluated at the times of `clock` with `num_steps` (K) steps."""

    num_steps: int
    clock: Literal["openpi", "lerobot"]
    method: Literal["flow_sde", "flow_noise", "flow_cps"]
    level: float
    ignore_last: bool
    joint: Literal["sum", "mean"]

    def __post_init__(self) -> None:
        if self.method == "flow_cps" and self.num_steps == 1:
            raise ValueError("num_steps is 1, and flow_cps has no noise in its last step: nothing would train. Set 2")

    @classmethod
    def of(cls, cfg: FlowConfig) -> Sampler:
        return cls(cfg.num_steps, cfg.layout, cfg.method, cfg.noise_level, cfg.ignore_last, cfg.joint)

    @torch.no_grad()
    def ode(self, velocity: Velocity, x: Tensor) -> Tensor:
        """Actions [B, H, D] from noise `x` [B, H, D], by the ODE."""
        t = times(self.num_steps, self.clock, x.device)
        step = 1.0 / self.num_steps
        for k in range(self.num_steps):
            x = x - step * velocity(x, t[k].expand(len(x)))[0]
        return x

    def act(
        self,
        velocity: Velocity,
        keys: np.ndarray,
        shape: tuple[int, int],
        mode: Mode,
        device: torch.device,
        start: Tensor | None = None,
    ) -> Chain:
        """`draw` with each row's own key, then `follow`; `shape` is (H, D)."""
        return self.follow(velocity, *self.draw(keys, shape, device, start), mode)

    def draw(
        self, keys: np.ndarray, shape: tuple[int, int], device: torch.device, start: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`draw_noise`, with `start` [B, H, D] in place of the first noise if it is given, and `draw_steps`."""
        noise = self.draw_noise(keys, shape).to(device)
        if start is not None:
            noise[:, 0] = start.to(device)
        return noise, self.draw_steps(keys).to(device)

    def follow(self, velocity: Velocity, noise: Tensor, chosen: Tensor, mode: Mode) -> Chain:
        """Act from drawn noise. train: `explore`. sampled: the ODE from the noise; greedy: the ODE from 0, the mean of
        the noise. These two return nothing to train on."""
        if mode == "train":
            return self.explore(velocity, noise, chosen)
        first = torch.zeros_like(noise[:, 0]) if mode == "greedy" else noise[:, 0]
        return Chain(self.ode(velocity, first), noise[:, :0], torch.zeros_like(chosen), torch.zeros_like(first))

    def draw_imitation(self, keys: np.ndarray, shape: tuple[int, int]) -> dict[str, Tensor]:
        """`noise` [B, *shape] and `time` [B] for `velocity_error`; the time is 0.999 Beta(1.5, 1) + 0.001."""
        time = torch.from_numpy(0.999 * uniform_noise(keys, 1)[:, 0] ** (1 / 1.5) + 0.001).float()
        return {"noise": self.draw_noise(keys, shape)[:, 0], "time": time}

    def draw_steps(self, keys: np.ndarray) -> Tensor:
        """The step that each row samples, int64 [B], uniform, by its own key. Never the last step of flow_cps, which
        has no noise, nor any last step with `ignore_last`."""
        count = self.num_steps - ((self.ignore_last or self.method == "flow_cps") and self.num_steps > 1)
        return torch.from_numpy(np.minimum((uniform_noise(keys, 1)[:, 0] * count).astype(np.int64), count - 1))

    def draw_noise(self, keys: np.ndarray, shape: tuple[int, int]) -> Tensor:
        """Noise float32 [B, 2, H, D], from each row's own key: the start, then the noise of the sampled step. With
        flow_noise, [B, K + 1, H, D]: the start, then the noise of every step."""
        count = self.num_steps + 1 if self.method == "flow_noise" else 2
        with np.errstate(over="ignore"):
            noise = normal_noise(keys + np.uint64(1), count * shape[0] * shape[1])
        return torch.from_numpy(noise).view(len(keys), count, *shape)

    @torch.no_grad()
    def explore(self, velocity: Velocity, noise: Tensor, chosen: Tensor) -> Chain:
        """Act with the noise from `draw_noise`. A row is sampled at step `chosen` [B] and follows the ODE at others;
        with flow_noise every step is sampled."""
        joint, x, chain, logprobs = self.method == "flow_noise", noise[:, 0], [noise[:, 0]], []
        for k in range(self.num_steps):
            steps = torch.full_like(chosen, k)
            sampled = torch.ones_like(chosen, dtype=torch.bool) if joint else chosen == k
            mean, std = self._moments(velocity, x, steps, sampled)
            x = mean + std * noise[:, k + 1 if joint else 1]
            chain.append(x)
            logprobs.append(log_density(x, mean, std))
        visited, each = torch.stack(chain, dim=1), torch.stack(logprobs, dim=1)
        if joint:
            return Chain(x, visited, torch.zeros_like(chosen), self._joined(noise[:, 0], each))
        rows = torch.arange(len(x), device=x.device)
        return Chain(
            x, torch.stack([visited[rows, chosen], visited[rows, chosen + 1]], dim=1), chosen, each[rows, chosen]
        )

    def score(self, velocity: Velocity, visited: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [B, H, D] of a `Chain`, with gradients: one pass, or K with flow_noise.

        The entropy of flow_sde and flow_cps is reported as 0: their noise does not depend on the network.
        """
        if self.method != "flow_noise":
            mean, std = self._moments(velocity, visited[:, 0], step, torch.ones_like(step, dtype=torch.bool))
            return log_density(visited[:, 1], mean, std), torch.zeros_like(mean)
        logprobs, entropies = [], []
        for k in range(self.num_steps):
            every = torch.full_like(step, k)
            mean, std = self._moments(velocity, visited[:, k], every, torch.ones_like(step, dtype=torch.bool))
            logprobs.append(log_density(visited[:, k + 1], mean, std))
            entropies.append(entropy_of(std))
        first = visited[:, 0]
        own = self._joined(first, torch.stack(logprobs, dim=1))
        every_entropy = torch.stack(entropies, dim=1).sum(1)
        if self.joint == "mean":
            every_entropy = (every_entropy + entropy_of(torch.ones_like(first))) / (self.num_steps + 1)
        return own, every_entropy

    def _moments(self, velocity: Velocity, x: Tensor, k: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
        """`step_moments` of step `k` [B] of each row; those of the ODE in rows that are not `sampled` [B]."""
        at = times(self.num_steps, self.clock, x.device)
        t, s = at[k], at[k + 1]
        v, std = velocity(x, t)
        level = torch.where(sampled, self.level, 0.0)
        return step_moments(self.method, x, v, t, s, level, at[1], std)

    def _joined(self, first: Tensor, logprobs: Tensor) -> Tensor:
        """Log-probability [B, H, D] of all K steps from theirs [B, K, H, D]. The density of the first noise cancels in
        ratios; it counts only in RLinf's average (`joint` mean)."""
        total = logprobs.sum(1)
        if self.joint == "sum":
            return total
        zero, one = torch.zeros_like(first), torch.ones_like(first)
        return (total + log_density(first, zero, one)) / (self.num_steps + 1)
