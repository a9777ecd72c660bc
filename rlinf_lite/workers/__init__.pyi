from .actor import EmbodiedFSDPActor as EmbodiedFSDPActor
from .env import EnvWorker as EnvWorker
from .rollout import MultiStepRolloutWorker as MultiStepRolloutWorker
