"""Text generation: the protocol of engines, and an engine for transformers models."""

from rlinf_lite.generation.protocol import Generation as Generation
from rlinf_lite.generation.protocol import GenerationEngine as GenerationEngine
from rlinf_lite.generation.protocol import PromptError as PromptError
from rlinf_lite.generation.protocol import SamplingError as SamplingError
from rlinf_lite.generation.protocol import SamplingParams as SamplingParams
from rlinf_lite.generation.protocol import sequence_keys as sequence_keys
