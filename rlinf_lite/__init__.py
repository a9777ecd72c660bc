"""rlinf_lite: reinforcement learning for vision-language-action policies in simulators."""

__version__ = "0.1.0"
