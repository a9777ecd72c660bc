"""`rlinf-lite export`: what the Hub reads, from a checkpoint as runs write it, and back through `load_policy`."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn

from rlinf_lite import load_config, load_policy
from rlinf_lite.cli import main
from rlinf_lite.cli.eval import free_name, plays_otherwise
from rlinf_lite.cli.export import export
from rlinf_lite.config import ReasoningConfig
from rlinf_lite.envs import EnvSpec
from rlinf_lite.metrics import summarize_episodes
from rlinf_lite.models import GaussianPolicy, MLPGaussianPolicy, build_policy
from rlinf_lite.runners.checkpoints import CheckpointStore
from rlinf_lite.runners.run_config import write_config

VLA = "assets/tabletop_vla"
PICTURE = {"images": {"top": np.full((64, 64, 3), 90, np.uint8)}, "instruction": "pick up the red block"}
Checkpoint = Callable[..., Path]


class Episode:
    env_id, task_id, length, return_, success_at_end, steps_to_success = 0, "pick", 9, 1.0, True, None

    def __init__(self, seed: int, success: bool | None) -> None:
        self.seed, self.success_once = seed, success


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """A run's checkpoint after 40 steps, and evaluations of steps 0 and 40; the run's directory."""

    def make(save: Callable[[Path], object], config: str = "tabletop_ppo_vla", success: bool | None = True) -> Path:
        run = tmp_path / "results" / "my-run"
        cfg = load_config(config, ["runner.run_name=my_run"])

        def write(directory: Path) -> None:
            save(directory / "policy")
            (directory / "training_state" / "runner.json").write_text('{"completed_steps": 40}')
            write_config(cfg, directory / "training_state")

        CheckpointStore(run, 2).write(40, write)
        (run / "eval").mkdir()
        for step, num in ((0, 2), (40, 6)):
            has = None if success is None else [seed < num for seed in range(8)]
            episodes = [Episode(seed, None if has is None else has[seed]) for seed in range(8)]
            is_language = isinstance(cfg, ReasoningConfig)
            protocol = {} if is_language else {"env": cfg.env.id, "task": cfg.env.task, "seed": 7}
            summary = summarize_episodes(episodes, "greedy", protocol=protocol)
            (run / "eval" / f"step_{step:06d}.json").write_text(summary.to_json(step=step))
        return run

    return make


def card(directory: Path) -> tuple[dict[str, Any], str]:
    _, front, page = (directory / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), page


def test_a_run_as_the_hub_expects_it(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, out = load_policy(VLA), tmp_path / "hub" / "picker"
    run = checkpoint(policy.save_pretrained)
    measured = json.loads((run / "eval" / "step_000040.json").read_text())
    for name, headline in (("", "success 75.0% [a, b] (6/8), sampled"), ("_changed", "success 99.9%")):
        (run / f"eval_step_000040{name}.json").write_text(json.dumps(measured | {"headline": headline}))
    assert main(["export", str(run), "--to", "hf", str(out), "--license", "apache-2.0", "--base-model", "me/base"]) == 0
    written = capsys.readouterr().out
    assert "nothing has been uploaded: hf upload <user>/picker" in written
    assert f"left out: {run}/eval_step_000040_changed.json; --evaluation FILE" in written

    names = {path.name for path in out.iterdir()}
    assert names >= {
        "model.safetensors",
        "config.json",
        "dataset_statistics.json",
        "tokenizer.json",
        "train_config.yaml",
    }
    assert [path.name for path in out.parent.iterdir()] == ["picker"]
    assert '"instruction": "..."})  # [4, 3]' in (out / "README.md").read_text()  # greedy, as evaluated
    for path in (run / "checkpoints" / "last" / "policy").iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes()
    assert (load_policy(out).act(PICTURE) == policy.act(PICTURE)).all()

    front, page = card(out)
    assert (front["license"], front["library_name"], front["pipeline_tag"]) == ("apache-2.0", "rlinf_lite", "robotics")
    assert front["base_model"] == "me/base" and "openvla" in front["tags"]
    [result] = front["model-index"][0]["results"]
    assert result["dataset"] == {"type": "tabletop", "name": "tabletop pick"}
    assert [(x["type"], x["value"]) for x in result["metrics"]] == [("success_rate", 0.75)] * 2
    assert "| tabletop pick | success 75.0% [40.9, 92.9] (6/8), greedy | 7 | [step_000040.json](evaluations/" in page
    assert "success 75.0% [a, b] (6/8), sampled" in page and "25.0%" not in page  # that was before training
    assert "99.9%" not in page and not (out / "evaluations" / "step_000040_changed.json").exists()
    assert (
        "40 steps of ppo, config `my_run`, seed 0." in page
        and "camera `top` | uint8 [H, W, 3], scaled to 64 x 64" in page
    )
    assert json.loads((out / "evaluations" / "step_000040.json").read_text()) == measured
    assert yaml.safe_load((out / "train_config.yaml").read_text())["runner"]["run_name"] == "my_run"


def test_the_card_has_the_evaluations_that_are_named(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = checkpoint(load_policy(VLA).save_pretrained), tmp_path / "out"
    measured = json.loads((run / "eval" / "step_000040.json").read_text())
    chosen = run / "eval_step_000040_changed.json"
    chosen.write_text(json.dumps(measured | {"headline": "success 99.9%"}))
    words = ["export", str(run), "--to", "hf", str(out), "--license", "mit", "--evaluation"]
    assert main([*words, str(run / "metrics.jsonl")]) == 2
    assert "metrics.jsonl cannot be read: No such file" in capsys.readouterr().err
    assert main([*words, str(run / "checkpoints" / "last" / "policy" / "config.json")]) == 2
    assert "config.json is not an evaluation. Name a file that rlinf-lite eval has written" in capsys.readouterr().err
    assert main([*words, str(chosen)]) == 0
    assert [file.name for file in (out / "evaluations").iterdir()] == ["eval_step_000040_changed.json"]
    front, page = card(out)
    assert "success 99.9%" in page and len(front["model-index"][0]["results"]) == 1


def test_the_code_of_the_card_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a policy without a run, which has nothing to say of itself."""
    import huggingface_hub

    out = tmp_path / "flow"
    assert main(["export", "assets/tabletop_flow", "--to", "hf", str(out), "--license", "mit"]) == 0
    front, page = card(out)
    assert "model-index" not in front and "have not been evaluated" in page and not (out / "train_config.yaml").exists()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name: {"<user>/flow": out}[name])
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    found = dict[str, Any]()
    exec(code, found)
    assert found["actions"].shape == (4, 3)


def test_returns_where_there_is_no_success(checkpoint: Checkpoint, tmp_path: Path) -> None:
    policy, out = MLPGaussianPolicy(3, [-2.0], [2.0]), tmp_path / "out"
    run = checkpoint(policy.save_pretrained, "gym_pendulum_ppo_mlp", success=None)
    evaluation = run / "eval" / "step_000040.json"
    evaluation.write_text(evaluation.read_text().replace('"mode": "greedy"', '"mode": "sampled"'))
    out.mkdir()  # empty
    words = ["export", str(run / "checkpoints" / "step_000040" / "policy"), "--to", "hf", str(out)]
    assert main([*words, "--license", "mit"]) == 0
    front, page = card(out)
    assert '{"state": np.zeros(3)}, mode="sampled")' in page
    assert front["pipeline_tag"] == "reinforcement-learning" and "| state | 3 numbers |" in page
    [metric] = front["model-index"][0]["results"][0]["metrics"]
    assert (metric["type"], metric["value"]) == ("mean_reward", 1.0)
    assert (load_policy(out).act({"state": np.ones(3)}) == policy.act({"state": np.ones(3)})).all()


class Cardless(GaussianPolicy):
    def build(self) -> None:
        self.layer = nn.Linear(3, self.num_outputs + self.num_values)

    def network(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        found = self.layer(inputs["state"])
        return found[:, : self.num_outputs], found[:, self.num_outputs :]


def test_a_policy_without_a_card_is_called_by_its_name(tmp_path: Path) -> None:
    policy = Cardless(EnvSpec(1, 3, {}, [-1.0], [1.0], 10, False), {})
    policy.policy_id = "tests.cli.test_export:Cardless"
    policy.save_pretrained(tmp_path / "policy")
    assert main(["export", str(tmp_path / "policy"), "--to", "hf", str(tmp_path / "out"), "--license", "mit"]) == 0
    _, page = card(tmp_path / "out")
    assert page.startswith("\n# out\n\n`tests.cli.test_export:Cardless`. ")


def test_adapters_are_merged(tmp_path: Path) -> None:
    """Readers of the published layout would see the weights without what was trained."""
    cfg = load_config("tabletop_ppo_vla", ["model.options.lora.rank=4", f"rollout.model_dir={VLA}"])
    spec = EnvSpec(3, None, {"top": (64, 64)}, [-1.0] * 3, [1.0] * 3, 24, True)
    policy = build_policy(cfg, spec)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    policy.save_pretrained(tmp_path / "adapted")
    words = ["export", str(tmp_path / "adapted"), "--to", "hf", str(tmp_path / "out"), "--license", "mit"]
    assert main(words) == 0
    merged = load_policy(tmp_path / "out")
    assert not any(".lora_" in name for name, _ in merged.named_parameters())
    scores = [x.predict_action_batch(batch(PICTURE), "greedy").logprobs for x in (policy.eval(), merged)]
    torch.testing.assert_close(*scores, atol=1e-4, rtol=0)
    unadapted = load_policy(VLA).predict_action_batch(batch(PICTURE), "greedy").logprobs
    assert not torch.allclose(scores[1], unadapted, atol=1e-3)


def test_weights_that_are_elsewhere_come_along(tmp_path: Path) -> None:
    cfg = load_config("tabletop_ppo_vla", ["model.options.lora.save_base=false", f"rollout.model_dir={VLA}"])
    build_policy(cfg, EnvSpec(3, None, {"top": (64, 64)}, [-1.0] * 3, [1.0] * 3, 24, True)).save_pretrained(
        tmp_path / "a"
    )
    assert not (tmp_path / "a" / "model.safetensors").exists()
    assert main(["export", str(tmp_path / "a"), "--to", "hf", str(tmp_path / "out"), "--license", "mit"]) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rlinf_lite"]["base"] is None


def batch(obs: dict[str, Any]) -> dict[str, Any]:
    return {"images": {"top": obs["images"]["top"][None]}, "instruction": [obs["instruction"]]}


def test_language_models_are_transformers_own(checkpoint: Checkpoint, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    def save(directory: Path) -> None:
        sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1)).save_pretrained(directory)
        AutoTokenizer.from_pretrained("assets/char_tokenizer").save_pretrained(directory)

    run, out = checkpoint(save, "math_arithmetic_grpo"), tmp_path / "out"
    assert main(["export", str(run), "--to", "hf", str(out), "--license", "mit"]) == 0
    front, page = card(out)
    assert (front["library_name"], front["pipeline_tag"]) == ("transformers", "text-generation")
    assert 'AutoModelForCausalLM.from_pretrained("<user>/out")' in page
    assert AutoModelForCausalLM.from_pretrained(out).config.vocab_size == 32
    assert "| `config.json` | the model's config |" in page
    for file in run.glob("eval/*"):
        file.unlink()
    assert main(["export", str(run), "--to", "hf", str(tmp_path / "again"), "--license", "mit"]) == 0
    _, page = card(tmp_path / "again")
    assert "`rlinf-lite eval --config-name train_config.yaml actor.checkpoint_load_path=DIR` does that" in page


def test_what_is_not_exported(checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(policy: Any, out: Path) -> str:
        assert export([str(policy), "--to", "hf", str(out), "--license", "mit"]) == 2
        assert list(tmp_path.glob(".*")) == []
        return capsys.readouterr().err

    run = checkpoint(MLPGaussianPolicy(3, [-2.0], [2.0]).save_pretrained, "gym_pendulum_ppo_mlp")
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("mine")
    assert "full exists and is not empty. Name a new directory" in refused(run, full)
    assert (full / "mine.txt").read_text() == "mine" and "not empty" in refused(run, full / "mine.txt")
    gone = refused("nowhere", tmp_path / "out")
    assert "nowhere: no such directory" in gone and "config.json" not in gone
    exported, policy = tmp_path / "exported", run / "checkpoints" / "step_000040" / "policy"
    (policy / "evaluations").mkdir()  # of the export that training started from
    (policy / "evaluations" / "eval_old.json").write_text("{}")
    assert export([str(run), "--to", "hf", str(exported), "--license", "mit"]) == 0
    capsys.readouterr()
    assert not (exported / "evaluations" / "eval_old.json").exists()
    assert "exported is an export already (it has train_config.yaml). Export the run" in refused(
        exported, tmp_path / "out"
    )
    assert "full holds no complete checkpoint" in (nothing := refused(full, tmp_path / "out"))
    assert nothing.endswith(". It is no policy's directory either, which has a config.json\n")
    for words, problem in (
        (["--license", "My own!"], "a name of the Hub, such as apache-2.0"),
        ([], "are required: --license"),
    ):
        with pytest.raises(SystemExit):
            export([str(run), "--to", "hf", str(tmp_path / "out"), *words])
        assert problem in capsys.readouterr().err
    weights = next((run / "checkpoints" / "step_000040" / "policy").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "model.safetensors" in refused(run, tmp_path / "out") and not (tmp_path / "out").exists()


def test_an_evaluation_under_other_settings_overwrites_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, names = tmp_path / "eval_step_000040.json", list[str]()
    for seed in (1, 2, 1, 3):
        summary = summarize_episodes([Episode(0, True)], "greedy", protocol={"seed": seed})
        found = free_name(path, summary)
        found.write_text(summary.to_json())
        names.append(found.name)
    numbered = [f"eval_step_000040{number}.json" for number in ("", "-2", "", "-3")]
    assert names == numbered and f"{path} has other settings or code, and is kept" in capsys.readouterr().out
    words = {"env.eval.seed=3": True, "+env.options.x=1": True, "model.temperature=2": True}
    words |= {"env.eval.num_envs=2": False, "env.train.num_envs=2": False, "cluster.accelerator=cpu": False}
    words |= {"rollout.max_response_length=8": True, "rollout.engine=a:b": True, "rollout.max_batch_size=8": False}
    words |= {"reward.weights.rule=0": True, "actor.tokenizer.tokenizer_model=x": True, "actor.num_threads=2": False}
    assert {word: plays_otherwise(word) for word in words} == words
