"""Ports for what tests start: none twice, and none that the kernel may give to an outgoing connection."""

from __future__ import annotations

import random
import socket

PORTS = range(15_000, 29_000)
"""Below Linux's ephemeral ports, beside wavegate's own defaults."""

_next = random.choice(PORTS)  # other test runs may go on beside this one


def free_port() -> int:
    """A port that was free a moment ago."""
    return consecutive_free_ports(1)


def consecutive_free_ports(count: int) -> int:
    """The first of `count` ports in a row that were free a moment ago."""
    global _next
    for _ in range(1000):
        first = _next if _next + count <= PORTS.stop else PORTS.start
        _next = first + count
        if all(_is_free(port) for port in range(first, first + count)):
            return first
    raise AssertionError(f"no {count} free ports in a row")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
