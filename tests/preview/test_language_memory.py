"""Sizes of language models from their config.json, without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_lite.config import load_config
from rlinf_lite.config.plan import plan_of
from rlinf_lite.models.text.causal_lm import CausalLM
from rlinf_lite.models.text.presets import preset
from rlinf_lite.models.training_options import TrainingOptions
from rlinf_lite.preview.dry_run import describe
from rlinf_lite.preview.fake import Meter
from rlinf_lite.preview.memory import Estimate, estimate

QWEN_0_5B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
    "dtype": "bfloat16",
}
TINY = "math/math_arithmetic_ppo"


def estimate_of(name: str, *overrides: str) -> Estimate:
    return estimate(plan_of(load_config(name, list(overrides))))


def directory_of(path: Path, config: dict[str, Any]) -> str:
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def test_a_directory_is_counted_by_its_config_alone(tmp_path: Path) -> None:
    several_passes = "rollout.max_prefill_tokens=240"  # of ten prompts each
    found = estimate_of(TINY, f"rollout.model_dir={directory_of(tmp_path, QWEN_0_5B)}", several_passes)
    assert found.unknown == []
    assert found.ranks["actor"].working["activations"] > 2**30
    assert found.models["model"].parameters == 494_032_768  # as published
    assert found.models["model"].parameter_bytes == {"float32": 4 * 494_032_768}  # though the file is in bf16
    assert found.models["critic"].parameters == 494_032_768 + 896 + 1
    rows, tokens, layers, heads, width = 250, 88, 24, 2, 64
    cached = 2 * rows * tokens * layers * heads * width * 4
    assert found.ranks["rollout"].working["keys and values"] == pytest.approx(cached, rel=0.001)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_keys_and_values_are_of_the_type_that_acts(precision: str, tmp_path: Path) -> None:
    """And no copies of weights are among them, which autocast keeps of what trains alone."""
    directory = directory_of(tmp_path, QWEN_0_5B)
    given = [f"rollout.model_dir={directory}", "rollout.dtype=bf16", f"actor.precision={precision}"]
    given += [
        "cluster.accelerator=cuda",
        "cluster.num_gpus_per_node=1",
        "cluster.fuse=null",
        "cluster.component_placement={actor: 0, critic: 0, reference: 0, rollout: 0, reward: 0}",
    ]
    found = estimate_of(TINY, *given)
    rollout, cached = found.ranks["rollout"], 2 * 320 * 88 * 24 * 2 * 64 * 2
    assert rollout.working["keys and values"] == pytest.approx(cached, rel=0.001)
    launched = estimate_of(TINY, *given, "rollout.cuda_graphs=false").ranks["rollout"].working["generating"]
    logits = 320 * 151_936 * 4
    assert rollout.working["generating"] > launched + 2 * logits, "recorded steps have their own"


def test_a_model_is_whole_before_it_is_spread(tmp_path: Path) -> None:
    """Of 32 shards each is small, and every rank has begun with the whole."""
    layers_alone = directory_of(tmp_path, QWEN_0_5B | {"vocab_size": 1000})
    given = [f"rollout.model_dir={layers_alone}", "cluster.num_gpus_per_node=32"]
    given += ["actor.strategy=fsdp", "actor.global_batch_size=320", "actor.max_tokens_per_micro_batch=88"]
    roles = "actor: 0-31, critic: 0, rollout: 0, reward: 0"
    found = estimate_of(TINY, *given, "cluster.fuse=null", f"cluster.component_placement={{{roles}}}")
    actor, model = found.ranks["actor"], found.models["model"]
    assert model.num_bytes > 2 * sum((actor.held | actor.working).values())
    assert found.slot_bytes[31] == actor.start == actor.device_bytes == model.num_bytes + model.buffer_bytes
    assert estimate_of(TINY).ranks["actor"].start == 0


def test_what_scores_keeps_no_copies_of_its_weights(tmp_path: Path) -> None:
    """Autocast keeps those of what trains alone."""
    given = [f"rollout.model_dir={directory_of(tmp_path, QWEN_0_5B)}", "actor.precision=bf16", "cluster.fuse=null"]
    given += ["cluster.accelerator=cuda", "cluster.num_gpus_per_node=1", "actor.max_tokens_per_micro_batch=88"]
    given += ["algorithm.kl.place=loss", "algorithm.kl.coef=0.1"]
    roles = "actor: 0, critic: 0, reference: 0, rollout: 0, reward: 0"
    found = estimate_of(TINY, *given, f"cluster.component_placement={{{roles}}}")
    copies = 2 * 494_032_768
    assert (
        found.ranks["reference"].working["scoring"] < copies / 2 < copies < found.ranks["actor"].working["activations"]
    )


@pytest.mark.parametrize("size", ["tiny", "small"])
def test_parameters_are_those_of_the_model(size: str) -> None:
    model = CausalLM.from_config(preset(size))
    counts = estimate_of(TINY, f"model.size={size}").models["model"]
    assert counts.parameters == counts.trained == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_those_of_a_real_pass(checkpointing: bool) -> None:
    found = estimate_of(TINY, f"model.gradient_checkpointing={checkpointing}", "rollout.temperature=0.9")
    rows, columns = 4096 // 88, 88

    def loss() -> Tensor:
        mask = torch.ones(rows, columns, dtype=torch.bool)
        mask[0, 0] = False  # what attends to all is another kernel
        output = model(torch.zeros(rows, columns, dtype=torch.int64), mask, 64, 0.9)
        return output.logprobs.sum() + output.entropy.sum()

    with Meter() as meter:
        model = CausalLM.from_config(preset("tiny"))
        if checkpointing:
            model.prepare(TrainingOptions(gradient_checkpointing="full"))
        measured = meter.activations(model, loss)
    assert found.ranks["actor"].working["activations"] == pytest.approx(measured, rel=0.02)


def test_the_dry_run_says_what_each_role_needs() -> None:
    text = describe(load_config(TINY))
    assert "model         800384 parameters" in text
    lines = {line.split()[0]: line for line in text.splitlines() if " = " in line and "MiB" in line}
    assert {"actor", "critic", "rollout", "reward"} <= lines.keys()
    assert "AdamW 6" in lines["actor"] and "weights" not in lines["rollout"]  # shared with the actor
    assert "for actor+rollout+critic, which work in turn" in text


def test_what_is_no_language_model_is_said_to_be(tmp_path: Path) -> None:
    found = estimate_of(TINY, f"rollout.model_dir={directory_of(tmp_path, {'model_type': 'no_such'})}")
    assert found.ranks == {}
    assert found.unknown[0].startswith("parameters of the model could not be counted without building it: ")
