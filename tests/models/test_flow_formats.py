"""Published flow checkpoints load whole or not at all, and are saved as they came."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlinf_lite.config.resources import policy_config
from rlinf_lite.config.schema import ModelConfig
from rlinf_lite.models import CheckpointFormatError, load_policy
from rlinf_lite.models.base import NOISE_KEY
from rlinf_lite.models.flow.config import StatisticsError, Tower, Transformer
from rlinf_lite.models.flow.files import UnsupportedFlowError
from rlinf_lite.models.flow.inputs import ObservationError, PromptEncoder, PromptTooLongError, TokenizerError
from rlinf_lite.models.flow.policy import FlowPolicy
from rlinf_lite.models.flow.published import published_family, read_config
from tests.models.flow_checkpoints import FOLDER, NAMES, golden, observation, policy_of

FAMILY = {"tiny-pi0": "pi0", "tiny-pi05": "pi05", "tiny-pi05-lerobot": "pi05", "tiny-smolvla": "smolvla"}


def model(name: str, **given: Any) -> ModelConfig:
    options = {key: value for key, value in given.items() if key not in ModelConfig.model_fields}
    settings = {key: value for key, value in given.items() if key in ModelConfig.model_fields}
    return ModelConfig(**{"id": FAMILY[name], "num_action_chunks": 5, **settings}, options=options)


def files(directory: Path) -> dict[str, bytes]:
    return {
        file.relative_to(directory).as_posix(): file.read_bytes() for file in directory.rglob("*") if file.is_file()
    }


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(FOLDER / name, tmp_path / name))

    return copy


@pytest.mark.parametrize("name", NAMES)
def test_saved_as_it_came(name: str, tmp_path: Path) -> None:
    """The unused tensors, the names and types of all, statistics and tokenizers."""
    policy = load_policy(FOLDER / name)
    policy.save_pretrained(tmp_path)
    before, after = files(FOLDER / name), files(tmp_path)
    assert set(before) - set(after) == {"golden.npz"}
    assert set(after) - set(before) == {"rlinf_lite.json", "rlinf_lite.safetensors"}
    for file in set(before) & set(after) - {"model.safetensors"}:
        assert before[file] == after[file], file
    one, other = load_file(FOLDER / name / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]) for key in one)

    assert policy_config(tmp_path)["policy_id"] == policy.policy_id  # which the checks of a run read
    again = load_policy(tmp_path)
    assert again.config_dict() == policy.config_dict()
    assert all(torch.equal(x, again.state_dict()[key]) for key, x in policy.state_dict().items())
    # without our files it is a published checkpoint again
    for file in set(after) - set(before):
        (tmp_path / file).unlink()
    assert read_config(tmp_path) == read_config(FOLDER / name)


@pytest.mark.parametrize("name", NAMES)
def test_what_trained_is_saved_and_the_rest_is_as_it_was(
    name: str, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of a file in bfloat16, as converters write them."""
    directory = copied(name)
    before = {key: x.bfloat16() for key, x in load_file(directory / "model.safetensors").items()}
    save_file(before, directory / "model.safetensors")
    policy = load_policy(directory, model(name, trainable="expert"))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 1e-4
    policy.save_pretrained(tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    for key, x in after.items():
        frozen = "paligemma." in key or ".vlm." in key or "expert.lm_head" in key
        assert frozen == (x.dtype == torch.bfloat16 and torch.equal(x, before[key])), key
    again = load_policy(tmp_path / "out")
    assert all(torch.equal(x, again.state_dict()[key]) for key, x in policy.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
def test_found_from_the_tensors(name: str) -> None:
    family = published_family(FOLDER / name, {})
    policy = load_policy(FOLDER / name)
    assert policy.policy_id == family
    tensors = load_file(FOLDER / name / "model.safetensors")
    assert policy.config_dict()["layout"] == (
        "lerobot" if all(key.startswith("model.") for key in tensors) else "openpi"
    )
    for other in {"pi0", "pi05", "smolvla"} - {family}:
        with pytest.raises(CheckpointFormatError, match=f"holds {family}, and {other} is asked for"):
            load_policy(FOLDER / name, ModelConfig(id=other, num_action_chunks=5))


@pytest.mark.parametrize("name", NAMES)
def test_every_wrong_tensor_is_named(name: str, copied: Callable[[str], Path]) -> None:
    directory = copied(name)
    tensors = load_file(directory / "model.safetensors")
    norm = next(key for key in tensors if "expert" in key and "layers.1." in key and "post_attention" in key)

    def refused(changed: dict[str, torch.Tensor], match: str) -> None:
        save_file(changed, directory / "model.safetensors")
        with pytest.raises((CheckpointFormatError, UnsupportedFlowError), match=match):
            load_policy(directory)

    refused({key: x for key, x in tensors.items() if key != norm}, f"missing {norm}")
    refused(
        {key: x for key, x in tensors.items() if "action_out_proj.bias" not in key}, "missing .*action_out_proj.bias"
    )
    refused({key: x for key, x in tensors.items() if "action_in_proj" not in key}, "action_in_proj.weight")
    refused({**tensors, "model.extra.weight": torch.zeros(2)}, "unexpected model.extra.weight")
    refused({**tensors, norm: torch.zeros(5)}, "has shape \\(5,\\)")
    depth = read_config(FOLDER / name).expert.depth
    last = (f"gemma_expert.model.layers.{depth - 1}.", f"lm_expert.layers.{depth - 1}.")
    without = {key: x for key, x in tensors.items() if not any(part in key for part in last)}
    refused(without, f"missing {next(key for key in sorted(tensors.keys() - without.keys()))}")
    refused({"something.weight": torch.zeros(2)}, "no registered policy knows the tensors")
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointFormatError, match="no registered policy knows"):
        load_policy(directory)


def test_tied_embeddings_have_either_name_or_both(copied: Callable[[str], Path], tmp_path: Path) -> None:
    directory, own = copied("tiny-pi05-lerobot"), "model.paligemma_with_expert.paligemma."
    file, head = directory / "model.safetensors", f"{own}lm_head.weight"
    embedding = f"{own}model.language_model.embed_tokens.weight"
    tensors = load_file(file)
    assert torch.equal(tensors[head], tensors[embedding])
    for left_out in (head, embedding):
        save_file({key: x for key, x in tensors.items() if key != left_out}, file)
        policy = load_policy(directory)
        assert torch.equal(policy.get_parameter("network.language.embed_tokens.weight"), tensors[head])
        policy.save_pretrained(tmp_path / "out")
        assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys() - {left_out}
    save_file({**tensors, head: tensors[head] + 1}, file)  # then it is no embedding, but kept
    policy = load_policy(directory)
    assert torch.equal(policy.get_parameter("network.language.embed_tokens.weight"), tensors[embedding])
    policy.save_pretrained(tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[head], tensors[head] + 1)
    save_file({key: x for key, x in tensors.items() if key not in (head, embedding)}, file)
    with pytest.raises(UnsupportedFlowError, match="lm_head"):
        load_policy(directory)


def test_heads_of_rlinf_are_read(copied: Callable[[str], Path]) -> None:
    directory = copied("tiny-pi05")
    tensors, width = load_file(directory / "model.safetensors"), read_config(directory).text.width
    heads = {
        f"value_head.mlp.{n}.weight": torch.randn(*size) for n, size in ((0, (9, width)), (2, (5, 9)), (4, (1, 5)))
    }
    heads |= {name.replace("weight", "bias"): torch.randn(len(x)) for name, x in heads.items()}
    save_file(tensors | heads, directory / "model.safetensors")
    policy = load_policy(directory)
    assert all(torch.equal(policy.state_dict()[name], x) for name, x in heads.items())


def test_statistics(copied: Callable[[str], Path], tmp_path: Path) -> None:
    directory = copied("tiny-pi0")
    (file,) = directory.rglob("norm_stats.json")
    with pytest.raises(StatisticsError, match=r"no statistics of 'droid'.*It has physical-intelligence/libero"):
        load_policy(directory, model("tiny-pi0", asset_id="droid"))
    load_policy(directory).save_pretrained(tmp_path / "ours")
    with pytest.raises(StatisticsError, match="no statistics of 'droid', but of 'physical-intelligence/libero'"):
        load_policy(tmp_path / "ours", model("tiny-pi0", asset_id="droid"))
    statistics = json.loads(file.read_text())
    shorter = {name: {key: x[:5] for key, x in entry.items()} for name, entry in statistics["norm_stats"].items()}
    file.write_text(json.dumps({"norm_stats": shorter}))
    with pytest.raises(
        StatisticsError, match="describe 5 numbers of state, and there are 8: they are for another robot"
    ):
        load_policy(directory)
    longer = {
        name: {key: [*x, 0.0, 0.0] for key, x in entry.items()} for name, entry in statistics["norm_stats"].items()
    }
    file.write_text(json.dumps({"norm_stats": longer}))  # cut, as published
    assert load_policy(directory).action_dim == 7
    file.unlink()
    with pytest.raises(StatisticsError, match="It has none"):
        load_policy(directory)

    directory = copied("tiny-smolvla")
    for file in directory.glob("policy_*.safetensors"):
        file.unlink()
    with pytest.raises(StatisticsError, match=r"normalizer_processor\.safetensors, which is not there"):
        load_policy(directory)


def test_a_missing_tokenizer_says_how_to_get_it(copied: Callable[[str], Path]) -> None:
    for name, words in (("tiny-pi0", "paligemma"), ("tiny-smolvla", "SmolVLM2-500M")):
        directory = copied(name)
        for file in directory.rglob("tokenizer.*"):
            file.unlink()
        with pytest.raises(TokenizerError, match=f"has no tokenizer.*{words}.*Or set actor.tokenizer.tokenizer_model"):
            load_policy(directory)
        prompts = load_policy(directory, tokenizer=FOLDER / name).prompts
        assert prompts.ids("move", "\n") == load_policy(FOLDER / name).prompts.ids("move", "\n")
        load_policy(directory, tokenizer=FOLDER / name).save_pretrained(directory.parent / f"{name} saved")
        again = load_policy(directory.parent / f"{name} saved").prompts
        assert again.ids("move", "\n") == prompts.ids("move", "\n")


def test_sentencepiece_and_json_are_one_tokenizer(copied: Callable[[str], Path]) -> None:
    directory = copied("tiny-pi0")
    cfg = read_config(directory)
    one = PromptEncoder.from_directory(directory, cfg)
    (directory / "tokenizer.json").unlink()
    other = PromptEncoder.from_directory(directory, cfg)
    found = golden("tiny-pi0")
    for encoder in (one, other):
        ids, mask = encoder.encode(found["prompts"].tolist(), found["state_norm"])
        np.testing.assert_array_equal(ids, found["tokens"])
        np.testing.assert_array_equal(mask, found["token_mask"])
    for text in ("pick up the red cup", "Öffne  the\tdrawer,\n\nstate: -1 255; 3", "  spaces  ", "", "日本"):
        assert one.ids(text, "\n") == other.ids(text, "\n"), text


def test_long_prompts(copied: Callable[[str], Path]) -> None:
    obs, cameras = observation("tiny-pi05"), {"base_0_rgb": "base", "left_wrist_0_rgb": "wrist"}
    with pytest.raises(PromptTooLongError, match=r"max_prompt_length is 20\. Raise it to"):
        load_policy(
            FOLDER / "tiny-pi05", model("tiny-pi05", max_prompt_length=20, cameras=cameras)
        ).predict_action_batch(obs)
    policy = policy_of("tiny-pi05")
    assert policy.prompts is not None
    policy.prompts._cfg = replace(policy.cfg, max_prompt_length=20, long_prompts="cut")
    inputs = policy._inputs(obs)
    np.testing.assert_array_equal(inputs["tokens"], golden("tiny-pi05")["tokens"][:, :20])
    assert inputs["token_mask"].all()


def test_observations_that_do_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    policy, obs = policy_of("tiny-pi0"), observation("tiny-pi0")
    obs[NOISE_KEY] = np.arange(2, dtype=np.uint64)
    with pytest.raises(ObservationError, match=r"reads 8 state numbers, and the observation has 6"):
        policy.predict_action_batch({**obs, "state": obs["state"][:, :6]})
    with pytest.raises(ObservationError, match="has none"):
        policy.predict_action_batch({key: x for key, x in obs.items() if key != "state"})
    with pytest.raises(ObservationError, match=r"there is no wrist; the environment has base"):
        policy.predict_action_batch({**obs, "images": {"base": obs["images"]["base"]}})
    with pytest.raises(ObservationError, match="float32; uint8"):
        policy.predict_action_batch({**obs, "images": {key: x.astype(np.float32) for key, x in obs["images"].items()}})
    with pytest.raises(ObservationError, match=r"knows base_0_rgb, left_wrist_0_rgb, right_wrist_0_rgb.*Say which"):
        load_policy(FOLDER / "tiny-pi0").predict_action_batch(obs)
    # one that the policy is told not to have is masked, as published
    policy.cfg = replace(policy.cfg, cameras={"base_0_rgb": "base"})
    assert policy.predict_action_batch(obs).actions.shape == (2, 6, 7)
    with pytest.raises(ValueError, match=r"knows no camera nose. It knows base_0_rgb"):
        load_policy(FOLDER / "tiny-pi0", model("tiny-pi0", cameras={"nose": "base"}))
    policy = load_policy(FOLDER / "tiny-pi0", model("tiny-pi0", num_steps=4, noise_level=0.3))
    [line] = caplog.messages  # who published it did not explore
    assert line.endswith("tiny-pi0: num_steps 4, where it was 10")
    assert isinstance(policy, FlowPolicy)
    assert (policy.sampler.num_steps, policy.sampler.level) == (4, 0.3)
    with pytest.raises(ValueError, match=r"is 7, and the policy's horizon is 6 actions"):
        load_policy(FOLDER / "tiny-pi0", model("tiny-pi0", num_action_chunks=7))


@pytest.mark.parametrize("family", ["pi0", "pi05", "smolvla"])
def test_any_size_is_read_off_the_tensors(family: str, tmp_path: Path) -> None:
    """Of a checkpoint with sizes that nothing here has, whose config.json says how many heads there are."""
    source = next(FOLDER / name for name, of in FAMILY.items() if of == family)
    cfg = replace(
        read_config(source),
        vision=Tower(30, 3, 44, 5, 40, 10) if family != "smolvla" else Tower(36, 1, 52, 6, 72, 12),
        text=Transformer(56, 5, 88, 6, 3, 12),
        expert=Transformer(20, 5, 36, 6, 3, 12),
        vocab_size=401,
        max_action_dim=17,
        max_state_dim=17,
        resize_to=(40, 40) if family != "smolvla" else (72, 72),
        pixel_shuffle=3 if family == "smolvla" else 1,
        cross_every=3 if family == "smolvla" else 0,
        value_hidden_sizes=(512, 256, 128),
    )
    policy = FlowPolicy(cfg)
    policy.policy_id, policy.origin = family, load_policy(source).origin
    policy.origin.dtypes, policy.origin.unread = {}, {}
    policy.save_pretrained(tmp_path)
    for file in tmp_path.glob("rlinf_lite.*"):
        file.unlink()
    config = json.loads((source / "config.json").read_text())
    if family == "smolvla":
        vlm = json.loads((source / "vlm" / "config.json").read_text())
        vlm["scale_factor"], vlm["vision_config"]["num_attention_heads"] = 3, 6
        vlm["vision_config"]["num_hidden_layers"], config["num_vlm_layers"] = 1, 5
        (tmp_path / "vlm" / "config.json").write_text(json.dumps(vlm))
        config |= {"self_attn_every_n_layers": 3, "resize_imgs_with_padding": [72, 72]}
    else:
        config["tiny"]["vision"]["num_attention_heads"], config["tiny"]["vision"]["num_hidden_layers"] = 5, 3
        config["tiny"]["text"]["depth"] = config["tiny"]["expert"]["depth"] = 5
        config["tiny"]["text"]["num_heads"] = config["tiny"]["expert"]["num_heads"] = 6
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_config(tmp_path)
    assert found == cfg
    loaded = load_policy(tmp_path)
    assert all(
        torch.equal(x, policy.state_dict()[name]) for name, x in loaded.state_dict().items() if "network" in name
    )
