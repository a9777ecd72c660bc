"""Loggers, progress, timelines and evaluation summaries. Needs neither torch nor ray nor a simulator."""

from rlinf_lite.metrics.evaluation import EvalSummary, TaskSummary, env_metrics, summarize_episodes
from rlinf_lite.metrics.live import Progress
from rlinf_lite.metrics.logger import MetricLogger, NullLogger, flatten_metrics
from rlinf_lite.metrics.reduce import combine_metrics
from rlinf_lite.metrics.timeline import Span, utilization, write_chrome_trace

__all__ = [
    "EvalSummary",
    "MetricLogger",
    "NullLogger",
    "Progress",
    "Span",
    "TaskSummary",
    "combine_metrics",
    "env_metrics",
    "flatten_metrics",
    "summarize_episodes",
    "utilization",
    "write_chrome_trace",
]
