"""The output of a run for people: its last printed lines, videos of episodes, the report."""

import html
import json

from PIL import Image

from rlinf_lite.script import shown_path
from tests.runners.conftest import read_metrics

PICK = [
    "env.id=tabletop",
    "env.task=pick",
    "env.options.obs_mode=rgb+state",
    "env.eval.num_videos=3",
    "runner.max_steps=2",
    "runner.val_check_interval=2",
    "runner.save_interval=2",
    "runner.timeline=true",
]


def test_a_run_ends_with_before_and_after_videos_and_a_report(start):
    result = start(*PICK).run()
    first, last = result.first_eval, result.last_eval
    said = result.describe()
    assert f"before: {first.headline()}" in said and f"reached: {last.headline()}" in said
    assert f"{last.tasks[0].task_id}:" in said and " -> " in said
    assert f"report: {shown_path(result.report)}" in said and f"checkpoint: {shown_path(result.checkpoint)}" in said

    for step in (0, 2):
        with Image.open(result.run_dir / "eval" / f"step_{step:06d}.gif") as gif:
            assert gif.info["comment"].decode().count("steps.") == 3
    page = result.report.read_text()
    assert page.count("data:image/gif") == 2 and "Step 2: every lane is a process" in page
    overlap = next(line for line in read_metrics(result.run_dir) if line["step"] == 2)["perf/overlap_frac"]
    assert f"overlap <b>{100 * overlap:.1f}%</b>" in page
    made_by = json.loads((result.run_dir / "versions.json").read_text())
    assert made_by["rlinf_lite"] and made_by["seed"] == "0" and "CPU cores" in made_by["machine"]
    assert all(html.escape(made_by[what]) in page for what in ("command", "commit", "machine"))


def test_states_have_no_videos_and_a_report_may_be_switched_off(start):
    result = start("runner.max_steps=1", "runner.val_check_interval=1", "runner.report=false").run()
    assert result.report is None and "report:" not in result.describe()
    assert not list(result.run_dir.glob("**/*.gif")) and not list(result.run_dir.glob("*.html"))
