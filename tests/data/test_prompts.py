"""Prompt data sets: what is read, what is refused, how rows are batched, and in which order."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlinf_lite.data.prompts import DatasetError, PromptDataset, ResumableSampler

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'nobody' %}{{ raise_exception('nobody may not speak') }}{% endif %}"
    "{{ message.role }}: {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture
def tokenizer(repo: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(str(repo / "assets" / "tiny_tokenizer"))


@pytest.fixture
def chat_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def row(prompt: Any, truth: Any = "4", **others: Any) -> dict[str, Any]:
    reward_model = {"style": "rule", "ground_truth": truth}
    return {"data_source": "arithmetic", "prompt": prompt, "reward_model": reward_model, **others}


def chat(content: str, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in rows))
    return path


def parquet(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def problems_of(*arguments: Any, **others: Any) -> list[str]:
    with pytest.raises(DatasetError) as caught:
        PromptDataset(*arguments, **others)
    return caught.value.problems


def test_text_is_tokenised_as_it_is(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [row("two plus two", 4, extra_info={"split": "train"})])
    prompts = PromptDataset(path, tokenizer, 100)
    assert len(prompts) == 1 and prompts.data_sources == {"arithmetic": f"{path}, row 1"}
    one = prompts[0]
    assert one.prompt_ids == tokenizer("two plus two")["input_ids"]
    assert (one.ground_truth, one.extra_info, one.row) == ("4", {"split": "train"}, 0)


def test_messages_go_through_the_chat_template(chat_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [row(chat("two plus two"))])
    expected = chat_tokenizer("user: two plus two assistant:", add_special_tokens=False)["input_ids"]
    assert PromptDataset(path, chat_tokenizer, 100)[0].prompt_ids == expected


def test_the_digest_is_of_rows_as_they_are_written(
    chat_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of the date that a template may write over them; with what rewards and supervised training read."""
    path = jsonl(tmp_path / "a.jsonl", [row(chat("two plus two"))])
    digest, template = PromptDataset(path, chat_tokenizer, 100).digest, str(chat_tokenizer.chat_template)
    monkeypatch.setattr(chat_tokenizer, "chat_template", "of another day " + template)
    assert PromptDataset(path, chat_tokenizer, 100).digest == digest
    for other in (row(chat("two plus one")), row(chat("two plus two")) | {"extra_info": {"solution": "4"}}):
        assert PromptDataset(jsonl(tmp_path / "b.jsonl", [other]), chat_tokenizer, 100).digest != digest


def test_messages_without_a_template_say_what_to_do(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [row(chat("two"))] * 3)
    (problem,) = problems_of(path, tokenizer, 100)
    assert "has no chat template. Use an instruction-tuned model's tokenizer, set tokenizer.chat_template" in problem


def test_an_answer_that_a_chat_has_begun_goes_on(chat_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    begun = [*chat("two plus two"), *chat("let us think: ", "assistant")]
    path = jsonl(tmp_path / "a.jsonl", [row(begun), row([*begun, *chat("go on")])])
    prompts, text = PromptDataset(path, chat_tokenizer, 100), "user: two plus two assistant: let us think: "
    for prompt, expected in zip((prompts[0], prompts[1]), (text, f"{text} user: go on assistant:"), strict=True):
        assert prompt.prompt_ids == chat_tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert prompts[0].prompt == begun
    chat_tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    [problem, _] = problems_of(jsonl(tmp_path / "b.jsonl", [row(begun)] * 2), chat_tokenizer, 100)
    assert "row 1: the tokenizer's chat template refuses it: continue_final_message is set but" in problem


@pytest.mark.parametrize(("truth", "text"), [(5.0, "5"), (-1200.0, "-1200"), (0.5, "0.5"), (7, "7"), ("5.0", "5.0")])
def test_whole_numbers_are_written_as_answers_have_them(
    truth: Any, text: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """A table's column of whole numbers is one of floats as soon as one row has none."""
    assert PromptDataset(jsonl(tmp_path / "a.jsonl", [row("two", truth)]), tokenizer, 100)[0].ground_truth == text


def test_parquet_reads_as_jsonl_does(chat_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [row(chat(f"number {i}"), str(i), extra_info={"index": i}, unused=b"\0") for i in range(3000)]
    from_parquet = PromptDataset(parquet(tmp_path / "a.parquet", rows), chat_tokenizer, 100)
    for one in rows:
        del one["unused"]
    from_jsonl = PromptDataset(jsonl(tmp_path / "a.jsonl", rows), chat_tokenizer, 100)
    assert len(from_parquet) == len(from_jsonl) == 3000
    for i in (0, 1, 1023, 1024, 2999):
        assert from_parquet[i] == from_jsonl[i]


def test_files_follow_one_another(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    paths = [jsonl(tmp_path / f"{name}.jsonl", [row(name, name), "", row(name, name * 2)]) for name in "ab"]
    prompts = PromptDataset(paths, tokenizer, 100)
    assert [prompts[i].ground_truth for i in range(4)] == ["a", "aa", "b", "bb"]
    with pytest.raises(IndexError, match="row 4 of a data set of 4"):
        prompts[4]


def test_long_prompts_are_dropped_and_counted(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [row("two", "1"), row("two " * 50, "2"), row("two", "3")])
    prompts = PromptDataset(path, tokenizer, 20)
    assert [prompts[i].ground_truth for i in range(len(prompts))] == ["1", "3"]
    assert prompts.num_overlong == 1
    count = len(tokenizer("two " * 50)["input_ids"])
    assert problems_of(path, tokenizer, 20, filter_overlong=False) == [
        f"{path}, row 2: the prompt has {count} tokens, {count - 20} more than max_prompt_length 20. Raise it, or set "
        "filter_overlong"
    ]
    (problem,) = problems_of(jsonl(tmp_path / "b.jsonl", [row("two " * 50)] * 2), tokenizer, 20)
    assert problem.endswith("all 2 prompts have more than 20 tokens. Raise max_prompt_length")


def test_every_bad_row_is_listed_with_what_is_missing(chat_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [
        row("fine"),
        {"problem": "two", "answer": "4"},
        row("two", None),
        {"prompt": "two"},
        "not json",
        row([{"role": "user"}]),
        row(chat("two", role="nobody")),
        row("two", ["4"]),
        row(5),
        row("two", reward_model={"style": "oracle", "ground_truth": "4"}),
        [1],
        row("two", extra_info="train"),
    ]
    path = jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(DatasetError) as caught:
        PromptDataset(path, chat_tokenizer, 100)
    expected = {
        2: "no prompt, which is text or a list of {role, content} (there is problem, answer)",
        3: "no ground truth",
        4: "no ground truth",
        5: "is not JSON",
        6: "message 1 of prompt has no role and content",
        7: "the tokenizer's chat template refuses it: nobody may not speak",
        8: "reward_model.ground_truth is a list, not text",
        9: "prompt is a int, neither text nor a list",
        10: "reward_model.style is 'oracle', neither rule nor model",
        11: "a row is a list, not an object",
        12: "data_source must be text, and extra_info an object",
    }
    problems = caught.value.problems
    assert len(problems) == len(expected)
    for problem, (number, said) in zip(problems, expected.items(), strict=True):
        assert problem.startswith(f"{path}, row {number}: {said}")
    message = str(caught.value)
    assert "11 problem(s)" in message and "row 6" in message and "row 7" not in message
    assert message.endswith("and 6 more")
    assert pickle.loads(pickle.dumps(caught.value)).problems == problems


def test_files_that_cannot_be_read_are_all_named(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("two")
    problems = problems_of([tmp_path / "missing.jsonl", text], tokenizer, 100)
    assert len(problems) == 2
    assert "there is no such file" in problems[0] and "neither .jsonl nor .parquet" in problems[1]


def test_damaged_parquet(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    damaged = tmp_path / "a.parquet"
    damaged.write_bytes(b"PAR1 and nothing else")
    assert "is not Parquet, or is damaged" in problems_of(damaged, tokenizer, 100)[0]
    other = parquet(tmp_path / "b.parquet", [{"problem": "two", "answer": "4"}])
    assert "there is no column prompt (there is problem, answer). Set prompt_key" in problems_of(other, tokenizer, 9)[0]


def test_parquet_without_pyarrow_says_what_installs_it(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlinf_lite.data.prompt_files.find_spec", lambda name: None)
    path = tmp_path / "a.parquet"
    path.touch()
    assert "pip install 'rlinf_lite[math]'" in problems_of(path, tokenizer, 100)[0]


@pytest.mark.parametrize("lines", [[], ["", " "]])
def test_no_rows_at_all(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, lines: list[str]) -> None:
    path = jsonl(tmp_path / "a.jsonl", lines)
    assert problems_of(path, tokenizer, 100) == [f"{path}: there are no rows"]


def test_another_prompt_key(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"question": "two", "reward_model": {"ground_truth": "2"}}])
    prompts = PromptDataset(path, tokenizer, 100, prompt_key="question")
    assert prompts[0].ground_truth == "2" and list(prompts.data_sources) == [""]


def test_a_batch_is_padded_on_the_left(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [row("two", "1", extra_info={"a": 1}), row("two plus two is", "2"), row("two plus", "3")]
    prompts = PromptDataset(jsonl(tmp_path / "a.jsonl", rows), tokenizer, 100)
    batch = prompts.batch(np.array([2, 0]))
    ids, mask = batch.batch["prompt_ids"], batch.batch["prompt_mask"]
    wanted = [prompts[2].prompt_ids, prompts[0].prompt_ids]
    assert ids.dtype == torch.int64 and mask.dtype == torch.bool
    assert ids.shape == mask.shape == (2, max(map(len, wanted)))
    for i, prompt_ids in enumerate(wanted):
        assert ids[i, mask[i]].tolist() == prompt_ids
        assert mask[i].tolist() == [False] * (ids.shape[1] - len(prompt_ids)) + [True] * len(prompt_ids)
    assert batch.non_tensor_batch["ground_truth"].tolist() == ["3", "1"]
    assert batch.non_tensor_batch["extra_info"].tolist() == [{}, {"a": 1}]
    assert batch.non_tensor_batch["data_source"].tolist() == ["arithmetic"] * 2
    assert batch.non_tensor_batch["row"].tolist() == [2, 0]
    assert batch.non_tensor_batch["prompt"].tolist() == ["two plus", "two"]


def test_rows_of_a_reward_model_need_no_answer(chat_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    of_model = [row(chat("two"), reward_model={"style": "model"}), row("two", reward_model={"style": "model"})]
    path = jsonl(tmp_path / "a.jsonl", [*(one | {"data_source": "talk"} for one in of_model), row("two", "1")])
    prompts = PromptDataset(path, chat_tokenizer, 100)
    batch = prompts.batch(range(3))
    assert batch.non_tensor_batch["ground_truth"].tolist() == [None, None, "1"]
    assert batch.non_tensor_batch["prompt"].tolist() == [chat("two"), "two", "two"]
    assert list(prompts.data_sources) == ["arithmetic"] and prompts.num_without_truth == 2


def test_every_pass_has_every_row_once_in_another_order() -> None:
    first, second, of_another_seed = (
        np.concatenate(list(islice(sampler, 3))).tolist()
        for sampler in [ResumableSampler(12, 4, seed=0)] * 2 + [ResumableSampler(12, 4, seed=1)]
    )
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second and first != of_another_seed


@pytest.mark.parametrize(("num_rows", "batch_size"), [(10, 4), (7, 5), (5, 5), (11, 10), (3, 1)])
def test_batches_are_full_and_rows_are_never_twice_in_one(num_rows: int, batch_size: int) -> None:
    batches = list(islice(ResumableSampler(num_rows, batch_size, seed=3), 10 * num_rows))
    assert all(len(set(batch.tolist())) == batch_size for batch in batches)
    drawn = np.concatenate(batches)
    for start in range(0, len(drawn), num_rows):
        assert sorted(drawn[start : start + num_rows].tolist()) == list(range(num_rows))


@pytest.mark.parametrize("num_drawn", [0, 1, 7])
def test_a_resumed_sampler_goes_on_with_the_same_batches(num_drawn: int) -> None:
    sampler, resumed = ResumableSampler(10, 4, seed=5), ResumableSampler(10, 4, seed=5)
    list(islice(sampler, num_drawn))
    list(islice(resumed, 3))
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    for one, other in islice(zip(sampler, resumed, strict=True), 20):
        assert one.tolist() == other.tolist()


def test_a_state_of_other_data_is_refused() -> None:
    state = ResumableSampler(10, 4, seed=5).state_dict()
    with pytest.raises(ValueError, match="num_rows was 10 and is 11, seed was 5 and is 6"):
        ResumableSampler(11, 4, seed=6).load_state_dict(state)


@pytest.mark.parametrize("batch_size", [0, 11])
def test_a_batch_of_more_rows_than_there_are_is_refused(batch_size: int) -> None:
    with pytest.raises(ValueError, match=f"a batch of {batch_size} prompts out of a data set of 10 rows"):
        ResumableSampler(10, batch_size, seed=0)


def test_rows_of_gsm8k_as_published(tmp_path, chat_tokenizer):
    row = {"question": "How many are 1,000 and 200?", "answer": "1000 + 200 = <<1000+200=1200>>1200\n#### 1,200"}
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps(row) + "\n")
    prompt = PromptDataset(file, chat_tokenizer, 400)[0]
    assert (prompt.data_source, prompt.ground_truth) == ("openai/gsm8k", "1200")
    assert prompt.extra_info["solution"] == row["answer"]
    assert row["question"].lower() in chat_tokenizer.decode(prompt.prompt_ids)
    file.write_text(json.dumps({"question": "?", "answer": "none"}) + "\n")
    with pytest.raises(DatasetError, match="row 1: question and answer are not as in GSM8K"):
        PromptDataset(file, chat_tokenizer, 400)
