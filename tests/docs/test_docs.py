"""The documentation holds: commands parse, keys and files exist, examples run. Links: `make docs`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import yaml

from rlinf_lite.config import Config, ConfigError, ReasoningConfig, load_config
from rlinf_lite.config.names import schema_keys
from rlinf_lite.registry import import_part
from tests.test_imports import LAYERS

pytestmark = pytest.mark.usefixtures("forks")

REPO = Path(__file__).resolve().parents[2]
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
DEFAULT_CONFIG = "tabletop_ppo_vla"
DEFAULT_MATH_CONFIG = "math_arithmetic_grpo"
IDS = [str(page.relative_to(REPO)) for page in PAGES]

FENCE = re.compile(r"(?:<!-- file: (?P<file>\S+) -->\n)?^```(?P<language>\w*)\n(?P<body>.*?)^```", re.M | re.S)
INLINE_CODE = re.compile(r"`([^`\n]+)`")
SECTIONS = {**Config.model_fields, **ReasoningConfig.model_fields}
KEY = re.compile(rf"(?:{'|'.join(SECTIONS)})(?:\.[a-z_]+)+")
OVERRIDE = re.compile(r"[~+]*[A-Za-z_][\w./@]*=.*", re.S)


def blocks(page: Path, language: str) -> Iterator[tuple[str | None, str]]:
    """The file that each fenced block stands for, if any, and its text."""
    for match in FENCE.finditer(page.read_text()):
        if match["language"] == language:
            yield match["file"], match["body"]


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every command in a `bash` block, which is what the pages call runnable."""
    for _, body in blocks(page, "bash"):
        for line in body.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


ALL_COMMANDS = [(name, words) for name, page in zip(IDS, PAGES, strict=True) for words in commands(page)]


def overrides_of(words: list[str]) -> tuple[str, list[str]]:
    """Config name and overrides of an entry point's arguments."""
    name, overrides, rest = DEFAULT_CONFIG, [], iter(words)
    for word in rest:
        if word == "--config-name":
            name = next(rest)
        elif not word.startswith("--"):
            assert OVERRIDE.fullmatch(word), f"{word!r} is neither an option nor key=value"
            overrides.append(word)
    return name, overrides


def import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def example(name: str, directory: Path) -> ModuleType:
    """The module that some page shows as the file `name`."""
    found = [body for page in PAGES for file, body in blocks(page, "python") if file == name]
    assert len(found) == 1, f"{name} is shown {len(found)} times"
    path = directory / name
    path.write_text(found[0])
    return import_file(path)


@pytest.fixture
def no_leftover_modules() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("my_"):
            del sys.modules[name]


def test_there_are_commands() -> None:
    assert len(ALL_COMMANDS) >= 15


def test_the_front_page_is_short() -> None:
    assert len((REPO / "README.md").read_text().split()) <= 1200, "docs/ has room for the rest"


def write_files(directory: Path) -> None:
    """All files that the pages show."""
    for page in PAGES:
        for file, body in blocks(page, "python"):
            if file is not None:
                (directory / file).parent.mkdir(parents=True, exist_ok=True)
                (directory / file).write_text(body)


@pytest.mark.parametrize(("page", "words"), ALL_COMMANDS, ids=lambda value: " ".join(value)[:70] if value else "")
def test_command_would_run(
    page: str, words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_leftover_modules: None
) -> None:
    monkeypatch.chdir(REPO)
    write_files(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    program, *arguments = words
    if program == "make":
        targets = [word for word in arguments if "=" not in word]
        variables = dict(word.split("=", 1) for word in arguments if "=" in word)
        for target in targets:
            assert re.search(rf"^{target}:", (REPO / "Makefile").read_text(), re.M), f"no target {target}"
        assert set(variables) <= {"CONFIG", "ARGS", "TESTS", "EXTRAS", "PYTHON", "VENV"}
        default = {"train": DEFAULT_CONFIG, "train-math": DEFAULT_MATH_CONFIG}.get(" ".join(targets))
        if default is None:
            return
        name, overrides = overrides_of(
            ["--config-name", variables.get("CONFIG", default), *shlex.split(variables.get("ARGS", ""))]
        )
    elif program == ".venv/bin/rlinf-lite":
        command, *arguments = arguments
        if command == "collect":
            from rlinf_lite.cli.collect import requested

            requested(arguments)
            return
        if command == "init":
            assert arguments[0] in ("env", "policy") and arguments[1].isidentifier()
            return
        if command == "sweep":
            from rlinf_lite.cli.sweep import trials_of

            assert arguments.pop() == "--dry-run"
            assert len(trials_of(arguments[0], arguments[1:])[1]) > 1
            return
        if command == "reward":
            importlib.import_module("rlinf_lite.cli.reward").parse(arguments)
            return
        if command in ("serve", "export"):
            given = importlib.import_module(f"rlinf_lite.cli.{command}").parse(arguments)
            assert (REPO / given.policy / "config.json").is_file()
            return
        if command not in ("train", "doctor"):
            assert command in ("info", "configs") and all(word.isalnum() for word in arguments), f"rlinf-lite {command}"
            return
        if arguments and "=" not in arguments[0] and not arguments[0].startswith("--"):  # short for --config-name
            arguments.insert(0, "--config-name")
        name, overrides = overrides_of(arguments)
    else:
        assert program == ".venv/bin/python", (
            f"{program}: what is not a command of this project belongs in a text block"
        )
        script, *arguments = arguments
        assert (REPO / script).is_file(), f"no file {script}"
        if script not in ("examples/embodiment/train_embodied_agent.py", "examples/math/train_math.py"):
            return
        if "math" in script:
            monkeypatch.setattr(sys.modules[__name__], "DEFAULT_CONFIG", DEFAULT_MATH_CONFIG)
        name, overrides = overrides_of(arguments)
    load_config(name, overrides)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_files_and_keys_exist(page: Path) -> None:
    known, wrong = {*schema_keys(), *schema_keys(ReasoningConfig)}, []
    for text in INLINE_CODE.findall(FENCE.sub("", page.read_text())):
        word = text.split()[0].split("=")[0].rstrip(":")
        is_path = re.fullmatch(r"(configs|examples|rlinf_lite|tests|benchmarks|docs|assets)/[\w./-]*", text)
        if is_path and not (REPO / text).exists() and not (REPO / f"{text}.yaml").exists():
            wrong.append(text)
        under = "cluster.component_placement." if word.startswith("cluster.component_placement.") else None
        if KEY.fullmatch(word) and word not in known and under is None:
            wrong.append(text)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_yaml_is_a_valid_part_of_a_config(page: Path) -> None:
    for _, body in blocks(page, "yaml"):
        content = yaml.safe_load(body)
        is_reasoning = content.get("runner", {}).get("task_type") == "reasoning"
        (ReasoningConfig if is_reasoning else Config).model_validate(content)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_compiles_and_what_asserts_holds(page: Path) -> None:
    for _, body in blocks(page, "python"):
        code = compile(body, str(page), "exec")
        if "assert " in body:
            exec(code, {"__name__": "__main__"})


def test_every_config_is_in_the_table() -> None:
    from rlinf_lite.config.loading import config_names

    table = [line for line in (REPO / "docs" / "configs.md").read_text().splitlines() if line.startswith("| `")]
    assert sorted(line.split("`")[1] for line in table) == sorted(name.split("/")[1] for name in config_names())


def test_the_floors_of_the_drawing_are_those_that_imports_are_held_to() -> None:
    page = (REPO / "docs" / "architecture.md").read_text()
    drawing = page.partition("```text\n")[2].partition("```")[0]
    floors = [line.split("|")[1] for line in drawing.splitlines() if line.startswith("|")]
    assert [{name.strip() for name in floor.split(",")} for floor in floors] == LAYERS[::-1]
    folders = {path.parent.name for path in (REPO / "rlinf_lite").glob("*/__init__.py")}
    assert folders == set(re.findall(r"^\| `rlinf_lite/(\w+)/`", page, re.M))


def test_what_to_change_is_where_the_page_says() -> None:
    page = (REPO / "docs" / "architecture.md").read_text()
    table = page.partition("| question | file | look for |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) >= 20
    for line in table:
        [file] = re.findall(r"\(\.\./(\S+)\)", line)
        names = INLINE_CODE.findall(line)
        missing = [name for name in names if not re.search(rf"\b{name}\b", (REPO / file).read_text())]
        assert missing == [], f"{file} has no {missing}"
    step = page.partition("## One training step")[2].partition("\n## ")[0]
    sources = "".join((REPO / file).read_text() for file in re.findall(r"\(\.\./(\S+\.py)\)", page))
    known = {part for name in INLINE_CODE.findall(step) for part in name.split(".")}
    assert len(known) >= 15 and {name for name in known if not re.search(rf"\b{name}\b", sources)} == set()


def test_every_section_of_the_log_is_in_its_index() -> None:
    index = (REPO / "docs" / "log" / "README.md").read_text()
    days = sorted((REPO / "docs" / "log").glob("2*.md"))
    assert len(days) >= 9
    sections = {day.name: len(re.findall(r"^## ", day.read_text(), re.M)) for day in days}
    assert {day.name: index.count(f"({day.name}#") for day in days} == sections


def test_config_reference_is_up_to_date() -> None:
    """Made in a process of its own: in this one, other tests have registered parts."""
    code = "import make_config_reference; print(make_config_reference.reference(), end='')"
    environment = {**os.environ, "PYTHONPATH": f"{REPO}:{REPO / 'tools'}"}
    made = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    written = (REPO / "docs" / "config_reference.md").read_text()
    assert written == made.stdout, f"run: python tools/make_config_reference.py {made.stderr}"


@pytest.mark.slow
def test_memory_tables_are_up_to_date() -> None:
    maker = import_file(REPO / "tools" / "make_memory_tables.py")
    assert (REPO / "docs" / "memory.md").read_text() == maker.page(), "run: python tools/make_memory_tables.py"


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_installs_extras_that_are_named_and_nothing_twice(tmp_path: Path) -> None:
    def planned(*extras: str) -> str:
        done = subprocess.run(
            ["make", "-n", "setup", f"VENV={tmp_path}", *extras], cwd=REPO, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert "'.[maniskill," in planned()
    (tmp_path / ".installed").touch()
    assert "'.[" not in planned()
    assert "'.[dev,wandb]'" in planned("EXTRAS=dev,wandb")
    (tmp_path / ".installed-dev,wandb").touch()
    assert "'.[" not in planned("EXTRAS=dev,wandb") and "'.[dev]'" in planned("EXTRAS=dev")


def test_messages_of_the_faq_are_those_of_the_code() -> None:
    """Between the parts of a heading, which `…` separates, lies what differs from run to run."""
    texts = [
        node.value
        for file in (REPO / "rlinf_lite").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    headings = re.findall(r'^### "(.+)"$', (REPO / "docs" / "faq.md").read_text(), re.M)
    assert len(headings) >= 25
    gone = [part for heading in headings for part in heading.split("…") if not any(part in text for text in texts)]
    assert gone == []


def test_the_shortest_environment_runs(tmp_path: Path, no_leftover_modules: None) -> None:
    from rlinf_lite.envs import make_env

    example("my_env.py", tmp_path)
    cfg = load_config("gym_pendulum_ppo_mlp", ["env.id=my_env:make_env", "env.train.max_episode_steps=30"])
    env = make_env(cfg.env, "train", 2)
    env.reset(seeds=[1, 2])
    episodes = [
        record for _ in range(30) for record in env.chunk_step(np.zeros((2, 1, 2), np.float32)).episodes
    ]  # it stays where it is, so the time limit ends it
    assert [record.length for record in episodes] == [30, 30]
    assert all(record.success_once is False for record in episodes)


def test_the_policy_of_the_docs_scores_what_it_samples(tmp_path: Path, no_leftover_modules: None) -> None:
    import torch

    from rlinf_lite.envs import EnvSpec

    policy_class = example("my_policy.py", tmp_path).ResidualPolicy
    cfg = load_config("gym_pendulum_ppo_mlp", ["model.id=my_policy:ResidualPolicy", "model.num_action_chunks=2"])
    spec = EnvSpec(2, 3, {}, [-1.0, -1.0], [1.0, 1.0], 10, False)
    policy = policy_class.from_config(cfg.model, spec)
    torch.nn.init.normal_(policy.linear.weight)
    acted = policy.predict_action_batch({"state": np.ones((4, 3), np.float32)})
    assert acted.actions.shape == (4, 2, 2)
    torch.testing.assert_close(policy(acted.forward_inputs).logprobs, acted.logprobs, rtol=0, atol=1e-5)
    policy.policy_id = "my_policy:ResidualPolicy"
    policy.save_pretrained(tmp_path / "policy")
    loaded = policy_class.from_pretrained(tmp_path / "policy")
    assert torch.equal(loaded.linear.weight, policy.linear.weight)


@pytest.mark.parametrize("method", ["flow_sde", "flow_noise", "flow_cps"])
def test_the_flow_policy_of_the_docs_explores_and_imitates(
    method: str, tmp_path: Path, no_leftover_modules: None
) -> None:
    import torch

    from rlinf_lite.envs import EnvSpec
    from rlinf_lite.models import check_policy

    policy_class = example("my_flow.py", tmp_path).MyFlow
    settings = ["model.id=my_flow:MyFlow", f"model.options.method={method}", "model.options.width=64"]
    cfg = load_config("gym_pendulum_ppo_mlp", [*settings, "model.num_action_chunks=2"])
    spec = EnvSpec(2, 3, {}, [-1.0, -2.0], [1.0, 0.0], 10, False)
    assert check_policy(policy_class, spec, cfg.model) == []
    if method != "flow_sde":
        return  # how it explores does not matter to what it imitates
    torch.manual_seed(0)
    policy = policy_class.from_config(cfg.model, spec)
    optimizer, rng = torch.optim.Adam(policy.parameters(), lr=3e-3), np.random.default_rng(0)
    for step in range(300):  # the wanted action is what the state says
        state = rng.uniform(-0.5, 0.5, (256, 3)).astype(np.float32)
        keys = np.arange(256, dtype=np.uint64) + np.uint64(256 * step)
        batch = policy.sft_inputs({"state": state, "noise_key": keys})
        wanted = torch.from_numpy(state[:, None, :2] + [0.0, -1.0]).float().expand(-1, 2, -1)
        loss = policy.sft_loss({**batch, "actions": wanted, "mask": torch.ones(256, 2, dtype=torch.bool)})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        acted = policy.predict_action_batch({"state": state, "noise_key": keys}, "sampled").actions
    assert float((acted - wanted).abs().mean()) < 0.15


def test_a_simulator_and_a_policy_in_one_folder_each_train_word_for_word(tmp_path: Path) -> None:
    """What the page says, done outside the package: its files are written, and its command is run."""
    page = (REPO / "docs" / "extending.md").read_text()
    section = page.partition("## A policy in one folder")[2].partition("\n## ")[0]
    write_files(tmp_path)
    [command] = [
        body for language, body in re.findall(r"^```(\w+)\n(.*?)^```", section, re.M | re.S) if language == "bash"
    ]
    program, *words = shlex.split(command.replace("\\\n", " "))
    assert program == ".venv/bin/rlinf-lite"
    small = ["runner.val_check_interval=-1", "rollout.num_chunks=16", "actor.global_batch_size=128"]
    done = subprocess.run(
        [sys.executable, "-m", "rlinf_lite.cli", *words, *small, "cluster.accelerator=cpu", "cluster.runtime=local"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPO)])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 2/2" in done.stdout
    [policy] = tmp_path.glob("results/*/checkpoints/last/policy/config.json")
    assert '"policy_id": "my_linear.card:Linear"' in policy.read_text() and '"log_std_init": -1.0' in policy.read_text()


def test_a_users_cards_are_as_good_as_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leftover_modules: None
) -> None:
    from rlinf_lite.envs import EnvSpec, check_env
    from rlinf_lite.models import check_policy
    from rlinf_lite.preview.dry_run import describe

    write_files(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    mine = ["env.id=my_corridor.card:Corridor", "env.task=stop", "model.id=my_linear.card:Linear"]

    def problems(*overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load_config("gym_pendulum_ppo_mlp", [*mine, *overrides])
        return caught.value.problems

    cfg = load_config("gym_pendulum_ppo_mlp", mine)
    assert cfg.env.options.length == 4.0 and cfg.model.options.log_std_init == -0.5
    assert "length: 4.0" in describe(cfg)
    assert problems("env.options.lenght=3") == [
        "env.options.lenght: there is no such key. Did you mean env.options.length?"
    ]
    assert problems("env.options.length=0") == ["env.options.length: is 0. It must be greater than 0"]
    assert problems("model.options.log_std_int=0") == [
        "model.options.log_std_int: there is no such key. Did you mean model.options.log_std_init?"
    ]
    assert problems("env.task=stopp") == ["env.task: my_corridor.card:Corridor has no task 'stopp'. Did you mean stop?"]
    assert problems("env.options.tolerance=5") == [
        "env.options.tolerance: 5.0 m is all of a corridor of 4.0 m. Use less"
    ]
    assert problems("model.num_action_chunks=21", "rollout.num_chunks=1", "actor.global_batch_size=16")[0].startswith(
        "model.num_action_chunks: a chunk of 21 actions is longer than an episode of 20 env steps"
    )
    assert check_env(import_part("my_corridor.card:Corridor", "")) == []
    spec = EnvSpec(1, 2, {}, [-1.0], [1.0], 20, True)
    assert check_policy(import_part("my_linear.policy:LinearPolicy", ""), spec, cfg.model) == []


def test_every_field_that_passes_by_is_in_a_table() -> None:
    import rlinf_lite.models
    from rlinf_lite import envs
    from rlinf_lite.models import NOISE_KEY, ActionOutput, PolicyInputs, PolicyOutput

    tables = dict[str, set[str]]()
    for page in ("extending.md", "environments.md"):
        for block in re.findall(r"(?:^\|.*\n)+", (REPO / "docs" / page).read_text(), re.M):
            head, _, *rows = block.splitlines()
            named = {name for row in rows for name in INLINE_CODE.findall(row.split("|")[1])}
            tables |= {found[1]: named} if (found := INLINE_CODE.search(head.split("|")[1])) else {}
    assert tables["obs"] == {*envs.Obs.__annotations__, NOISE_KEY}
    for part in (envs.EnvSpec, envs.ChunkResult, envs.EpisodeRecord, ActionOutput, PolicyOutput, PolicyInputs):
        assert tables[part.__name__] == {field.name for field in fields(part)}, part
    assert tables["batch"] == {"sft_inputs(obs)", "actions", "mask"}
    helpers = ("row_noise_keys", "normal_noise", "uniform_noise", "Gaussian", "CategoricalTokens")
    assert all(callable(getattr(rlinf_lite.models, name)) for name in helpers)


def test_the_program_of_the_python_page_runs(tmp_path: Path) -> None:
    """Word for word, on a config made small."""
    page = (REPO / "docs" / "python.md").read_text()
    program = next(body for _, body in blocks(REPO / "docs" / "python.md", "python") if "def main()" in body)
    small = ["runner.max_steps=1", "env.train.num_envs=8", "rollout.num_chunks=8", "rollout.pipeline_stage_num=1"]
    small += ["env.eval.num_envs=4", "env.eval.num_episodes=4", "env.eval.max_episode_steps=10"]
    small += ["actor.global_batch_size=64", "cluster.component_placement={actor: 0, rollout: 0, env: 0}"]
    program = f"""import rlinf_lite
load_config = rlinf_lite.load_config
rlinf_lite.load_config = lambda name, overrides: load_config(name, [*overrides, *{small}])
{program}
"""
    done = subprocess.run(
        [sys.executable, "-"],
        input=program,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"return .* \(4 episodes\), greedy\n", done.stdout) and re.search(
        r"^\[\[.*\]\]$", done.stdout, re.M
    )
    import rlinf_lite

    names = re.findall(r"`rlinf_lite\.(\w+)", page)
    assert {"train", "evaluate", "load_config", "load_policy", "make_env", "RunResult", "EvalSummary"} <= set(names)
    assert all(getattr(rlinf_lite, name) for name in names)


def test_the_estimator_of_the_docs_runs(tmp_path: Path, no_leftover_modules: None) -> None:
    import torch

    from rlinf_lite.algorithms import AdvantageInputs, compute_advantages

    example("my_algorithm.py", tmp_path)
    cfg = load_config("gym_pendulum_ppo_mlp", ["algorithm.adv_type=my_algorithm:reward_to_go"])
    inputs = AdvantageInputs(rewards=torch.tensor([[1.0, 2.0, 4.0]]), mask=torch.tensor([[1, 1, 0]]))
    assert compute_advantages("my_algorithm:reward_to_go", inputs, cfg.algorithm).advantages.tolist() == [
        [3.0, 2.0, 0.0]
    ]


def test_every_metric_of_a_run_is_documented() -> None:
    """Names that code logs, from its source, against docs/metrics.md."""
    page = (REPO / "docs" / "metrics.md").read_text()
    logged = set()
    for path in (REPO / "rlinf_lite").rglob("*.py"):
        logged |= set(re.findall(r'f?"((?:env|eval|rollout|train|time|perf)/[a-z0-9_/]+)"', path.read_text()))
    assert {name for name in logged if f"`{name}`" not in page} == set()
    assert len(logged) >= 10
