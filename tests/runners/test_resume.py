"""A resumed run ends like an uninterrupted one, bit for bit; checkpoints give equal evaluations; damaged ones are
refused.

Plain runs of every kind are resumed in test_interrupts too, and on the other runtime in test_both_runtimes.
"""

import pytest

from rlinf_lite.runners.checkpoints import CheckpointError
from tests.runners.conftest import placed, read_metrics
from tests.runners.test_both_runtimes import RUNS, numbers, run, tensors

TIED = ["model.id=tests.models.tied:TiedPolicy", "model.options={}", "algorithm.recompute_logprobs=false"]
ADAPTERS = ["model.lora={rank: 2, alpha: 4}", "sft.num_steps=1", "algorithm.adv_type=gae"]
ADAPTIVE = ["sft.num_steps=2", "algorithm.kl={place: reward, controller: adaptive}"]
TWO_ACTORS = "cluster.component_placement={actor: 0-1, rollout: '0', env: 0-1}"
SHARDS = "cluster.component_placement={actor: 0-1, rollout: 0-1, env: 0-1}"
CLASSIFIER = (
    "env.train={ignore_terminations: true, reward: {id: success_classifier, model_dir: assets/tabletop_success}}"
)
ON_THREADS = {
    "asynchronous": ("asynchronous", []),
    "tokens": ("tokens", []),
    "a classifier's rewards": ("tokens", [CLASSIFIER]),
    "flow": ("flow", []),
    "off-policy": ("off-policy", []),
    "a round of DAgger": ("rounds", []),
    "tied parameters": ("simulator", TIED),
    "adapters of a language model": ("language", ADAPTERS),
    "a critic and an adaptive penalty after supervised training": ("language", ADAPTIVE),
}
ON_RAY = {
    "two actors": ("simulator", [TWO_ACTORS]),
    "off-policy, two actors": ("off-policy", [TWO_ACTORS, "actor.strategy=replicated"]),
    "tied parameters in two actors": ("simulator", [*TIED, TWO_ACTORS]),
    "adapters in shards, without their base": (
        "tokens",
        [TWO_ACTORS, "model.options.lora.rank=2", "model.options.lora.save_base=false"],
    ),
    "flow_noise in shards": ("flow", [SHARDS, "model.options.method=flow_noise"]),
    "imitation by two actors": ("imitation", [TWO_ACTORS, "actor.micro_batch_size=16"]),
    "adapters of a language model in shards": (
        "language",
        [*ADAPTERS, "actor.strategy=fsdp", placed("0-1", rollout="1", num_slots=2)],
    ),
}


def check(runtime, kind, more, root):
    whole = run(runtime, RUNS[kind], 2, root / "whole", *more)
    half = run(runtime, RUNS[kind], 1, root / "half", *more)
    resumed = run(runtime, RUNS[kind], 2, root / "half", *more)
    assert resumed.run_dir == half.run_dir
    assert tensors(resumed, 2) == tensors(whole, 2) != tensors(whole, 1)
    assert numbers(resumed)[2] == numbers(whole)[2]
    assert [line["step"] for line in read_metrics(resumed.run_dir) if "time/step" in line] == [1, 2]
    if any("lora" in override for override in more):
        assert any("lora_" in name for _, name in tensors(whole, 2))


@pytest.mark.parametrize("row", ON_THREADS)
def test_two_steps_equal_one_and_one_more(tmp_path, row):
    check("local", *ON_THREADS[row], tmp_path)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("row", ON_RAY)
def test_two_steps_of_several_ranks_equal_one_and_one_more(tmp_path, row):
    check("ray", *ON_RAY[row], tmp_path)


def test_other_problems_of_the_same_number_are_refused(tmp_path):
    run("local", RUNS["language"], 1, tmp_path)
    problems = next((tmp_path / "problems").glob("*/train.jsonl"))
    rows = problems.read_text().splitlines(keepends=True)
    problems.write_text("".join([rows[1], rows[0], *rows[2:]]))
    with pytest.raises(CheckpointError, match=r"data\.train_files: rows \w{8} -> rows \w{8}\nPut them back"):
        run("local", RUNS["language"], 2, tmp_path)


def test_a_damaged_checkpoint_is_refused_before_anything_starts(start, tmp_path):
    result = start("runner.max_steps=2", "runner.save_interval=1").run()
    start.stop()
    file = result.checkpoint / "policy" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors has .* bytes.*step_000001"):
        start("runner.resume=auto")


def test_evaluation_plays_the_same_episodes_every_time_and_everywhere(start, tmp_path):
    result = start("runner.max_steps=1", "runner.save_interval=1").run()
    start.stop()
    load = f"actor.checkpoint_load_path={result.checkpoint}"
    first = start(load)
    summaries = [first.evaluate(), first.evaluate()]
    start.stop()
    summaries.append(start(load, "cluster.component_placement.env=0-1", "rollout.pipeline_stage_num=2").evaluate())
    assert all(len(summary.episodes) == 6 for summary in summaries)
    for other in summaries[1:]:
        assert [e["seed"] for e in other.episodes] == [e["seed"] for e in summaries[0].episodes]
        assert other.total.return_mean == pytest.approx(summaries[0].total.return_mean, abs=1e-4)
