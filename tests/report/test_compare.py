"""The page about several runs: every run's line, what each reached, and where the configs differ."""

import json
import re
from pathlib import Path

import pytest
import yaml

from rlinf_lite.cli.compare import compare
from rlinf_lite.report import ReportError, write_comparison
from tests.report.test_report import Tags, write_run


def configured(run: Path, **runner: object) -> Path:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["runner"] |= runner
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    return run


def test_runs_over_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = configured(write_run(tmp_path / "a<b>", last=70), seed=0)
    second = configured(write_run(tmp_path / "second", last=90), seed=1, logger={"backends": ["wandb"]})
    out = tmp_path / "both.html"
    assert compare([str(first), str(second), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    text = out.read_text(encoding="utf-8")

    rows = re.findall(r"<tr><th scope=row>(.*?)</tr>", text, re.DOTALL)
    assert "a&lt;b&gt;" in rows[0] and "<b>70.0%</b>" in rows[0] and "[60.4, 78.1]" in rows[0] and "70/100" in rows[0]
    assert "<b>90.0%</b>" in rows[1] and "35.0%" in rows[1] and "4,000" in rows[1]
    titles = re.findall(r"<figcaption><b>(.*?)</b>", text)
    assert (
        titles[:3] == ["Success, evaluated", "Success, training", "Return, evaluated"] and "Pipeline, overlap" in titles
    )
    success = re.findall(r"<figure class=chart>.*?</figure>", text, re.DOTALL)[0]
    assert {"f1", "f2"} == set(re.findall(r'circle class="(f\d)"', success))
    assert "4,000 env steps\nA 70.0% [60.4%, 78.1%]\nB 90.0% [82.6%, 94.5%]" in success

    differing = dict(re.findall(r"<code>(.*?)</code></th>(.*?)</tr>", text))
    assert differing.keys() == {"runner.seed", "runner.logger.backends"}
    assert differing["runner.seed"] == "<td class=wrap>0<td class=wrap>1"
    assert differing["runner.logger.backends"] == "<td class=wrap>–<td class=wrap>[wandb]"


def test_nothing_is_loaded_from_elsewhere_and_nothing_runs(tmp_path: Path) -> None:
    text = write_comparison([write_run(tmp_path / name) for name in "ab"], tmp_path / "c.html").read_text()
    assert not re.search(r"https?:|@import|url\(", text)
    tags = Tags(text).tags
    assert not {tag for tag, _ in tags} & {"script", "link", "iframe", "object", "embed", "base", "img"}
    assert not [name for _, given in tags for name in given if name.startswith("on") or name in ("src", "href")]


def test_language_models_over_steps(tmp_path: Path) -> None:
    runs = []
    for name in "ab":
        runs.append(configured(write_run(tmp_path / name), task_type="reasoning"))
        lines = [{"step": n, "time": 1.0 + n, "time/step": 0.1, "rollout/ref_kl": 0.1 * n} for n in (1, 2, 3)]
        (runs[-1] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = write_comparison(runs, tmp_path / "c.html").read_text()
    assert "3 steps\nA 0.3\nB 0.3" in text and "Distance to the reference" in text and "No run was evaluated" in text


def test_many_runs_can_be_told_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"run{i}") for i in range(10)]
    text = write_comparison(runs, tmp_path / "c.html").read_text()
    figure = next(f for f in re.findall(r"<figure.*?</figure>", text, re.DOTALL) if "Policy loss" in f)
    assert len(set(re.findall(r'<path class="line  (\w* s\d)"', figure))) == 10


def test_what_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, other = write_run(tmp_path / "run"), configured(write_run(tmp_path / "sft"), task_type="sft")
    out = str(tmp_path / "c.html")
    for words, said in (
        ([run, tmp_path], "no metrics.jsonl here"),
        ([run, other], "sft is imitation. Name runs of one runner.task_type"),
        ([run, tmp_path / "." / "run"], "is named twice"),
        ([run], "compares 2 to 24 runs; 1 were named"),
    ):
        assert compare([*map(str, words), "--out", out]) == 2
        assert said in capsys.readouterr().err
        with pytest.raises(ReportError):
            write_comparison(words, out)
    assert not Path(out).exists()
    both = [str(run), str(write_run(tmp_path / "b"))]
    assert compare([*both, "--out", str(run / "metrics.jsonl" / "c.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert compare([*both, "--out", str(tmp_path / "made" / "c.html")]) == 0
