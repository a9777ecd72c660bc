import dataclasses
import string

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from rlinf_lite.config import ConfigError, load_config
from rlinf_lite.models.vla.config import VLAConfig, preset
from rlinf_lite.models.vla.inputs import PromptEncoder, PromptTooLongError, TokenizerError
from rlinf_lite.registry import suite_overrides
from rlinf_lite.shipped import shipped

TOKENIZER = shipped("assets") / "tiny_tokenizer"


def tiny(**changes: object) -> VLAConfig:
    return dataclasses.replace(preset("tiny"), **changes)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(str(TOKENIZER))


def test_tabletop_words_are_one_token_each(tokenizer: PreTrainedTokenizerFast) -> None:
    sentence = "place the yellow block to the left of the purple block"
    ids = PromptEncoder(tokenizer, tiny()).token_ids(sentence)
    assert len(ids) == 2 + len(sentence.split())
    assert (ids[0], ids[-1]) == (1, 3)


def test_any_ascii_text_has_tokens_that_spell_it(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = PromptEncoder(tokenizer, tiny())
    text = f"quickly wedge({string.digits}) {string.ascii_lowercase} {string.punctuation}!"
    ids = encoder.token_ids(text.upper())
    assert tokenizer.unk_token_id not in ids
    assert str(tokenizer.decode(ids, skip_special_tokens=True)).strip() == text
    assert max(ids) < 256, "ids from 256 on are actions"


def test_rows_are_bos_padding_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = PromptEncoder(tokenizer, tiny(max_prompt_length=8))
    ids, mask = encoder.encode(["pick up the red block", "Grab the cube", "pick up the red block"])
    short = encoder.token_ids("grab the cube")
    assert ids.shape == mask.shape == (3, 8) and mask.dtype == torch.bool
    assert ids[1].tolist() == [short[0], 0, 0, 0, *short[1:]]
    assert mask[1].tolist() == [True, False, False, False, True, True, True, True]
    assert ids[1][mask[1]].tolist() == short
    assert torch.equal(ids[0], ids[2])


def test_a_prompt_that_is_too_long_is_an_error_with_its_length(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(PromptTooLongError, match=r"'pick up the red block' has 7 tokens.*is 6. Raise it to 7"):
        PromptEncoder(tokenizer, tiny(max_prompt_length=6)).encode(["pick up the red block"])


def test_prompts_images_and_actions_must_fit_the_context(tokenizer: PreTrainedTokenizerFast) -> None:
    cfg = tiny(max_prompt_length=500)  # beside 16 patches and 28 actions, of 512
    with pytest.raises(PromptTooLongError, match="Use 468 or less"):
        PromptEncoder(tokenizer, cfg)


def test_a_tokenizer_that_ends_prompts_otherwise_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(TokenizerError, match="end in id 29871"):
        PromptEncoder(tokenizer, tiny(empty_token_id=29871))
    with pytest.raises(TokenizerError, match="start with id 7"):
        PromptEncoder(tokenizer, tiny(bos_token_id=7))


def test_the_published_prompt_is_lower_case_within_its_frame(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = PromptEncoder(tokenizer, tiny(prompt=VLAConfig().prompt))
    prompt = "in: what action should the robot take to push the cube?\nout:"
    assert str(tokenizer.decode(encoder.token_ids("Push the CUBE"), skip_special_tokens=True)).strip() == prompt


def test_a_directory_without_a_tokenizer_says_so(tmp_path: str) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        PromptEncoder.from_directory(tmp_path, tiny())


def problems(name: str, *overrides: str) -> list[str]:
    try:
        load_config(name, overrides, elsewhere=True)
    except ConfigError as error:
        return error.problems
    return []


def test_a_task_whose_sentence_is_too_long_is_refused_before_anything_starts() -> None:
    key = "model.options.max_prompt_length"
    assert problems("metaworld_ppo_vla", "env.task=MT10", f"{key}=22") == [
        f"{key}: is 22, and the prompt of 'Open a door with a revolving joint', which is a task of MT10, has 23 "
        "tokens. Set it to 23 or more: padding is masked"
    ]
    assert problems("metaworld_ppo_vla", "env.task=MT10", f"{key}=23") == []
    assert problems("metaworld_ppo_vla", f"{key}=16") == [], "of the three tasks that it trains the longest has 14"
    own = ["rollout.model_dir=assets/tabletop_vla", "env.id=metaworld", "env.task=MT50", "env.options.obs_mode=rgb"]
    assert any(f"{key}: is 9, and the prompt of " in text for text in problems("tabletop_ppo_vla", *own, f"{key}=9"))
    flow = ["model.id=pi0", "model.options={max_prompt_length: 40}", "env.task=MT50", "env.eval.num_episodes=50"]
    assert [text.partition("'")[0] for text in problems("metaworld_ppo_vla", *flow)] == [
        f"{key}: is 40, and the prompt of "
    ]
    assert problems("metaworld_ppo_vla", *flow, "model.options.long_prompts=cut") == []
    no_context = problems("metaworld_ppo_vla", f"{key}=500")
    assert len(no_context) == 1 and no_context[0].startswith(f"{key}: 500 tokens and ")


def test_what_metaworld_sft_vla_trains_can_be_evaluated_on_mt10() -> None:
    overrides = suite_overrides("metaworld-mt10", "metaworld")
    assert problems("metaworld_sft_vla", *overrides) == []
    [too_long] = problems("metaworld_sft_vla", *suite_overrides("metaworld-mt50", "metaworld"))
    assert "has 45 tokens. Set it to 45 or more" in too_long
