"""A decision that comes later: in every mode the stream is silent until then, and the client may leave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from ext_proc.decision import Decision, DropReason, Placed, Refused
from ext_proc.ledger import Ledger
from ext_proc.vocabulary import RequestFacts
from tests.builders import balancer, pool
from tests.builders_protocol import (
    BODY,
    REJECT,
    REQ,
    ROUTE,
    ROUTE_HEADERS,
    A,
    Messages,
    Replies,
    canonical,
    in_modes,
)
from tests.hermetic.conftest import Serve, whole_body
from tests.hermetic.test_body_modes import ROUTE_BODY


class HeldRequest:
    """A request that waits until a test decides."""

    def __init__(self, facts: RequestFacts) -> None:
        self.facts = facts
        self.decision: Placed | Refused | None = None
        self.is_withdrawn = False

    def withdraw(self, now_s: float) -> None:
        self.is_withdrawn = True


class Holding:
    """A decider that holds every request."""

    def __init__(self, ledger: Ledger) -> None:
        self._balancer = balancer(ledger, pick_list_length=1)
        self.held: list[HeldRequest] = []
        self.is_quick = False
        """Decide at once about what is held."""
        self.thinks_for_s = 0.0

    def decide(self, facts: RequestFacts, _now_s: float) -> Decision:
        time.sleep(self.thinks_for_s)
        self.held.append(HeldRequest(facts))
        if self.is_quick:
            self.place(self.held[-1])
        return self.held[-1]

    def place(self, held: HeldRequest) -> None:
        held.decision = self._balancer.decide(held.facts, 0.0)


ROUTED_BY_METADATA = ROUTE_BODY(A.endpoint)
for _reply in ROUTED_BY_METADATA:
    _reply.request_body.ClearField("response")

MODES: list[tuple[str, Messages, int, Replies]] = [
    ("one message", [whole_body(BODY)], 0, ROUTED_BY_METADATA),
    ("header-only", in_modes(REQ()[:1], request="NONE"), 0, ROUTE_HEADERS(A)),
    ("buffered", in_modes(REQ(), request="BUFFERED"), 1, ROUTE_BODY(A.endpoint)),
    ("endpoint picker", REQ(), 0, ROUTE(A)),
]
in_every_mode = pytest.mark.parametrize(
    ("request_", "replies_before", "route"), [mode[1:] for mode in MODES], ids=[mode[0] for mode in MODES]
)


@in_every_mode
async def test_a_held_request_is_routed_when_it_is_decided(
    serve_ext_proc: Serve, eventually: Any, request_: Messages, replies_before: int, route: Replies
) -> None:
    ledger = pool([A])
    decider = Holding(ledger)
    async with serve_ext_proc(decider) as served:
        stream = await served.sent(request_)
        for _ in range(replies_before):
            await stream.read()
        await eventually(lambda: len(decider.held) == 1)
        assert served.observed.picks == []
        decider.place(decider.held[0])
        served.server.wake(decider.held[0])
        assert canonical([await stream.read() for _ in route]) == canonical(route)
        assert len(served.observed.picks) == 1
        assert ledger.accounts[0].reservations == 1
        stream.cancel()


async def test_what_it_took_to_hold_a_request_counts_as_time_to_decide(
    serve_ext_proc: Serve, eventually: Any
) -> None:
    decider = Holding(pool([A]))
    decider.thinks_for_s = 0.05
    async with serve_ext_proc(decider) as served:
        stream = await served.sent([whole_body(BODY)])
        await eventually(lambda: len(decider.held) == 1)
        decider.place(decider.held[0])
        served.server.wake(decider.held[0])
        await stream.read()
        assert served.observed.durations_s[0] >= decider.thinks_for_s


@in_every_mode
async def test_a_held_request_may_be_refused_in_the_end(
    serve_ext_proc: Serve, eventually: Any, request_: Messages, replies_before: int, route: Replies
) -> None:
    decider = Holding(pool([A]))
    async with serve_ext_proc(decider) as served:
        stream = await served.sent(request_)
        for _ in range(replies_before):
            await stream.read()
        await eventually(lambda: len(decider.held) == 1)
        decider.held[0].decision = Refused(503, DropReason.SATURATED)
        served.server.wake(decider.held[0])
        assert canonical([await stream.read()]) == REJECT(503)
        assert await stream.read() is grpc.aio.EOF
        assert await served.server.drain(timeout_s=5) == 0


@pytest.mark.parametrize("leave", [lambda s: s.cancel(), lambda s: asyncio.ensure_future(s.done_writing())])
@in_every_mode
async def test_a_client_that_leaves_while_its_request_is_held_withdraws_it(
    serve_ext_proc: Serve,
    eventually: Any,
    request_: Messages,
    replies_before: int,
    route: Replies,
    leave: Callable[[Any], object],
) -> None:
    ledger = pool([A])
    decider = Holding(ledger)
    async with serve_ext_proc(decider) as served:
        stream = await served.sent(request_)
        await eventually(lambda: len(decider.held) == 1)
        leave(stream)
        await eventually(lambda: decider.held[0].is_withdrawn)
        assert await served.server.drain(timeout_s=5) == 0
        served.server.wake(decider.held[0])
    assert ledger.accounts[0].picks == 0


async def test_a_request_decided_just_as_its_client_leaves_frees_its_rank(
    serve_ext_proc: Serve, eventually: Any
) -> None:
    ledger = pool([A])
    decider = Holding(ledger)
    async with serve_ext_proc(decider) as served:
        stream = await served.sent(REQ())
        await eventually(lambda: len(decider.held) == 1)
        decider.place(decider.held[0])
        assert ledger.accounts[0].reservations == 1
        stream.cancel()
        await eventually(lambda: ledger.accounts[0].reservations == 0)


async def test_a_last_chunk_that_comes_twice_does_not_end_the_wait(
    serve_ext_proc: Serve, eventually: Any
) -> None:
    decider = Holding(pool([A]))
    async with serve_ext_proc(decider) as served:
        request = REQ()
        stream = await served.sent(request, request[-1:])
        await eventually(lambda: len(decider.held) == 1)
        decider.place(decider.held[0])
        served.server.wake(decider.held[0])
        assert canonical([await stream.read() for _ in range(2)]) == canonical(ROUTE(A))
        stream.cancel()


async def test_requests_are_decided_in_any_order(serve_ext_proc: Serve, eventually: Any) -> None:
    decider = Holding(pool([A]))
    async with serve_ext_proc(decider) as served:
        streams = [await served.sent([whole_body(BODY)]) for _ in range(20)]
        await eventually(lambda: len(decider.held) == 20)
        for held in reversed(decider.held):
            decider.place(held)
            served.server.wake(held)
        for stream in streams:
            assert (await stream.read()).WhichOneof("response") == "request_body"
            stream.cancel()


async def test_a_request_decided_before_its_stream_begins_to_wait_is_routed(serve_ext_proc: Serve) -> None:
    decider = Holding(pool([A]))
    decider.is_quick = True
    async with serve_ext_proc(decider) as served:
        stream = await served.sent(REQ())
        assert canonical([await stream.read() for _ in range(2)]) == canonical(ROUTE(A))
        stream.cancel()
