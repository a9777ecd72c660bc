"""Loggers, progress, timelines and evaluation summaries. Needs neither torch nor ray nor a simulator."""

from rlinf_lite.metrics.evaluation import EvalSummary as EvalSummary
from rlinf_lite.metrics.evaluation import TaskSummary as TaskSummary
from rlinf_lite.metrics.evaluation import env_metrics as env_metrics
from rlinf_lite.metrics.evaluation import summarize_episodes as summarize_episodes
from rlinf_lite.metrics.live import Progress as Progress
from rlinf_lite.metrics.logger import MetricLogger as MetricLogger
from rlinf_lite.metrics.logger import flatten_metrics as flatten_metrics
from rlinf_lite.metrics.timeline import utilization as utilization
from rlinf_lite.metrics.timeline import write_chrome_trace as write_chrome_trace
from rlinf_lite.scheduler import Span as Span
