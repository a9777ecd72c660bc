from .builder import RLJobBuilder as RLJobBuilder
from .ported import RLRoleType as RLRoleType
from .spec import JobSpecError as JobSpecError
from .trainer import BaseTrainer as BaseTrainer
from .trainer import trainer_invocation as trainer_invocation
from .workload import BaseWorkload as BaseWorkload
