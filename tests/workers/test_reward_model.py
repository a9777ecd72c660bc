"""Scores of a reward model are those of transformers' own forward on each text by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from rlinf_lite.config import load_config
from rlinf_lite.config.reasoning import RewardConfig
from rlinf_lite.data import DataProto
from rlinf_lite.data.tokenizers import TokenizerError
from rlinf_lite.models.base import CheckpointFormatError
from rlinf_lite.models.text.causal_lm import UnsupportedModelError
from rlinf_lite.rewards import RewardError
from rlinf_lite.workers.reasoning import RewardWorker
from rlinf_lite.workers.reasoning.reward_model import RewardModel, check_reward_model

SMALL: dict[str, Any] = {"vocab_size": 100, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SMALL |= {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 200,
    "num_labels": 1,
    "initializer_range": 0.5,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "pad_token_id": 0},
    "llama without padding": {"model_type": "llama", "pad_token_id": None},
    "qwen2 that pads with what ends a turn": {"model_type": "qwen2", "pad_token_id": 2},
    "gpt2": {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 200},
    "bert": {"model_type": "bert", "pad_token_id": 0},
    "roberta": {"model_type": "roberta", "pad_token_id": 1, "max_position_embeddings": 202},
    "xlnet, which sees padding and has no end": {
        "model_type": "xlnet",
        "d_model": 16,
        "n_layer": 2,
        "n_head": 2,
        "d_inner": 32,
        "max_position_embeddings": None,
    },
    "fnet, which sees padding": {"model_type": "fnet", "pad_token_id": 0},
}
PROMPTS = ["1+1=?\n", "Which is the longest of these prompts, would you say?", "x", "1+1=?\n"]
RESPONSES = ["2</s>", "", "a rather long answer " * 4, "#### 2"]


def write(directory: Path, settings: dict[str, Any], labels: int = 1, template: str | None = None) -> Path:
    """A tiny classifier with the character tokenizer."""
    torch.manual_seed(0)
    said = {name: value for name, value in (SMALL | {"num_labels": labels} | settings).items() if value is not None}
    config = AutoConfig.for_model(said.pop("model_type"), **said)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained("assets/char_tokenizer")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return directory


def alone(directory: Path, texts: list[str], label: int = 0, **arguments: Any) -> list[float]:
    """transformers, one text at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(directory, **arguments).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with torch.no_grad():
        ids = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
        return [float(model(input_ids=row).logits[0, label]) for row in ids]


def model_of(directory: Path, max_tokens: int = 300, **settings: Any) -> RewardModel:
    return RewardModel(RewardConfig(model=str(directory), **settings), max_tokens, "cpu")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_tokens", [1, 10_000])
def test_batches_score_as_each_text_alone(family: str, max_tokens: int, tmp_path: Path) -> None:
    directory = write(tmp_path, FAMILIES[family])
    model = model_of(directory, max_tokens)
    assert model.max_rows == (1 if "sees padding" in family else None)
    expected = alone(directory, [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)])
    found = model.score_batch(PROMPTS, RESPONSES)
    np.testing.assert_allclose(found.scores, expected, atol=1e-5, rtol=1e-5)
    assert found.scores.dtype == np.float32 and np.std(found.scores) > 1e-3
    assert (found.num_failed, found.num_cut) == (0, 0)
    assert model.score_batch([], []).scores.shape == (0,)


def test_one_of_several_labels(tmp_path: Path) -> None:
    directory = write(tmp_path, FAMILIES["llama"], labels=3)
    found = model_of(directory, label="LABEL_2").score_batch(["a", "b"], ["c", "ddd"])
    np.testing.assert_allclose(found.scores, alone(directory, ["ac", "bddd"], 2), atol=1e-5)


def test_bf16_is_transformers_bf16(tmp_path: Path) -> None:
    directory = write(tmp_path, FAMILIES["llama"])
    model = model_of(directory, max_tokens=1, precision="bf16")
    assert next(model.model.parameters()).dtype == torch.bfloat16
    expected = alone(directory, ["ac", "bddd"], dtype=torch.bfloat16)
    assert model.score_batch(["a", "b"], ["c", "ddd"]).scores.tolist() == expected


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"


def test_chats_go_through_the_reward_models_own_template(tmp_path: Path) -> None:
    directory = write(tmp_path / "with", FAMILIES["llama"], template=TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    said = [[*CHAT, {"role": "assistant", "content": text}] for text in ("2", "")]
    reference = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    encoded: list[Any] = [tokenizer.apply_chat_template(m, return_tensors="pt", return_dict=True) for m in said]
    expected = [reference(input_ids=row["input_ids"]).logits.item() for row in encoded]
    model, begun = model_of(directory), [*CHAT, {"role": "assistant", "content": "2"}]
    found = model.score_batch([CHAT, CHAT, begun], ["2", "", ""])  # the last: an answer that the prompt has begun
    np.testing.assert_allclose(found.scores, [*expected, expected[0]], atol=1e-5)

    directory = write(tmp_path / "without", FAMILIES["llama"])
    found = model_of(directory).score_batch([CHAT, begun], ["2", "4"])
    np.testing.assert_allclose(found.scores, alone(directory, ["Be brief.\n1+1\n2", "Be brief.\n1+1\n24"]), atol=1e-5)


def test_a_chat_that_the_template_refuses_costs_its_score(tmp_path: Path) -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + TEMPLATE
    model = model_of(write(tmp_path, FAMILIES["llama"], template=refusing))
    found = model.score_batch([CHAT, CHAT[1:]], ["2", "2"])
    assert found.num_failed == 1 and found.scores[0] == 0 != found.scores[1]
    assert "no system here" in next(iter(found.failures.values()))


def test_what_comes_last_of_a_long_text_is_read(tmp_path: Path) -> None:
    directory = write(tmp_path, FAMILIES["bert"])
    found = model_of(directory, max_length=5).score_batch(["abc", "abcdefg", "a" * 300], ["d", "h", "b"])
    np.testing.assert_allclose(found.scores, alone(directory, ["abcd", "defgh", "aaaab"]), atol=1e-5)
    assert found.num_cut == 2
    longest = model_of(directory).score_batch(["a" * 300], ["b"])  # as many as it has positions
    np.testing.assert_allclose(longest.scores, alone(directory, ["a" * 199 + "b"]), atol=1e-5)


def test_scores_that_are_not_finite_and_texts_without_tokens_are_counted(tmp_path: Path) -> None:
    directory = write(tmp_path, FAMILIES["llama"])
    model = model_of(directory)
    with torch.no_grad():
        model.model.get_input_embeddings().weight[model.tokenizer("z")["input_ids"][-1]] = torch.nan
    found = model.score_batch(["a", "z", ""], ["a", "z", ""])
    assert found.num_failed == 2 and found.scores[1] == found.scores[2] == 0 != found.scores[0]


def test_what_is_no_reward_model_is_named(tmp_path: Path) -> None:
    directory = write(tmp_path / "bart", {"model_type": "bart", "d_model": 16})  # reads the state of an end token
    with pytest.raises(UnsupportedModelError, match="of type 'bart', fails here"):
        model_of(directory)
    policy = AutoConfig.for_model("llama", **{k: v for k, v in SMALL.items() if k != "num_labels"})
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(policy).save_pretrained(tmp_path / "policy")
    with pytest.raises(TokenizerError, match=r"(?s)holds no tokenizer .* reward\.model needs its own"):
        check_reward_model(RewardConfig(model=str(tmp_path / "policy")))
    AutoTokenizer.from_pretrained("assets/char_tokenizer").save_pretrained(tmp_path / "policy")
    with pytest.raises(CheckpointFormatError, match=r"missing score\.weight"):
        model_of(tmp_path / "policy")
    AutoConfig.for_model("vit").save_pretrained(tmp_path / "policy")
    with pytest.raises(RewardError, match=r"reward\.model: transformers has no sequence classifier of type 'vit'"):
        check_reward_model(RewardConfig(model=str(tmp_path / "policy")))


def answered(truths: list[str | None], responses: list[str]) -> DataProto:
    """As a rollout worker gives them, of the character tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained("assets/char_tokenizer")
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in responses]
    mask = torch.arange(16) < torch.tensor([len(row) for row in ids])[:, None]
    tensors = {"input_ids": torch.zeros(len(ids), 20, dtype=torch.int64), "response_mask": mask}
    tensors["input_ids"][:, 4:][mask] = torch.tensor([token for row in ids for token in row], dtype=torch.int64)
    tensors["attention_mask"] = torch.cat([torch.zeros(len(ids), 4, dtype=torch.bool), mask], 1)
    arrays = {"ground_truth": truths, "data_source": ["arithmetic"] * len(ids), "extra_info": [{}] * len(ids)}
    arrays["row"] = list(range(len(ids)))
    return DataProto.from_dict(tensors, {"prompt": [f"{i}=?\n" for i in range(len(ids))], **arrays})


def test_a_score_is_the_weighted_sum_of_rule_and_model(tmp_path: Path) -> None:
    directory = write(tmp_path, FAMILIES["llama"])
    by_model = np.array(alone(directory, ["0=?\n#### 2", "1=?\n#### 2", "2=?\n"]))
    batch = answered(["2", None, "7"], ["#### 2", "#### 2", ""])
    wanted = {"{rule: 2, model: 0.5}": [2.0, 0.0, 0.0], "{rule: 0, model: -0.5}": [0.0, 0.0, 0.0]}
    for weights, by_rule in wanted.items():
        cfg = load_config("math/math_arithmetic_grpo", [f"reward.model={directory}", f"reward.weights={weights}"])
        worker = RewardWorker(cfg)
        worker.init()
        found = worker.compute_rewards(batch).batch
        expected = by_rule + cfg.reward.weights.model * by_model
        np.testing.assert_allclose(found["scores"], expected, atol=1e-5)
        np.testing.assert_allclose(found["model_scores"], by_model, atol=1e-5)
        is_ruled = [cfg.reward.weights.rule != 0, False, cfg.reward.weights.rule != 0]
        assert (~found["rule_scores"].isnan()).tolist() == is_ruled
        assert len(worker.compute_rewards(batch[:0])) == 0  # a rank without rows


def problems(*overrides: str) -> list[str]:
    from rlinf_lite.config import ConfigError

    with pytest.raises(ConfigError) as caught:
        load_config("math/math_arithmetic_grpo", list(overrides))
    return caught.value.problems


def test_directory_label_and_weights_are_checked_before_anything_starts(tmp_path: Path) -> None:
    directory = write(tmp_path, FAMILIES["llama"], labels=3)
    assert problems("reward.model=nowhere")[0].startswith("reward.model: no directory 'nowhere'")
    [said] = problems(f"reward.model={directory}")
    assert said.startswith("reward.label: is null, and the classifier in") and "has 3 labels" in said
    [said] = problems(f"reward.model={directory}", "reward.label=LABEL_3")
    assert "has no label 'LABEL_3'. Did you mean" in said
    [said] = problems(f"reward.model={directory}", "reward.label=LABEL_1", "reward.max_length=201")
    assert said.startswith("reward.max_length: 201 tokens, and the reward model has 200 positions. Use 200 or less")
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": -1}))  # without an end
    settings = [f"reward.model={directory}", "reward.label=LABEL_1", "reward.max_length=201"]
    load_config("math/math_arithmetic_grpo", settings)
    [said] = problems(f"reward.model={directory}", "reward.label=LABEL_1", "reward.weights.model=0")
    assert said.startswith("reward.weights.model: is 0")
    [said] = problems("reward.weights.rule=0")
    assert said.startswith("reward.weights.rule: is 0, and reward.model is null")
    content = json.loads((directory / "config.json").read_text())
    content.pop("id2label")
    (directory / "config.json").write_text(json.dumps(content))
    assert "has 2 labels" in problems(f"reward.model={directory}")[0]  # as transformers reads it
