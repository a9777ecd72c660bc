"""load_config: finding, composing, overriding; what a bad file or key gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf_lite.config import Config, ConfigError, load_config
from rlinf_lite.config.loading import config_names

PUSHCUBE = "embodiment/maniskill_pushcube_ppo_mlp"
PPO = Path(__file__).parent / "yaml" / "ppo.yaml"


def problems_of(name: str | Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(name, overrides)
    assert isinstance(caught.value, ValueError)
    return caught.value.problems


def only_problem(name: str | Path, *overrides: str) -> str:
    problems = problems_of(name, *overrides)
    assert len(problems) == 1, problems
    return problems[0]


@pytest.mark.parametrize("name", config_names())
def test_every_config_loads(name: str, tmp_path: Path) -> None:
    to_fill_in = []
    if "gsm8k" in name:
        (tmp_path / "rows.jsonl").touch()
        (tmp_path / "config.json").write_text("{}")
        files = f"[{tmp_path / 'rows.jsonl'}]"
        to_fill_in = [f"rollout.model_dir={tmp_path}", f"data.train_files={files}", f"data.val_files={files}"]
    config = load_config(name, to_fill_in, elsewhere=True)
    assert config.runner.run_name == name.rsplit("/", 1)[-1]


@pytest.mark.parametrize("name", [name for name in config_names() if name.startswith("embodiment/")])
def test_every_config_fits_the_map_of_a_machine_with_8_gpus(name: str) -> None:
    placement = {"actor": "0-7", "env": "0-3", "rollout": "4-7"}
    overrides = [f"cluster.component_placement.{component}={slots}" for component, slots in placement.items()]
    overrides += ["cluster.accelerator=cuda", "cluster.num_gpus_per_node=8"]
    load_config(name, overrides, elsewhere=True)


def test_a_process_with_several_gpus_is_refused() -> None:
    overrides = [
        "cluster.num_gpus_per_node=8",
        "cluster.component_placement={actor: 0-7, env: 0-3, rollout: '4-7:0-1'}",
    ]
    load_config(PUSHCUBE, [*overrides, "cluster.accelerator=cpu"], elsewhere=True)
    with pytest.raises(ConfigError, match=r"component_placement\.rollout: gives a process the GPUs 4\.\.5.* '4-7'"):
        load_config(PUSHCUBE, [*overrides, "cluster.accelerator=cuda"], elsewhere=True)


def test_two_ranks_that_train_on_one_gpu_are_refused() -> None:
    overrides = ["cluster.num_gpus_per_node=2", "cluster.component_placement={actor: '0:0-1', env: 0, rollout: 1}"]
    load_config(PUSHCUBE, [*overrides, "cluster.accelerator=cpu"], elsewhere=True)
    with pytest.raises(ConfigError, match=r"component_placement\.actor: has 2 processes on 1 GPUs, and NCCL"):
        load_config(PUSHCUBE, [*overrides, "cluster.accelerator=cuda"], elsewhere=True)


def test_the_shipped_configs_are_there() -> None:
    assert {name.rsplit("/", 1)[-1] for name in config_names()} >= {
        "maniskill_pushcube_ppo_mlp",
        "maniskill_pickcube_ppo_mlp",
        "maniskill_pushcube_grpo_mlp",
        "gym_pendulum_ppo_mlp",
        "maniskill_pushcube_ppo_mlp_hybrid8",
    }


def test_short_and_long_names_are_the_same_config() -> None:
    assert load_config("maniskill_pushcube_ppo_mlp") == load_config(PUSHCUBE)


def test_any_working_directory_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(PUSHCUBE).env.task == "PushCube-v1"


def test_overrides_set_keys_that_no_file_mentions() -> None:
    overrides = [
        "actor.optim.warmup_steps=3",
        "+runner.timeline=true",
        "++model.temperature=0.5",
        "env.options.kwargs.foo=[1,b]",
    ]
    config = load_config(PPO, [*overrides, "cluster.component_placement.env=0:0-3", "runner.run_name=mine"])
    assert config.actor.optim.warmup_steps == 3
    assert config.runner.timeline
    assert config.model.temperature == 0.5
    assert config.env.options.kwargs == {"foo": [1, "b"]}
    assert config.cluster.component_placement["env"] == "0:0-3"
    assert config.runner.run_name == "mine"


def test_a_dict_override_replaces_and_a_deletion_restores_the_default() -> None:
    config = load_config(PPO, ["cluster.component_placement={actor: 0, rollout: 0, env: 0}", "~algorithm.gamma"])
    assert config.cluster.component_placement == {"actor": 0, "rollout": 0, "env": 0}
    assert config.algorithm.gamma == Config().algorithm.gamma
    assert config.rollout.pipeline_stage_num == 2


def test_a_file_elsewhere_may_build_on_ours(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"defaults:\n  - {PUSHCUBE}\n  - _self_\nactor:\n  optim:\n    lr: 1.0e-5\n")
    config = load_config(path, ["runner.seed=7"])
    assert (config.env.task, config.actor.optim.lr, config.runner.seed) == ("PushCube-v1", 1e-5, 7)
    assert config.runner.run_name == "mine"


def test_a_file_elsewhere_may_stand_alone(tmp_path: Path) -> None:
    path = tmp_path / "alone.yaml"
    path.write_text("env:\n  id: gymnasium\n  task: Pendulum-v1\nrollout:\n  num_chunks: 64\n")
    assert load_config(str(path)).env.train == Config().env.train


def test_an_unknown_config_gets_the_nearest_names() -> None:
    problem = only_problem("maniskill_pushcub_ppo_mlp")
    assert "maniskill_pushcub_ppo_mlp: no config has this name" in problem
    assert "Did you mean maniskill_pushcube_ppo_mlp" in problem
    assert only_problem("pendulum").endswith(". Did you mean gym_pendulum_ppo_mlp or gym_pendulum_sac_mlp?")
    assert only_problem("pushcube").endswith(
        "Known with pushcube: maniskill_pushcube_async_ppo_mlp, maniskill_pushcube_grpo_mlp, "
        "maniskill_pushcube_ppo_mlp, maniskill_pushcube_ppo_mlp_hybrid8, maniskill_pushcube_sac_mlp."
    )
    assert only_problem("xyz").endswith(". rlinf-lite configs lists them")
    assert "xyz: no config has this name" in only_problem("xyz")


def test_a_path_is_not_taken_for_a_misspelled_config(tmp_path: Path) -> None:
    assert "no such directory (looked for /" in only_problem("results/nope")
    assert "no such directory" not in only_problem("embodiment/gym_pendulum_ppo_ml")
    assert "not a run's directory, which has a config.yaml. rlinf-lite runs lists runs" in only_problem(str(tmp_path))


def test_a_missing_file_and_missing_defaults(tmp_path: Path) -> None:
    missing = only_problem(tmp_path / "nope.yaml")
    assert "no such file" in missing and missing.endswith("or a name: rlinf-lite configs lists them")
    path = tmp_path / "mine.yaml"
    path.write_text("defaults: [embodiment/base/pp_mlp, _self_]\n")
    problem = only_problem(path)
    assert "'embodiment/base/pp_mlp', which does not exist" in problem
    assert "embodiment/base/ppo_mlp" in problem


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("runner:\n  seed: [1,\nactor: }\n", 3, "not valid YAML"),
        ("runner:\n  seed: 1\n  seed: 2\n", 3, "duplicate key seed"),
        ("runner:\n  seed: 1\n seed: 2\n", 3, "not valid YAML"),
    ],
)
def test_yaml_mistakes_are_found_by_line(tmp_path: Path, text: str, line: int, reason: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    problem = only_problem(path)
    assert problem.startswith(f"{path}:{line}: ")
    assert reason in problem


def test_a_reference_to_nothing_says_where_it_stands() -> None:
    assert only_problem(PPO, "runner.seed=${nope.x}").startswith("runner.seed: Interpolation key 'nope.x' not found")


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("actor.micro_batch_sise=512", "Did you mean actor.micro_batch_size?"),
        ("algorithm.gama=0.9", "Did you mean algorithm.gamma?"),
        ("algorithm.lr=1e-4", "lr belongs in actor.optim.lr"),
        ("algorithm.global_batch_size=512", "global_batch_size belongs in actor.global_batch_size"),
        ("algorithms.gamma=0.9", "Did you mean algorithm?"),
        ("seed=1", "seed belongs in runner.seed or env.eval.seed"),
        ("env.train.num_env=8", "Did you mean env.train.num_envs?"),
        ("actor.max_tokens_per_micro_batch=8", "In runs of this runner.task_type it is actor.micro_batch_size"),
        ("data.num_prompts=8", "In runs of this runner.task_type it is env.train.num_envs"),
        ("cluster.node_groups=[{lable: x, nodes: 0}]", "Did you mean cluster.node_groups[0].label?"),
        ("cluster.component_placement.env={placement: 0, node_grup: x}", "component_placement.env.node_group?"),
        ("qqqqqq=1", "Known in a config: cluster, runner, actor, weight_sync, control, algorithm, env"),
    ],
)  # fmt: skip
def test_unknown_keys_get_the_nearest(override: str, advice: str) -> None:
    section = override.partition(".")[0].partition("=")[0]
    problems = [problem for problem in problems_of(PPO, override) if "there is no such key" in problem]
    assert len(problems) == 1
    assert problems[0].startswith(section)
    assert advice in problems[0]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("env.train.num_envs=many", "env.train.num_envs: is 'many'. It must be a whole number"),
        ("env.train.num_envs=1.5", "env.train.num_envs: is 1.5. It must be a whole number"),
        ("env.train.num_envs=true", "env.train.num_envs: is True. It must be a number, not true or false"),
        ("env.train.num_envs=0", "env.train.num_envs: is 0. It must be greater than 0"),
        ("env.train.auto_reset=7", "env.train.auto_reset: is 7. It must be true or false"),
        ("actor.optim.lr=fast", "actor.optim.lr: is 'fast'. It must be a number"),
        ("actor.optim.lr=inf", "actor.optim.lr: is inf. It must be a finite number"),
        ("actor.optim.betas=[0.9,1.0]", "actor.optim.betas[1]: is 1.0. It must be less than 1"),
        ("algorithm.gamma=1.1", "algorithm.gamma: is 1.1. It must be less than or equal to 1"),
        ("actor.precision=fp16", "actor.precision: is 'fp16'. It must be one of 'fp32', 'bf16'"),
        ("model.options=3", "model.options: is 3. It must be a section of keys"),
        ("model.options.hidden_sizes=64", "model.options.hidden_sizes: is 64. It must be a list, such as [a, b]"),
        ("runner.run_name=5", "runner.run_name: is 5. It must be a text (in quotes)"),
        ("cluster.component_placement.env=0.5", "cluster.component_placement.env: is 0.5. It must be"),
        ("cluster.component_placement=5", "cluster.component_placement: is 5. It must be auto, or a section of lines"),
        ("cluster.component_placement=Auto", "cluster.component_placement: is 'Auto'. It must be auto, or a section"),
    ],
)
def test_wrong_values_are_named(override: str, expected: str) -> None:
    assert only_problem(PPO, override).startswith(expected)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("runner.seed", "runner.seed: cannot be read as an override"),
        (
            "runner.seed=1,2",
            "runner.seed: a run has one value of it, here are several (1,2). `rlinf-lite sweep` runs each",
        ),
        ("cluster.xyz=actor,rollout", "cluster.xyz: there is no such key. Known in cluster: num_nodes"),
        ("actor.optim.ler=1,2", "actor.optim.ler: there is no such key. Did you mean actor.optim.lr?"),
        ("runner.seed.more=1,2", "runner.seed: is {'more': '1,2'}. It must be a whole number"),
        ("~runner.sed", "~runner.sed: nothing to delete"),
    ],
)
def test_overrides_that_cannot_be_applied(override: str, expected: str) -> None:
    assert only_problem(PPO, override).startswith(expected)


def test_every_problem_comes_at_once() -> None:
    problems = problems_of(
        PPO,
        "foo",
        "runner.seed=1,2",
        "actor.optim.lr=fast",
        "actor.micro_batch_sise=7",
        "algorithm.clip_ratio_c=0.9",
        "env.train.num_envs=30",
        "actor.global_batch_size=500",
        "env.id=maniskil",
        "runner.resume=/no/such/run",
        "cluster.component_placement.rollout=4-7",
    )
    starts = (
        "foo:",
        "runner.seed:",
        "actor.optim.lr:",
        "actor.micro_batch_sise:",
        "algorithm.clip_ratio_c:",
        "env.train.num_envs:",
        "env.id:",
        "runner.resume:",
        "cluster.component_placement.rollout:",
    )
    assert all(sum(problem.startswith(start) for problem in problems) == 1 for start in starts), problems


def test_a_wrong_value_does_not_cause_problems_elsewhere() -> None:
    """Arithmetic is left out where a number in it is not the author's: its key is misspelt, or its value unreadable."""
    unreadable = only_problem(PPO, "env.train.num_envs=many", "actor.global_batch_size=48")
    assert unreadable.startswith("env.train.num_envs:")
    misspelt = only_problem(PPO, "actor.global_batch_sise=8", "actor.micro_batch_size=7")
    assert misspelt.startswith("actor.global_batch_sise:")


def test_the_error_reads_as_a_list() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(PPO, ["algorithm.lr=1", "algorithm.gama=1"])
    lines = str(caught.value).splitlines()
    assert lines[0] == "ppo: 2 problems"
    assert all(line.startswith("  - algorithm.") for line in lines[1:])


def test_values_do_not_change_after_loading() -> None:
    with pytest.raises(ValueError, match=r'seed cannot be changed.*load_config\(name, \["SECTION\.seed=3"\]\)'):
        load_config(PPO).runner.seed = 3


def test_overrides_are_a_list_or_a_mapping() -> None:
    with pytest.raises(TypeError, match=r"overrides is the text 'runner.seed=3'\. Give a list, \['runner.seed=3'\]"):
        load_config(PPO, "runner.seed=3")
    placed = {"actor": 0, "rollout": "0:0-1", "env": "0"}
    values = {"runner.seed": 3, "runner.report": False, "runner.run_name": "a, b", "model.options.hidden_sizes": [8, 4]}
    config = load_config(
        "gym_pendulum_ppo_mlp", {**values, "cluster.component_placement": placed, "algorithm.target_kl": None}
    )
    assert config.runner.seed == 3 and not config.runner.report and config.runner.run_name == "a, b"
    assert tuple(config.model.options.hidden_sizes) == (8, 4) and config.algorithm.target_kl is None
    assert {name: str(where) for name, where in config.cluster.component_placement.items()} == {**placed, "actor": "0"}
