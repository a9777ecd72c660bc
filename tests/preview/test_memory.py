"""What is computed from a config alone equals what the modules have, or bounds it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf_lite.config import Config, load_config
from rlinf_lite.config.plan import complete_plan, observed
from rlinf_lite.envs import EnvSpec, get_env_spec, make_vec_env
from rlinf_lite.models import Policy, policy_class
from rlinf_lite.models.check import random_obs
from rlinf_lite.preview.footprint import policy_sizes
from rlinf_lite.preview.memory import estimate
from rlinf_lite.registry import ENVIRONMENTS, env_card
from rlinf_lite.workers.messages import StepResult
from rlinf_lite.workers.trajectory import TrajectoryBuilder

VLA = ["model.num_action_chunks=2"]
LORA = [*VLA, "model.options.size=small", "model.options.lora.rank=8"]
AUTOREGRESSIVE = [*VLA, "model.options.parallel_decoding=false"]
PROPRIO = [
    *VLA,
    "model.options.use_proprio=true",
    "model.value_type=action_level",
    "algorithm.reward_type=action_level",
]
SEVEN_B = ["env.id=maniskill", "env.task=StackCube-v1", "env.options.obs_mode=rgb", "model.options.size=7b", *VLA]
MLP = ["model.id=mlp_gaussian", "env.options.obs_mode=state"]


def load(*overrides: str) -> Config:
    return load_config("tabletop_ppo_vla", ["rollout.model_dir=null", *overrides])


def spec_of(config: Config) -> EnvSpec:
    seen = observed(config)
    assert seen is not None
    bounds = [-1.0] * seen.action_dim, [1.0] * seen.action_dim
    return EnvSpec(seen.action_dim, seen.state_dim or None, seen.cameras, *bounds, 24, True)


def build(config: Config) -> Policy:
    torch.manual_seed(0)
    return policy_class(config.model.id).from_config(config.model, spec_of(config))


def sizes_of(config: Config) -> Any:
    seen = observed(config)
    assert seen is not None
    return policy_sizes(config, seen)


def test_it_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from rlinf_lite.preview.footprint import policy_sizes\n"
        "from rlinf_lite.config.plan import observed\n"
        "from rlinf_lite.config import load_config\n"
        f"config = load_config('tabletop_ppo_vla', {['rollout.model_dir=null', *VLA]})\n"
        "print(policy_sizes(config, observed(config)).parameters, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{sizes_of(load(*VLA)).parameters} False\n", done.stderr


TASKS = {(env_id, name): task for env_id in ENVIRONMENTS.names() for name, task in env_card(env_id).tasks.items()}
SEEN = [(*task, "state") for task in TASKS]
SEEN += [(*task, "rgb") for task in TASKS if task[1] in ("pick", "all", "PickCube-v1", "StackCube-v1")]
SEEN += [("tabletop", "pick", "rgb+state")]


@pytest.mark.parametrize(("env_id", "task", "obs_mode"), SEEN)
def test_what_a_policy_will_see_is_known(env_id: str, task: str, obs_mode: str) -> None:
    if env_id == "maniskill" and obs_mode != "state":
        from rlinf_lite.envs.maniskill.setup import import_maniskill, material_works

        import_maniskill()
        if not material_works():
            pytest.skip("NO VULKAN DEVICE: sizes of image observations are NOT compared (docs/environments.md)")
    modes = [f"env.options.obs_mode={obs_mode}"] * (env_card(env_id).Options is not None)
    policy = "examples.embodiment.custom_policy:SquashedGaussianPolicy"
    config = load(f"env.id={env_id}", f"env.task={task}", *modes, f"model.id={policy}")
    env = make_vec_env(config.env, "train", 1)
    spec, seen = get_env_spec(env, env.reset([1])), observed(config)
    assert seen is not None
    assert (seen.action_dim, seen.state_dim, seen.cameras) == (spec.action_dim, spec.state_dim or 0, spec.cameras)
    assert spec.max_episode_steps == TASKS[env_id, task].max_episode_steps


@pytest.mark.parametrize(
    "overrides",
    [
        MLP,
        [*MLP, "model.num_action_chunks=2", "model.options.hidden_sizes=[8, 16]"],
        VLA,
        [*VLA, "model.options.size=small"],
        AUTOREGRESSIVE,
        PROPRIO,
        LORA,
        [*LORA, "model.options.lora.also_train=[projector]", "model.options.lora.targets=[q_proj, fc1]"],
    ],
)
def test_parameters_and_samples_are_counted_as_the_policy_has_them(overrides: list[str]) -> None:
    config = load(*overrides)
    policy, sizes = build(config), sizes_of(config)
    assert sizes.parameters == sum(parameter.numel() for parameter in policy.parameters())
    assert sizes.trained == sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    units = [sum(p.numel() for p in unit.parameters()) for unit in policy.fsdp_units()]
    if not config.model.options.lora.rank:  # adapters are counted by policy, not by layer
        assert sizes.root == sizes.parameters - sum(units)
        assert sizes.largest_unit == max(units, default=0)
    with torch.no_grad():
        acted = policy.predict_action_batch(random_obs(spec_of(config)))
    assert sizes.sample_bytes == trajectory_bytes(acted) / len(acted.actions)


def trajectory_bytes(acted: Any) -> int:
    """Bytes of one decision of all rows in the trajectories that are sent to the actors."""
    rows, chunk = acted.actions.shape[:2]
    builder = TrajectoryBuilder(np.arange(rows), 1)
    builder.add_decision(acted.logprobs, acted.values, acted.forward_inputs)
    flags = np.zeros((rows, chunk), bool)
    builder.add_result(StepResult(np.zeros((rows, chunk), np.float32), flags, flags, ~flags, np.empty(0, int), None))
    trajectories = vars(builder.finish(None))
    tensors = [*trajectories.pop("forward_inputs").values(), *trajectories.values()]
    return sum(tensor.nbytes for tensor in tensors) - 8 * rows  # each environment's id, once a trajectory


@pytest.mark.parametrize("lora", [[], ["model.options.lora.rank=32"]])
def test_7b_is_counted_as_it_would_be_built(lora: list[str]) -> None:
    from rlinf_lite.models.vla.adapters import add_adapters
    from rlinf_lite.models.vla.config import preset
    from rlinf_lite.models.vla.policy import OpenVLAPolicy

    config = load(*SEVEN_B, *lora, "model.num_action_chunks=8", "env.options.control_mode=pd_ee_delta_pose")
    statistics = {"env": {"action": {"q01": [-1.0] * 7, "q99": [1.0] * 7}}}
    architecture = preset("7b").from_dict({**preset("7b").to_dict(), "norm_stats": statistics})
    with torch.device("meta"):
        policy = OpenVLAPolicy(architecture)
        if lora:
            add_adapters(policy, config.model.options.lora.model_dump())
    sizes = sizes_of(config)
    assert sizes.parameters == sum(parameter.numel() for parameter in policy.parameters())
    assert sizes.trained == sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "overrides",
    [
        VLA,
        [*VLA, "model.options.size=small"],
        AUTOREGRESSIVE,
        LORA,
        [*VLA, "model.options.size=small", "model.options.gradient_checkpointing=true"],
    ],
)
def test_activations_are_bounded_closely(overrides: list[str], precision: str) -> None:
    """Bytes that autograd keeps per row: no more than the estimate, and no less than 3/4 of it."""
    config = load(*overrides, f"actor.precision={precision}")
    policy = build(config)
    with torch.no_grad():
        inputs = policy.predict_action_batch(random_obs(spec_of(config))).forward_inputs
    few, many = (kept_bytes(policy, {name: x[:rows] for name, x in inputs.items()}, precision) for rows in (1, 5))
    measured, estimated = (many - few) / 4, sizes_of(config).activation_bytes
    assert 0.75 * estimated <= measured <= estimated


def kept_bytes(policy: Policy, inputs: dict[str, Tensor], precision: str) -> int:
    kept: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    amp = torch.autocast("cpu", dtype=torch.bfloat16) if precision == "bf16" else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), amp:
        output = policy(inputs)
    assert output.logprobs.requires_grad
    return sum(kept.values())


PEAK = """
import sys
import torch
torch.set_num_threads(1)
from rlinf_lite.config.schema import OptimConfig
from rlinf_lite.models.check import random_obs
from rlinf_lite.training.sharding import build_optimizer
from tests.preview.test_memory import VLA, build, load, spec_of

def update(rows):
    policy = build(config)
    optimizer = build_optimizer(policy, OptimConfig())
    with torch.no_grad():
        inputs = policy.predict_action_batch(random_obs(spec_of(config))).forward_inputs
    inputs = {name: x[:1].expand(rows, *x.shape[1:]).contiguous() for name, x in inputs.items()}
    for _ in range(2):
        output = policy(inputs)
        (output.logprobs.sum() + output.values.sum()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

def status(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))

config = load(*VLA)
update(1)  # what libraries take for themselves, once
before = status("VmRSS")
update(128)
print(status("VmHWM") - before)
"""


def test_an_actors_bytes_are_those_of_a_process_within_a_factor() -> None:
    """A tiny policy, micro-batches of 128: a real process needs between 2/3 of the estimate and all of it."""
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}  # freed memory is given back at once
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PEAK],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    found = estimate(complete_plan(load(*VLA)))
    assert found is not None
    estimated = found.ranks["actor"].device_bytes
    assert 2 / 3 * estimated <= int(done.stdout) <= estimated, (int(done.stdout), estimated)


def plan_of(*overrides: str) -> Any:
    found = estimate(complete_plan(load(*overrides)))
    assert found is not None
    return found


def test_ranks_share_what_is_sharded_and_slots_add_up() -> None:
    on_one, on_four = (
        plan_of(
            *SEVEN_B,
            f"cluster.component_placement={{env: 0, rollout: 0, actor: {slots}}}",
            "cluster.num_gpus_per_node=4",
            "cluster.accelerator=cuda",
            "actor.precision=bf16",
        )
        for slots in ("0", "0-3")
    )
    one, four = on_one.ranks["actor"].device, on_four.ranks["actor"].device
    for part in ("weights", "gradients", "AdamW"):
        assert math.isclose(four[part], one[part] / 4, rel_tol=1e-6)
    assert "gathered layers" not in one and "bf16 copies" not in four
    actor, rollout = on_four.ranks["actor"].device_bytes, on_four.ranks["rollout"].device_bytes
    assert on_four.slot_bytes == {0: actor + rollout, 1: actor, 2: actor, 3: actor}
    assert sum(one.values()) > 16 * 7.5e9  # fp32 weights, gradients and moments


def test_lora_checkpointing_and_a_smaller_micro_batch_save_what_they_should() -> None:
    full, lora = plan_of(*SEVEN_B), plan_of(*SEVEN_B, "model.options.lora.rank=32")
    assert lora.ranks["actor"].device["AdamW"] < 0.03 * full.ranks["actor"].device["AdamW"]
    checkpointed = plan_of(*SEVEN_B, "model.options.gradient_checkpointing=true")
    assert checkpointed.ranks["actor"].device["activations"] < 0.15 * full.ranks["actor"].device["activations"]
    halved = plan_of(*SEVEN_B, "actor.micro_batch_size=64")
    assert halved.ranks["actor"].device["activations"] * 2 == full.ranks["actor"].device["activations"]


def test_a_checkpoint_says_its_own_size(tmp_path: Any) -> None:
    config = load(*VLA, "model.options.size=small")
    build(config).save_pretrained(tmp_path)
    started = load(f"rollout.model_dir={tmp_path}", "model.num_action_chunks=2")  # model.options.size: tiny
    assert sizes_of(started) == sizes_of(config)
