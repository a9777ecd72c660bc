"""Published directories as they are found in the world: other names, forms and faults than the fixtures have."""

from __future__ import annotations

import itertools
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from rlinf_lite.cards import ProblemError
from rlinf_lite.config.schema import ModelConfig
from rlinf_lite.models import CheckpointFormatError, load_policy
from rlinf_lite.models.flow.config import FlowConfig, StatisticsError
from rlinf_lite.models.flow.files import UnsupportedFlowError
from rlinf_lite.models.flow.inputs import Normalizer, ObservationError, PromptEncoder, TokenizerError, pixel_values
from rlinf_lite.models.flow.policy import FlowPolicy
from rlinf_lite.models.flow.published import read_config
from tests.models.flow_checkpoints import FOLDER, observation, policy_of

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Copy = Callable[[str], Path]


@pytest.fixture
def copied(tmp_path: Path) -> Copy:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(FOLDER / name, tmp_path / name, dirs_exist_ok=True))

    return copy


def edit(directory: Path, change: Callable[[dict[str, Any]], object], file: str = "config.json") -> None:
    content = json.loads((directory / file).read_text())
    change(content)
    (directory / file).write_text(json.dumps(content))


def load(directory: Path, model: ModelConfig | None = None) -> FlowPolicy:
    policy = load_policy(directory, model)
    assert isinstance(policy, FlowPolicy)
    return policy


def into_shards(directory: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(directory / WEIGHTS)
    shards = {f"model-0000{n}-of-00002.safetensors": sorted(tensors)[n - 1 :: 2] for n in (1, 2)}
    for file, names in shards.items():
        save_file({name: tensors[name] for name in names}, directory / file, metadata={"format": "pt"})
    (directory / WEIGHTS).unlink()
    weight_map = {name: file for file, names in shards.items() for name in names}
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def test_lerobots_state_is_in_the_bins_that_lerobot_computes() -> None:
    """Its quantiles are float32: numbers on the edge of a bin are in another one in float64."""
    rng, bins = np.random.default_rng(0), np.linspace(-1, 1, 257)[:-1]
    for _ in range(50):
        low = np.round(rng.normal(size=8), 2).astype(np.float32)
        high = np.round(low + rng.uniform(0.1, 3, 8), 2).astype(np.float32)
        high[0] = low[0]
        x = np.round(low + (high - low) * rng.integers(0, 257, (50, 8)) / 256, 4).astype(np.float32)
        statistics = {"state": {"q01": low.tolist(), "q99": high.tolist()}}
        cfg = FlowConfig(layout="lerobot", state_norm="quantiles", norm_eps=1e-8, statistics=statistics)
        given, one, other = map(torch.from_numpy, (x, low, high))
        span = torch.where(other - one == 0, torch.tensor(1e-8), other - one)
        expected = (2.0 * (given - one) / span - 1.0).numpy()  # as in lerobot's normalize_processor.py
        found = Normalizer(cfg, "state", 8).normalize(x)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(np.digitize(found, bins), np.digitize(expected, bins))
        np.testing.assert_array_equal(Normalizer(cfg, "state", 8).normalize(given).numpy(), expected)


def test_the_processor_says_what_is_added_to_ranges(copied: Copy) -> None:
    directory = copied("tiny-smolvla")
    before = load(directory).cfg
    assert before.norm_eps == 1e-8

    def change(content: dict[str, Any]) -> None:
        for step in content["steps"]:
            if step["registry_name"] == "normalizer_processor":
                step["config"]["eps"] = 0.25

    edit(directory, change, "policy_preprocessor.json")
    policy = load(directory)
    mean, std = (np.array(policy.cfg.statistics["state"][name], np.float32) for name in ("mean", "std"))
    np.testing.assert_allclose(policy.states.normalize(mean + 1), 1 / (std + 0.25), rtol=1e-6)


def test_shards_that_are_saved_over_leave_nothing_behind(copied: Copy) -> None:
    directory = copied("tiny-pi0")
    tensors = into_shards(directory)
    policy = load(directory)
    with torch.no_grad():
        policy.network.action_out_proj.bias += 1
    for _ in range(2):  # over shards, and over one file
        policy.save_pretrained(directory)
        assert [file.name for file in directory.glob("model*")] == [WEIGHTS]
        after = load_file(directory / WEIGHTS)
        assert after.keys() == tensors.keys()
        assert {name for name in tensors if not torch.equal(after[name], tensors[name])} == {"action_out_proj.bias"}
        policy = load(directory)


def test_lerobots_tensors_need_no_model_before_their_names(copied: Copy, tmp_path: Path) -> None:
    """lerobot/pi0_base and pi05_base: LeRobot's behaviour comes from config.json, names from the tensors."""
    directory = copied("tiny-pi05-lerobot")
    tensors = {name.removeprefix("model."): x for name, x in load_file(directory / WEIGHTS).items()}
    save_file(tensors, directory / WEIGHTS)
    one, other = load(directory), load(FOLDER / "tiny-pi05-lerobot")
    assert (one.cfg.layout, one.cfg.prefix, other.cfg.prefix) == ("lerobot", "", "model.")
    assert {**one.config_dict(), "prefix": "model."} == other.config_dict()
    assert all(torch.equal(x, other.state_dict()[name]) for name, x in one.state_dict().items() if "network" in name)
    one.save_pretrained(tmp_path / "out")
    after = load_file(tmp_path / "out" / WEIGHTS)
    assert after.keys() == tensors.keys()
    assert all(torch.equal(x, tensors[name]) for name, x in after.items())
    assert load(tmp_path / "out").config_dict() == one.config_dict()


def test_names_of_special_tokens_in_a_text(copied: Copy) -> None:
    """openpi's SentencePiece reads them as words, tokenizer.json of a directory without that one too; LeRobot's
    tokenizer does not."""
    directory = copied("tiny-pi0")
    cfg, text = read_config(directory), "wipe <pad> off<eos>"
    pieces = PromptEncoder.from_directory(directory, cfg).ids(text, "\n")
    (directory / "tokenizer.model").unlink()
    assert PromptEncoder.from_directory(directory, cfg).ids(text, "\n") == pieces
    assert pieces.count(0) == 0
    assert 0 in load(FOLDER / "tiny-pi05-lerobot").prompts.ids(text, "")


@pytest.mark.parametrize("name", ["tiny-pi0", "tiny-smolvla"])
def test_turned_pictures_are_read(name: str) -> None:
    """As environments turn them, by negative strides; also where the size is the policy's."""
    policy, obs = policy_of(name), observation(name)
    width, height = policy.cfg.resize_to
    for shape in ((60, 80), (height, width)):
        images = {key: np.resize(x, (len(x), *shape, 3)) for key, x in obs["images"].items()}
        turned = {key: x[:, ::-1, ::-1] for key, x in images.items()}
        found = policy._inputs({**obs, "images": turned})
        copies = policy._inputs({**obs, "images": {key: x.copy() for key, x in turned.items()}})
        assert all(torch.equal(x, copies[key]) for key, x in found.items())


@pytest.mark.parametrize("name", ["tiny-pi0", "tiny-pi05", "tiny-smolvla"])
def test_observations_that_cannot_be_read_are_refused(name: str) -> None:
    policy, obs = policy_of(name), observation(name)

    def refused(match: str, **changed: Any) -> None:
        images = {key: changed["image"](x) for key, x in obs["images"].items()} if "image" in changed else obs["images"]
        given = {**obs, "images": images, **{key: x for key, x in changed.items() if key != "image"}}
        with pytest.raises(ObservationError, match=match):
            policy.predict_action_batch({key: x for key, x in given.items() if x is not None})

    refused(r"images have shape \(2, 3, \d+, 80\)", image=lambda x: x.transpose(0, 3, 1, 2))
    refused(r"images have shape \(2, \d+, 80, 4\)", image=lambda x: np.concatenate([x, x[..., :1]], axis=-1))
    refused(r"images have shape \(2, \d+, 80\)", image=lambda x: x[..., 0])
    refused("has 1 rows, and there are 2 instructions", image=lambda x: x[:1])
    refused(r"states have shape \(1, \d\)", state=obs["state"][:1])
    refused("reads an instruction, and the observation has none", instruction=None)
    refused("the instruction of row 0 is None; a text is needed", instruction=[None, "move"])
    for wrong in (np.nan, np.inf):  # pi0.5's prompt would have it as bin 255
        state = obs["state"].copy()
        state[1, 2] = wrong
        refused(rf"state\[2\] of row 1 is {wrong}; a finite number", state=state)


def test_white_is_one_for_lerobots_pi0() -> None:
    """LeRobot clamps to [0, 1] behind interpolation, SmolVLA's own code does not."""
    for trial in range(60):
        height, width, size = np.random.default_rng(trial).integers(28, 120, 3)
        white = torch.full((1, int(height), int(width), 3), 255, dtype=torch.uint8)
        cfg = FlowConfig(family="pi05", layout="lerobot", resize_to=(int(size), int(size)))
        pixels = pixel_values(white, cfg)
        ratio = max(width / size, height / size)
        inner = (int(height / ratio), int(width / ratio))
        expected = F.interpolate(torch.ones(1, 3, int(height), int(width)), inner, mode="bilinear").clamp(0, 1) * 2 - 1
        assert torch.equal(pixels[pixels > 0].sort().values, expected.flatten().sort().values)


@pytest.mark.parametrize("name", ["tiny-pi0", "tiny-pi05"])
def test_statistics_that_openpi_writes_as_null(name: str, copied: Copy, tmp_path: Path) -> None:
    """z-scores need no quantiles; quantiles that are null are missing."""
    directory = copied(name)
    (file,) = directory.rglob("norm_stats.json")
    content = json.loads(file.read_text())
    for entry in content["norm_stats"].values():
        entry |= {"q01": None, "q99": None}
    file.write_text(json.dumps(content))
    if name == "tiny-pi05":
        with pytest.raises(StatisticsError, match="quantiles needs q01 of state, and the statistics have mean, std"):
            load_policy(directory)
        return
    load(directory).save_pretrained(tmp_path / "out")
    assert load(tmp_path / "out").config_dict() == load(directory).config_dict()


@pytest.mark.parametrize(
    ("name", "key", "changed", "said"),
    [
        ("tiny-pi0", "std", -0.1, r"say mean \S+ and std -0\.1 of actions\[1\], which is no range"),
        ("tiny-pi0", "mean", float("nan"), r"say mean nan and std \S+ of actions\[1\]"),
        ("tiny-pi05", "q99", -1e9, r"say q01 \S+ and q99 -1000000000\.0 of actions\[1\]"),
        ("tiny-pi05", "q01", float("inf"), r"say q01 inf and q99 \S+ of actions\[1\]"),
    ],
)
def test_statistics_that_are_no_range(name: str, key: str, changed: float, said: str, copied: Copy) -> None:
    directory = copied(name)
    (file,) = directory.rglob("norm_stats.json")
    content = json.loads(file.read_text())
    actions = content["norm_stats"]["actions"]
    unread = "q99" if key in ("std", "mean") else "std"
    whole, actions[unread] = actions[key].copy(), [-1.0] * 7
    file.write_text(json.dumps(content))
    load_policy(directory)  # what is not read may be anything
    actions[key] = [whole[0], changed, *whole[2:]]
    file.write_text(json.dumps(content))
    with pytest.raises(StatisticsError, match=rf"the statistics of physical-intelligence/libero {said}"):
        load_policy(directory)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_visual_memory", True),
        ("use_proprioceptive_memory", True),
        ("n_obs_steps", 2),
        ("time_sampling_scale", 0.5),
        ("time_sampling_offset", 0.3),
        ("time_sampling_beta_alpha", 1.0),
        ("use_relative_actions", True),
    ],
)
def test_what_lerobot_can_be_told_and_is_not_built(key: str, value: Any, copied: Copy) -> None:
    directory = copied("tiny-pi05-lerobot")
    edit(directory, lambda content: content.update({key: value}))
    with pytest.raises(UnsupportedFlowError, match=rf"{key} is {value}; only"):
        load_policy(directory)


def test_the_processors_normalisation_wins(copied: Copy) -> None:
    """It is what LeRobot computes with; a kind that it does not name is none."""
    directory = copied("tiny-pi05-lerobot")

    def change(content: dict[str, Any]) -> None:
        for step in content["steps"]:
            if step["registry_name"].endswith("normalizer_processor"):  # or un-
                step["config"]["norm_map"] = {"ACTION": "MEAN_STD"}

    edit(directory, change, "policy_preprocessor.json")
    with pytest.raises(StatisticsError, match=r"postprocessor\.json and its file have other numbers for actions"):
        read_config(directory)
    edit(directory, change, "policy_postprocessor.json")
    cfg = read_config(directory)
    assert (cfg.state_norm, cfg.action_norm) == ("identity", "mean_std")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"norm_map": {"VISUAL": "MEAN_STD", "STATE": "QUANTILES", "ACTION": "QUANTILES"}}, "pictures are normalised"),
        ({"normalize_observation_keys": ["observation.images.top"]}, "or the state is not"),
        (None, r"has steps that are not known here: image_crop_resize_processor. Remove those that change nothing"),
    ],
)
def test_what_a_processor_does_besides(changes: dict[str, Any] | None, said: str, copied: Copy) -> None:
    directory = copied("tiny-pi05-lerobot")

    def change(content: dict[str, Any]) -> None:
        if changes is None:
            content["steps"].insert(0, {"registry_name": "image_crop_resize_processor", "config": {}})
        for step in content["steps"]:
            if step["registry_name"] == "normalizer_processor":
                step["config"].update(changes or {})

    edit(directory, change, "policy_preprocessor.json")
    with pytest.raises(UnsupportedFlowError, match=said):
        read_config(directory)


def test_adapters_beside_the_weights_are_no_part_of_them(copied: Copy) -> None:
    directory = copied("tiny-smolvla")
    save_file({"base_model.model.x.lora_A.weight": torch.ones(2, 2)}, directory / "adapter_model.safetensors")
    with pytest.raises(CheckpointFormatError, match=r"has adapters beside its weights.*Merge them"):
        load_policy(directory)


def change_numbers(directory: Path, processor: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    (file,) = directory.glob(f"policy_{processor}_*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_the_postprocessors_statistics_are_the_preprocessors(copied: Copy) -> None:
    directory = copied("tiny-smolvla")
    # of the state nobody reads them; in another type they are the same
    change_numbers(directory, "postprocessor", lambda x: x.pop("observation.state.mean"))
    change_numbers(directory, "postprocessor", lambda x: x.update({key: one.double() for key, one in x.items()}))
    assert read_config(directory) == read_config(FOLDER / "tiny-smolvla")
    change_numbers(directory, "postprocessor", lambda x: x["action.std"].add_(1e-3))
    with pytest.raises(StatisticsError, match=r"postprocessor\.json and its file have other numbers for actions"):
        read_config(directory)


@pytest.mark.parametrize("feature", ["observation.state.velocity", "observation.state_velocity", "action.velocity"])
def test_statistics_of_other_features(feature: str, copied: Copy) -> None:
    directory = copied("tiny-smolvla")
    other = {f"{feature}.{key}": torch.full((6,), 50.0) for key in ("mean", "std")}
    change_numbers(directory, "preprocessor", lambda x: x.update(other))
    assert read_config(directory) == read_config(FOLDER / "tiny-smolvla")


@pytest.mark.parametrize(
    ("file", "step"),
    [
        ("policy_preprocessor.json", "relative_actions_processor"),
        ("policy_postprocessor.json", "absolute_actions_processor"),
    ],
)
def test_processors_that_make_actions_relative(file: str, step: str, copied: Copy) -> None:
    """What they say is what LeRobot computes, whatever config.json says of it."""
    directory = copied("tiny-pi05-lerobot")

    def enable(content: dict[str, Any]) -> None:
        (found,) = (one for one in content["steps"] if one["registry_name"] == step)
        found["config"]["enabled"] = True

    edit(directory, enable, file)
    with pytest.raises(UnsupportedFlowError, match=f"the {step} of {file} is enabled; only false is supported"):
        load_policy(directory)


@pytest.mark.parametrize(
    ("name", "action", "state", "refused"),
    [
        ("tiny-smolvla", 6, 11, "its state have 11 numbers, and the tensors take 10"),
        ("tiny-smolvla", 13, 6, "its actions have 13 numbers, and the tensors take 12"),
        ("tiny-smolvla", 12, 10, None),
        ("tiny-pi05-lerobot", 7, 14, None),  # words of the prompt
    ],
)
def test_robots_wider_than_the_tensors(name: str, action: int, state: int, refused: str | None, copied: Copy) -> None:
    directory = copied(name)
    widths = {"observation.state": state, "action": action}
    for processor in ("preprocessor", "postprocessor"):
        change_numbers(
            directory,
            processor,
            lambda x: x.update({key: torch.ones(widths[key.rpartition(".")[0]]) for key in x}),
        )
    edit(directory, lambda said: said["input_features"]["observation.state"].update(shape=[state]))
    edit(directory, lambda said: said["output_features"]["action"].update(shape=[action]))
    if refused is not None:
        with pytest.raises(UnsupportedFlowError, match=refused):
            load_policy(directory)
        return
    assert (load(directory).cfg.action_dim, load(directory).cfg.state_dim) == (action, state)


def test_one_file_wins_over_shards(copied: Copy) -> None:
    """As where it is published; a model.safetensors is what somebody saved in the place of them."""
    directory = copied("tiny-pi05")
    tensors = into_shards(directory)
    save_file({name: x + 1 for name, x in tensors.items()}, directory / WEIGHTS)
    assert torch.equal(load(directory).network.action_in_proj.bias, tensors["action_in_proj.bias"] + 1)


def test_sentencepiece_of_another_kind(copied: Copy) -> None:
    from transformers.utils import sentencepiece_model_pb2_new as messages

    directory = copied("tiny-pi0")
    file = directory / "tokenizer.model"
    for key in ("add_dummy_prefix", "remove_extra_whitespaces"):
        model = messages.ModelProto()
        model.ParseFromString((FOLDER / "tiny-pi0" / "tokenizer.model").read_bytes())
        setattr(model.normalizer_spec, key, True)
        file.write_bytes(model.SerializeToString())
        with pytest.raises(TokenizerError, match=r"of PaliGemma's kind. Replace it by PaliGemma's tokenizer.json"):
            load_policy(directory)
    file.unlink()
    load_policy(directory)  # with tokenizer.json, which is there


def test_what_we_saved_and_is_not_there(tmp_path: Path) -> None:
    """A head that was lost is no head of random weights."""
    load(FOLDER / "tiny-pi05", settings("pi05", method="flow_noise")).save_pretrained(tmp_path)
    file = tmp_path / "rlinf_lite.safetensors"
    whole = load_file(file)

    def refused(tensors: dict[str, torch.Tensor], match: str) -> None:
        save_file(tensors, file)
        with pytest.raises(CheckpointFormatError, match=rf"rlinf_lite\.safetensors .*{match}"):
            load(tmp_path)

    for head in ("value_head", "noise_head"):
        refused({name: x for name, x in whole.items() if head not in name}, rf"has no {head}\.\*")
    first = next(name for name in whole if "noise_head" in name)
    refused({name: x for name, x in whole.items() if name != first}, f"missing {first}")
    refused({**whole, "something.else": torch.zeros(2)}, r"unexpected something\.else")
    refused({**whole, "value_head.else": torch.zeros(2)}, r"unexpected value_head\.else")
    file.unlink()
    with pytest.raises(CheckpointFormatError, match=r"has no value_head\.\*, noise_head\.\*"):
        load(tmp_path)
    save_file(whole, file)
    load(tmp_path)


@pytest.mark.parametrize("name", ["tiny-pi0", "tiny-pi05-lerobot", "tiny-smolvla"])
def test_files_that_were_not_downloaded_whole(name: str, copied: Copy) -> None:
    """git-lfs pointers, whose first bytes are no length of a header, and what was cut off."""
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n"
    whole = (FOLDER / name / WEIGHTS).read_bytes()
    for content in (pointer, b"", b"abc", whole[: len(whole) // 2], whole[:1000]):
        directory = copied(name)
        (directory / WEIGHTS).write_bytes(content)
        with pytest.raises(UnsupportedFlowError, match=rf"{WEIGHTS} has {len(content)} bytes.*git-lfs pointer"):
            load_policy(directory)
        copied(name)
        for file in directory.glob("policy_preprocessor*.safetensors"):
            file.write_bytes(content[:1000])
            with pytest.raises(UnsupportedFlowError, match=rf"{file.name} has .* bytes.*git-lfs pointer"):
                load_policy(directory)


def test_shards_that_are_missing(copied: Copy) -> None:
    directory = copied("tiny-pi05")
    into_shards(directory)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UnsupportedFlowError, match=r"names model-00002-of-00002\.safetensors, which is not there"):
        load_policy(directory)
    (directory / INDEX).write_text("{}")
    with pytest.raises(UnsupportedFlowError, match="names no file"):
        load_policy(directory)


def test_smolvlas_vision_tower_says_its_epsilon(copied: Copy) -> None:
    directory = copied("tiny-smolvla")
    edit(directory, lambda content: content["vision_config"].update(layer_norm_eps=0.01), "vlm/config.json")
    layers = [module for module in load(directory).network.vision.modules() if isinstance(module, torch.nn.LayerNorm)]
    assert {layer.eps for layer in layers} == {0.01}
    layers = [module for module in policy_of("tiny-pi0").network.vision.modules() if hasattr(module, "eps")]
    assert {layer.eps for layer in layers} == {1e-6}


def settings(family: str, **options: Any) -> ModelConfig:
    return ModelConfig(id=family, num_action_chunks=5, options=options)


def test_padded_statistics_and_the_robots_widths(copied: Copy, tmp_path: Path) -> None:
    """openpi's are as long as its padding where they were computed behind that; nothing says how long the robot is."""
    directory = copied("tiny-pi0")
    (file,) = directory.rglob("norm_stats.json")
    content = json.loads(file.read_text())
    for entry in content["norm_stats"].values():
        for key, numbers in entry.items():
            entry[key] = numbers + [0.0] * (32 - len(numbers))
    file.write_text(json.dumps(content))
    edit(directory, lambda config: [config["tiny"].pop(key) for key in ("action_env_dim", "state_dim")])
    wide = load(directory)
    assert (wide.action_dim, wide.cfg.state_dim) == (12, 12)
    cameras = {"base_0_rgb": "base", "left_wrist_0_rgb": "wrist"}
    told = settings("pi0", action_dim=7, state_dim=8, cameras=cameras, delta_dims=6)
    policy, obs = load(directory, told), observation("tiny-pi0")
    expected = load(FOLDER / "tiny-pi0", settings("pi0", cameras=cameras)).predict_action_batch(obs, "greedy").actions
    assert torch.equal(policy.predict_action_batch(obs, "greedy").actions, expected)
    policy.save_pretrained(tmp_path / "out")
    assert torch.equal(load(tmp_path / "out").predict_action_batch(obs, "greedy").actions, expected)
    with pytest.raises(ProblemError, match=r"model.options.action_dim: is 13, and the policy has 12"):
        load(directory, settings("pi0", action_dim=13))


def test_a_state_in_the_prompt_may_be_longer_than_the_padding(copied: Copy) -> None:
    """pi0.5's, which is words: no tensor is as wide."""
    directory = copied("tiny-pi05")
    (file,) = directory.rglob("norm_stats.json")
    content = json.loads(file.read_text())
    state = content["norm_stats"]["state"]
    content["norm_stats"]["state"] = {key: (numbers * 3)[:14] for key, numbers in state.items()}
    file.write_text(json.dumps(content))
    edit(directory, lambda config: config["tiny"].update(state_dim=14))
    policy, obs = load(directory, settings("pi05", cameras={"base_0_rgb": "base"})), observation("tiny-pi05")
    assert policy.cfg.max_action_dim < 14
    state = np.tile(obs["state"], (1, 3))[:, :14]
    changed = state.copy()
    changed[:, -1] += 0.5
    one, other = (policy._inputs({**obs, "state": x})["tokens"] for x in (state, changed))
    assert not torch.equal(one, other)
    assert policy.predict_action_batch({**obs, "state": state}).actions.shape == (2, 5, 7)


@pytest.mark.parametrize("section", ["text_config", None])
def test_smolvlas_tied_embedding_has_the_heads_name(section: str | None, copied: Copy, tmp_path: Path) -> None:
    """Only where its vision-language model says that it is tied; else the head is another tensor."""
    directory, own = copied("tiny-smolvla"), "model.vlm_with_expert.vlm."
    tensors = load_file(directory / WEIGHTS)
    tensors[f"{own}lm_head.weight"] = tensors.pop(f"{own}model.text_model.embed_tokens.weight")
    save_file(tensors, directory / WEIGHTS)
    with pytest.raises(UnsupportedFlowError, match=r"text_model\.embed_tokens\.weight"):
        load(directory)
    edit(
        directory,
        lambda said: (said[section] if section else said).update(tie_word_embeddings=True),
        "vlm/config.json",
    )
    policy = load(directory)
    assert torch.equal(policy.get_parameter("network.language.embed_tokens.weight"), tensors[f"{own}lm_head.weight"])
    policy.save_pretrained(tmp_path / "out")
    after = load_file(tmp_path / "out" / WEIGHTS)
    assert after.keys() == tensors.keys()
    assert all(torch.equal(x, tensors[name]) for name, x in after.items())


_SMALL = ("tiny-pi0", "tiny-pi05-lerobot", "tiny-smolvla")


def without(directory: Path, *parts: str) -> list[str]:
    """Take tensors whose names have one of `parts` out of the weights, and say which they were."""
    tensors = load_file(directory / WEIGHTS)
    gone = [name for name in tensors if any(part in name for part in parts)]
    save_file({name: x for name, x in tensors.items() if name not in gone}, directory / WEIGHTS)
    return gone


@pytest.mark.parametrize("name", _SMALL)
def test_last_layers_that_are_missing(name: str, copied: Copy) -> None:
    """As many are needed as are said, not as many as are there."""
    cfg = read_config(FOLDER / name)
    last = cfg.text.depth - 1
    both = (f"language_model.layers.{last}.", f"text_model.layers.{last}.", f"expert.model.layers.{last}.")
    for parts in ((f"vision_model.encoder.layers.{cfg.vision.depth - 1}.",), (*both, f"lm_expert.layers.{last}.")):
        directory = copied(name)
        gone = without(directory, *parts)
        with pytest.raises(CheckpointFormatError) as error:
            load_policy(directory)
        assert gone
        assert all(f"missing {one}" in str(error.value) for one in gone)


def test_depths_of_the_published_variants(copied: Copy) -> None:
    directory = copied("tiny-pi0")
    edit(directory, lambda said: said.update(paligemma_variant="gemma_2b", action_expert_variant="gemma_300m"))
    edit(directory, lambda said: said["tiny"].clear())
    (file,) = directory.rglob("norm_stats.json")
    shutil.move(file, directory / "norm_stats.json")
    cfg = read_config(directory)
    assert (cfg.vision.depth, cfg.text.depth, cfg.expert.depth) == (27, 18, 18)
    directory, name = copied("tiny-smolvla"), "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
    for kept, depth in ((16, 16), (0, 32), (-1, 32), (64, 32), (None, 4)):  # None is not said: those that are there
        edit(directory, lambda said, kept=kept: said.update(vlm_model_name=name, num_vlm_layers=kept))
        cfg = read_config(directory)
        assert (cfg.vision.depth, cfg.text.depth, cfg.expert.depth) == (12, depth, depth)


@pytest.mark.parametrize("name", _SMALL)
def test_layers_are_counted_where_nothing_says_how_many(name: str, copied: Copy) -> None:
    directory = copied(name)
    if name == "tiny-smolvla":
        edit(directory, lambda said: said.pop("num_vlm_layers"))
        edit(directory, lambda said: said["vision_config"].pop("num_hidden_layers"), "vlm/config.json")
    else:
        depths = {"vision": "num_hidden_layers", "text": "depth", "expert": "depth"}
        edit(directory, lambda said: [said["tiny"][part].pop(key) for part, key in depths.items()])
    assert load(directory).cfg == load(FOLDER / name).cfg
    last = read_config(directory).text.depth - 1
    without(directory, f"gemma_expert.model.layers.{last}.", f"lm_expert.layers.{last}.")
    with pytest.raises(UnsupportedFlowError, match=rf"the expert has {last} layers.*language model {last + 1}"):
        load_policy(directory)


@pytest.mark.parametrize("parts", [("time_mlp_in.weight",), ("time_mlp_in",), ("time_mlp_in", "time_mlp_out")])
def test_pi05_without_its_time_is_pi05(parts: tuple[str, ...], copied: Copy) -> None:
    directory = copied("tiny-pi05")
    (first, *_) = without(directory, *parts)
    with pytest.raises(CheckpointFormatError, match=rf"missing {first}"):
        load(directory, settings("pi05"))


def test_a_camera_of_another_name_is_no_missing_camera() -> None:
    policy, obs = policy_of("tiny-pi05-lerobot"), observation("tiny-pi05-lerobot")
    images = {{"image2": "imagee2"}.get(name, name): x for name, x in obs["images"].items()}
    with pytest.raises(ObservationError, match=r"has no image2, and imagee2 is not used\. Say which is which"):
        policy.predict_action_batch({**obs, "images": images})
    images["image2"] = images["imagee2"]  # all are there, and one more
    assert policy.predict_action_batch({**obs, "images": images}).actions.shape[0] == 2


def rlinfs_noise_head(directory: Path, low: float, high: float) -> None:
    cfg, tensors = read_config(directory), load_file(directory / WEIGHTS)
    sizes = [cfg.expert.width, *cfg.noise_hidden_sizes, cfg.max_action_dim]
    for number, (before, after) in enumerate(itertools.pairwise(sizes)):
        name = f"noise_head.mlp_logvar.moduleList.{number}.linear_1"
        tensors |= {f"{name}.weight": torch.randn(after, before), f"{name}.bias": torch.zeros(after)}
    limits = {"noise_head.logvar_min": low, "noise_head.logvar_max": high}
    save_file(
        {**tensors, **{name: torch.tensor(2 * np.log(x)).float() for name, x in limits.items()}}, directory / WEIGHTS
    )


def test_rlinfs_noise_head_brings_its_range(copied: Copy) -> None:
    directory = copied("tiny-pi05")
    rlinfs_noise_head(directory, 0.2, 0.4)
    half = {name: x.bfloat16() for name, x in load_file(directory / WEIGHTS).items()}
    policy = load(directory, settings("pi05", method="flow_noise"))
    assert policy.noise_head is not None
    assert policy.noise_head.range == pytest.approx((0.2, 0.4))
    given = load(directory, settings("pi05", method="flow_noise", noise_range=[0.1, 0.3]))
    assert given.cfg.noise_range == (0.1, 0.3)
    save_file(half, directory / WEIGHTS)
    assert read_config(directory).noise_range == pytest.approx((0.2, 0.4), rel=0.01)


def test_a_noise_head_outlives_a_run_without_it(tmp_path: Path) -> None:
    first = load(FOLDER / "tiny-pi05", settings("pi05", method="flow_noise"))
    first.save_pretrained(tmp_path / "noise")
    load(tmp_path / "noise", settings("pi05", method="flow_sde")).save_pretrained(tmp_path / "sde")
    again = load(tmp_path / "sde", settings("pi05", method="flow_noise"))
    heads = {name: x for name, x in first.state_dict().items() if name.startswith("noise_head")}
    assert heads
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in heads.items())


def test_options_that_say_nothing_to_a_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    directory = FOLDER / "tiny-smolvla"
    with pytest.raises(StatisticsError, match=r"have no names, and model.options.asset_id is 'droid'"):
        load(directory, settings("smolvla", asset_id="droid"))
    with pytest.raises(ProblemError, match=r"model.options.delta_dims: is 20, and there are \d+ actions"):
        load(directory, settings("smolvla", delta_dims=20))
    load(directory, settings("smolvla", horizon=40))
    assert "horizon 40, where it was 6" in caplog.text


def test_settings_other_than_those_of_training_are_said(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """As far as they matter to how the policy explores, by one line."""
    trained = {"num_steps": 3, "noise_level": 0.3, "noise_range": [0.1, 0.2], "ignore_last": True, "joint": "mean"}
    load(FOLDER / "tiny-pi05", settings("pi05", **trained)).save_pretrained(tmp_path)
    caplog.clear()
    for given in (None, settings("pi05"), settings("pi05", **trained)):
        load(tmp_path, given)
    assert caplog.messages == []
    other = {"num_steps": 4, "noise_level": 0.5, "noise_range": [0.1, 0.3], "ignore_last": False, "joint": "sum"}
    for method, changed in (
        ("flow_sde", ["num_steps 4, where it was 3", "noise_level 0.5, where it was 0.3", "ignore_last False, where"]),
        (
            "flow_noise",
            ["num_steps 4", "method flow_noise", "noise_range (0.1, 0.3), where", "joint sum, where it was"],
        ),
    ):
        caplog.clear()
        load(tmp_path, settings("pi05", **other, method=method))
        [line] = caplog.messages
        said = line.partition(f"settings differ from those of the policy in {tmp_path}: ")[2].split("; ")
        assert len(said) == len(changed)
        assert all(one.startswith(start) for one, start in zip(said, changed, strict=True))


def test_a_policy_saved_below_its_base_model(copied: Copy, tmp_path: Path) -> None:
    """Is no part of it. What else lies beside the weights goes with them."""
    directory = copied("tiny-pi0")
    edit(directory, lambda config: config["tiny"].pop("asset_id"))
    for name in ("LICENSE", "train.yaml"):
        (directory / name).write_text("x")
    before = load(directory)
    before.save_pretrained(directory / "rl")
    after = load(directory)
    assert after.config_dict() == before.config_dict()
    assert after.origin.files == before.origin.files
    assert {"LICENSE", "train.yaml", "config.json"} <= after.origin.files.keys()
    assert load(directory / "rl").origin.files == before.origin.files


def test_broken_files_are_named(copied: Copy) -> None:
    def refused(name: str, error: type[Exception], match: str, change: Callable[[Path], object]) -> None:
        directory = copied(name)
        change(directory)
        with pytest.raises(error, match=match):
            load_policy(directory)
        shutil.rmtree(directory)

    def write(pattern: str, content: str) -> Callable[[Path], object]:
        return lambda directory: [file.write_text(content) for file in directory.rglob(pattern)]

    def cameras(directory: Path) -> None:
        edit(directory, lambda said: [said["input_features"].pop(f"observation.images.image{n}") for n in ("", 2)])

    def no_size(directory: Path) -> None:
        edit(directory, lambda said: said.update(resize_imgs_with_padding=None))

    def doubles(directory: Path) -> None:
        (file,) = directory.glob("policy_preprocessor_*.safetensors")
        save_file({name: x.double() for name, x in load_file(file).items()}, file)

    refused("tiny-pi0", CheckpointFormatError, "config.json, or our additions to it, cannot", write("config.json", "{"))
    refused(
        "tiny-pi05",
        TokenizerError,
        "tokenizer.json cannot be read",
        lambda d: ((d / "tokenizer.model").unlink(), (d / "tokenizer.json").write_text("{")),
    )
    (copied("tiny-pi0") / "config.json").write_text("{")
    with pytest.raises(UnsupportedFlowError, match=r"config\.json, or our additions to it, is no JSON"):
        read_config(copied("tiny-pi05").parent / "tiny-pi0")
    refused("tiny-pi05", TokenizerError, "is no SentencePiece model", write("tokenizer.model", "version https://git"))
    refused("tiny-pi0", StatisticsError, "has no norm_stats of state", write("norm_stats.json", "{}"))
    refused("tiny-pi0", UnsupportedFlowError, "norm_stats.json is no JSON", write("norm_stats.json", "{"))
    refused("tiny-pi05-lerobot", UnsupportedFlowError, "have no camera", cameras)
    refused("tiny-smolvla", UnsupportedFlowError, "resize_imgs_with_padding is null", no_size)
    directory = copied("tiny-pi05-lerobot")
    doubles(directory)  # is not broken
    assert read_config(directory) == read_config(FOLDER / "tiny-pi05-lerobot")


def test_chunks_longer_than_the_horizon_are_no_demonstrations() -> None:
    policy, obs = policy_of("tiny-smolvla"), observation("tiny-smolvla")
    rows, horizon = len(obs["state"]), policy.cfg.horizon
    actions, mask = torch.zeros(rows, 2 * horizon, policy.action_dim), torch.ones(rows, 2 * horizon, dtype=torch.bool)
    with pytest.raises(ValueError, match=rf"chunks have {2 * horizon} actions, and the policy's horizon is {horizon}"):
        policy.sft_loss({**policy.sft_inputs(obs), "actions": actions, "mask": mask})


def test_a_policy_can_be_pickled() -> None:
    policy, obs = policy_of("tiny-pi05"), observation("tiny-pi05")
    expected = policy.predict_action_batch(obs, "greedy").actions
    again = pickle.loads(pickle.dumps(policy))
    assert torch.equal(again.predict_action_batch(obs, "greedy").actions, expected)
