"""Loggers, progress, timelines and evaluation summaries. Needs neither torch nor ray nor a simulator."""

from rlinf_lite.metrics.evaluation import EvalSummary, TaskSummary, env_metrics, summarize_episodes
from rlinf_lite.metrics.live import Progress
from rlinf_lite.metrics.logger import MetricLogger, flatten_metrics
from rlinf_lite.metrics.timeline import utilization, write_chrome_trace
from rlinf_lite.scheduler import Span

__all__ = [
    "EvalSummary",
    "MetricLogger",
    "Progress",
    "Span",
    "TaskSummary",
    "env_metrics",
    "flatten_metrics",
    "summarize_episodes",
    "utilization",
    "write_chrome_trace",
]
