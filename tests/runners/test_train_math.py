"""Mistakes that training of a language model refuses before anything starts."""

import pytest

TINY_PROBLEMS = [
    "data.num_prompts=4",
    "data.max_prompt_length=12",
    "data.arithmetic={num_train: 400, num_val: 6, num_terms: 2, max_number: 20}",
    "rollout.max_response_length=24",
    "actor.global_batch_size=16",
    "sft.num_steps=2",
    "sft.batch_size=4",
]
SMALL = [*TINY_PROBLEMS, "algorithm={group_size: 4, filter_groups: false}"]


@pytest.mark.parametrize(
    ("override", "said", "code"),
    [
        ("reward.fn=tests.no_such_module:length", "No module named 'tests.no_such_module'", 2),
        ("data.max_prompt_length=2", "all 400 prompts have more than 2 tokens", 1),
        ("data.arithmetic.max_number=1", "400 train rows were asked for", 1),
    ],
)
def test_what_cannot_work_is_said_before_ray_starts(tmp_path, monkeypatch, capsys, command_line, override, said, code):
    def start_ray(*_, **__):
        raise AssertionError("Ray starts")

    monkeypatch.setattr("rlinf_lite.scheduler.Cluster.from_config", start_ray)
    paths = [f"runner.logger.log_path={tmp_path}"]
    assert command_line(["train", "math_arithmetic_grpo", *SMALL, *paths, override]) == code
    output = capsys.readouterr().err
    assert said in output
