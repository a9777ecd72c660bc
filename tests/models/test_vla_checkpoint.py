"""Published directories in, published directories out; what does not fit is listed."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlinf_lite.config import ConfigError, load_config
from rlinf_lite.envs import EnvSpec
from rlinf_lite.models import CheckpointFormatError, build_policy, load_policy
from rlinf_lite.models.base import check_tensors, read_policy_config, tokenizer_files
from rlinf_lite.models.vla.actions import StatisticsError
from rlinf_lite.models.vla.checkpoint import read_config
from rlinf_lite.models.vla.config import TowerConfig, VLAConfig, preset
from rlinf_lite.models.vla.inputs import TokenizerError
from rlinf_lite.models.vla.keymap import LM_HEAD, KeyMap
from rlinf_lite.models.vla.policy import OpenVLAPolicy
from tests.models.settings import openvla
from tests.preview.test_memory import spec_of

FIXTURE = Path(__file__).parent / "tiny_openvla"
QKV = "vision_backbone.featurizer.blocks.0.attn.qkv"
PATCH = "vision_backbone.fused_featurizer.patch_embed.proj"
Q_PROJ = "language_model.model.layers.1.self_attn.q_proj"


@pytest.fixture
def published(tmp_path):
    """A copy of the published directory, to be changed."""
    directory = tmp_path / "published"
    shutil.copytree(FIXTURE, directory)
    return directory


def run_settings(**settings):
    return openvla(num_action_chunks=8, **settings)


def bits(tensors):
    return {name: (tensor.dtype, tensor.view(torch.uint8).numpy().tobytes()) for name, tensor in tensors.items()}


def rewrite(directory, **changes):
    """Change tensors of a published directory: None deletes."""
    tensors = load_file(directory / "model.safetensors") | {k.replace("__", "."): v for k, v in changes.items()}
    save_file({k: v for k, v in tensors.items() if v is not None}, directory / "model.safetensors")


def edit_config(directory, **changes):
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


# round trips


def test_an_untouched_policy_is_saved_bit_for_bit(tmp_path):
    load_policy(FIXTURE).save_pretrained(tmp_path)
    before, after = (load_file(directory / "model.safetensors") for directory in (FIXTURE, tmp_path))
    assert len(before) == 130 and bits(before) == bits(after)
    for name in ("dataset_statistics.json", "generation_config.json"):
        assert (tmp_path / name).read_bytes() == (FIXTURE / name).read_bytes()
    config, own = (json.loads((directory / "config.json").read_text()) for directory in (FIXTURE, tmp_path))
    assert config.items() <= own.items() and own.keys() - config.keys() == {"policy_id", "rlinf_lite"}


def test_what_was_saved_loads_again_with_its_settings_and_value_head(tmp_path):
    policy = load_policy(FIXTURE, run_settings(append_stop=False, temperature=1.6, value_type="action_level"))
    policy.save_pretrained(tmp_path)
    loaded = load_policy(tmp_path)
    assert loaded.cfg == policy.cfg and not loaded.cfg.append_stop
    assert bits(loaded.state_dict()) == bits(policy.state_dict())


def test_a_trained_bf16_checkpoint_keeps_every_bit_of_both(published, tmp_path):
    tensors = {name: x.bfloat16() for name, x in load_file(FIXTURE / "model.safetensors").items()}
    save_file(tensors, published / "model.safetensors")
    policy = load_policy(published)
    changed = policy.projector.fc1.weight
    with torch.no_grad():
        changed += 1e-6
    policy.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert torch.equal(saved.pop("projector.fc1.weight"), changed)
    tensors.pop("projector.fc1.weight")
    assert bits(saved) == bits(tensors)


def test_shards_are_read_by_their_index_and_a_missing_one_is_named(published):
    tensors = load_file(published / "model.safetensors")
    names = sorted(tensors)
    (published / "model.safetensors").unlink()
    shards = {"model-00001-of-00002.safetensors": names[:70], "model-00002-of-00002.safetensors": names[70:]}
    for shard, part in shards.items():
        save_file({name: tensors[name] for name in part}, published / shard)
    index = {"weight_map": {name: shard for shard, part in shards.items() for name in part}}
    (published / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_policy(published).origin.dtypes.keys() == tensors.keys()
    newer = tensors | {"projector.fc2.bias": tensors["projector.fc2.bias"] + 1}  # what was saved over shards goes first
    save_file(newer, published / "model.safetensors")
    assert torch.equal(load_policy(published).state_dict()["projector.fc2.bias"], newer["projector.fc2.bias"])
    (published / "model.safetensors").unlink()
    (published / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointFormatError, match=r"names model-00002-of-00002\.safetensors, which is not there"):
        load_policy(published)


def test_files_of_others_come_along(published, tmp_path):
    (published / "modeling_prismatic.py").write_text("raise RuntimeError('never run')")
    (published / "action_head--100_checkpoint.pt").write_bytes(b"a regression head")
    load_policy(published).save_pretrained(tmp_path / "saved")
    for name in ("modeling_prismatic.py", "action_head--100_checkpoint.pt"):
        assert (tmp_path / "saved" / name).read_bytes() == (published / name).read_bytes()


def test_what_the_class_token_learnt_of_its_position_is_kept_and_exported(tmp_path):
    policy = load_policy(FIXTURE)
    embeddings = policy.vision_backbone.dino.embeddings
    with torch.no_grad():
        embeddings.position_embeddings[:, 0] += 0.25
    policy.save_pretrained(tmp_path)
    assert bits(load_policy(tmp_path).state_dict()) == bits(policy.state_dict())
    token = load_file(tmp_path / "model.safetensors")["vision_backbone.featurizer.cls_token"]
    assert torch.equal(token, embeddings.cls_token + 0.25)


def test_a_policy_from_random_weights_is_whole_in_its_directory(tmp_path):
    spec = EnvSpec(3, 4, {"front": (64, 64)}, [-2.0] * 3, [2.0] * 3, 24, True)
    policy = OpenVLAPolicy.from_config(openvla(num_action_chunks=4, use_proprio=True), spec)
    policy.save_pretrained(tmp_path)
    loaded = load_policy(tmp_path)
    assert loaded.cfg == policy.cfg and bits(loaded.state_dict()) == bits(policy.state_dict())
    assert torch.equal(loaded.prompts.encode(["grab it"])[0], policy.prompts.encode(["grab it"])[0])


def test_a_sharded_policy_reads_its_state_without_being_changed(tmp_path):
    policy, other = load_policy(FIXTURE), load_policy(FIXTURE)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 1
    before = bits(other.state_dict())
    policy.save_pretrained(tmp_path, policy.state_dict())
    state = other.read_state(tmp_path)
    assert bits(other.state_dict()) == before
    mask_token = "vision_backbone.dino.embeddings.mask_token"  # which nothing reads
    assert {n: b for n, b in bits(state).items() if n != mask_token} == {
        n: b for n, b in bits(policy.state_dict()).items() if n != mask_token
    }


# what does not fit


def test_missing_foreign_and_misshapen_tensors_are_listed_by_their_published_names(published):
    rewrite(published, **{f"{QKV}.weight": None, "foreign.weight": torch.zeros(1), "projector.fc1.bias": torch.ones(3)})
    with pytest.raises(CheckpointFormatError) as error:
        load_policy(published)
    for part in (f"missing {QKV}.weight", "unexpected foreign.weight", "projector.fc1.bias has shape (3,)", "(320,)"):
        assert part in str(error.value)


def test_tensors_that_no_forward_reads_may_be_missing(published, tmp_path):
    rewrite(published, **{"vision_backbone.featurizer.norm.weight": None})
    load_policy(published).save_pretrained(tmp_path / "saved")
    assert len(load_file(tmp_path / "saved" / "model.safetensors")) == 129


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_resize_strategy": "letterbox"}, "letterbox.*Supported: resize-naive"),
        ({"timm_model_ids": ["vit_huge_dinov2", "tiny_siglip"], "vit_dims": None}, "vit_huge_dinov2.*vit_large"),
        ({"text_config": {"model_type": "phi"}}, "type phi.*Supported: llama, qwen2"),
        ({"model_type": None}, "neither policy_id nor model_type"),
    ],
)
def test_what_is_not_supported_is_said(published, changes, message):
    edit_config(published, **changes)
    with pytest.raises(CheckpointFormatError, match=message):
        load_policy(published)


def test_directories_that_are_no_policies_are_refused(published, tmp_path):
    with pytest.raises(CheckpointFormatError, match=r"no config\.json"):
        load_policy(tmp_path)
    (published / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(CheckpointFormatError, match=r"model\.safetensors cannot be read"):
        load_policy(published)
    (published / "model.safetensors").unlink()
    with pytest.raises(CheckpointFormatError, match=r"it has no \*\.safetensors"):
        load_policy(published)


def test_a_wrong_unnorm_key_lists_those_there_are(published):
    (published / "dataset_statistics.json").write_text(json.dumps({"bridge": json.loads(_statistics())["toy"]}))
    with pytest.raises(StatisticsError, match=r"'bridge_orig'\. It has toy, bridge"):
        load_policy(published, run_settings(unnorm_key="bridge_orig"))
    with pytest.raises(StatisticsError, match=r"unnorm_key: is null.*toy, bridge"):
        load_policy(published)
    assert load_policy(published, run_settings(unnorm_key="bridge")).cfg.unnorm_key == "bridge"


def test_statistics_of_the_fine_tuning_come_first(published):
    statistics = json.loads(_statistics())
    statistics["toy"]["action"]["q99"][0] = 7.0
    (published / "dataset_statistics.json").write_text(json.dumps(statistics))
    assert read_config(published, read_policy_config(published)).norm_stats["toy"]["action"]["q99"][0] == 7.0


def test_a_policy_without_a_tokenizer_cannot_start_a_run():
    policy = load_policy(FIXTURE)
    with pytest.raises(TokenizerError, match="has no tokenizer"):
        policy.check_env_spec(EnvSpec(7, None, {"image": (40, 48)}, [-1.0] * 7, [1.0] * 7, 10, True))


def _statistics():
    return (FIXTURE / "dataset_statistics.json").read_text()


# parts and adapters


def test_the_proprio_projector_of_oft_is_read_and_written_back(published, tmp_path):
    name = "proprio_projector--500_checkpoint.pt"
    part = {"fc1.weight": (32, 5), "fc1.bias": (32,), "fc2.weight": (32, 32), "fc2.bias": (32,)}
    part = {f"module.{key}": torch.randn(shape) for key, shape in part.items()}
    torch.save(part, published / name)
    policy = load_policy(published)
    assert policy.cfg.proprio_dim == 5
    policy.save_pretrained(tmp_path / "saved")
    saved = torch.load(tmp_path / "saved" / name, weights_only=True)
    assert bits(saved) == bits({key.removeprefix("module."): x for key, x in part.items()})
    assert bits(load_policy(tmp_path / "saved").state_dict()) == bits(policy.state_dict())
    assert load_policy(published, run_settings(use_proprio=False)).proprio_projector is None

    torch.save(part, published / "proprio_projector--600_checkpoint.pt")
    with pytest.raises(CheckpointFormatError, match="Leave the one to use"):
        load_policy(published)


def test_film_is_refused(published):
    torch.save({}, published / "vision_backbone--500_checkpoint.pt")
    with pytest.raises(CheckpointFormatError, match="FiLM"):
        load_policy(published)


def write_adapter(directory, shapes, **settings):
    """An adapter of rank 2 on modules of (A's, B's) shapes."""
    torch.manual_seed(0)
    adapter = {
        f"base_model.model.{name}.lora_{letter}.weight": torch.randn(shape)
        for name, pair in shapes.items()
        for letter, shape in zip("AB", pair, strict=True)
    }
    save_file(adapter, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 6, **settings}))
    return adapter


SHAPES = {
    QKV: ((2, 32), (96, 2)),
    Q_PROJ: ((2, 32), (32, 2)),
    PATCH: ((2, 3, 14, 14), (48, 2, 1, 1)),
}


def test_a_published_adapter_is_merged_before_it_is_renamed(published, tmp_path):
    base, adapter = load_file(published / "model.safetensors"), write_adapter(published, SHAPES)
    load_policy(published).save_pretrained(tmp_path / "saved")
    merged = load_file(tmp_path / "saved" / "model.safetensors")
    for name in SHAPES:
        a, b = (adapter[f"base_model.model.{name}.lora_{letter}.weight"].flatten(1) for letter in "AB")
        by_hand = base[f"{name}.weight"] + (3.0 * b @ a).view(base[f"{name}.weight"].shape)
        torch.testing.assert_close(merged.pop(f"{name}.weight"), by_hand, atol=1e-6, rtol=1e-6)
    assert bits(merged) == {name: value for name, value in bits(base).items() if name in merged}
    assert not (tmp_path / "saved" / "adapter_config.json").exists()


def test_adapters_of_other_modules_are_listed(published):
    write_adapter(published, {**SHAPES, "language_model.lm_tail": ((2, 32), (32, 2))})
    with pytest.raises(CheckpointFormatError, match=r"language_model\.lm_tail\.lora_A\.weight"):
        load_policy(published)


def test_adapters_that_change_the_weights_beneath_or_are_half_there(published):
    adapter = write_adapter(published, SHAPES, init_lora_weights="pissa")
    with pytest.raises(CheckpointFormatError, match=r"init_lora_weights 'pissa' in adapter_config\.json"):
        load_policy(published)
    write_adapter(published, SHAPES)
    half = {name: x for name, x in adapter.items() if name != f"base_model.model.{QKV}.lora_A.weight"}
    save_file(half, published / "adapter_model.safetensors")
    with pytest.raises(CheckpointFormatError, match=rf"does not fit the weights beside it: {QKV}\.lora_B\.weight"):
        load_policy(published)


def trained_with_adapters(directory, **lora):
    policy = load_policy(directory, run_settings(lora={"rank": 2, "targets": ["q_proj", "fc1"], **lora}))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
                assert "lora_" in name or name.startswith(("value_head", "projector"))
    return policy


def test_own_adapters_are_saved_beside_untouched_base_weights(tmp_path):
    policy = trained_with_adapters(FIXTURE)
    policy.save_pretrained(tmp_path)
    assert bits(load_file(tmp_path / "model.safetensors")) == bits(load_file(FIXTURE / "model.safetensors"))
    loaded = load_policy(tmp_path)
    assert bits(loaded.state_dict()) == bits(policy.state_dict())
    assert [p.requires_grad for p in loaded.parameters()] == [p.requires_grad for p in policy.parameters()]
    with pytest.raises(ValueError, match="the checkpoint has adapters of"):
        load_policy(tmp_path, run_settings(lora={"rank": 4}))


def test_a_checkpoint_of_adapters_alone_finds_its_base(tmp_path):
    policy = trained_with_adapters(FIXTURE, save_base=False, also_train=["projector"])
    policy.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("model*.safetensors"))
    loaded = load_policy(tmp_path)
    assert bits(loaded.state_dict()) == bits(policy.state_dict())
    loaded.save_pretrained(tmp_path / "whole")
    assert bits(load_policy(tmp_path / "whole").state_dict()) == bits(policy.state_dict())


def test_what_was_trained_beside_a_base_is_not_lost_beneath_adapters(tmp_path):
    policy = load_policy(FIXTURE, run_settings(lora={"save_base": False}))
    with torch.no_grad():
        policy.get_parameter("projector.fc2.bias").add_(1)
    policy.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("model*.safetensors"))
    with pytest.raises(ValueError, match="save_base: false would lose base weights that the policy to start from has"):
        load_policy(tmp_path, run_settings(lora={"rank": 2, "targets": ["q_proj"], "save_base": False}))
    adapted = load_policy(tmp_path, run_settings(lora={"rank": 2, "targets": ["q_proj"]}))
    adapted.save_pretrained(tmp_path / "adapted")
    bias = load_policy(tmp_path / "adapted").state_dict()["projector.fc2.bias"]
    assert torch.equal(bias, policy.state_dict()["projector.fc2.bias"])


def test_merged_adapters_load_without_any_and_act_the_same(tmp_path):
    policy = trained_with_adapters(FIXTURE)
    images = torch.randint(0, 256, (2, 1, 28, 28, 3), dtype=torch.uint8)
    ids = torch.randint(4, 200, (2, 9))
    bins = torch.randint(0, 256, (2, 8, 7))
    inputs = {"images": images, "input_ids": ids, "attention_mask": torch.ones_like(ids).bool(), "action_bins": bins}
    before = policy(inputs).logprobs
    policy.merge_adapters()
    policy.save_pretrained(tmp_path)
    loaded = load_policy(tmp_path)
    assert loaded.cfg.lora == {} and "lora" not in "".join(loaded.state_dict())
    torch.testing.assert_close(loaded(inputs).logprobs, before, atol=1e-4, rtol=1e-4)


# other architectures


def published_7b():
    """Names and shapes of the published 7B checkpoint, written down from its description."""
    shapes = {}

    def add(prefix, **own):
        shapes.update({f"{prefix}.{name.replace('__', '.')}": shape for name, shape in own.items()})

    for tower, width, mlp, blocks in (("featurizer", 1024, 4096, 24), ("fused_featurizer", 1152, 4304, 27)):
        root = f"vision_backbone.{tower}"
        add(root, pos_embed=(1, 256, width), patch_embed__proj__weight=(width, 3, 14, 14))
        add(root, patch_embed__proj__bias=(width,), norm__weight=(width,), norm__bias=(width,))
        for block in range(blocks):
            linears = {
                "attn.qkv": (3 * width, width),
                "attn.proj": (width, width),
                "mlp.fc1": (mlp, width),
                "mlp.fc2": (width, mlp),
            }
            for name, shape in linears.items():
                add(f"{root}.blocks.{block}.{name}", weight=shape, bias=shape[:1])
            for name in ("norm1", "norm2"):
                add(f"{root}.blocks.{block}.{name}", weight=(width,), bias=(width,))
            if tower == "featurizer":
                add(f"{root}.blocks.{block}", ls1__scale_factor=(width,), ls2__scale_factor=(width,))
    add("vision_backbone.featurizer", cls_token=(1, 1, 1024), reg_token=(1, 4, 1024))
    pool = "vision_backbone.fused_featurizer.attn_pool"
    add(pool, latent=(1, 1, 1152), norm__weight=(1152,), norm__bias=(1152,))
    for name, shape in (
        ("q", (1152, 1152)),
        ("kv", (2304, 1152)),
        ("proj", (1152, 1152)),
        ("mlp.fc1", (4304, 1152)),
        ("mlp.fc2", (1152, 4304)),
    ):
        add(f"{pool}.{name}", weight=shape, bias=shape[:1])
    for name, shape in (("fc1", (8704, 2176)), ("fc2", (4096, 8704)), ("fc3", (4096, 4096))):
        add(f"projector.{name}", weight=shape, bias=shape[:1])
    add("language_model", model__embed_tokens__weight=(32064, 4096), model__norm__weight=(4096,))
    add("language_model", lm_head__weight=(32064, 4096))
    for layer in range(32):
        root = f"language_model.model.layers.{layer}"
        add(root, input_layernorm__weight=(4096,), post_attention_layernorm__weight=(4096,))
        for name in "qkvo":
            add(f"{root}.self_attn.{name}_proj", weight=(4096, 4096))
        add(f"{root}.mlp", gate_proj__weight=(11008, 4096), up_proj__weight=(11008, 4096))
        add(f"{root}.mlp", down_proj__weight=(4096, 11008))
    return shapes


def test_every_tensor_of_the_7b_checkpoint_has_its_place():
    stats = {"q01": [-1.0] * 7, "q99": [1.0] * 7}
    cfg = replace(preset("7b"), norm_stats={"toy": {"action": stats}})
    with torch.device("meta"):
        policy = OpenVLAPolicy(cfg)
    shapes = published_7b()
    assert len(shapes) == 982
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    own = policy.state_dict()
    keys = KeyMap(cfg, own)
    unread = {name for name in tensors if keys.is_unread(name)}
    read = {name: tensor for name, tensor in tensors.items() if name not in unread}
    check_tensors(keys.to_published(own), read, "the 7B checkpoint")
    state = keys.to_policy(read)
    assert set(keys.additions) == {name for name in own if name.startswith("value_head.")}
    check_tensors({name: own[name] for name in own.keys() - set(keys.additions)}, state, "the policy")
    assert keys.to_published(own).keys() | unread == shapes.keys()


def test_an_embedding_that_trains_beside_a_base_is_the_output_layer_too(tmp_path):
    text = {"model_type": "qwen2", "vocab_size": 576, "hidden_size": 32, "intermediate_size": 64, "pad_token_id": 0}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    stats = {"toy": json.loads(_statistics())["toy"]}
    policy = OpenVLAPolicy(
        VLAConfig(dino=None, siglip=TowerConfig(48, 3, 2, 96), image_size=28, text=text, norm_stats=stats)
    )
    policy.save_pretrained(tmp_path / "base")
    also = ["language_model.model.embed_tokens"]
    policy = load_policy(
        tmp_path / "base", run_settings(lora={"rank": 2, "targets": ["q_proj"], "save_base": False, "also_train": also})
    )
    assert policy.language_model.lm_head.weight is policy.get_parameter(f"{also[0]}.weight")
    with torch.no_grad():
        policy.get_parameter(f"{also[0]}.weight").add_(1)
    policy.save_pretrained(tmp_path / "trained")
    assert bits(load_policy(tmp_path / "trained").state_dict()) == bits(policy.state_dict())


@pytest.mark.parametrize("tied", [False, True])
def test_one_tower_and_qwen2(tied, tmp_path):
    text = {"model_type": "qwen2", "vocab_size": 576, "hidden_size": 32, "intermediate_size": 64, "pad_token_id": 0}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    stats = {"toy": json.loads(_statistics())["toy"]}
    tower = TowerConfig(48, 3, 2, 96)
    cfg = VLAConfig(dino=None, siglip=tower, image_size=28, text=text, norm_stats=stats)
    policy = OpenVLAPolicy(cfg)
    policy.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "language_model.model.layers.0.self_attn.q_proj.bias" in names
    assert "vision_backbone.featurizer.blocks.1.attn.qkv.weight" in names and "projector.fc3.weight" not in names
    assert ("language_model.lm_head.weight" in names) != tied
    assert bits(load_policy(tmp_path).state_dict()) == bits(policy.state_dict())
    lora = run_settings(lora={"rank": 2, "targets": ["q_proj", "lm_head"]})
    if tied:
        with pytest.raises(ValueError, match=r"the output layer shares the embedding's weights .*Leave lm_head out"):
            load_policy(tmp_path, lora)
    else:
        assert load_policy(tmp_path, lora).cfg.lora["rank"] == 2

    # the same as others would publish it
    shared = {"model_type": "openvla", "timm_model_ids": ["tiny_siglip"], "vit_dims": [[48, 3, 2, 96]]}
    config = {**shared, "image_sizes": [28, 28], "text_config": text, "use_fused_vision_backbone": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    foreign = load_policy(tmp_path)
    assert (foreign.cfg.bos_token_id, foreign.cfg.empty_token_id) == (None, 220)
    write_adapter(tmp_path, {"language_model.lm_head": ((2, 32), (576, 2))})
    if tied:
        save_file(
            load_file(tmp_path / "model.safetensors") | {LM_HEAD: torch.ones(576, 32)}, tmp_path / "model.safetensors"
        )
        with pytest.raises(CheckpointFormatError, match="an adapter of the output layer, which shares the embedding's"):
            load_policy(tmp_path)
    weight = "language_model.model.layers.1.mlp.up_proj.weight"
    assert torch.equal(foreign.state_dict()[weight], policy.state_dict()[weight])


def test_a_run_names_the_tokenizer_of_a_policy_that_has_none(tmp_path):
    cfg = load_config("tabletop_ppo_vla", ["rollout.model_dir=null"])
    spec = spec_of(cfg)
    whole = build_policy(cfg, spec)
    whole.save_pretrained(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "bare")
    for file in tokenizer_files(tmp_path / "bare"):
        (tmp_path / "bare" / file).unlink()
    images = {name: np.zeros((1, 64, 64, 3), np.uint8) for name in spec.cameras}
    obs = {"images": images, "instruction": ["pick up the cube"]}
    with pytest.raises(TokenizerError, match=r"or set actor\.tokenizer\.tokenizer_model"):
        load_policy(tmp_path / "bare").sft_inputs(obs)

    overrides = [f"rollout.model_dir={tmp_path / 'bare'}", "actor.tokenizer.tokenizer_model=assets/tiny_tokenizer"]
    policy = build_policy(load_config("tabletop_ppo_vla", overrides), spec)
    policy.save_pretrained(tmp_path / "saved")
    assert tokenizer_files(tmp_path / "saved") == tokenizer_files(tmp_path / "whole") != {}
    for loaded in (policy, load_policy(tmp_path / "saved")):
        assert torch.equal(loaded.sft_inputs(obs)["input_ids"], whole.sft_inputs(obs)["input_ids"])

    (tmp_path / "other").mkdir()  # not looked at, where the policy has its own
    load_policy(tmp_path / "whole", tokenizer=tmp_path / "other")
    with pytest.raises(TokenizerError, match="other has no tokenizer"):
        load_policy(tmp_path / "bare", tokenizer=tmp_path / "other")


def test_a_tokenizer_that_nobody_reads_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"tokenizer_model: a policy of random weights brings its tokenizer\. Set it to"
    ):
        load_config(
            "tabletop_ppo_vla", ["rollout.model_dir=null", "actor.tokenizer.tokenizer_model=assets/tiny_tokenizer"]
        )
    with pytest.raises(ConfigError, match=r"actor\.tokenizer\.tokenizer_model: no directory 'nowhere'"):
        load_config("tabletop_ppo_vla", ["actor.tokenizer.tokenizer_model=nowhere", f"rollout.model_dir={FIXTURE}"])
    spec = EnvSpec(1, 3, (), [-1.0], [1.0], 24, True)
    build_policy(load_config("gym_pendulum_ppo_mlp"), spec).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer_model: mlp_gaussian reads no tokenizer\. Set it to null"):
        load_policy(tmp_path, tokenizer=FIXTURE)


@pytest.mark.parametrize("config", ["gym_pendulum_ppo_mlp", "tabletop_ppo_vla", "tabletop_ppo_flow"])
def test_a_runs_policy_is_built_from_one_reading_of_its_config(tmp_path, monkeypatch, config):
    cfg = load_config(config, ["rollout.model_dir=null"])
    spec = spec_of(cfg)
    build_policy(cfg, spec).save_pretrained(tmp_path / "start")
    resumed = load_config(config, [f"rollout.model_dir={tmp_path / 'start'}"])
    read, read_text = [], Path.read_text

    def counted(path, *args, **kwargs):
        read.append(path.name)
        return read_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", counted)
    build_policy(resumed, spec)
    assert read.count("config.json") == 1
