"""Text generation: what an engine does, and one that runs transformers models."""

from rlinf_lite.generation.protocol import (
    Generation,
    GenerationEngine,
    PromptError,
    SamplingError,
    SamplingParams,
    sequence_keys,
)

__all__ = [
    "Generation",
    "GenerationEngine",
    "PromptError",
    "SamplingError",
    "SamplingParams",
    "sequence_keys",
]
