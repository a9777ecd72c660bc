"""`rlinf-lite serve`: serve a trained policy over a WebSocket, in the wire format of openpi's policy server."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlinf_lite.config.resources import policy_directory, why_no_policy
from rlinf_lite.registry import install_command, is_installed
from rlinf_lite.serving.address import ServeError, bind

if TYPE_CHECKING:
    from rlinf_lite.models import Policy


def serve(arguments: Sequence[str]) -> int:
    """Serve until Ctrl-C. Returns the exit code: 0, or 2 where there is no such policy or an option is refused."""
    given = parse(arguments)
    try:
        missing = [name for name in ("websockets", "msgpack") if not is_installed(name)]
        if missing:
            raise ServeError(f"{' and '.join(missing)} cannot be imported: {install_command('serve')}")
        if (problem := why_no_policy(policy_directory(given.policy))) is not None:
            raise ServeError(f"{given.policy}{problem}")
        secret = _token(given)
        bound = bind(given.host, given.port, has_token=secret is not None)
    except ServeError as error:
        print(error, file=sys.stderr)
        return 2

    # imported only now, because they take seconds
    import torch

    from rlinf_lite.models import load_policy
    from rlinf_lite.serving.server import PolicyServer

    logging.basicConfig(format="%(message)s")
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device != "cpu" and not torch.cuda.is_available():
        print(
            f"--device {device}: torch sees no GPU here. Leave the option out, or see rlinf-lite doctor",
            file=sys.stderr,
        )
        return 2
    with bound:
        try:
            policy = load_policy(given.policy).to(device)
            _act_once(policy)
        except (ValueError, OSError, RuntimeError) as error:
            named = str(error).startswith(given.policy)
            print(error if named else f"{given.policy}: {error}", file=sys.stderr)
            return 2
        with PolicyServer(policy, bound, secret, given.mode, given.seed) as server:
            host = f"[{server.host}]" if ":" in server.host else server.host
            said = f"{policy.policy_id}, {given.mode}, on {device}, process {os.getpid()}. Ctrl-C ends it"
            print(f"serving {given.policy} at ws://{host}:{server.port}: {said}", flush=True)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                print("ended; the clients were disconnected", flush=True)
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Exits with 2 where an argument is wrong."""
    parser = argparse.ArgumentParser(prog="rlinf-lite serve", description=__doc__, allow_abbrev=False)
    parser.add_argument("policy", metavar="RUN", help="a run, one of its checkpoints, or a policy's directory")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: only this machine can connect); any other needs a token",
    )
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0: any free one (default: 8000)")
    token = parser.add_mutually_exclusive_group()
    token.add_argument("--token-file", type=Path, metavar="FILE", help="file with the token that clients have to send")
    token.add_argument("--token", help="the token itself, which other users of this machine can see")
    parser.add_argument(
        "--mode", choices=("greedy", "sampled"), default="greedy", help="sampled: with noise (default: greedy)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of that noise (default: 0)")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda if there is a GPU)")
    given = parser.parse_args(arguments)
    if given.device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", given.device):
        parser.error(f"--device {given.device}: give cpu, cuda, or cuda:N for GPU number N")
    return given


def _act_once(policy: Policy) -> None:
    """Act once on empty observations. So missing files, such as a tokenizer, show before a client connects, and the
    first client waits no longer than others. Raises what `Policy.act` raises."""
    import numpy as np

    reads = policy.reads()
    if reads is not None:
        images = {camera: np.zeros((*size, 3), np.uint8) for camera, size in reads.cameras.items()}
        obs = {"images": images, "state": np.zeros(reads.state_dim), "instruction": "wait"}
        policy.act({name: obs[name] for name in obs if name != "state" or reads.state_dim})


def _token(given: argparse.Namespace) -> str | None:
    """The token that clients have to send; None if there is none. Raises ServeError where its file cannot be read, or
    where it is empty or not printable ASCII."""
    if given.token_file is None and given.token is None:
        return None
    try:
        token: str = given.token if given.token_file is None else given.token_file.read_text().strip()
    except (OSError, ValueError) as error:
        raise ServeError(f"--token-file {given.token_file}: {getattr(error, 'strerror', None) or error}") from error
    if not token or not token.isascii() or not token.isprintable():
        raise ServeError("the token is empty or not printable ASCII. `openssl rand -hex 32` makes one")
    return token
