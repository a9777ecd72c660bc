"""Checkpoints of LeRobot's pi0 and pi0.5 are read by the rules of the release that trained them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlinf_lite.cards import ProblemError
from rlinf_lite.config import load_config
from rlinf_lite.config.schema import ModelConfig
from rlinf_lite.models import load_policy
from rlinf_lite.models.flow.config import FlowConfig
from rlinf_lite.models.flow.inputs import pixel_values, prompt_text, stored_images
from rlinf_lite.models.flow.policy import FlowPolicy
from rlinf_lite.models.flow.published import read_config
from rlinf_lite.runners.protocol import protocol_of
from tests.models.flow_checkpoints import FOLDER, observation

FIXTURES = Path(__file__).parents[1] / "fixtures"
RELEASES = {"0.4.0": "v0.4", "0.5.0": "v0.5"}
"""Those of LeRobot that changed what policies read, written by tools/make_lerobot_preprocessing.py."""
NOTE = "says which release of LeRobot trained it"
WROTE, PADDED = "wrote zeros into the prompt after the state, up to 12 numbers", "padded pictures with -3 instead of -1"


@pytest.fixture
def unmarked(tmp_path: Path) -> Path:
    """pi0.5 of LeRobot 0.4 or 0.5.0: its files say nothing of relative actions."""
    directory = Path(shutil.copytree(FIXTURES / "tiny-pi05-lerobot", tmp_path / "policy"))
    for key in ("use_relative_actions", "relative_exclude_joints", "action_feature_names"):
        edit(directory / "config.json", lambda said, key=key: said.pop(key))
    edit(directory / "policy_preprocessor.json", lambda said: said["steps"].pop(2))
    return directory


def edit(file: Path, change: Any) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def pictures_are(directory: Path, height: int, width: int) -> None:
    features = [f"observation.images.{name}" for name in ("image", "image2")]
    edit(
        directory / "config.json",
        lambda said: [said["input_features"][name].update(shape=[3, height, width]) for name in features],
    )


def settings(family: str = "pi05", **options: Any) -> ModelConfig:
    return ModelConfig(id=family, num_action_chunks=5, options=options)


def load(directory: Path, model: ModelConfig | None = None) -> FlowPolicy:
    policy = load_policy(directory, model)
    assert isinstance(policy, FlowPolicy)
    return policy


@pytest.mark.parametrize("family", ["pi0", "pi05", "smolvla"])
@pytest.mark.parametrize("release", RELEASES)
def test_pictures_and_prompts_are_those_of_the_release(release: str, family: Any) -> None:
    """To the bit. The square picture is padded too, as LeRobot rounds."""
    found = dict(np.load(FIXTURES / f"lerobot-{release}.npz"))
    rules: Any = None if family == "smolvla" else RELEASES[release]
    cfg = FlowConfig(family, "lerobot", resize_to=(7, 7), state_in_prompt=family == "pi05", lerobot_preprocessing=rules)
    images = [name.removeprefix("image_") for name in found if name.startswith("image_")]
    assert images == ["5x9", "8x5", "9x9"]
    for name in images:
        pixels = pixel_values(stored_images(found[f"image_{name}"], cfg), cfg)
        np.testing.assert_array_equal(pixels.numpy(), found[f"{family}_{name}"])
    texts = [prompt_text(*one, cfg) for one in zip(found["sentences"].tolist(), found["states"], strict=True)]
    assert texts == [(text, "") for text in found[f"{family}_prompts"].tolist()]


@pytest.mark.parametrize(
    ("training", "config", "step", "rules"),
    [
        (None, False, False, None),
        ({"steps": 3000}, False, False, "v0.4"),
        ({"steps": 3000, "cudnn_deterministic": False}, False, False, "v0.5"),
        (None, True, False, "v0.5"),  # 0.5.1 or later with the processors of an older checkpoint
        (None, False, True, "v0.5"),
        ({"steps": 3000}, True, True, "v0.5"),
    ],
)
def test_files_say_which_release_trained(
    unmarked: Path, training: dict[str, Any] | None, config: bool, step: bool, rules: str | None
) -> None:
    if training is not None:
        (unmarked / "train_config.json").write_text(json.dumps(training))
    if config:
        edit(unmarked / "config.json", lambda said: said.update(use_relative_actions=False))
    if step:
        relative = {"registry_name": "relative_actions_processor", "config": {"enabled": False}}
        edit(unmarked / "policy_preprocessor.json", lambda said: said["steps"].insert(2, relative))
    assert read_config(unmarked).lerobot_preprocessing == rules


@torch.no_grad()
def test_training_reads_what_acting_reads(unmarked: Path) -> None:
    """Likelihoods and imitation are of the same prompts and pictures as what was done; these are not v0.5's."""
    obs = observation("tiny-pi05-lerobot")
    new, old = (load(unmarked, settings(lerobot_preprocessing=rules)) for rules in ("v0.5", "v0.4"))
    acted = old.predict_action_batch(obs, "train")
    given, imitated = acted.forward_inputs, old.sft_inputs(obs)
    assert torch.equal(old(given).logprobs, acted.logprobs)
    assert not torch.equal(new(given).logprobs, acted.logprobs), "their pictures differ"
    read = [name for name in given if name in imitated]
    assert {"tokens", "token_mask", "image_image", "image_image2"} <= set(read)
    assert all(torch.equal(imitated[name], given[name]) for name in read)
    assert old.prompts is not None
    texts = [
        old.prompts._tokenizer.decode(ids[mask].tolist())
        for ids, mask in zip(given["tokens"], given["token_mask"], strict=True)
    ]
    assert all(re.search(r"State:( -?\d+){8}( 128){4};", text) for text in texts), texts
    one, other = (policy.predict_action_batch(obs, "greedy").actions for policy in (new, old))
    assert (one - other).abs().max() > 1e-3


def test_a_line_where_no_file_says_the_release(
    unmarked: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def lines(directory: Path, model: ModelConfig | None = None) -> list[str]:
        caplog.clear()
        load_policy(directory, model)
        return [record.getMessage() for record in caplog.records if NOTE in record.getMessage()]

    (line,) = lines(unmarked)
    said = f"no file of {unmarked} {NOTE}; inputs are processed as in 0.5 and later. LeRobot 0.4 {WROTE} and {PADDED}. "
    assert said in line
    assert lines(unmarked, settings()) == [line]
    assert lines(unmarked, settings(lerobot_preprocessing="v0.4")) == []
    assert lines(unmarked, settings(lerobot_preprocessing="v0.5")) == []
    assert lines(FIXTURES / "tiny-pi05-lerobot") == []
    pictures_are(unmarked, 80, 80)
    (line,) = lines(unmarked)
    assert WROTE in line and PADDED not in line
    assert lines(unmarked, settings(state_in_prompt=False)) == []
    edit(unmarked / "config.json", lambda said: said.update(max_state_dim=8))
    assert lines(unmarked) == []
    for name in ("tiny-pi0", "tiny-pi05", "tiny-smolvla"):
        assert lines(FIXTURES / name) == []
    pictures_are(unmarked, 60, 80)
    load(unmarked).save_pretrained(tmp_path / "copy")  # a copy of which no more is known
    assert len(lines(tmp_path / "copy")) == 1


def test_pi0_reads_no_state_in_its_prompt(unmarked: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file(load_file(FOLDER / "tiny-pi0" / "model.safetensors"), unmarked / "model.safetensors")
    shutil.copy(FOLDER / "tiny-pi0" / "tokenizer.json", unmarked / "tokenizer" / "tokenizer.json")
    tiny = json.loads((FOLDER / "tiny-pi0" / "config.json").read_text())["tiny"]
    edit(unmarked / "config.json", lambda said: said.update(type="pi0", tiny=tiny))
    policy = load(unmarked)
    (line,) = (record.getMessage() for record in caplog.records if NOTE in record.getMessage())
    assert f"LeRobot 0.4 {PADDED}. If" in line
    obs = observation("tiny-pi05-lerobot")
    old = load(unmarked, settings("pi0", lerobot_preprocessing="v0.4"))
    one, other = policy._inputs(obs), old._inputs(obs)
    assert all(torch.equal(one[name], other[name]) for name in one), "pictures are padded by the network's side"
    assert [pixel_values(one["image_image"], one_of.cfg).min() for one_of in (policy, old)] == [-1, -3]
    caplog.clear()
    pictures_are(unmarked, 80, 80)
    load(unmarked)
    assert not any(NOTE in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("rules", ["v0.4", "v0.5"])
def test_what_is_saved_keeps_its_rules(unmarked: Path, tmp_path: Path, rules: str) -> None:
    """A run's, also where it left them open; and where other files say another release."""
    (unmarked / "train_config.json").write_text(json.dumps({"steps": 3000}))
    load(unmarked, settings(lerobot_preprocessing=rules)).save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "train_config.json").is_file()
    assert load(tmp_path / "out").cfg.lerobot_preprocessing == rules
    assert load(tmp_path / "out", settings()).cfg.lerobot_preprocessing == rules
    (unmarked / "train_config.json").unlink()
    load(unmarked, settings()).save_pretrained(tmp_path / "open")
    assert load(tmp_path / "open").cfg.lerobot_preprocessing == "v0.5"


def test_other_rules_than_those_it_was_trained_on_are_said(unmarked: Path, caplog: pytest.LogCaptureFixture) -> None:
    (unmarked / "train_config.json").write_text(json.dumps({"steps": 3000}))
    load(unmarked, settings(lerobot_preprocessing="v0.5"))
    assert "lerobot_preprocessing v0.5, where it was v0.4" in caplog.text
    for name, family in (("tiny-pi05", "pi05"), ("tiny-smolvla", "smolvla")):
        with pytest.raises(ProblemError, match=r"options\.lerobot_preprocessing: is v0\.4, and .* Set it to null"):
            load(FIXTURES / name, settings(family, lerobot_preprocessing="v0.4"))


def test_evaluations_say_it_in_their_protocol(unmarked: Path) -> None:
    """Of the environment's pictures, which are square in LIBERO, whatever those of the demonstrations were."""
    cameras = "model.options.cameras={image: agentview, image2: robot0_eye_in_hand}"
    left = ["model.options.num_steps=null", "model.options.horizon=null", "model.options.state_in_prompt=null"]
    overrides = [f"rollout.model_dir={unmarked}", cameras, *left]

    def notes(*more: str) -> list[str]:
        config = load_config("embodiment/libero_ppo_pi05", [*overrides, *more], elsewhere=True)
        found: list[str] = protocol_of(config, ["a"], {"max_episode_steps": 7}, {})["notes"]
        return found

    (line,) = notes()
    assert NOTE in line and WROTE in line and PADDED not in line
    assert notes("model.options.lerobot_preprocessing=v0.4") == []
    assert notes("model.options.state_in_prompt=false") == []
