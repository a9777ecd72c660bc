"""Every causal family of transformers, with sizes, weights and settings that make a difference show."""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB_SIZE = 64


def names(text: str) -> list[str]:
    return text.split()


SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "num_heads"), 4),
    **dict.fromkeys(("attention_heads", "linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("head_dim", "linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank", "index_head_dim", "index_n_heads"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB_SIZE),
    **{"rotary_dim": 4, "num_kv_shared_layers": 0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
"""What a family's config is given, of what it has."""
_LATENT = {"head_dim": None, "num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_LATENT |= {"q_lora_rank": 16, "kv_lora_rank": 16}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
_SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), _LATENT),
    **dict.fromkeys(("glm_moe_dsa", "kimi_linear", "minicpm3", "youtu"), _LATENT),
    "bamba": _MAMBA,
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in ("sliding_attention", "full_attention")
        },
    },
    "diffllama": {"attention_dropout": 0.0},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": _LATENT,
    "falcon": {"head_dim": None},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64},
    "gemma4_text": {"per_layer_config": {}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": _MAMBA | {"shared_intermediate_size": 16},
    "hy_v4": _LATENT,
    "lfm2_moe": {"layer_types": ["full_attention", "full_attention"]},
    "longcat_flash": _LATENT | {"head_dim": 8},
    "mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 16},
    "prophetnet": {"num_hidden_layers": None, "num_decoder_layers": 2, "num_decoder_attention_heads": 4},
    "xlnet": {"max_position_embeddings": None},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "layer_types": None},
    "zaya": {"num_experts_per_tok": 1},
}
_WINDOWS = re.compile("window(_size)?$|attention_chunk_size|local_attention$|sliding_window_size")
_FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "logits_mup_width_multiplier")
_CAPS = ("final_logit_softcapping", "logits_soft_cap")


def tiny_config(family: str, window: int, dropout: float = 0.3) -> PreTrainedConfig:
    """Windows of `window` tokens, heads that scale and cap, dropout and noise wherever the family has any."""
    default = AutoConfig.for_model(family)
    known = default.to_dict()
    settings = {name: size for name, size in SIZES.items() if name in known or hasattr(default, name)}
    settings |= {name: 0.4 for name in _FACTORS if isinstance(known.get(name), float)}
    settings |= {name: 3.0 for name in _CAPS if name in known}
    for name, value in known.items():
        if _WINDOWS.search(name) and isinstance(value, int | None) and not isinstance(value, bool):
            settings[name] = window
        if re.search("drop|jitter", name) and isinstance(value, float):
            settings[name] = dropout
    settings |= {
        name: value for name, value in (("use_sliding_window", True), ("max_window_layers", 0)) if name in known
    }
    settings |= _SPECIAL.get(family, {})
    return AutoConfig.for_model(family, **{name: value for name, value in settings.items() if value is not None})


def tiny_model(family: str, window: int, dropout: float = 0.3) -> PreTrainedModel:
    """With weights so large that its tokens are far from equally likely; sdpa where the family has it."""
    torch.manual_seed(0)
    config = tiny_config(family, window, dropout)
    try:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    except ValueError:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    return model.eval()
