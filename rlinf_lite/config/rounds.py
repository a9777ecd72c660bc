"""The sections of imitation runs whose student plays in rounds: `data.dagger` and `data.recap`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlinf_lite.cards import Float, NonNegativeFloat, NonNegativeInt, PositiveInt, Section


class RoundsConfig(Section):
    rounds: NonNegativeInt = 0
    """Rounds in which the student plays; 0: none."""
    interval: PositiveInt = 500
    """Updates from one round to the next, and before the first."""
    episodes: PositiveInt = 100
    """Episodes of a round."""


class DaggerConfig(RoundsConfig):
    """DAgger (Ross et al. 2011, arXiv:1011.0686): in rounds of an imitation run the student plays, the environment's
    expert says at each decision what it would have done, and the student goes on with all of it."""


class RecapConfig(RoundsConfig):
    """RECAP (arXiv:2511.14759): in rounds of an imitation run the student plays by itself, a value network says which
    of all actions so far were better than usual, and the student goes on with all of them, told which."""

    failure_cost: NonNegativeFloat = 20.0
    """What a failure costs at its end, in env steps; a step costs 1."""
    horizon: PositiveInt = 10
    """Env steps that an advantage looks ahead, before the value network takes over."""
    positive_share: Annotated[Float, Field(gt=0, lt=1)] = 0.3
    """Share of each task's played frames that are labelled positive; demonstrations of an expert all are."""
    drop: Annotated[Float, Field(ge=0, le=1)] = 0.2
    """Probability with which the condition is left out of a training row's prompt."""
    value_updates: PositiveInt = 500
    """Updates of the value network, which begins from random weights in each round; of actor.global_batch_size frames
    each."""
    camera_size: PositiveInt = 32
    """Height and width that pictures are scaled to for the value network."""
