"""Where a server listens, and who may reach it. Imports nothing heavy: what is refused here is refused at once."""

from __future__ import annotations

import ipaddress
import socket


class ServeError(ValueError):
    """A server that cannot be started: its address, or who may use it."""


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def bind(host: str, port: int, has_token: bool = False) -> socket.socket:
    """The address, taken; nobody is listened to before `PolicyServer` has it. Port 0: any that is free.

    Raises:
        ServeError: where it is taken, or is none, or others could reach it and need no token.
    """
    if not has_token and not is_loopback(host):
        raise ServeError(f"--host {host}: other machines could use the policy. Give them a token: --token-file FILE")
    if not 0 <= port <= 65535:
        raise ServeError(f"--port {port}: ports are 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ServeError(f"--host {host}: {error.strerror}. Name an address of this machine") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ServeError(f"--host {host} --port {port}: {error.strerror}. Name another") from error
    return bound
