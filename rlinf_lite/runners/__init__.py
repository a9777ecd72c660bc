"""The loops that drive worker groups."""

from rlinf_lite.runners.embodied import EmbodiedRunner, RunResult

__all__ = ["EmbodiedRunner", "RunResult"]
