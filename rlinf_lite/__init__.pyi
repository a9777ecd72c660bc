from .config import load_config as load_config
from .envs import make_env as make_env
from .launch import evaluate as evaluate
from .launch import train as train
from .metrics import EvalSummary as EvalSummary
from .models import ActionQueue as ActionQueue
from .models import load_policy as load_policy
from .runners import RunResult as RunResult

__version__: str
