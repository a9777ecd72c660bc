"""Configs of small language models that start from random weights; importable without torch."""

from __future__ import annotations

from typing import Any

CHAR_VOCAB_SIZE = 100
"""Number of ids in assets/char_tokenizer."""


def preset(size: str) -> dict[str, Any]:
    """`config.json` of a Llama over the character tokenizer: tiny (0.8 M parameters) or small (4.7 M).

    Not a Qwen2, since for that model type AutoTokenizer replaces the splitting rule of the tokenizer file.

    Raises:
        ValueError: for any other size.
    """
    if size not in _PRESETS:
        raise ValueError(f"model.size: there is no {size!r} language model. There are {', '.join(_PRESETS)}")
    return dict(_PRESETS[size])


def _llama(hidden: int, layers: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": CHAR_VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.05,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


_PRESETS = {"tiny": _llama(128, 4), "small": _llama(256, 6)}
