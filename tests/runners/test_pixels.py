"""ManiSkill from pixels: demonstrations of the scripted expert, imitation, then a step of reinforcement learning."""

import numpy as np
import pytest

from rlinf_lite.data.demonstrations import FRAMES, Demonstrations, read_provenance
from rlinf_lite.runners import EmbodiedRunner, SFTRunner
from tests.runners.conftest import read_metrics

pytest.importorskip("mani_skill")

SMALL = [
    "env.train.num_envs=2",
    "env.train.max_episode_steps=24",
    "env.eval.num_envs=2",
    "env.eval.num_episodes=2",
    "env.eval.max_episode_steps=8",
    "rollout.num_chunks=2",
    "rollout.pipeline_stage_num=1",
    "actor.global_batch_size=4",
    "actor.micro_batch_size=4",
    "actor.optim.lr_scheduler=constant",
    "runner.phase_timeout_s=300",
    "cluster.num_gpus_per_node=2",
    "cluster.component_placement={actor: '0', rollout: '0', env: '0'}",
]


@pytest.fixture(autouse=True)
def vulkan():
    from rlinf_lite.envs.maniskill.setup import material_works

    if not material_works():
        pytest.skip("NO VULKAN DEVICE: training from pixels is NOT tested on this machine (docs/environments.md)")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_imitation_of_the_expert_and_a_full_step_from_there(start, tmp_path):
    demos = [
        "data.num_episodes=2",
        "data.action_noise=0.0",
        f"data.demos_dir={tmp_path / 'demos'}",
        "env.eval.num_videos=1",
    ]
    often = ["runner.max_steps=2", "runner.val_check_interval=2", "runner.save_interval=2"]
    student = start(*demos, *often, config="maniskill_pickcube_sft_vla", small=SMALL, runner_class=SFTRunner)
    imitated = student.run()
    meta = read_provenance(tmp_path / "demos")
    assert meta["counts"]["num_episodes"] == 2, "the expert failed"
    [frames] = (tmp_path / "demos" / FRAMES).iterdir()
    obs, actions = Demonstrations(frames, 4, 4).read(np.arange(3))
    image = next(iter(obs["images"].values()))
    assert image.shape == (3, 64, 64, 3) and image.dtype == np.uint8 and image.std() > 10, "nothing is seen"
    assert len(set(obs["instruction"])) == 1 and "red cube" in obs["instruction"][0]
    assert actions.shape == (3, 4, 7)

    start.stop()
    load = [f"actor.checkpoint_load_path={imitated.checkpoint}", "algorithm.critic_warmup_steps=0"]
    learner = start(*load, *often[:1], config="maniskill_pickcube_ppo_vla", small=SMALL, runner_class=EmbodiedRunner)
    learned = learner.run()
    lines = [line for line in read_metrics(learned.run_dir) if "train/actor/lr" in line]
    assert len(lines) == 2 and lines[-1]["env/num_steps"] == 2 * 2 * 2 * 4
    assert lines[0]["rollout/logprob_drift"] < 1e-5
    assert all(line["train/actor/skipped_updates"] == 0 for line in lines)
