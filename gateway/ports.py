"""Whether the ports of a configuration are free, checked before anything starts.

Must never keep a port: between the check and the start somebody else may take it.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterable

from gateway.config_types import Listener

SEARCHED_PORTS = 1000


Remedy = Callable[[Listener], str]
"""What to do about a taken port, e.g. `set envoy.port to another, e.g. 8081`."""


def choose_another(listener: Listener) -> str:
    """The remedy where a configuration file says which ports are used."""
    free = _next_free_port(listener.host, listener.port)
    return f"set {listener.field} to another" + (f", e.g. {free}" if free is not None else "")


def port_problems(listeners: Iterable[Listener], remedy: Remedy = choose_another) -> list[str]:
    """One line for each address that cannot be listened on: the port, its field, what to change."""
    return [problem for listener in listeners if (problem := _problem(listener, remedy)) is not None]


def _problem(listener: Listener, remedy: Remedy) -> str | None:
    error = _bind_error(listener.host, listener.port)
    if error is None:
        return None
    place = f"port {listener.port} for {listener.purpose}"
    if error == errno.EADDRINUSE:
        return f"{place} is taken by another process: stop it, or {remedy(listener)}"
    if error == errno.EACCES:
        return f"{place} is not allowed for this user: set {listener.field} to a port from 1024 on"
    if error == errno.EADDRNOTAVAIL:
        return f"{place}: {listener.host} is not an address of this machine ({listener.field})"
    return f"{place} cannot be used: {errno.errorcode.get(error, error)} ({listener.field})"


def _bind_error(host: str, port: int) -> int | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: connections that are still closing do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return error.errno
    return None


def _next_free_port(host: str, port: int) -> int | None:
    candidates = range(port + 1, min(port + 1 + SEARCHED_PORTS, 65536))
    return next((candidate for candidate in candidates if _bind_error(host, candidate) is None), None)
