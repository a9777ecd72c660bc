"""A user's policy with weights in several places: a tied pair of layers, and a block that is used twice."""

from torch import Tensor, nn

from rlinf_lite.models import GaussianPolicy


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(size, size), nn.LayerNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x)).tanh()


class TiedPolicy(GaussianPolicy):
    def build(self) -> None:
        size = 12
        assert self.spec.state_dim
        self.embed = nn.Linear(self.spec.state_dim, size)
        self.first, self.last = Block(size), Block(size)
        self.second = self.first
        self.last.linear.weight = self.first.linear.weight  # in two units
        self.decode = nn.Linear(size, self.spec.state_dim)
        self.back = nn.Linear(self.spec.state_dim, size)
        self.back.weight = self.embed.weight
        self.actor, self.critic = nn.Linear(size, self.num_outputs), nn.Linear(size, self.num_values)

    def fsdp_units(self) -> list[nn.Module]:
        return [self.first, self.second, self.last, self.decode]

    def network(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        hidden = self.last(self.second(self.first(self.embed(inputs["state"]))))
        hidden = self.back(self.decode(hidden).tanh())
        return self.actor(hidden), self.critic(hidden)
