"""Sizes of language models from their configs, against the models themselves, without weights."""

from __future__ import annotations

from typing import Any

import pytest

from rlinf_lite.config import load_config
from rlinf_lite.models.text.presets import preset
from rlinf_lite.preview.dry_run import describe
from rlinf_lite.preview.reasoning_memory import Decoder

QWEN_0_5B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
LLAMA_UNTIED = {**preset("tiny"), "tie_word_embeddings": False, "num_key_value_heads": 4}


@pytest.mark.parametrize("config", [preset("tiny"), preset("small"), LLAMA_UNTIED, QWEN_0_5B])
def test_parameters_are_those_of_the_model(config: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    arguments = dict(config)
    built = AutoConfig.for_model(arguments.pop("model_type"), **arguments)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(built)
    assert Decoder.from_config(config).parameters == sum(p.numel() for p in model.parameters())


def test_the_dry_run_says_what_each_role_needs() -> None:
    text = describe(load_config("math/math_arithmetic_ppo"))
    assert "model         800384 parameters" in text
    lines = {line.split()[0]: line for line in text.splitlines() if " = " in line and "MiB" in line}
    assert {"actor", "critic", "rollout"} <= lines.keys()
    assert "optimizer 6" in lines["actor"] and "weights" not in lines["rollout"]  # shared with the actor
