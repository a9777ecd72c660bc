from .actor import EmbodiedFSDPActor as EmbodiedFSDPActor
from .env import EnvWorker as EnvWorker
from .off_policy import OffPolicyActor as OffPolicyActor
from .off_policy import ReplayRolloutWorker as ReplayRolloutWorker
from .rollout import MultiStepRolloutWorker as MultiStepRolloutWorker
