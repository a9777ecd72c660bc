from .entry import supervise as supervise
from .supervisor import JobFailedError as JobFailedError
from .supervisor import Supervisor as Supervisor
