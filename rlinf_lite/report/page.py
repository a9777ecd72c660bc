"""The report's page: sections put into `page.html`, which holds the layout and the style."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Iterable
from html import escape
from pathlib import Path
from statistics import median
from string import Template

from PIL import Image

from rlinf_lite.report.axes import compact, duration, percent
from rlinf_lite.report.curves import charts
from rlinf_lite.report.failures import failure_section
from rlinf_lite.report.lanes import draw_step, draw_zoom, read_tasks
from rlinf_lite.report.line_chart import draw_chart
from rlinf_lite.report.results import headline, measured, task_table
from rlinf_lite.report.run_files import Line, RunFiles

TEMPLATE = Path(__file__).with_name("page.html")
PHASES = {
    "generate_rollouts": "rollouts",
    "sync_weights": "weight sync",
    "training": "training",
    "eval": "evaluation",
    "advantages": "advantages",
}
"""Shown in the series' colours, in this order: rollouts in that of env, training in that of actor."""
NUM_ANSWERS = 8
LANES = {
    "env": "env steps (shades: stages)",
    "rollout": "policy acts",
    "reward": "reward",
    "reference": "reference",
    "critic": "critic",
    "actor": "actor",
    "driver": "phases of the driver",
}


def render_page(run: RunFiles) -> str:
    """The whole page as HTML: nothing in it is loaded from elsewhere, and it runs no script."""
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(run.run_dir.name),
        about=_about(run),
        headline=headline(run),
        facts=_facts(run),
        tasks=task_table(run),
        curves="".join(draw_chart(chart) for chart in charts(run)) or "<p class=note>No step was completed.</p>",
        time=_time_bar(run),
        pipeline=_pipeline(run),
        failures=failure_section(run),
        episodes=_episodes(run),
        commands=_commands(run),
        versions=_pairs(run.versions.items()) or "<p class=note>Not recorded.</p>",
        config=escape(run.config_text),
    )


def _about(run: RunFiles) -> str:
    env, model, algorithm = run.section("env"), run.section("model"), run.section("algorithm")
    learns = f"{algorithm.get('adv_type')} + {algorithm.get('loss_type')}" if algorithm else ""
    parts = [
        f"{env.get('task', '')} ({env.get('id', '')})" if env else "",
        str(model.get("id") or run.section("rollout").get("model_dir") or f"{model.get('size', '')} language model"),
        "imitation" if run.section("runner").get("task_type") == "sft" else learns,
        time.strftime("%-d %B %Y, %H:%M", time.localtime(run.lines[-1]["time"])) if run.lines else "",
    ]
    return " &middot; ".join(escape(part) for part in parts if part)


def _facts(run: RunFiles) -> str:
    limits = [run.section("runner").get(name, -1) for name in ("max_steps", "max_epochs")]
    planned = min((limit for limit in limits if limit > 0), default=0)
    steps = f"{run.completed_steps:,}" + (f" of {planned:,}" if planned else "")
    facts = [("Steps", steps), ("Time", duration(run.seconds))]
    facts[1:1] = [("Env steps", f"{run.env_steps:,}")] if run.env_steps else []
    for name, metric, shown in (
        ("Env steps / s", "perf/env_steps_per_s", compact),
        ("Samples / s", "perf/samples_per_s", compact),
        ("Tokens / s", "perf/tokens_per_s", compact),
        ("Overlap", "perf/overlap_frac", percent),
        ("Env idle", "perf/env_idle_frac", percent),
        ("Rollout idle", "perf/rollout_idle_frac", percent),
    ):
        values = [line[metric] for line in run.steps if line.get(metric) is not None]
        if values:
            facts.append((name, shown(median(values))))
    memory = [line["perf/peak_memory_bytes"] for line in run.steps if line.get("perf/peak_memory_bytes")]
    if memory:
        facts.append(("Actor memory", f"{max(memory) / 2**20:,.0f} MiB"))
    return "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)


def _time_bar(run: RunFiles) -> str:
    totals = [sum(line.get(f"time/{name}") or 0.0 for line in run.lines) for name in PHASES]
    whole = sum(totals)
    if not whole:
        return ""
    shown = [(i, label, s) for i, (label, s) in enumerate(zip(PHASES.values(), totals, strict=True), 1) if s]
    bars = "".join(f'<span class=k{i} style="flex:{s / whole:.4f}"></span>' for i, _, s in shown)
    keys = "".join(
        f'<span class="key k{i}">{label} {duration(s)} ({percent(s / whole)})</span>' for i, label, s in shown
    )
    return f"<h3>Where the time went</h3><div class=bar aria-hidden=true>{bars}</div><p class=legend>{keys}</p>"


def _pipeline(run: RunFiles) -> str:
    tasks = read_tasks(run.trace) if run.trace else []
    if not tasks:
        return "<p class=note>No timeline: <code>runner.timeline=true</code> records one step.</p>"
    step = (run.trace or {}).get("otherData", {}).get("step")
    line = next((line for line in run.steps if line["step"] == step), None)
    what = "One step" if step is None else f"Step {step}"
    stated = f" {_utilization(line)}" if line else ""
    present = {task.component for task in tasks}
    keys = "".join(
        f'<span class="key t-{component}">{label}</span>' for component, label in LANES.items() if component in present
    )
    zoom = draw_zoom(tasks)
    closer = f"<h3>A dozen decisions of it</h3>{zoom}" if zoom else ""
    return (
        f"<p>{what}: every lane is a process, gaps are waiting.{stated}</p><p class=legend>{keys}</p>"
        f"{draw_step(tasks)}{closer}"
    )


def _utilization(line: Line) -> str:
    names = {
        "perf/overlap_frac": "overlap_frac",
        "perf/env_idle_frac": "env idle",
        "perf/rollout_idle_frac": "rollout idle",
        "perf/actor_idle_frac": "actor idle",
    }
    parts = [f"{name} <b>{percent(line[metric])}</b>" for metric, name in names.items() if line.get(metric) is not None]
    return ", ".join(parts) + "."


def _answers(run: RunFiles) -> str:
    """The first problems of the evaluation, with the first and the last answers."""
    first, last = min(run.answers), max(run.answers)
    steps = [first, last] if last > first else [last]
    rows = []
    for answers in zip(*(run.answers[step][:NUM_ANSWERS] for step in steps), strict=True):
        cells = "".join(
            f"<td class={'ok' if a['score'] >= 1 else 'ko'}><pre>{escape(a['response'])}</pre></td>" for a in answers
        )
        rows.append(f"<tr><td><pre>{escape(answers[0]['prompt'])}</pre></td>{cells}</tr>")
    head = "".join(f"<th>{name}, step {step:,}</th>" for name, step in zip(("Before", "After"), steps, strict=False))
    return (
        "<p>The first problems of the evaluation, the same ones each time.</p>"
        f"<table class=answers><tr><th>Problem</th>{head}</tr>{''.join(rows)}</table>"
    )


def _episodes(run: RunFiles) -> str:
    if any(run.answers.values()):
        return _answers(run)
    if not run.videos:
        off = run.section("env", "eval").get("num_videos") == 0
        why = "<code>env.eval.num_videos</code> is 0" if off else "observations have no images"
        return f"<p class=note>No videos: {why if run.evals else 'no evaluation was run'}.</p>"
    first, last = min(run.videos), max(run.videos)
    shown = [("Before", first), ("After", last)] if last > first else [("Measured", first)]
    totals = {content["step"]: measured(content["total"]) for content in run.evals}
    figures = [_video(name, step, totals[step].number, run.videos[step]) for name, step in shown]
    return (
        "<p>The first episodes of the evaluation as the policy sees them, the same ones each time.</p>"
        "<p class=legend><span class='key ok'>success</span><span class='key ko'>failure</span></p>"
        f"<div class=videos>{''.join(figures)}</div>"
    )


def _video(name: str, step: int, number: str, path: Path) -> str:
    """A GIF; its last frame on paper and for readers who want nothing to move."""
    with Image.open(path) as gif:
        width, height = gif.size
        alt = escape(bytes(gif.info.get("comment", b"")).decode())
        gif.seek(getattr(gif, "n_frames", 1) - 1)
        still = io.BytesIO()
        gif.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(still, "PNG", optimize=True)
    moving, standing = _data_uri("gif", path.read_bytes()), _data_uri("png", still.getvalue())
    return (
        f"<figure><figcaption><b>{name}</b>, step {step:,}: {number} of all episodes</figcaption><picture>"
        f'<source media="print, (prefers-reduced-motion: reduce)" srcset="{standing}">'
        f'<img src="{moving}" width={width} height={height} alt="{alt}"></picture></figure>'
    )


def _commands(run: RunFiles) -> str:
    checkpoint = run.checkpoint
    commands = {"Curves": f"python -m tensorboard.main --logdir {run.run_dir}"}
    if checkpoint is not None:
        is_reasoning = run.section("runner").get("task_type") == "reasoning"
        measure = f"rlinf-lite eval --checkpoint {checkpoint}"
        if is_reasoning:
            measure = f"the same command with {measure_overrides(checkpoint)}"
        commands = {
            "Measure the policy": measure,
            "Go on": f"the same command with runner.resume={checkpoint} runner.max_steps=<more>",
            **commands,
        }
    commands["This page anew"] = f"python -m rlinf_lite.report {run.run_dir}"
    return _pairs(commands.items(), code=True)


def measure_overrides(checkpoint: Path) -> str:
    """What makes a reasoning run evaluate a checkpoint and end."""
    return f"actor.checkpoint_load_path={checkpoint} runner.max_steps=0 sft.num_steps=0"


def _pairs(pairs: Iterable[tuple[str, str]], code: bool = False) -> str:
    opened, closed = ("<code>", "</code>") if code else ("", "")
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{opened}{escape(value)}{closed}</dd>" for name, value in pairs)
    return f"<dl class=pairs>{rows}</dl>" if rows else ""


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
