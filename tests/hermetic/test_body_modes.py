"""All body modes but the endpoint picker's, in whole messages over real gRPC: what decides, and when."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyResponse,
    HeadersResponse,
    HttpBody,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    TrailersResponse,
)

from ext_proc.decision import Decider, Decision
from ext_proc.ledger import Ledger
from ext_proc.protocol_names import STREAM_END_METADATA
from ext_proc.vocabulary import RequestFacts
from tests.builders import balancer, pool, report
from tests.builders_protocol import (
    BODY,
    GET,
    PASSED_RESPONSE,
    REJECT,
    REQ,
    RESPONSE,
    ROUTE_HEADERS,
    A,
    B,
    Messages,
    Replies,
    canonical,
    in_modes,
    overwrite,
    waiting,
    with_hint,
)
from tests.hermetic.conftest import Serve, whole_body


class Recording:
    """A decider that remembers the facts it was asked about."""

    def __init__(self, ledger: Ledger) -> None:
        self._decider: Decider = balancer(ledger, pick_list_length=1)
        self.facts: list[RequestFacts] = []

    def decide(self, facts: RequestFacts, now_s: float) -> Decision:
        self.facts.append(facts)
        return self._decider.decide(facts, now_s)


def HEADERS_CLEANED(*removed: str, new_request_id: str | None = None) -> Replies:
    """The reply to headers that decides nothing: what only we may say is taken out."""
    reply = ProcessingResponse(request_headers=HeadersResponse())
    overwrite(reply, {"x-request-id": new_request_id} if new_request_id else {})
    mutation = reply.request_headers.response.header_mutation
    mutation.remove_headers.extend(["x-gateway-destination-endpoint", *removed])
    return [reply]


def ROUTE_BODY(endpoint: str) -> Replies:
    """The reply to a body that routes while the headers are still held: by header and metadata."""
    reply = ProcessingResponse(request_body=BodyResponse())
    reply.request_body.response.clear_route_cache = True
    overwrite(reply, {"x-gateway-destination-endpoint": endpoint})
    reply.dynamic_metadata.update({"envoy.lb": {"x-gateway-destination-endpoint": endpoint}})
    return [reply]


# --- Header-only ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["NONE", "STREAMED"])
async def test_without_a_buffered_body_the_headers_decide(serve_ext_proc: Serve, mode: str) -> None:
    decider = Recording(waiting(A=3, B=0))
    request = in_modes(REQ(headers=[("content-length", "4000")])[:1], request=mode)
    async with serve_ext_proc(decider) as served:
        assert await served.replies(request) == canonical(ROUTE_HEADERS(B))
    (facts,) = decider.facts
    assert (facts.request_id, facts.model, facts.prompt_tokens) == ("id-1", None, 1000)


@pytest.mark.parametrize(("mode", "pieces"), [("NONE", 1), ("BUFFERED_PARTIAL", 2)])
async def test_no_announced_length_is_believed_beyond_what_a_body_may_have(
    serve_ext_proc: Serve, mode: str, pieces: int
) -> None:
    decider = Recording(waiting(A=0))
    request = REQ(BODY[:-1], headers=[("content-length", "9" * 15)])[:pieces]
    if request[-1].HasField("request_body"):
        request[-1].request_body.end_of_stream = False
    async with serve_ext_proc(decider, max_body_bytes=1 << 20) as served:
        await served.replies(in_modes(request, request=mode))
    assert decider.facts[0].prompt_tokens <= 1 << 18


async def test_chunks_of_a_body_that_was_decided_on_by_its_headers_pass(serve_ext_proc: Serve) -> None:
    request = in_modes(REQ(BODY, b""), request="STREAMED")
    passed = ProcessingResponse(request_body=BodyResponse())
    async with serve_ext_proc(Recording(waiting(A=0))) as served:
        assert await served.replies(request) == canonical([*ROUTE_HEADERS(A), passed, passed])


async def test_headers_get_an_id_and_lose_what_ranks_must_not_see(serve_ext_proc: Serve) -> None:
    request = REQ(headers=[("x-data-parallel-rank", "1")], request_id=None)[:1]
    decider = Recording(waiting(A=0))
    async with serve_ext_proc(decider) as served:
        got = await served.replies(in_modes(request, request="NONE"))
    route = ROUTE_HEADERS(
        A, set_headers={"x-request-id": decider.facts[0].request_id}, removed=["x-data-parallel-rank"]
    )
    assert got == canonical(route)


# --- Buffered ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["BUFFERED", "BUFFERED_PARTIAL"])
async def test_a_buffered_body_decides_while_its_headers_are_held(serve_ext_proc: Serve, mode: str) -> None:
    decider = Recording(waiting(A=3, B=0))
    async with serve_ext_proc(decider) as served:
        got = await served.replies(in_modes(REQ(), request=mode))
    assert got == canonical([*HEADERS_CLEANED(), *ROUTE_BODY(B.endpoint)])
    (facts,) = decider.facts
    assert (facts.request_id, facts.model, facts.max_tokens) == ("id-1", "m", 8)


async def test_a_partial_body_decides_by_what_is_there_and_the_announced_length(
    serve_ext_proc: Serve,
) -> None:
    whole = json.dumps({"model": "m", "stream": True, "prompt": "abcd" * 10_000}).encode()
    request = REQ(whole[:1000], headers=[("content-length", str(len(whole)))])
    request[1].request_body.end_of_stream = False
    decider = Recording(waiting(A=3, B=0))
    async with serve_ext_proc(decider) as served:
        got = await served.replies(in_modes(request, request="BUFFERED_PARTIAL"))
    assert got == canonical([*HEADERS_CLEANED(), *ROUTE_BODY(B.endpoint)])
    (facts,) = decider.facts
    assert (facts.model, facts.stream) == ("m", True)
    assert facts.prompt_tokens == pytest.approx(10_000, rel=0.1)


@pytest.mark.parametrize("mode", ["BUFFERED", "BUFFERED_PARTIAL"])
async def test_a_request_without_body_is_decided_by_its_headers_in_buffered_modes_too(
    serve_ext_proc: Serve, mode: str
) -> None:
    async with serve_ext_proc(Recording(waiting(A=3, B=0))) as served:
        assert await served.replies(in_modes(GET(), request=mode)) == canonical(ROUTE_HEADERS(B))


async def test_trailers_decide_if_there_is_neither_body_nor_end_before(serve_ext_proc: Serve) -> None:
    request = in_modes(REQ()[:1], request="BUFFERED")
    routed = ProcessingResponse(request_trailers=TrailersResponse())
    routed.dynamic_metadata.update({"envoy.lb": {"x-gateway-destination-endpoint": A.endpoint}})
    async with serve_ext_proc(Recording(waiting(A=0))) as served:
        got = await served.replies(request, [ProcessingRequest(request_trailers=HttpTrailers())])
    assert got == canonical([*HEADERS_CLEANED(), routed])


@pytest.mark.parametrize("mode", ["NONE", "BUFFERED"])
async def test_a_subset_hint_counts_in_every_mode(serve_ext_proc: Serve, mode: str) -> None:
    async with serve_ext_proc(Recording(waiting(A=0))) as served:
        request = in_modes(REQ(hint=["10.0.0.99"]), request=mode)
        assert (await served.replies(request))[-1:] == REJECT(503)


async def test_a_malformed_body_is_never_refused_where_bodies_are_buffered(serve_ext_proc: Serve) -> None:
    async with serve_ext_proc(Recording(waiting(A=0))) as served:
        got = await served.replies(in_modes(REQ(b"no json"), request="BUFFERED"))
    assert got == canonical([*HEADERS_CLEANED(), *ROUTE_BODY(A.endpoint)])


async def test_response_phases_pass_and_are_noted_in_every_mode(serve_ext_proc: Serve) -> None:
    usage = b'{"usage":{"prompt_tokens":1,"completion_tokens":2}}'
    headers, body = PASSED_RESPONSE()[0], ProcessingResponse(response_body=BodyResponse())
    async with serve_ext_proc(Recording(waiting(A=0))) as served:
        request = in_modes(REQ()[:1], request="NONE", response="STREAMED")
        got = await served.replies(request, RESPONSE(usage, b""))
        assert got == canonical([*ROUTE_HEADERS(A), headers, body, body])
        ((rank, status, found),) = served.observed.responses
    assert (rank, status) == (A, 200)
    assert found is not None
    assert found.completion_tokens == 2


# --- One message ---------------------------------------------------------------------------------------


async def test_a_cut_off_body_without_headers_decides_by_what_is_there(serve_ext_proc: Serve) -> None:
    message = whole_body(b'{"model":"m","messages":[{"role":"user","content":"abcdefgh', request_id="r")
    message.request_body.end_of_stream = False
    decider = Recording(waiting(A=3, B=0))
    async with serve_ext_proc(decider) as served:
        (got,) = await served.replies(in_modes([message], request="BUFFERED_PARTIAL"))
    assert got.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == B.endpoint
    (facts,) = decider.facts
    assert (facts.model, facts.prompt_tokens) == ("m", 2)


async def test_a_refusal_in_one_message_mode_is_an_answer_of_the_gateways_own(serve_ext_proc: Serve) -> None:
    message = with_hint(whole_body(BODY), ["10.0.0.99:1"])
    async with serve_ext_proc(Recording(waiting(A=0))) as served:
        assert await served.replies([message]) == REJECT(503)


# --- How a stream ends and what that says of its request -----------------------------------------------


def partly(body: bytes) -> ProcessingRequest:
    return ProcessingRequest(response_body=HttpBody(body=body))


ENDS: list[tuple[str, Messages, Messages, bool]] = [
    ("one message", in_modes([whole_body(BODY)], request="BUFFERED"), [], True),
    ("one message, before Envoy sent modes", [whole_body(BODY)], [], True),
    ("buffered", in_modes(REQ(), request="BUFFERED"), [], True),
    ("partial", in_modes(REQ(), request="BUFFERED_PARTIAL"), [], True),
    (
        "endpoint picker",
        in_modes(REQ(), request="FULL_DUPLEX_STREAMED", response="FULL_DUPLEX_STREAMED"),
        [],
        True,
    ),
    ("endpoint picker that states no mode", REQ(), [], True),
    (
        "response streamed",
        in_modes(REQ()[:1], request="NONE", response="STREAMED"),
        RESPONSE(b"a", b"b")[:2],
        True,
    ),
    ("header-only", in_modes(REQ()[:1], request="NONE"), [], False),
    ("header-only, answered without a body", in_modes(REQ()[:1], request="NONE"), RESPONSE(), True),
    ("header-only, response headers seen", in_modes(REQ()[:1], request="NONE"), RESPONSE(b"a")[:1], False),
    ("request streamed", in_modes(REQ(), request="STREAMED"), [], False),
    ("buffered, without a body", in_modes(GET(), request="BUFFERED"), [], False),
    ("request phases of an endpoint picker", in_modes(REQ(), request="FULL_DUPLEX_STREAMED"), [], False),
    ("the same without a body", in_modes(GET(), request="FULL_DUPLEX_STREAMED"), [], False),
]
"""What a stream saw before it ended, and whether its request has surely ended with it."""


@pytest.mark.parametrize(
    ("request_", "response", "has_ended"), [case[1:] for case in ENDS], ids=[case[0] for case in ENDS]
)
async def test_a_reservation_outlives_its_stream_only_where_the_request_may(
    serve_ext_proc: Serve,
    eventually: Callable[..., Any],
    request_: Messages,
    response: Messages,
    has_ended: bool,
) -> None:
    ledger = waiting(A=0)
    account = ledger.accounts[0]
    async with serve_ext_proc(Recording(ledger)) as served:
        await served.replies(request_, response)
        assert (account.reservations, len(account.unobserved)) == ((0, 0) if has_ended else (1, 1))


async def test_a_gateway_may_promise_that_its_streams_end_with_the_response(serve_ext_proc: Serve) -> None:
    ledger = waiting(A=0)
    async with serve_ext_proc(Recording(ledger)) as served:
        stream = served.client.open(metadata=[STREAM_END_METADATA])
        await stream.write(in_modes(REQ()[:1], request="NONE")[0])
        await stream.read()
        assert ledger.accounts[0].reservations == 1
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
    assert (ledger.accounts[0].reservations, len(ledger.accounts[0].unobserved)) == (0, 0)


async def test_what_nobody_observes_is_retired_by_the_ranks_reports(serve_ext_proc: Serve) -> None:
    ledger = waiting(A=0)
    async with serve_ext_proc(Recording(ledger)) as served:
        for _ in range(3):
            await served.replies(in_modes(REQ()[:1], request="NONE"))
        assert ledger.accounts[0].reservations == 3
        now_s = asyncio.get_running_loop().time()
        ledger.record_report(A, report(now_s + 1, running=3))
        ledger.record_report(A, report(now_s + 2, running=1))
        assert ledger.accounts[0].reservations == 1


async def test_streams_above_the_bound_are_refused_so_that_the_gateway_balances_itself(
    serve_ext_proc: Serve,
) -> None:
    ledger = pool([A])
    async with serve_ext_proc(Recording(ledger), max_streams=2) as served:
        kept = [await served.sent([whole_body(BODY)]) for _ in range(2)]
        for stream in kept:
            assert (await stream.read()).WhichOneof("response") == "request_body"
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await served.replies([whole_body(BODY)])
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await kept[0].done_writing()
        assert await kept[0].read() is grpc.aio.EOF
        assert len(await served.replies([whole_body(BODY)])) == 1
    assert ledger.accounts[0].reservations == 0
