"""doctor measures what is there, and says of each failure how it is mended."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_lite.cli import doctor, main
from rlinf_lite.cli.doctor import Finding, Needs, examine, probe, try_out

GIB = 2**30


def python(code: str, timeout_s: float = 30) -> Finding:
    return try_out([sys.executable, "-c", code], "mend it", timeout_s)


def test_what_is_tried_out_may_crash_raise_or_hang() -> None:
    assert python("print('noise\\n42 ms')") == Finding("ok", "42 ms")
    assert python("raise RuntimeError('no device')") == Finding("fail", "RuntimeError: no device", "mend it")
    crashed = python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert crashed == Finding("fail", "crashed (SIGSEGV)", "mend it")
    assert python("import sys; sys.exit(3)") == Finding("fail", "exit code 3", "mend it")


def test_what_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    code = (
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)"
    )
    assert python(code, timeout_s=3) == Finding("fail", "no answer within 3 s", "mend it")
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    os.kill(pid, 9)
    raise AssertionError("the child is alive")


def test_an_interpreter_that_compiles_everything_again_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert doctor._python().status == "ok"  # what torch was compiled to is there
    monkeypatch.setattr(doctor, "cache_from_source", lambda path: "/nowhere")
    found = doctor._python()
    assert (found.status, found.fix) == ("warn", "unset PYTHONDONTWRITEBYTECODE")
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert doctor._python().status == "ok"


def test_probes_measure(tmp_path: Path) -> None:
    assert probe("tabletop", "fix").value.endswith(" env steps/s in one process")
    torch = probe("torch", "fix")
    assert torch.status == "ok" and "GFLOP/s" in torch.value


def sentences(monkeypatch: pytest.MonkeyPatch, needs: Needs, tried: Finding) -> dict[str, Finding]:
    monkeypatch.setattr(doctor, "probe", lambda name, fix: Finding(tried.status, tried.value, tried.status and fix))
    return examine(needs)


def test_too_little_memory_fails_with_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(free=GIB // 16)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    needs = Needs(num_processes=4, host_bytes=10_000 * GIB, shared_bytes=2 * GIB)
    found = sentences(monkeypatch, needs, Finding("ok", "fine"))
    assert found["memory"].status == found["shared memory"].status == found["disk"].status == "fail"
    assert found["shared memory"].value == "64.0 MiB free in /dev/shm, up to 2.0 GiB needed"
    assert found["shared memory"].fix.startswith("mount -o remount,size=8g /dev/shm")
    assert "10000.0 GiB needed by 4 worker processes" in found["memory"].value
    without_config = sentences(monkeypatch, Needs(), Finding("ok", "fine"))["shared memory"]
    assert without_config.status == "warn"


def test_failures_name_their_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    present: Any = {"torchvision", "mani_skill"}
    monkeypatch.setattr(doctor, "find_spec", lambda name: name if name in present else None)
    broken = Finding("fail", "ImportError: libGL.so.1: cannot open shared object file")
    found = sentences(monkeypatch, Needs(), broken)
    assert found["transformers"].fix == "pip uninstall -y torchvision"
    assert found["maniskill"].fix.startswith("apt-get install libgl1")
    assert found["Vulkan"].status == "warn" and "mesa-vulkan-drivers" in found["Vulkan"].fix
    present.remove("mani_skill")
    assert examine(Needs())["maniskill"] == Finding("ok", "not installed", "pip install 'rlinf_lite[maniskill]'")


def test_a_failure_is_exit_code_1_and_in_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = {"Ray": Finding("fail", "no [answer]", "pip install 'rlinf_lite[x]'"), "disk": Finding("ok", "5 GiB")}
    monkeypatch.setattr(doctor, "examine", lambda needs: bad)
    assert main(["doctor"]) == 1
    written = capsys.readouterr().out
    assert "fail  Ray   no [answer]" in written and "$ pip install 'rlinf_lite[x]'" in written
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["status"] == "fail"
    monkeypatch.setattr(doctor, "examine", lambda needs: {"disk": bad["disk"]})
    assert main(["doctor"]) == 0
    assert main(["doctor", "--config-name", "no_such"]) == 2


def test_a_configs_needs_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Needs] = []

    def look(needs: Needs) -> dict[str, Finding]:
        seen.append(needs)
        return {}

    monkeypatch.setattr(doctor, "examine", look)
    words = [
        "doctor",
        "--config-name",
        "tabletop_sft_mlp",
        "runner.logger.log_path=/tmp/runs",
        "env.train.num_envs=128",
    ]
    assert main([*words, "--json"]) == 0
    assert seen[0].log_path == "/tmp/runs" and seen[0].num_processes == 5
    assert seen[0].host_bytes > seen[0].shared_bytes > 1_000_000


@pytest.mark.slow
def test_this_machine_passes(repo: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlinf_lite.cli", "doctor", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    found = {one["check"]: one for one in json.loads(done.stdout)}
    assert done.returncode == 0, found
    assert len(found) == 18 and all(one["value"] for one in found.values())
    assert all(one["fix"] for one in found.values() if one["status"] == "fail")
    assert "workers answer" in found["Ray"]["value"] and "env steps/s" in found["maniskill"]["value"]
