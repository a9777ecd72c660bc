"""A policy behind a real socket: the same actions as in process, whoever else is there, in openpi's own format."""

import http.client
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rlinf_lite
from rlinf_lite.cli import main
from rlinf_lite.models import MLPGaussianPolicy, Policy, load_policy
from rlinf_lite.models.base import PolicyInputs, UnknownModeError
from rlinf_lite.models.sampling import noise_keys

pytest.importorskip("websockets")
pytest.importorskip("msgpack")

import msgpack
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin

from rlinf_lite.serving import server as serving
from rlinf_lite.serving.address import ServeError, bind
from rlinf_lite.serving.requests import RequestError, observation
from rlinf_lite.serving.server import PolicyServer
from rlinf_lite.serving.wire import WireError, pack, unpack

RNG = np.random.default_rng(0)
VLA = "assets/tabletop_vla"
Serve = Callable[..., PolicyServer]


def by_hand(value: Any) -> Any:
    """As openpi-client packs, without a line of ours."""
    array = np.asarray(value)
    return {b"__ndarray__": True, b"data": array.tobytes(), b"dtype": array.dtype.str, b"shape": list(array.shape)}


def read(message: str | bytes) -> Any:
    def array(found: dict[Any, Any]) -> Any:
        if b"__ndarray__" not in found:
            return found
        return np.frombuffer(found[b"data"], found[b"dtype"]).reshape(found[b"shape"])

    return msgpack.unpackb(message, object_hook=array)


def ask(connection: ClientConnection, request: dict[str, Any]) -> Any:
    connection.send(msgpack.packb(request, default=by_hand))
    return read(connection.recv())


@pytest.fixture
def serve() -> Iterator[Serve]:
    running = list[PolicyServer]()

    def start(policy: Policy, **options: Any) -> PolicyServer:
        running.append(PolicyServer(policy, bind("127.0.0.1", 0), **options).start())
        return running[-1]

    yield start
    for server in running:
        server.close()


@pytest.fixture(scope="module")
def vla() -> Policy:
    return load_policy(VLA)


@pytest.fixture
def mlp() -> MLPGaussianPolicy:
    return MLPGaussianPolicy(3, [-2.0, 0.0], [2.0, 4.0], num_action_chunks=4)


def client_of(server: PolicyServer, **options: Any) -> ClientConnection:
    return connect(f"ws://127.0.0.1:{server.port}", compression=None, max_size=None, **options)


def test_messages_are_openpis_to_the_byte() -> None:
    array = b"\x84\xc4\x0b__ndarray__\xc3\xc4\x04data\xc4\x04\x01\x00\x02\x00\xc4\x05dtype\xa3<i2\xc4\x05shape\x91\x02"
    scalar = b"\x83\xc4\x0d__npgeneric__\xc3\xc4\x04data\x05\xc4\x05dtype\xa3|u1"
    message = b"\x82\xa1a" + array + b"\xa1b" + scalar
    assert pack({"a": np.array([1, 2], "<i2"), "b": np.uint8(5)}) == message
    found = unpack(message)
    assert found["a"].tolist() == [1, 2] and found["a"].dtype == np.int16
    assert found["a"].flags.writeable  # torch warns of others
    assert found["b"] == 5 and isinstance(found["b"], np.uint8)
    turned = np.arange(6, dtype=np.float32).reshape(2, 3).T
    assert (unpack(pack({"x": turned}))["x"] == turned).all()


@pytest.mark.parametrize(
    "message",
    [
        b"\xc1",
        b"\x82\xa1a",
        msgpack.packb({b"__ndarray__": True, b"data": b"123", b"dtype": "<f4", b"shape": [1]}),
        msgpack.packb({b"__ndarray__": True, b"data": b"1234", b"dtype": "<f4", b"shape": [2]}),
        msgpack.packb({b"__ndarray__": True, b"data": b"12345678", b"dtype": "|O", b"shape": [1]}),
        msgpack.packb({b"__ndarray__": True, b"data": b"1234"}),
    ],
)
def test_broken_messages(message: bytes) -> None:
    with pytest.raises(WireError, match="not msgpack as openpi-client packs it"):
        unpack(message)
    with pytest.raises(ValueError, match="arrays of object cannot be sent"):
        pack({"x": np.array([None])})


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_an_environment_is_driven_to_the_same_actions(mode: Any, vla: Policy, serve: Serve) -> None:
    """Three episodes of Tabletop at a time, by the server; in process, the same observations give the same bits."""
    server = serve(vla, mode=mode, seed=5)
    cfg = rlinf_lite.load_config("tabletop_ppo_vla", ["env.eval.auto_reset=false"])
    env = rlinf_lite.make_env(cfg.env, "eval", 3)
    obs, episodes, number = env.reset([0, 1, 2]), 0, 0
    with client_of(server) as connection:
        metadata = read(connection.recv())
        assert metadata["cameras"] == {"top": [64, 64]} and metadata["instruction_key"] == "prompt"
        assert (metadata["num_action_chunks"], metadata["action_dim"], metadata["state_dim"]) == (4, 3, 0)
        assert (metadata["policy_id"], metadata["client"], metadata["seed"]) == ("openvla", 0, 5)
        while episodes < 3:
            reply = ask(connection, dict(obs))
            keys = noise_keys(5, np.arange(3), number)
            assert (reply["actions"] == vla.act({**obs, "noise_key": keys}, mode)).all()
            assert set(reply["server_timing"]) == {"infer_ms", "wait_ms"} | ({"prev_total_ms"} if number else set())
            result = env.chunk_step(reply["actions"])
            obs, episodes, number = result.obs, episodes + len(result.episodes), number + 1
    assert number > 1


def test_openpis_own_client(vla: Policy, serve: Serve) -> None:
    """Two of them, in turns, with single observations under openpi's names."""
    library = pytest.importorskip("openpi_client.websocket_client_policy")
    server = serve(vla, mode="sampled", seed=1, token="abc")
    clients = [library.WebsocketClientPolicy("127.0.0.1", server.port, api_key="abc") for _ in range(2)]
    numbers = [client.get_server_metadata()["client"] for client in clients]
    assert numbers == [0, 1]
    for step in range(3):
        for number, client in zip(numbers, clients, strict=True):
            image = RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8)
            request = {"observation/image": image, "observation/state": np.zeros(8), "prompt": "pick up the red block"}
            obs = {"images": {"top": image}, "instruction": request["prompt"]}
            keys = noise_keys(1, np.array([number << 32]), step)
            acted = client.infer(request)
            assert (acted["actions"] == vla.act({**obs, "noise_key": keys}, "sampled")).all()
            assert acted["server_timing"]["infer_ms"] > 0
    with pytest.raises(RuntimeError, match="the policy needs camera 'top'"):
        clients[0].infer({"prompt": "pick up the red block"})


def test_clients_at_once_do_not_touch_each_other(mlp: MLPGaussianPolicy, serve: Serve) -> None:
    server, states, answers = serve(mlp, mode="sampled"), RNG.standard_normal((4, 25, 3)), dict[int, Any]()

    def play(mine: np.ndarray) -> None:
        with client_of(server) as connection:
            client = read(connection.recv())["client"]
            answers[client] = mine, [ask(connection, {"observation/state": state})["actions"] for state in mine]

    threads = [threading.Thread(target=play, args=(mine,)) for mine in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [0, 1, 2, 3]
    for client, (mine, acted) in answers.items():
        for number, (state, actions) in enumerate(zip(mine, acted, strict=True)):
            key = noise_keys(0, np.array([client << 32]), number)
            assert (actions == mlp.act({"state": state, "noise_key": key}, "sampled")).all()


def test_the_policys_own_time_is_without_the_wait_for_other_clients(
    mlp: MLPGaussianPolicy, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at once: whoever is second waits as long as the policy takes for the first."""
    computing, act = threading.Event(), mlp.act

    def slow(*arguments: Any) -> np.ndarray:
        computing.set()
        time.sleep(0.5)
        return act(*arguments)

    monkeypatch.setattr(mlp, "act", slow)
    with client_of(server := serve(mlp)) as first, client_of(server) as second:
        for connection in (first, second):
            connection.recv()
        first.send(pack({"state": np.zeros(3)}))
        assert computing.wait(30)
        second.send(pack({"state": np.zeros(3)}))
        timings = [read(connection.recv())["server_timing"] for connection in (first, second)]
    assert all(timing["infer_ms"] >= 500 for timing in timings)
    assert timings[0]["wait_ms"] < 100 < 300 < timings[1]["wait_ms"]
    assert timings[1]["infer_ms"] < 900  # not those of both


def test_a_client_may_choose_its_noise(mlp: MLPGaussianPolicy, serve: Serve) -> None:
    with client_of(serve(mlp, mode="sampled")) as connection:
        connection.recv()
        request = {"state": np.zeros(3), "noise_key": np.uint64(7)}
        connection.send(pack(request))
        first = read(connection.recv())["actions"]
        assert (first == mlp.act(request, "sampled")).all()
        connection.send(pack({**request, "noise_key": np.array([1, 2], np.uint64)}))
        assert "noise_key has 2 keys, and the observation 1 rows" in str(connection.recv())


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (pack({"prompt": "pick"}), "RequestError: the policy reads a state: give state or observation/state; the "),
        (pack({"state": np.zeros(4)}), r"RequestError: state has shape [4]; the policy reads 3 numbers"),
        (pack({"state": np.zeros((4097, 3), np.float32)}), "RequestError: the observation has 4097 rows. Send at most"),
        (pack({"state": np.array([0.0, 0.0, np.nan])}), "ObservationError: state has numbers that are not finite"),
        (b"\xc1", "WireError: this is not msgpack"),
        (msgpack.packb([1]), "RequestError: a request is a map with texts as keys"),
        ("state", "RequestError: a request is a binary frame of msgpack, and this is a text"),
    ],
)
def test_what_goes_wrong_is_said_and_ends_that_connection_alone(
    message: str | bytes, problem: str, mlp: MLPGaussianPolicy, serve: Serve
) -> None:
    server = serve(mlp)
    with client_of(server) as other:
        other.recv()
        with client_of(server) as connection:
            connection.recv()
            connection.send(message)
            text = connection.recv()
            assert isinstance(text, str) and text.startswith("Traceback (most recent call last)") and problem in text
            with pytest.raises(ConnectionClosedError) as closed:
                connection.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1011
        assert ask(other, {"state": np.zeros(3)})["actions"].shape == (4, 2)


def test_requests_have_a_largest_size(mlp: MLPGaussianPolicy, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_REQUEST_BYTES", 1000)
    with client_of(serve(mlp)) as connection:
        assert read(connection.recv())["max_request_bytes"] == 1000
        connection.send(bytes(1001))
        with pytest.raises(ConnectionClosedError) as closed:
            connection.recv()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009


def test_who_is_let_in(mlp: MLPGaussianPolicy, serve: Serve) -> None:
    server = serve(mlp, token="abc")
    for headers in ({}, {"Authorization": "Api-Key abd"}, {"Authorization": "abc"}):
        with pytest.raises(InvalidStatus, match="HTTP 401"):
            client_of(server, additional_headers=headers)
    with client_of(server, additional_headers={"Authorization": "Api-Key abc"}) as connection:
        assert read(connection.recv())["client"] == 0
    with pytest.raises(InvalidStatus, match="HTTP 403"):  # a page that somebody has open in a browser
        client_of(serve(mlp), origin="https://example.org")

    def page(of: PolicyServer, site: str) -> ClientConnection:
        channel, headers = socket.create_connection(("127.0.0.1", of.port)), {"Authorization": "Api-Key abc"}
        return connect(f"ws://{site}", sock=channel, origin=Origin(f"http://{site}"), additional_headers=headers)

    with pytest.raises(InvalidStatus, match="HTTP 403"):  # of a site whose name leads here by now
        page(serve(mlp), "example.org:8000")
    for of, site in ((serve(mlp), "localhost:8000"), (serve(mlp), "[::1]:8000"), (server, "example.org:8000")):
        with page(of, site) as connection:
            assert read(connection.recv())["policy_id"] == mlp.policy_id
    health = http.client.HTTPConnection("127.0.0.1", server.port)
    health.request("GET", "/healthz")
    answer = health.getresponse()
    assert (answer.status, answer.read()) == (200, b"OK\n")
    health.close()


def test_what_is_refused_before_anything_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*words: str, policy: str | Path = VLA) -> str:
        assert main(["serve", str(policy), *words]) == 2
        return capsys.readouterr().err

    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        assert "Address already in use" in refused("--port", port)
    for host in ("0.0.0.0", "::", "192.168.1.2", "robot"):
        assert "other machines could use the policy. Require a token" in refused("--host", host)
    (tmp_path / "token").write_text("\n")
    for words in (["--token", ""], ["--token-file", str(tmp_path / "token")]):
        assert "the token is empty" in refused("--host", "0.0.0.0", *words)
    assert "No such file" in refused("--token-file", str(tmp_path / "none"))
    assert "ports are 0 to 65535" in refused("--port", "70000")
    if not torch.cuda.is_available():
        assert "--device cuda:1: torch sees no GPU here" in refused("--port", "0", "--device", "cuda:1")
    with pytest.raises(SystemExit):
        refused("--device", "cud")
    assert "give cpu, cuda, or cuda:N" in capsys.readouterr().err
    assert refused(policy=Path("nowhere")).startswith("nowhere: no such directory (looked for /")
    none = f"{tmp_path} is no policy, nor a checkpoint or run that has one: {tmp_path} has no config.json. A run "
    assert refused(policy=tmp_path).startswith(none)
    assert main(["serve", "tests/models/tiny_openvla", "--port", "0"]) == 2  # before a client comes
    assert "the policy has no tokenizer" in capsys.readouterr().err
    with pytest.raises(ServeError), bind("0.0.0.0", 0):
        pass
    with bind("127.0.0.1", 0) as bound, pytest.raises(UnknownModeError, match="there is no mode 'Greedy'"):
        PolicyServer(load_policy(VLA), bound, mode="Greedy")
    bind("localhost", 0).close()
    bind("0.0.0.0", 0, has_token=True).close()


def test_ctrl_c_ends_it(repo: Path) -> None:
    command = [sys.executable, "-m", "rlinf_lite.cli", "serve", VLA, "--port", "0"]
    with subprocess.Popen(command, cwd=repo, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            line = process.stdout.readline()
            port = re.search(r"ws://127\.0\.0\.1:(\d+)", line)
            assert port is not None, line + process.stderr.read()
            with connect(f"ws://127.0.0.1:{port[1]}") as connection:
                connection.recv()
                process.send_signal(signal.SIGINT)
                with pytest.raises(Exception, match="1001"):
                    connection.recv(timeout=30)
            assert process.wait(30) == 0
            assert process.stdout.read() == "ended; the clients were disconnected\n" and process.stderr.read() == ""
        finally:
            process.kill()


LIBERO = PolicyInputs({"agentview": (224, 224), "robot0_eye_in_hand": (224, 224)}, 8, has_instruction=True)
SLOTS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
PI0 = PolicyInputs(dict.fromkeys(SLOTS, (224, 224)), 0, has_instruction=True, needs_all_cameras=False)


def image(number: int) -> np.ndarray:
    return np.full((8, 6, 3), number, np.uint8)


def test_requests_of_openpis_clients() -> None:
    request = {
        "observation/image": image(1),
        "observation/wrist_image": image(2),
        "observation/state": np.zeros(8),
        "prompt": "open the drawer",
    }
    obs = observation(request, LIBERO)
    assert {name: x[0, 0, 0] for name, x in obs["images"].items()} == {"agentview": 1, "robot0_eye_in_hand": 2}
    assert obs["instruction"] == "open the drawer" and obs["state"].shape == (8,)
    obs = observation(request, PI0)
    assert {name: x[0, 0, 0] for name, x in obs["images"].items()} == {SLOTS[0]: 1, SLOTS[1]: 2} and "state" not in obs
    # as its ALOHA clients have it: nested, channels first
    nested = {"images": {SLOTS[0]: np.moveaxis(image(3), -1, 0)}, "prompt": "fold", "state": np.zeros(14)}
    obs = observation(nested, PI0)
    assert obs["images"][SLOTS[0]].shape == (8, 6, 3) and "state" not in obs
    # by name; a policy that does not say what it reads gets whatever has a place
    named = {"observation/agentview": image(4), "observation/state": np.zeros(2), "prompt": "go", "other": 1}
    obs = observation(named, None)
    assert set(obs) == {"images", "state", "instruction"} and set(obs["images"]) == {"agentview"}


def test_a_picture_of_no_camera_is_no_masked_camera() -> None:
    """A policy that may do without a camera is told of one by another name."""
    given = {"images": {SLOTS[0]: image(1), "wirst": image(2)}, "prompt": "fold"}
    with pytest.raises(RequestError, match=r"no camera is called images/wirst; the policy's cameras are base_0_rgb, "):
        observation(given, PI0)
    whole = {f"observation/{name}": image(3) for name in (*SLOTS, "depth")}
    assert set(observation({**whole, "prompt": "fold"}, PI0)["images"]) == set(SLOTS)


@pytest.mark.parametrize("name", ["tiny-pi0", "tiny-pi05-lerobot", "tiny-smolvla"])
def test_published_policies_read_them(name: str) -> None:
    policy = load_policy(f"tests/fixtures/{name}")
    reads = policy.reads()
    assert reads is not None and not reads.needs_all_cameras
    request = {"observation/image": image(1), "observation/wrist_image": image(2), "prompt": "pick"}
    obs = observation({**request, "observation/state": np.zeros(reads.state_dim)}, reads)
    assert list(obs["images"]) == list(reads.cameras)[:2]
    assert policy.act(obs).shape == (policy.num_action_chunks, policy.action_dim)


@pytest.mark.parametrize(
    ("missing", "problem"),
    [
        (
            "observation/image",
            "the policy needs camera 'agentview': give images/agentview or observation/agentview or ",
        ),
        ("observation/wrist_image", r"camera 'robot0_eye_in_hand': .* or observation/wrist_image; the request has "),
        ("observation/state", "the policy reads a state: give state or observation/state; the request has "),
        ("prompt", "the policy reads a text: give instruction or prompt; the request has observation/image, "),
    ],
)
def test_what_is_missing_is_named(missing: str, problem: str) -> None:
    request = {
        "observation/image": image(1),
        "observation/wrist_image": image(2),
        "observation/state": np.zeros(8),
        "prompt": "open the drawer",
    }
    with pytest.raises(RequestError, match=problem):
        observation({name: value for name, value in request.items() if name != missing}, LIBERO)
    with pytest.raises(RequestError, match=r"the policy's cameras are base_0_rgb, .*; the request has prompt"):
        observation({"prompt": "fold"}, PI0)
