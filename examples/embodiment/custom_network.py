"""A custom policy that defines only its network; rlinf_lite.models.GaussianPolicy does the rest.

    python examples/embodiment/train_embodied_agent.py --config-name gym_pendulum_ppo_mlp \\
        model.id=examples.embodiment.custom_network:StatePolicy model.options.hidden_size=64

`python examples/embodiment/custom_network.py` checks it. For a complete policy, with pictures and its own distribution,
see custom_policy.py in examples/embodiment of rlinf_lite.
"""

import sys

from torch import Tensor, nn

from rlinf_lite.cards import PolicyCard, PositiveInt, Section
from rlinf_lite.config.schema import ModelConfig
from rlinf_lite.envs import EnvSpec
from rlinf_lite.models import GaussianPolicy, check_policy


class Card(PolicyCard):
    reads_state = True  # it reads only the state, so that environments without one are refused

    class Options(Section):
        hidden_size: PositiveInt = 128
        """Width of both layers of the trunk."""


class StatePolicy(GaussianPolicy):
    card = Card

    def build(self) -> None:
        assert self.spec.state_dim, "it reads the state, and the environment has none"
        size = self.options.hidden_size
        self.trunk = nn.Sequential(nn.Linear(self.spec.state_dim, size), nn.SiLU(), nn.Linear(size, size), nn.SiLU())
        self.actor, self.critic = nn.Linear(size, self.num_outputs), nn.Linear(size, self.num_values)

    def network(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(inputs["state"])  # pictures would be inputs, too, by camera
        return self.actor(hidden), self.critic(hidden)


if __name__ == "__main__":
    spec = EnvSpec(2, 6, {}, action_low=[-1, -1], action_high=[1, 1], max_episode_steps=50, has_instruction=False)
    problems = check_policy(StatePolicy, spec, ModelConfig(num_action_chunks=4))
    print("\n".join(problems) or "StatePolicy keeps the contract")
    sys.exit(1 if problems else 0)
