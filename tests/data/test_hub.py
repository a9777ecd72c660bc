"""Datasets on the Hub: the published client against a server on this machine that speaks as the Hub does."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlinf_lite.config import ConfigError, load_config
from rlinf_lite.hub import HubError, hub_problem, local_path

ROW = {"data_source": "arithmetic", "prompt": "1+1=?\n", "reward_model": {"ground_truth": "2"}}
FILES = {
    "train.jsonl": (json.dumps(ROW) + "\n").encode() * 40,
    "meta/info.json": b"{}",
    "data/part-0.parquet": b"rows",
}
SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    asked: list[str]

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        path = self.path.partition("?")[0]
        type(self).asked.append(f"{self.command} {path}")
        files = [
            {"type": "file", "path": name, "oid": hashlib.sha1(x).hexdigest(), "size": len(x)}
            for name, x in FILES.items()
        ]
        content, status, headers = b"", 404, {"X-Error-Code": "RepoNotFound"}
        if path in ("/api/datasets/org/sums/revision/main", f"/api/datasets/org/sums/revision/{SHA}"):
            siblings = [{"rfilename": name} for name in FILES]
            content, status = json.dumps({"id": "org/sums", "sha": SHA, "siblings": siblings}).encode(), 200
        elif path == f"/api/datasets/org/sums/tree/{SHA}":
            content, status = json.dumps(files).encode(), 200
        elif path.startswith(f"/datasets/org/sums/resolve/{SHA}/"):
            content, status = FILES[path.partition(SHA + "/")[2]], 200
            headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": SHA}
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content)), "Content-Type": "application/json"}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@pytest.fixture
def hub(tmp_path):
    """`hub(code)` runs Python with a client of that server and a cache of its own."""
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "cache")}

    def run(code, **more):
        found = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            env=os.environ | settings | more,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return found.stdout.strip() or found.stderr

    yield run
    server.shutdown()


def printing(path):
    return f"from rlinf_lite.hub import local_path\ntry: print(local_path({path!r}))\nexcept ValueError as e: print(e)"


def test_a_file_is_downloaded_once_and_alone(hub, tmp_path):
    where = hub(printing("hf://datasets/org/sums/train.jsonl"))
    with open(where, "rb") as file:
        assert file.read() == FILES["train.jsonl"]
    downloads = [line for line in Hub.asked if "GET /datasets" in line]
    assert downloads == [f"GET /datasets/org/sums/resolve/{SHA}/train.jsonl"]
    assert hub(printing(f"hf://datasets/org/sums@{SHA}/train.jsonl")) == where
    assert hub(printing("hf://datasets/org/sums/train.jsonl"), HF_HUB_OFFLINE="1") == where
    assert [line for line in Hub.asked if "GET /datasets" in line] == downloads


def test_a_whole_dataset_and_what_is_not_there(hub):
    directory = hub(printing("hf://datasets/org/sums"))
    assert {os.path.join(at, name) for at, _, names in os.walk(directory) for name in names} == {
        os.path.join(directory, name) for name in FILES
    }
    assert "the dataset org/sums has no file other.jsonl" in hub(printing("hf://datasets/org/sums/other.jsonl"))
    for part in ("meta", "*.jsonl"):
        assert f"the dataset org/sums has no file {part}" in hub(printing(f"hf://datasets/org/sums/{part}"))
    assert "org/other could not be had from the Hub" in hub(printing("hf://datasets/org/other"))
    nowhere = hub(printing("hf://datasets/org/sums"), HF_HUB_OFFLINE="1", HF_HOME="/nowhere")
    assert "could not be had from the Hub" in nowhere


def test_problems_are_read_from_there(hub):
    overrides = ["data.train_files=['hf://datasets/org/sums/train.jsonl']", "runner.val_check_interval=-1"]
    code = "from rlinf_lite.config import load_config\nfrom rlinf_lite.data.problems import open_problems\n"
    more = [*overrides, "sft.num_steps=0"]
    code += f"print(len(open_problems(load_config('math/math_arithmetic_grpo', {more!r})).train))"
    assert hub(code) == "40"
    code = code.replace("sums/", "gone/")
    assert "DatasetError" in hub(code) and "could not be had from the Hub" in hub(code)


def test_other_paths_stay_as_they_are():
    assert local_path("some/file.jsonl") == "some/file.jsonl"
    with pytest.raises(HubError, match="is not written hf://datasets"):
        local_path("hf://org/name")


@pytest.mark.parametrize(
    "path, needs_file, text",
    [
        ("hf://datasets/org/name/a/b.parquet", True, None),
        ("hf://datasets/org/name@v3.0", False, None),
        ("hf://datasets/org/name", True, "names no file of the dataset"),
        ("hf://datasets/org/name/data", False, "names a file, and a whole dataset is read"),
        ("hf://datasets/name", False, "is not written"),
        ("hf://datasets/org/name/../../etc/passwd", True, "is not written"),
        ("hf://models/org/name", False, "is not written"),
    ],
)
def test_how_they_are_written(path, needs_file, text):
    found = hub_problem(path, needs_file)
    assert found is None if text is None else text in str(found)


def test_a_config_is_checked_without_the_hub(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"data\.train_files: 'hf://datasets/org/sums' names no file"):
        load_config("math/math_arithmetic_grpo", ["data.train_files=['hf://datasets/org/sums']"])
    folder = ["data.demos_dir=hf://datasets/lerobot/pusht", "data.source=folder"]
    load_config("embodiment/tabletop_sft_flow", folder)
    with pytest.raises(ConfigError, match=r"data\.demos_dir: is on the Hub, to be read.*source: folder"):
        load_config("embodiment/tabletop_sft_flow", folder[:1])
