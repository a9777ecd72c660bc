"""Distillation on the student's own actions: what a teacher of the same kind makes of them."""

from pathlib import Path

import pytest

from rlinf_lite.config import ConfigError
from rlinf_lite.data.tokenizers import TokenizerError
from tests.runners.conftest import SMALL_PENDULUM, read_metrics
from tests.runners.test_flow_runs import PPO as SMALL_TABLETOP
from tests.runners.test_flow_runs import TOGETHER

OPD = ["algorithm.adv_type=opd", "algorithm.loss_type=opd", "algorithm.critic_warmup_steps=0"]
KINDS = {
    "tokens": ("tabletop_ppo_vla", "assets/tabletop_vla"),
    "flow": ("tabletop_ppo_flow", "assets/tabletop_flow"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_that_is_the_student_teaches_nothing(start, kind):
    config, teacher = KINDS[kind]
    settings = [*OPD, f"teacher.model_dir={teacher}", "runner.max_steps=1"]
    lines = read_metrics(start(*settings, config=config, small=[*SMALL_TABLETOP, *TOGETHER]).run().run_dir)
    [line] = [line for line in lines if "train/actor/teacher_kl" in line]
    assert abs(line["train/actor/teacher_kl"]) < 1e-4 and abs(line["train/actor/policy_loss"]) < 1e-2


def test_a_student_of_a_gaussian_policy_comes_nearer_to_its_teacher(start):
    small = [x for x in SMALL_PENDULUM if not x.startswith("algorithm.")]
    teacher = start("runner.save_interval=3", "model.options.log_std_init=-1.5").run()
    start.stop()
    settings = [*OPD, f"teacher.model_dir={teacher.run_dir}", "runner.max_steps=40", "actor.optim.lr=1e-2"]
    lines = read_metrics(start(*settings, small=small).run().run_dir)
    found = [line["train/actor/teacher_kl"] for line in lines if "train/actor/teacher_kl" in line]
    assert len(found) == 40 and sum(found[-5:]) < 0.5 * sum(found[:5])


def test_a_language_model_comes_nearer_to_its_teacher(start_reasoning, tmp_path):
    opd = ["algorithm.adv_type=opd", "algorithm.loss_type=opd"]
    more = ["sft.num_steps=20", "runner.save_interval=1", "runner.max_steps=1"]
    teacher = start_reasoning(*more, root=tmp_path / "teacher").run()
    start_reasoning.stop()
    settings = [*opd, f"teacher.model_dir={teacher.run_dir}", "runner.max_steps=12"]
    lines = read_metrics(start_reasoning(*settings, root=tmp_path / "student").run().run_dir)
    found = [line["train/actor/teacher_kl"] for line in lines if "train/actor/teacher_kl" in line]
    assert len(found) == 12 and sum(found[-3:]) < 0.7 * sum(found[:3])
    start_reasoning.stop()
    itself = [*opd, *(f"{key}={teacher.checkpoint}" for key in ("teacher.model_dir", "actor.checkpoint_load_path"))]
    [line, *_] = read_metrics(start_reasoning(*itself, "runner.max_steps=1", root=tmp_path / "itself").run().run_dir)
    assert abs(line["train/actor/teacher_kl"]) < 1e-5


def test_a_teacher_may_be_larger_and_keeps_its_own_adapters(start_reasoning, tmp_path):
    more = ["sft.num_steps=2", "runner.save_interval=1", "runner.max_steps=1", "model.size=small", "model.lora.rank=2"]
    teacher = start_reasoning(*more, root=tmp_path / "teacher").run()
    start_reasoning.stop()
    opd = [
        "algorithm.adv_type=opd",
        "algorithm.loss_type=opd",
        "model.lora.rank=4",
        f"teacher.model_dir={teacher.run_dir}",
    ]
    lines = read_metrics(start_reasoning(*opd, "runner.max_steps=1", root=tmp_path / "student").run().run_dir)
    assert any("train/actor/teacher_kl" in line for line in lines)


def test_language_models_that_cannot_teach_are_named(start_reasoning, tmp_path):
    opd = ["algorithm.adv_type=opd", "algorithm.loss_type=opd"]
    for settings, said in (
        (opd, r"teacher\.model_dir: is null, and opd learns from a teacher"),
        ([*opd, f"teacher.model_dir={tmp_path}"], r"teacher\.model_dir: .* holds no language model"),
        ([f"teacher.model_dir={tmp_path}"], r"teacher\.model_dir: is set, and ppo learns from no teacher"),
        ([*opd, "algorithm.kl={place: loss, coef: 0.1}"], r"kl\.place: is loss, and with opd the teacher is the only"),
        (["algorithm.loss_type=opd", "algorithm.adv_type=gae"], r"adv_type: is gae, whose advantages"),
        (["algorithm.adv_type=opd"], r"loss_type: is ppo, and the advantages of algorithm\.adv_type: opd are all 0"),
        ([*opd, "algorithm.filter_groups=true"], r"filter_groups: is true, which drops groups by their rewards"),
    ):
        with pytest.raises(ConfigError, match=said):
            start_reasoning(*settings)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 16}')
    with pytest.raises(
        ConfigError, match=r"teacher\.model_dir: .* has 16 positions, and sequences 12 \+ 16 = 28 tokens"
    ):
        start_reasoning(*opd, f"teacher.model_dir={tmp_path}")
    (tmp_path / "config.json").write_text("{}")
    for file in Path("assets/tiny_tokenizer").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(TokenizerError, match=r"teacher\.model_dir: .* numbers \d+ tokens otherwise"):
        start_reasoning(*opd, f"teacher.model_dir={tmp_path}")


def test_teachers_that_cannot_teach_are_named(start, tmp_path):
    small = [x for x in SMALL_PENDULUM if not x.startswith("algorithm.")]
    for settings, said in (
        (OPD, r"teacher\.model_dir: is null, and opd learns from a teacher"),
        ([*OPD, f"teacher.model_dir={tmp_path}"], r"teacher\.model_dir: .* holds no policy"),
        (["teacher.model_dir=assets/tabletop_vla"], r"teacher\.model_dir: is set, and ppo learns from no teacher"),
        (["algorithm.loss_type=opd", "teacher.model_dir=assets/tabletop_vla"], r"adv_type: is gae, whose advantages"),
        (["algorithm.adv_type=opd"], r"loss_type: is ppo, and the advantages of algorithm\.adv_type: opd are all 0"),
        (
            [*OPD, "teacher.model_dir=assets/tabletop_vla"],
            r"is openvla with chunks of 4, and the student mlp_gaussian with",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            start(*settings, small=small)
