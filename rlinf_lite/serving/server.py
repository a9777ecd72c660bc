"""A WebSocket server for a policy, in the protocol of openpi's clients.

A client that connects gets one frame of metadata. Each request is answered with `actions` [C, D] (or [B, C, D]) and
`server_timing`: `infer_ms`, `wait_ms` (the wait for other clients before that) and, from the second answer on,
`prev_total_ms`. After an error the server sends a text frame with the traceback and closes the connection with 1011.
GET /healthz answers 200.

Each client has a thread; the policy computes one request at a time. The noise of a client's n-th request (from 0) comes
from `noise_keys(seed, client * 2**32 + row, n)`, unless the request has a `noise_key`. So it does not depend on other
clients. `client` and `seed` are in the metadata; clients are numbered in the order in which they connect.
"""

from __future__ import annotations

import hmac
import http
import itertools
import logging
import socket
import threading
import time
import traceback
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

from rlinf_lite.envs.observations import as_batch, num_rows
from rlinf_lite.models.base import NOISE_KEY, Mode, Policy, check_mode
from rlinf_lite.models.sampling import noise_keys
from rlinf_lite.serving.address import is_loopback
from rlinf_lite.serving.requests import RequestError, camera_keys, observation
from rlinf_lite.serving.wire import pack, unpack

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 256 * 2**20
MAX_ROWS = 4096  # each is scaled to the policy's size, so that few bytes may need much memory
_FAILED = "Internal server error. Traceback included in previous frame."  # the words of openpi


class PolicyServer:
    """A server of one policy.

    `with PolicyServer(policy, bind(host, port)) as server: server.serve_forever()`, or `server.start()`. If there is a
    `token`, clients have to send it as `Authorization: Api-Key <token>` (openpi-client: `api_key`).
    """

    def __init__(
        self, policy: Policy, bound: socket.socket, token: str | None = None, mode: Mode = "greedy", seed: int = 0
    ) -> None:
        check_mode(mode)
        self._policy, self._token, self._mode, self._seed = policy.eval(), token, mode, seed
        self._reads, self._lock, self._clients = policy.reads(), threading.Lock(), itertools.count()
        reads = self._reads
        self.metadata: dict[str, Any] = {
            "policy_id": policy.policy_id,
            "num_action_chunks": policy.num_action_chunks,
            "action_dim": policy.action_dim,
            "cameras": None if reads is None else {name: list(size) for name, size in reads.cameras.items()},
            "camera_keys": None if reads is None else camera_keys(reads.cameras),
            "state_dim": None if reads is None else reads.state_dim,
            "instruction_key": None if reads is not None and not reads.has_instruction else "prompt",
            "mode": mode,
            "seed": seed,
            "max_request_bytes": MAX_REQUEST_BYTES,
            "max_rows": MAX_ROWS,
        }
        self.host, self.port = bound.getsockname()[:2]
        bound.listen()
        self._server = serve(
            self._converse,
            sock=bound,
            compression=None,
            max_size=MAX_REQUEST_BYTES,
            process_request=self._admit,
            logger=log,
        )
        self._has_started = False

    def serve_forever(self) -> None:
        """Serve until `close`, or until an exception such as KeyboardInterrupt."""
        self._has_started = True
        self._server.serve_forever()

    def start(self) -> Self:
        """Serve in a thread, until `close`."""
        self._has_started = True
        threading.Thread(target=self.serve_forever, name="policy server", daemon=True).start()
        return self

    def close(self) -> None:
        """Accept no more clients, finish the requests in progress, and disconnect all clients (code 1001)."""
        if self._has_started:
            self._server.shutdown()
        else:
            self._server.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """The refusal of a connection, or the answer to a health check; None: the connection is accepted."""
        if request.path == "/healthz":
            return connection.respond(http.HTTPStatus.OK, "OK\n")
        origin, host = request.headers.get("Origin"), request.headers.get("Host", "")
        if origin is not None:  # a page in a browser; its site's name may have been redirected to this machine
            is_here = self._token is not None or is_loopback(urlsplit(f"//{host}").hostname or "")
            if urlsplit(origin).netloc != host or not is_here:
                return connection.respond(http.HTTPStatus.FORBIDDEN, "pages of other sites may not use this policy\n")
        if self._token is not None:
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            if scheme not in ("Api-Key", "Bearer") or not hmac.compare_digest(given.encode(), self._token.encode()):
                return connection.respond(http.HTTPStatus.UNAUTHORIZED, "send Authorization: Api-Key <token>\n")
        return None

    def _converse(self, connection: ServerConnection) -> None:
        client, total_ms = next(self._clients), None
        try:
            connection.send(pack({**self.metadata, "client": client}))
            for number in itertools.count():
                message = connection.recv()
                began = time.perf_counter()
                try:
                    reply = self._answer(message, client, number)
                except Exception as error:
                    log.warning("client %d, request %d: %s: %s", client, number, type(error).__name__, error)
                    connection.send(traceback.format_exc())
                    connection.close(1011, _FAILED)
                    return
                if total_ms is not None:
                    reply["server_timing"]["prev_total_ms"] = total_ms
                connection.send(pack(reply))
                total_ms = 1e3 * (time.perf_counter() - began)
        except ConnectionClosed:
            return

    def _answer(self, message: str | bytes, client: int, number: int) -> dict[str, Any]:
        if isinstance(message, str):
            raise RequestError("a request is a binary frame of msgpack, and this is a text frame")
        request = unpack(message)
        obs = observation(request, self._reads)
        rows = num_rows(as_batch(obs)[0])
        if rows > MAX_ROWS:
            raise RequestError(f"the observation has {rows} rows. Send at most {MAX_ROWS} at a time")
        keys = request.get(NOISE_KEY)
        if keys is None:
            keys = noise_keys(self._seed, (client << 32) + np.arange(rows), number)
        elif np.size(keys) != rows:
            raise RequestError(f"noise_key has {np.size(keys)} keys, and the observation {rows} rows")
        came = time.perf_counter()
        with self._lock:
            began = time.perf_counter()
            actions = self._policy.act({**obs, NOISE_KEY: keys}, self._mode)
            ended = time.perf_counter()
        return {
            "actions": actions,
            "server_timing": {"infer_ms": 1e3 * (ended - began), "wait_ms": 1e3 * (began - came)},
        }
