"""Taken ports are told before anything starts: which, for what, and what to change."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import pytest

from gateway.config_types import Listener
from gateway.ports import port_problems


@pytest.fixture
def squatter() -> Iterator[int]:
    """A port that somebody else listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def listener(port: int, host: str = "127.0.0.1") -> Listener:
    """Envoy at this address."""
    return Listener("envoy.port", host, port, "Envoy")


def test_a_free_port_is_no_problem_and_stays_free() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert port_problems([listener(port)]) == []
    assert port_problems([listener(port)]) == []


def test_a_taken_port_is_named_with_its_field_and_a_free_one(squatter: int) -> None:
    (problem,) = port_problems([listener(squatter)])
    told = re.fullmatch(
        rf"port {squatter} for Envoy is taken by another process: "
        r"stop it, or set envoy\.port to another, e\.g\. (\d+)",
        problem,
    )
    assert told is not None
    assert port_problems([listener(int(told[1]))]) == []


def test_a_port_taken_on_all_addresses_is_taken_on_each() -> None:
    with socket.socket() as listening:
        listening.bind(("0.0.0.0", 0))
        listening.listen()
        assert port_problems([listener(listening.getsockname()[1])])


def test_every_taken_port_has_its_line(squatter: int) -> None:
    assert len(port_problems([listener(squatter), listener(squatter)])) == 2


def test_an_address_of_another_machine_is_told_as_such() -> None:
    assert port_problems([listener(8080, host="192.0.2.1")]) == [
        "port 8080 for Envoy: 192.0.2.1 is not an address of this machine (envoy.port)"
    ]


def test_the_remedy_can_be_another_one(squatter: int) -> None:
    (problem,) = port_problems([listener(squatter)], remedy=lambda _listener: "wait")
    assert problem.endswith("stop it, or wait")
