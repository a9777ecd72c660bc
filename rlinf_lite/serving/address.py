"""The address of a server, and the rule on who may reach it. Imports nothing heavy, so that mistakes show at once."""

from __future__ import annotations

import ipaddress
import socket


class ServeError(ValueError):
    """A server cannot be started, because of its address, or because others could use it."""


def is_loopback(host: str) -> bool:
    """Whether a host is reached only from this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def bind(host: str, port: int, has_token: bool = False) -> socket.socket:
    """A socket bound to the address; it accepts no connection before `PolicyServer` uses it. Port 0: any free one.

    Raises:
        ServeError: the address is in use, wrong, or open to other machines without a token.
    """
    if not has_token and not is_loopback(host):
        raise ServeError(f"--host {host}: other machines could use the policy. Require a token: --token-file FILE")
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
        raise ServeError(f"--host {host} --port {port}: {error.strerror}. Name another address") from error
    return bound
