"""The report of a run: right numbers, nothing loaded from elsewhere, and made from whatever files there are."""

import json
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml

from rlinf_lite.cli.report import report
from rlinf_lite.metrics import Span, summarize_episodes, write_chrome_trace
from rlinf_lite.report import ReportError, write_comparison, write_report
from rlinf_lite.report.axes import compact, duration, nice_ticks, tick_labels
from rlinf_lite.report.page import TaskTable
from rlinf_lite.report.run_files import RunFiles
from rlinf_lite.report.video import write_gif
from rlinf_lite.workers.messages import EpisodeVideo

TASKS = ("push <b>fast</b>", "lift & hold")


@dataclass(frozen=True)
class Episode:
    env_id: int
    task_id: str
    seed: int
    success_once: bool | None
    length: int = 40
    return_: float = 2.0

    @property
    def success_at_end(self) -> bool | None:
        return self.success_once

    @property
    def steps_to_success(self) -> int | None:
        return 24 if self.success_once else None


def write_eval(
    run: Path,
    step: int,
    num_successes: int | None,
    tasks: tuple[str, ...] = TASKS,
    mode: str = "sampled",
    groups: dict[str, tuple[str, ...]] | None = None,
    **settings: int,
) -> dict[str, object]:
    """100 episodes, of which the first `num_successes` succeed; returns the log's line."""
    episodes = [
        Episode(i, tasks[i % len(tasks)], i, None if num_successes is None else i < num_successes) for i in range(100)
    ]
    summary = summarize_episodes(episodes, mode, groups, {"mode": mode, "commit": step, **settings})
    (run / "eval").mkdir(exist_ok=True)
    (run / "eval" / f"step_{step:06d}.json").write_text(summary.to_json(step=step, env_steps=1000 * step))
    return {"step": step, "time": 100.0 + step, "env/num_steps": 1000 * step, "time/eval": 0.5, **summary.metrics()}


def write_run(run: Path, num_steps: int = 4, last: int = 90) -> Path:
    run.mkdir()
    lines = [write_eval(run, 0, 35)]
    for step in range(1, num_steps + 1):
        values = {"env/success_once": step / 10, "train/actor/policy_loss": -0.01 * step, "train/actor/lr": 1e-4}
        perf = {"perf/overlap_frac": 0.9, "perf/env_idle_frac": 0.25, "perf/env_steps_per_s": 1200.0}
        times = {"time/step": 1.0, "time/generate_rollouts": 0.7, "time/training": 0.3}
        lines.append({"step": step, "time": 100.0 + step, "env/num_steps": 1000 * step, **values, **perf, **times})
    lines.append(write_eval(run, num_steps, last))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = {
        "runner": {"max_steps": -1, "max_epochs": 2},
        "env": {"id": "toy", "task": "<Reach>", "eval": {"num_videos": 2}},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "versions.json").write_text(json.dumps({"steps": str(num_steps)}))
    return run


def write_videos(run: Path, step: int, success: bool) -> None:
    frames = np.zeros((3, 16, 16, 3), np.uint8)
    video = EpisodeVideo(0, '<script>alert("pick up")</script>', success, 12, 7 if success else None, frames)
    write_gif([video], run / "eval" / f"step_{step:06d}.gif")


def page(run: Path) -> str:
    return write_report(run).read_text(encoding="utf-8")


class Tags(HTMLParser):
    """All tags with their attributes; void and SVG tags as they come."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))


def test_before_and_after_with_intervals_in_all_and_by_task(tmp_path):
    text = page(write_run(tmp_path / "run"))
    assert "35.0%" in text and "[26.4, 44.7]" in text and "35/100" in text
    assert "90.0%" in text and "[82.6, 94.5]" in text and "90/100" in text
    assert "Before, step 0" in text and "After, step 4" in text
    rows = re.findall(r"<th scope=row>(.*?)</th>", text)
    assert rows == ["lift &amp; hold", "push &lt;b&gt;fast&lt;/b&gt;", "all tasks"]
    assert text.count("[78.6, 95.7]") >= 2  # 45/50 each
    assert "4,000" in text and "4 of 4" in text


def test_what_was_evaluated_otherwise_is_not_compared(tmp_path):
    """A resumed run may evaluate by other rules: what was measured before then is in the curves, by its name."""
    run = write_run(tmp_path / "run")
    lines = [write_eval(run, 0, 20, mode="greedy", limit=6), write_eval(run, 4, 80, limit=24)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = page(run)
    assert "Measured, step 4" in text and "Before, step" not in text and "80.0%" in text
    assert "other settings (limit, mode), shown only in the curves: 1" in text
    assert "evaluation, sampled: 80.0% at 4,000" in text and "with other settings: 20.0% at 0" in text


def test_where_nobody_succeeded_at_first_groups_had_no_success_either(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(write_eval(run, s, k, groups={"easy": TASKS[:1]})) + "\n" for s, k in ((0, None), (4, 50)))
    )
    table = TaskTable(RunFiles(run))
    assert {task["task_id"]: (before.number, before.count) for task, before, _ in table.rows} == {
        "lift & hold": ("0.0%", "0/50"),
        "push <b>fast</b>": ("0.0%", "0/50"),
        "easy": ("0.0%", "0/50"),
        "all": ("0.0%", "0/100"),
    }


def test_nothing_is_loaded_from_elsewhere_and_nothing_runs(tmp_path):
    run = write_run(tmp_path / "run")
    for step in (0, 4):
        write_videos(run, step, success=step > 0)
    text = page(run)
    assert not re.search(r"https?:|@import|url\(", text)
    tags = Tags(text).tags
    assert not {tag for tag, _ in tags} & {"script", "link", "iframe", "object", "embed", "base"}
    sources = [value or "" for _, given in tags for name, value in given.items() if name in ("src", "srcset", "href")]
    assert len(sources) == 4 and all(source.startswith("data:image/") for source in sources)
    assert not [name for _, given in tags for name in given if name.startswith("on")]


def test_text_from_files_is_escaped(tmp_path):
    run = write_run(tmp_path / "run")
    write_videos(run, 0, success=False)
    text = page(run)
    assert "<script" not in text and "&lt;script&gt;alert(&#34;pick up&#34;)" in text
    assert "<Reach>" not in text and "&lt;Reach&gt;" in text


def test_the_table_says_when_episodes_succeed(tmp_path):
    run = write_run(tmp_path / "run")
    assert "Steps to success" in page(run) and "24.0" in page(run)
    write_eval(run, 4, None)
    assert "Length" in page(run) and "40.0" in page(run)
    old = json.loads((run / "eval" / "step_000004.json").read_text())
    for summary in (old["total"], *old["tasks"]):
        del summary["steps_to_success"]
    (run / "eval" / "step_000004.json").write_text(json.dumps(old))
    assert "Length" in page(run)


def test_pictures_say_what_they_show(tmp_path):
    run = write_run(tmp_path / "run")
    write_videos(run, 4, success=True)
    tags = Tags(page(run)).tags
    assert all(given.get("aria-label") for tag, given in tags if tag == "svg")
    (alt,) = [given["alt"] for tag, given in tags if tag == "img"]
    assert alt is not None and "success after 7 steps" in alt


def test_curves_over_env_steps_with_evaluations_marked(tmp_path):
    text = page(write_run(tmp_path / "run"))
    over_env_steps = text.partition('<div class="charts over2">')[0]
    charts = re.findall(r"<figure class=chart>.*?</figure>", over_env_steps, re.DOTALL)
    titles = [re.search(r"<b>(.*?)</b>", chart).group(1) for chart in charts]
    assert titles == ["Success", "Return", "Policy loss", "Learning rate", "Throughput", "Pipeline"]
    assert all(chart.count("class=mark") == 2 for chart in charts)
    assert "evaluation, sampled 90.0% [82.6%, 94.5%]" in charts[0] and charts[0].count("<circle") == 2
    assert "2,000 env steps\ntraining 20.0%" in charts[0]


def test_curves_over_steps_where_training_takes_no_env_steps(tmp_path):
    run = write_run(tmp_path / "run")
    steps = [{"step": n, "time": 100.0 + n, "time/step": 0.1, "train/actor/sft_loss": 1 / n} for n in (1, 2, 3)]
    lines = [write_eval(run, 0, 10), *steps, write_eval(run, 3, 60)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = page(run)
    assert "Imitation loss" in text and "2 steps\nimitation loss 0.5" in text and "3 steps\nevaluation" in text


def test_evaluations_alone_have_an_axis(tmp_path):
    """Of a language model that was measured, or stopped in its first step: its evaluations count no env steps."""
    run = write_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text(json.dumps(write_eval(run, 0, 35)) + "\n")
    assert "0 env steps" in page(run)
    file = run / "eval" / "step_000000.json"
    content = json.loads(file.read_text())
    del content["env_steps"]
    file.write_text(json.dumps(content))
    assert "env steps" not in page(run)


def test_long_runs_are_thinned(tmp_path):
    short, long = (page(write_run(tmp_path / f"run{n}", num_steps=n)) for n in (400, 8000))
    assert len(long) < 1.2 * len(short)


def test_timeline_of_a_step(tmp_path):
    run = write_run(tmp_path / "run")
    spans = [Span("generate_rollouts", 0.0, 0.8, "driver"), Span("train", 0.8, 1.0, "actor 0")]
    for i in range(40):
        spans.append(Span(f"step stage {i % 2}", 0.02 * i, 0.02 * i + 0.015, "env 0"))
        spans.append(Span(f"act env 0 stage {i % 2}", 0.02 * i + 0.015, 0.02 * i + 0.02, "rollout 0"))
    write_chrome_trace(spans, run / "timeline.json", step=3)
    text = page(run)
    lanes = re.findall(r'class="end lane">(.*?)<', text)
    assert lanes == ["driver", "env 0", "rollout 0", "actor 0"] * 2  # the whole step, and a part of it
    assert "Step 3" in text and "overlap <b>90.0%</b>, env idle <b>25.0%</b>" in text
    assert "env 0: step stage 1\n15.0 ms" in text


def test_spans_too_short_to_see_are_merged(tmp_path):
    run = write_run(tmp_path / "run")
    spans = [Span("step stage 0", 1e-4 * i, 1e-4 * i + 9e-5, "env 0") for i in range(20_000)]
    write_chrome_trace(spans, run / "timeline.json", step=3)
    assert page(run).count("<rect") < 100


def test_evaluations_that_a_resumed_run_took_back_are_left_out(tmp_path):
    run = write_run(tmp_path / "run")
    write_eval(run, 7, 100)
    text = page(run)
    assert "After, step 4" in text and "100/100" not in text


def test_returns_where_there_is_no_success(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    lines = [write_eval(run, step, None) for step in (0, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = page(run)
    assert "mean return per episode" in text and "[2, 2]" in text and "100 episodes" in text


def test_a_run_of_few_files_says_what_is_missing(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    text = page(tmp_path)
    for missing in ("runner.val_check_interval", "No step was completed", "runner.timeline=true", "No videos"):
        assert missing in text


def test_command(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert report([str(run)]) == 0 and capsys.readouterr().out.strip() == str(run / "report.html")
    assert report([str(tmp_path)]) == 2 and "no metrics.jsonl here" in capsys.readouterr().err
    with pytest.raises(ReportError):
        write_report(tmp_path / "nowhere")


def write_events(run: Path, *events: dict[str, object]) -> None:
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + '{"time": 1')


def failures(run: Path) -> list[list[str]]:
    """The cells of the section's rows, without their tags."""
    [section] = re.findall(r"<h2>Failures</h2>.*?</section>", page(run), re.DOTALL)
    rows = re.findall(r"<tr[^>]*>(<t[dh].*?)</tr>", section.partition("<tbody>")[2], re.DOTALL)
    return [[re.sub(r"<[^>]*>", "", cell) for cell in re.split(r"<t[dh][^>]*>", row)[1:]] for row in rows]


def test_failures_of_a_supervised_run(tmp_path):
    run = write_run(tmp_path / "run")
    detected = {"event": "detected", "kind": "crashed", "group": "env", "rank": 1, "evidence": "died <hard>\nmore"}
    failover = {"event": "failover", "id": "a", "level": "worker", "ranks": {"env": [1]}, "reason": ""}
    wider = {**failover, "level": "group", "ranks": {"env": [0, 1]}}
    recovered = {"event": "recovered", "id": "a", "failed": ["env[1]"], "seconds": 6.0, "steps_lost": 1}
    trainer = {"event": "failover", "id": "b", "level": "fail", "ranks": {}, "reason": "the trainer failed 4 times"}
    write_events(
        run,
        {"time": 100.0, "event": "running"},
        {"time": 110.0, **detected},
        {"time": 110.5, **failover},
        {"time": 111.0, "event": "recovery_failed", "id": "a", "failed": ["env[1]"], "seconds": 0.5, "problem": "no"},
        {"time": 112.0, **detected, "rank": 0, "kind": "hung", "evidence": "is stuck"},
        {"time": 112.0, **wider},
        {"time": 116.0, **recovered},
        {"time": 120.0, "event": "master_restarted", "stage": "running"},
        {"time": 130.0, **detected, "kind": "slow", "evidence": "computes 90% of the time"},
        {"time": 140.0, **trainer},
    )
    first, master, slow, last, total = failures(run)
    evidence = "died &lt;hard&gt;; is stuck"
    assert first == ["10.0 s", "env[1]; env[0]", "crashed; hung", evidence, "env[0, 1]", "6.0 s", "1"]
    assert master == ["20.0 s", "master", "crashed", "–", "the master", "–", "–"]
    assert slow == ["30.0 s", "env[1]", "slow", "computes 90% of the time", "nothing", "–", "–"]
    assert last[1:5] == ["trainer", "–", "the trainer failed 4 times", "nothing: the job ended"]
    assert total[0] == "4 in all" and total[-2:] == ["6.0 s", "1"]


def test_no_failures_no_section(tmp_path):
    run = write_run(tmp_path / "run")
    assert "Failures" not in page(run)
    write_events(run, {"time": 100.0, "event": "running"}, {"time": 110.0, "event": "finished", "step": 4})
    assert "Failures" not in page(run)


def test_numbers():
    assert nice_ticks(0, 0.97) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert nice_ticks(3.0, 3.0)[0] <= 3.0 <= nice_ticks(3.0, 3.0)[-1]
    assert tick_labels([0.0, 100e3, 200e3]) == ["0", "100 k", "200 k"]
    assert tick_labels([0.0, 2.5e-4, 5e-4]) == ["0", "2.5e−4", "5e−4"]
    assert tick_labels([-0.5, 0.0, 0.5]) == ["−0.5", "0.0", "0.5"]
    assert tick_labels([0.0, 0.25, 0.5], percent=True) == ["0%", "25%", "50%"]
    assert tick_labels([0.3, 0.325, 0.35], percent=True) == ["30.0%", "32.5%", "35.0%"]
    assert [compact(x) for x in (0.5, 1234.0, 225_280.0, -3.1e-5)] == ["0.5", "1,234", "225 k", "−3.1e−5"]
    assert [compact(x) for x in (-999.9, 999_960.0, 1e9)] == ["−1,000", "1,000 k", "1,000 M"]
    assert [duration(s) for s in (0.012, 12.34, 245.0, 11_520.0)] == ["12 ms", "12.3 s", "4 min 05 s", "3 h 12 min"]


def labels(text: str) -> list[tuple[str, float, float, float]]:
    """Every text of every drawing with its left and right end and the drawing's width, where a character takes 0.6
    times the font's size, as digits do."""
    found = []
    for width, drawing in re.findall(r'<svg[^>]*viewBox="0 0 (\S+) .*?>(.*?)</svg>', text, re.DOTALL):
        for at, look, label in re.findall(r'<text x="(\S+)" y="\S+" class="(.*?)">(.*?)</text>', drawing):
            size = 0.6 * (12.5 if "lane" in look else 11) * len(label)
            left = float(at) - {"end": size, "mid": size / 2}.get(look.split()[0], 0.0)
            found.append((label, left, left + size, float(width)))
    return found


@pytest.mark.parametrize("size", [1e-9, 1e-5, 1e-3, 1e-2, 1.0, 1e4, 1e7, 1e9])
def test_no_label_leaves_its_drawing(tmp_path: Path, size: float) -> None:
    """Values of every size and sign, alike and apart, in training and in evaluations, of runs of every length."""
    runs = []
    for i, values in enumerate(([-5.8, -1.2], [-1.234567, 1.234567], [9.99, 9.99], [-9.99, -9.99], [0.0, 1.1])):
        run = write_run(tmp_path / f"run{i}")
        metrics = ("train/actor/policy_loss", "train/critic/explained_variance", "async/staleness_max")
        lines = [write_eval(run, 0, None)]
        for step, value in zip((1, 999 * 10**i), values, strict=True):
            line = {"step": step, "time": 100.0 + step, "env/num_steps": 977 * step, "time/step": 1.0}
            lines.append(line | dict.fromkeys(metrics, value * size))
        lines.append(write_eval(run, 999 * 10**i, None))
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for path in (run / "eval").iterdir():
            content = json.loads(path.read_text())
            content["total"] |= {"return_mean": values[0] * size, "return_interval": [-abs(values[0]) * size, size]}
            path.write_text(json.dumps(content))
        spans = [Span("train", 0.0, max(size, 1e-3), f"{role} 10") for role in ("driver", "reference", "rollout")]
        write_chrome_trace(spans, run / "timeline.json", step=3)
        runs.append(run)
    texts = [page(run) for run in runs] + [write_comparison(runs, tmp_path / "all.html").read_text(encoding="utf-8")]
    assert any(label.startswith("−") for label, *_ in labels(texts[0]))
    for text in texts:
        found = labels(text)
        assert len(found) > 20
        assert not [label for label, left, right, width in found if left < 0 or right > width]


def test_curves_are_drawn_over_env_steps_and_over_steps(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "run")).read_text()
    first, second = page.split('<div class="charts over1">')[1].split('<div class="charts over2">')
    for drawn, x, name in ((first, 4000, "env steps"), (second, 4, "steps")):
        assert f'−0.04 at {x:,}"' in drawn and f"0 {name}</text>" in drawn
    assert page.count("<input type=radio") == 2 and page.count(" checked>") == 1


def test_every_table_scrolls_in_its_own_box_where_the_page_is_narrow(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "run")).read_text()
    tables = re.findall(r"(.*)\n<table", page)
    assert len(tables) >= 1 and set(tables) == {"<div class=scroll>"}
    css = (Path(write_report.__code__.co_filename).parent / "templates" / "style.css").read_text()
    assert "table { min-width: 0;" in css.partition("@media (max-width: 640px)")[2].partition("@media print")[0]
