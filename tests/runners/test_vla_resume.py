"""VLA policies resume exactly too: sharded, with adapters, from a directory that holds their base weights."""

import pytest
import torch

from rlinf_lite.config.schema import ModelConfig
from rlinf_lite.envs import EnvSpec
from rlinf_lite.models import load_policy
from rlinf_lite.models.vla.policy import OpenVLAPolicy

SMALL_TABLETOP = [
    "env.train.num_envs=4",
    "rollout.num_chunks=2",
    "rollout.pipeline_stage_num=1",
    "actor.global_batch_size=8",
    "actor.micro_batch_size=4",
    "actor.optim.lr_scheduler=constant",
    "algorithm.update_epochs=1",
    "algorithm.critic_warmup_steps=0",
    "runner.val_check_interval=-1",
    "runner.timeline=false",
    "runner.phase_timeout_s=120",
    "cluster.num_gpus_per_node=2",
]
SHARDED = "cluster.component_placement={actor: 0-1, rollout: '0', env: '0'}"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A directory to start from."""
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("base")
    spec = EnvSpec(3, 3, {"top": (64, 64)}, [-1.0] * 3, [1.0] * 3, 24, True)
    OpenVLAPolicy.from_config(ModelConfig(id="openvla", num_action_chunks=4), spec).save_pretrained(directory)
    return directory


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["cluster.component_placement={actor: '0', rollout: '0', env: '0'}"], id="whole"),
        pytest.param(
            [SHARDED, "model.options.lora.rank=2", "model.options.lora.save_base=false"],
            id="sharded_adapters",
            marks=pytest.mark.processes,
        ),
    ],
)
def test_two_steps_equal_one_and_resume_and_one(start, tmp_path, base, settings):
    def run(root, steps, *more):
        settled = [f"runner.max_steps={steps}", f"runner.save_interval={steps}", f"rollout.model_dir={base}"]
        overrides = [*settled, *settings, *more]
        runner = start(*overrides, config="tabletop_ppo_vla", small=SMALL_TABLETOP, root=tmp_path / root)
        result = runner.run()
        start.stop()
        return load_policy(result.checkpoint / "policy").state_dict()

    expected = run("whole", 2)
    run("half", 1)
    got = run("half", 2, "runner.resume=auto")
    assert expected.keys() == got.keys() and any("lora_" in name for name in got) == (len(settings) > 1)
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    before = load_policy(base).state_dict()
    assert not torch.equal(before["value_head.0.weight"], got["value_head.0.weight"])
