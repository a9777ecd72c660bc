from .supervisor import JobFailedError as JobFailedError
from .supervisor import Supervisor as Supervisor
from .supervisor import supervise as supervise
