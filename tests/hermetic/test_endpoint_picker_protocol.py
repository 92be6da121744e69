"""The endpoint-picker protocol, case by case, over real gRPC: whole messages in, whole messages out.

Names begin with the number of a case in the list of what a conformant picker does. Where a case speaks of
loads, they are such that our default policy has the choice that the case intends.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import grpc
import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    ProcessingRequest,
    ProcessingResponse,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ext_proc.admission import Admission
from ext_proc.decision import Decision, DropReason, Refused
from ext_proc.health import LIVENESS, READINESS, SERVICE_NAME
from ext_proc.ledger import Ledger
from ext_proc.output_lengths import UNKNOWN_TOKENS
from ext_proc.usage import Usage
from ext_proc.vocabulary import RequestFacts
from tests.builders import DOWN_AFTER_FAILURES, balancer, pool, report, request
from tests.builders_protocol import (
    BODY,
    GET,
    PASSED_RESPONSE,
    PIECES,
    REJECT,
    REQ,
    RESPONSE,
    ROUTE,
    ROUTE_HEADERS,
    A,
    B,
    C,
    Messages,
    Replies,
    canonical,
    in_modes,
    overwrite,
    waiting,
    with_hint,
)
from tests.hermetic.conftest import Serve, Served


def one(ledger: Ledger) -> Admission:
    """Picks of a single rank."""
    return balancer(ledger, pick_list_length=1)


async def told(serve_ext_proc: Serve, decider: Any, *conversation: Messages, **protocol: Any) -> Replies:
    """The replies of a server of its own."""
    async with serve_ext_proc(decider, **protocol) as served:
        return await served.replies(*conversation)


def open_reservations(ledger: Ledger) -> dict[str, int]:
    return {account.rank.endpoint: account.reservations for account in ledger.accounts}


# --- Request path --------------------------------------------------------------------------------------


async def test_01_the_least_loaded_rank_is_picked(serve_ext_proc: Serve) -> None:
    assert await told(serve_ext_proc, one(waiting(A=3, B=0, C=10)), REQ()) == canonical(ROUTE(B))


async def test_02_nothing_is_said_before_the_body_has_ended_and_its_bytes_stay(serve_ext_proc: Serve) -> None:
    body = b'{"model":"m",  "prompt":"split here", "max_tokens":8}'
    async with serve_ext_proc(one(waiting(A=4, B=5))) as served:
        whole = REQ(body[:29], body[29:])
        assert await served.replies(whole[:-1]) == []
        assert await served.replies(whole) == canonical(ROUTE(A, body=body))


@pytest.mark.parametrize(("size", "pieces"), [(0, 1), (62_000, 1), (62_001, 2), (125_000, 3)])
async def test_03_a_body_is_passed_on_in_pieces_that_every_envoy_takes(
    serve_ext_proc: Serve, size: int, pieces: int
) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    got = await told(
        serve_ext_proc, one(waiting(A=0)), REQ(body[:size], path="/tokenize"), max_body_bytes=1 << 20
    )
    assert len(got) == 1 + pieces
    assert got == canonical(ROUTE(A, body=body[:size]))


async def test_04_an_empty_last_chunk_makes_no_second_pick(serve_ext_proc: Serve) -> None:
    assert await told(serve_ext_proc, one(waiting(A=0)), REQ(BODY, b"")) == canonical(ROUTE(A))


async def test_05_a_last_chunk_that_comes_twice_is_ignored(serve_ext_proc: Serve) -> None:
    ledger = waiting(A=0)
    async with serve_ext_proc(one(ledger)) as served:
        request = REQ()
        assert await served.replies(request, request[-1:]) == canonical(ROUTE(A))
        assert len(served.observed.picks) == 1
    assert ledger.accounts[0].picks == 1


async def test_06_trailers_end_a_body(serve_ext_proc: Serve) -> None:
    got = await told(serve_ext_proc, one(waiting(A=0)), REQ(BODY, trailers=True))
    assert got == canonical(ROUTE(A, trailers=True))


async def test_07_a_request_without_a_body_is_routed_by_its_headers(serve_ext_proc: Serve) -> None:
    assert await told(serve_ext_proc, one(waiting(A=3, B=0)), GET()) == canonical(ROUTE_HEADERS(B))


async def test_08_a_get_to_an_empty_pool_gets_503(serve_ext_proc: Serve) -> None:
    assert await told(serve_ext_proc, one(pool([])), GET()) == REJECT(503)


async def test_09_a_get_goes_where_its_subset_allows(serve_ext_proc: Serve) -> None:
    got = await told(serve_ext_proc, one(waiting(A=0, B=9)), GET(hint=[B.endpoint]))
    assert got == canonical(ROUTE_HEADERS(B))


async def test_10_a_body_that_is_no_json_gets_400(serve_ext_proc: Serve) -> None:
    assert await told(serve_ext_proc, one(waiting(A=0)), REQ(b"no healthy upstream")) == REJECT(400)


async def test_11_a_body_without_a_model_gets_400_that_says_so(serve_ext_proc: Serve) -> None:
    async with serve_ext_proc(one(waiting(A=0))) as served:
        stream = await served.sent(REQ(b'{"prompt":"hello world"}'))
        reply: ProcessingResponse = await stream.read()
        assert canonical([reply]) == REJECT(400)
        error = json.loads(reply.immediate_response.body)["error"]
        assert "model" in error["message"]
        assert error["type"] == "invalid_request_error"
        assert await stream.read() is grpc.aio.EOF


async def test_11_a_body_without_a_prompt_gets_400(serve_ext_proc: Serve) -> None:
    assert await told(serve_ext_proc, one(waiting(A=0)), REQ(b'{"model":"m"}')) == REJECT(400)


@pytest.mark.parametrize(
    ("path", "settings"),
    [("/v1/audio/transcriptions", {}), ("/v1/completions", {"pass_malformed_bodies": True})],
)
async def test_12_where_bodies_are_passed_through_one_that_is_no_json_is_routed_by_load(
    serve_ext_proc: Serve, path: str, settings: dict[str, bool]
) -> None:
    got = await told(serve_ext_proc, one(waiting(A=3, B=0)), REQ(b"\x00\xff no json", path=path), **settings)
    assert got == canonical(ROUTE(B, body=b"\x00\xff no json"))


async def test_13_a_mapped_model_is_renamed_and_nothing_else_changes(serve_ext_proc: Serve) -> None:
    before = b'{"z":12345678901234567890123,"model" : "m", "prompt":"\\u0041", "a":1.0}'
    after = b'{"z":12345678901234567890123,"model" : "longer-name", "prompt":"\\u0041", "a":1.0}'
    got = await told(
        serve_ext_proc, one(waiting(A=0)), REQ(before[:40], before[40:]), model_names={"m": "longer-name"}
    )
    assert got == canonical(ROUTE(A, body=after))


async def test_13_a_decision_is_made_for_the_model_that_the_ranks_know(serve_ext_proc: Serve) -> None:
    shedding = Sheds(waiting(A=0), "target")
    assert await told(serve_ext_proc, shedding, REQ(), model_names={"m": "target"}) == REJECT(429)


async def test_14_a_model_that_nobody_knows_is_routed_unchanged(serve_ext_proc: Serve) -> None:
    body = b'{"model":"unknown","prompt":"p"}'
    got = await told(serve_ext_proc, one(waiting(A=0)), REQ(body), model_names={"m": "t"})
    assert got == canonical(ROUTE(A, body=body))


async def test_15_headers_are_read_in_every_spelling(serve_ext_proc: Serve) -> None:
    plain = REQ()
    odd = REQ(request_id=None)
    odd[0].request_headers.ClearField("headers")
    for name, value in [(":path", "/v1/completions"), ("X-Request-ID", "id-1"), ("X-Request-ID", "id-2")]:
        header = odd[0].request_headers.headers.headers.add()
        header.key, header.value = name, value
    async with serve_ext_proc(one(waiting(A=0, B=9))) as served:
        assert await served.replies(odd) == await served.replies(plain) == canonical(ROUTE(A))


async def test_16_a_request_without_an_id_gets_one(serve_ext_proc: Serve) -> None:
    got = await told(serve_ext_proc, one(waiting(A=0)), REQ(request_id=None))
    mutation = got[0].request_headers.response.header_mutation
    (given,) = [o.header.raw_value.decode() for o in mutation.set_headers if o.header.key == "x-request-id"]
    assert len(given) == 36
    assert got == canonical(ROUTE(A, new_request_id=given))


FORGED = [("x-gateway-destination-endpoint", "evil:1"), ("X-Gateway-Destination-Endpoint", "evil:2")]


@pytest.mark.parametrize(
    ("request_", "route"), [(REQ(headers=FORGED), ROUTE(A)), (GET(headers=FORGED), ROUTE_HEADERS(A))]
)
async def test_17_a_destination_from_the_client_is_overwritten(
    serve_ext_proc: Serve, request_: Messages, route: Replies
) -> None:
    assert await told(serve_ext_proc, one(waiting(A=0)), request_) == canonical(route)


async def test_17_control_headers_of_clients_do_not_reach_ranks(serve_ext_proc: Serve) -> None:
    control = [
        ("x-gateway-inference-objective", "cheap"),
        ("X-LLM-D-Inference-Fairness-ID", "me"),
        ("x-gateway-model-name-rewrite", "other"),
        ("x-gateway-destination-endpoint-fallback", "evil:1"),
        ("test-epp-endpoint-selection", B.endpoint),
        ("x-data-parallel-rank", "3"),
    ]
    got = await told(serve_ext_proc, one(waiting(A=0, B=9)), REQ(headers=control))
    assert got == canonical(ROUTE(A, removed=[name.lower() for name, _ in control]))


@pytest.mark.parametrize("objective", ["important", "cheap"])
async def test_18_an_empty_pool_is_503_and_no_overload_whatever_the_priority(
    serve_ext_proc: Serve, objective: str
) -> None:
    request = REQ(headers=[("x-gateway-inference-objective", objective)])
    assert await told(serve_ext_proc, one(pool([])), request) == REJECT(503)


async def test_19_ranks_that_filters_leave_out_make_503_and_no_overload(serve_ext_proc: Serve) -> None:
    ledger = waiting(A=0, B=0)
    assert await told(serve_ext_proc, one(ledger), REQ(hint=[C.endpoint])) == REJECT(503)


class Sheds:
    """Refuses what asks for one model, as an admission does that sheds the unimportant when all is full."""

    def __init__(self, ledger: Ledger, model: str) -> None:
        self._balancer = one(ledger)
        self._model = model

    def decide(self, facts: RequestFacts, now_s: float) -> Decision:
        if facts.model == self._model:
            return Refused(429, DropReason.SATURATED, retry_after_s=2.5)
        return self._balancer.decide(facts, now_s)


async def test_20_what_is_shed_gets_429_and_what_is_not_is_routed(serve_ext_proc: Serve) -> None:
    ledger = waiting(A=10)
    async with serve_ext_proc(Sheds(ledger, "cheap")) as served:
        assert await served.replies(REQ(b'{"model":"cheap","prompt":"p"}')) == REJECT(429)
        assert await served.replies(REQ()) == canonical(ROUTE(A))
        assert [refused.reason for refused in served.observed.refused] == [DropReason.SATURATED]


async def test_20_a_refusal_tells_its_reason_and_when_to_try_again(serve_ext_proc: Serve) -> None:
    async with serve_ext_proc(Sheds(waiting(A=0), "m")) as served:
        stream = await served.sent(REQ())
        answer = (await stream.read()).immediate_response
        headers = {option.header.key: option.header.raw_value for option in answer.headers.set_headers}
        assert headers == {
            "content-type": b"application/json",
            "retry-after": b"3",
            "x-wavegate-drop-reason": b"saturated",
        }
        assert answer.details == "wavegate_saturated"


# --- Subset --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        pytest.param([A.endpoint, B.endpoint, C.endpoint], A, id="21: the best of three"),
        pytest.param([C.endpoint], C, id="22: the most loaded, if it is the only one"),
        pytest.param([B.endpoint], B, id="23: the port counts: B, never A"),
        pytest.param(["10.0.0.99:8000"], None, id="24: nobody there"),
        pytest.param([], None, id="25: nobody allowed"),
        pytest.param([1, None, True, B.endpoint], B, id="27: what is no text is ignored"),
        pytest.param([1, {"a": "b"}], None, id="27: and may leave nobody"),
        pytest.param(f" {C.endpoint} , {B.endpoint} ", B, id="28: texts with commas are split and trimmed"),
        pytest.param([f"{C.endpoint}, {B.endpoint}"], B, id="28: within a list too"),
        pytest.param(["10.0.0.1"], A, id="29: an address without port stands for all its ports"),
        pytest.param(["10.0.0.2"], C, id="29: and for no other address"),
        pytest.param("", None, id="an empty text allows nobody"),
    ],
)
@pytest.mark.parametrize("has_body", [True, False], ids=["POST", "GET"])
async def test_a_subset_hint_is_honoured(
    serve_ext_proc: Serve, hint: Any, expected: Any, has_body: bool
) -> None:
    request = REQ(hint=hint) if has_body else GET(hint=hint)
    got = await told(serve_ext_proc, one(waiting(A=0, B=2, C=9)), request)
    if expected is None:
        assert got == REJECT(503)
    else:
        assert got == canonical(ROUTE(expected) if has_body else ROUTE_HEADERS(expected))


@pytest.mark.parametrize("missing", ["metadata", "namespace", "key"])
async def test_26_without_a_hint_the_whole_pool_is_allowed(serve_ext_proc: Serve, missing: str) -> None:
    request = REQ()
    if missing == "namespace":
        request[0].metadata_context.filter_metadata["envoy.lb"].update({"other": "10.0.0.99:8000"})
    elif missing == "key":
        request[0].metadata_context.filter_metadata["envoy.lb.subset_hint"].update({"other": ["10.0.0.99"]})
    assert await told(serve_ext_proc, one(waiting(A=3, B=0)), request) == canonical(ROUTE(B))


@pytest.mark.parametrize("where", [0, -1], ids=["on the headers", "on the last body message"])
async def test_30_a_hint_counts_on_the_headers_and_on_the_last_body_message(
    serve_ext_proc: Serve, where: int
) -> None:
    request = REQ(BODY[:10], BODY[10:])
    with_hint(request[where], [C.endpoint])
    assert await told(serve_ext_proc, one(waiting(A=0, B=2, C=9)), request) == canonical(ROUTE(C))


async def test_a_hint_with_ipv6_is_compared_as_an_address(serve_ext_proc: Serve) -> None:
    rank = replace(A, endpoint="[2001:db8::1]:8000")
    request = REQ(hint=["[2001:DB8:0::1]:8000"])
    assert await told(serve_ext_proc, one(pool([rank, B])), request) == canonical(ROUTE(rank))


# --- Fallback, feedback, response ----------------------------------------------------------------------


async def test_31_the_pick_is_a_list_in_order_of_preference(serve_ext_proc: Serve) -> None:
    got = await told(serve_ext_proc, balancer(waiting(A=3, B=0, C=10), pick_list_length=2), REQ())
    assert got == canonical(ROUTE(B, A))


async def test_32_the_reservation_moves_to_the_rank_that_serves(serve_ext_proc: Serve) -> None:
    ledger = waiting(A=3, B=0)
    async with serve_ext_proc(balancer(ledger)) as served:
        stream = await served.sent(REQ())
        for _ in range(2):
            await stream.read()
        assert open_reservations(ledger) == {A.endpoint: 0, B.endpoint: 1}
        response = RESPONSE(b"{}", served=A.endpoint)
        await stream.write(response[0])
        await stream.read()
        assert open_reservations(ledger) == {A.endpoint: 1, B.endpoint: 0}
        await stream.write(response[1])
        await stream.read()
        assert open_reservations(ledger) == {A.endpoint: 0, B.endpoint: 0}
        assert served.observed.responses == []
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert served.observed.responses == [(A, 200, None)]


@pytest.mark.parametrize("selection", [B.endpoint, "10.0.0.2"])
async def test_33_a_conformance_test_selects_its_rank_and_sees_who_served(
    serve_ext_proc: Serve, selection: str
) -> None:
    chosen = B if selection == B.endpoint else C
    request = REQ(headers=[("test-epp-endpoint-selection", selection)])
    response = RESPONSE(served=chosen.endpoint)
    shown = PASSED_RESPONSE()
    overwrite(shown[0], {"x-conformance-test-served-endpoint": chosen.endpoint})
    got = await told(serve_ext_proc, one(waiting(A=0, B=1, C=1)), request, response, conformance_tests=True)
    assert got == canonical([*ROUTE(chosen, removed=["test-epp-endpoint-selection"]), *shown])


async def test_33_outside_conformance_tests_nothing_is_shown(serve_ext_proc: Serve) -> None:
    got = await told(serve_ext_proc, one(waiting(A=0)), REQ(), RESPONSE(served=A.endpoint))
    assert got == canonical([*ROUTE(A), *PASSED_RESPONSE()])


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param((b'{"id": 1, ', b'"choices": []}'), id="34: JSON in two chunks"),
        pytest.param((b"\x00\xff", b"no json"), id="35: no JSON"),
        pytest.param((b'{"id": 1}', b""), id="36: an empty last chunk"),
    ],
)
async def test_a_response_passes_unchanged(serve_ext_proc: Serve, chunks: tuple[bytes, ...]) -> None:
    got = await told(serve_ext_proc, one(waiting(A=0)), REQ(), RESPONSE(*chunks))
    assert got == canonical([*ROUTE(A), *PASSED_RESPONSE(*chunks)])


async def test_a_large_response_chunk_is_passed_on_in_pieces(serve_ext_proc: Serve) -> None:
    body = b"x" * 100_000
    got = await told(serve_ext_proc, one(waiting(A=0)), REQ(), RESPONSE(body))
    assert got == canonical([*ROUTE(A), *PASSED_RESPONSE(body[:62_000], body[62_000:])])


SSE = (
    b"data: {}\n\n",
    b'data: {"usage":{"prompt_tokens":7,"total_tokens":17,"completion_tokens":10}}\n\ndata: [DONE]\n\n',
    b"",
)
EVENT_STREAM = (("content-type", "text/event-stream"),)


async def test_37_server_sent_events_pass_one_by_one_and_their_tokens_are_counted(
    serve_ext_proc: Serve,
) -> None:
    async with serve_ext_proc(one(waiting(A=0))) as served:
        got = await served.replies(REQ(), RESPONSE(*SSE, headers=EVENT_STREAM))
        assert got == canonical([*ROUTE(A), *PASSED_RESPONSE(*SSE)])
        assert served.observed.responses == [(A, 200, Usage(7, 10))]


async def test_38_tokens_are_counted_when_chunks_cut_their_event(serve_ext_proc: Serve) -> None:
    text = b"".join(SSE)
    chunks = [text[start : start + 9] for start in range(0, len(text), 9)]
    async with serve_ext_proc(one(waiting(A=0))) as served:
        got = await served.replies(REQ(), RESPONSE(*chunks, headers=EVENT_STREAM))
        assert got == canonical([*ROUTE(A), *PASSED_RESPONSE(*chunks)])
        assert served.observed.responses == [(A, 200, Usage(7, 10))]


async def test_39_an_error_status_is_counted(serve_ext_proc: Serve) -> None:
    async with serve_ext_proc(one(waiting(A=0))) as served:
        await served.replies(REQ(), RESPONSE(status=503))
        assert served.observed.responses == [(A, 503, None)]


@pytest.mark.parametrize(
    "response",
    [
        pytest.param(RESPONSE(), id="40: headers alone"),
        pytest.param(RESPONSE(b"data", trailers=True), id="41: trailers"),
        pytest.param(RESPONSE(b"data"), id="a body"),
    ],
)
async def test_the_end_of_a_response_frees_its_rank_before_the_stream_ends(
    serve_ext_proc: Serve, response: Messages
) -> None:
    ledger = waiting(A=0)
    async with serve_ext_proc(one(ledger)) as served:
        stream = await served.sent(REQ(), response)
        expected = [*ROUTE(A), *PASSED_RESPONSE(*[b"data"] * (len(response) > 1), trailers=len(response) > 2)]
        assert canonical([await stream.read() for _ in expected]) == canonical(expected)
        assert open_reservations(ledger) == {A.endpoint: 0}
        stream.cancel()


async def test_what_follows_the_end_of_a_response_is_ignored(serve_ext_proc: Serve) -> None:
    response = RESPONSE(b"{}")
    got = await told(serve_ext_proc, one(waiting(A=0)), REQ(), response, response[-1:])
    assert got == canonical([*ROUTE(A), *PASSED_RESPONSE(b"{}")])


async def test_42_the_clients_name_of_a_model_is_restored_across_chunks(serve_ext_proc: Serve) -> None:
    chunks = (
        b'data: {"id":"1","mod',
        b'el":"ta',
        b'rget","choices":[]}\n\n',
        b'data: {"model": "target"}\n\n',
    )
    restored = (b'data: {"id":"1",', b'"model":"m","choices":[]}\n\n', b'data: {"model": "m"}\n\n')
    request = b'{"model":"m","prompt":"p"}'
    passed = PASSED_RESPONSE(*restored)
    passed[0].response_headers.response.header_mutation.remove_headers.append("content-length")
    got = await told(
        serve_ext_proc,
        one(waiting(A=0)),
        REQ(request),
        RESPONSE(*chunks, headers=EVENT_STREAM),
        model_names={"m": "target"},
    )
    assert got == canonical([*ROUTE(A, body=b'{"model":"target","prompt":"p"}'), *passed])


async def test_42_an_encoded_response_is_not_searched_for_names(serve_ext_proc: Serve) -> None:
    chunk = b'{"model":"target"}'
    response = RESPONSE(chunk, headers=(("content-encoding", "gzip"),))
    got = await told(serve_ext_proc, one(waiting(A=0)), REQ(), response, model_names={"m": "target"})
    assert got[2:] == PASSED_RESPONSE(chunk)


async def test_42_what_may_be_a_name_at_the_end_of_a_body_is_passed_on_before_its_trailers(
    serve_ext_proc: Serve,
) -> None:
    got = await told(
        serve_ext_proc,
        one(waiting(A=0)),
        REQ(),
        RESPONSE(b'{"mod', trailers=True),
        model_names={"m": "target"},
    )
    assert got[-3:] == [
        *PIECES("response_body", b"{", ends=False),
        *PIECES("response_body", b'"mod', ends=False),
        PASSED_RESPONSE(trailers=True)[-1],
    ]


async def test_43_a_response_that_is_cancelled_frees_its_rank_once(serve_ext_proc: Serve) -> None:
    ledger = waiting(A=0)
    async with serve_ext_proc(one(ledger)) as served:
        stream = await served.sent(REQ(), RESPONSE(b"part", b"rest")[:-1])
        for _ in range(4):
            await stream.read()
        assert open_reservations(ledger) == {A.endpoint: 1}
        stream.cancel()
        async with asyncio.timeout(5):
            while open_reservations(ledger) != {A.endpoint: 0}:
                await asyncio.sleep(0.005)
    learned = ledger.output_lengths.expected(request(max_tokens=None))
    assert learned == UNKNOWN_TOKENS, "a response cut short says nothing of how long responses are"


# --- Load accounting -----------------------------------------------------------------------------------


async def test_44_a_burst_spreads_before_any_report(serve_ext_proc: Serve) -> None:
    ledger = pool([A, B, C])
    async with serve_ext_proc(one(ledger)) as served:
        streams = [served.client.open() for _ in range(31)]

        async def route(stream: Any) -> None:
            for message in REQ():
                await stream.write(message)
            await stream.read()

        await asyncio.gather(*map(route, streams))
        counts = open_reservations(ledger).values()
        assert sum(counts) == 31
        assert max(counts) - min(counts) <= 1


async def test_46_a_rank_that_never_reported_is_neither_idle_nor_full(serve_ext_proc: Serve) -> None:
    ledger = pool([A, B, C], reported_at_s=None)
    now_s = time.monotonic()
    ledger.record_report(B, report(now_s, waiting=1))
    ledger.record_report(C, report(now_s, waiting=9))
    async with serve_ext_proc(balancer(ledger)) as served:
        assert await served.replies(REQ()) == canonical(ROUTE(B, A, C))


async def test_46_a_rank_that_cannot_be_reached_is_taken_out(serve_ext_proc: Serve) -> None:
    ledger = waiting(A=0, B=9)
    for _ in range(DOWN_AFTER_FAILURES):
        ledger.record_failed_scrape(A)
    assert await told(serve_ext_proc, balancer(ledger), REQ()) == canonical(ROUTE(B))


# --- Health --------------------------------------------------------------------------------------------

READY_NAMES = (READINESS, SERVICE_NAME, "")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(served: Served, *names: str) -> dict[str, int]:
    stub = health_pb2_grpc.HealthStub(served.client.channel)
    return {n: (await stub.Check(health_pb2.HealthCheckRequest(service=n))).status for n in names}


async def test_48_before_it_is_ready_a_gateway_is_alive_only(serve_ext_proc: Serve) -> None:
    async with serve_ext_proc(one(waiting(A=0))) as served:
        assert await health(served, LIVENESS) == {LIVENESS: SERVING}
        assert await health(served, *READY_NAMES) == dict.fromkeys(READY_NAMES, NOT_SERVING)


async def test_49_a_ready_gateway_serves_under_all_names_and_no_other(serve_ext_proc: Serve) -> None:
    async with serve_ext_proc(one(waiting(A=0))) as served:
        await served.server.set_ready(True)
        names = (LIVENESS, *READY_NAMES)
        assert await health(served, *names) == dict.fromkeys(names, SERVING)
        unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        assert await health(served, "inference.Other") == {"inference.Other": unknown}


async def test_49_a_watcher_sees_readiness_come_and_go(serve_ext_proc: Serve) -> None:
    async with serve_ext_proc(one(waiting(A=0))) as served:
        stub = health_pb2_grpc.HealthStub(served.client.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        assert (await watch.read()).status == NOT_SERVING
        await served.server.set_ready(True)
        assert (await watch.read()).status == SERVING
        watch.cancel()


async def test_50_a_draining_gateway_takes_no_new_requests_and_finishes_its_own(
    serve_ext_proc: Serve,
) -> None:
    async with serve_ext_proc(one(waiting(A=0))) as served:
        await served.server.set_ready(True)
        stream = served.client.open()
        request = REQ(BODY[:10], BODY[10:])
        await stream.write(request[0])
        await served.server.set_ready(False)
        assert await health(served, LIVENESS) == {LIVENESS: SERVING}
        assert await health(served, *READY_NAMES) == dict.fromkeys(READY_NAMES, NOT_SERVING)
        for message in request[1:]:
            await stream.write(message)
        assert canonical([await stream.read() for _ in range(2)]) == canonical(ROUTE(A))


# --- Bounds --------------------------------------------------------------------------------------------


async def test_a_body_above_the_limit_gets_413_before_it_has_ended(serve_ext_proc: Serve) -> None:
    ledger = waiting(A=0)
    request = REQ(b"x" * 600, b"x" * 600, b"")
    got = await told(serve_ext_proc, one(ledger), request[:-1], max_body_bytes=1024)
    assert got == REJECT(413)
    assert ledger.accounts[0].picks == 0


async def test_a_body_as_large_as_the_limit_is_routed(serve_ext_proc: Serve) -> None:
    body = b"x" * 1024
    request = REQ(body, path="/tokenize", headers=[("content-length", "1024")])
    got = await told(serve_ext_proc, one(waiting(A=0)), request, max_body_bytes=1024)
    assert got == canonical(ROUTE(A, body=body))


async def test_a_body_announced_above_the_limit_gets_413_once_it_is(serve_ext_proc: Serve) -> None:
    """Not sooner: many clients read nothing before they have sent what they announced."""
    request = REQ(b"x" * 600, b"x" * 600, headers=[("content-length", "1200")])
    async with serve_ext_proc(one(waiting(A=0)), max_body_bytes=1024) as served:
        assert await served.replies(request[:2]) == []
        assert await served.replies(request) == REJECT(413)


async def test_bodies_that_together_take_too_much_memory_get_429(serve_ext_proc: Serve) -> None:
    body = b'{"model":"m","prompt":"' + b"x" * 600 + b'"}'
    async with serve_ext_proc(one(waiting(A=0)), max_collected_bytes=1000) as served:
        first = REQ(body[:-1], body[-1:])
        slow = await served.sent(first[:-1])
        async with asyncio.timeout(5):
            while await served.replies(REQ(body)) != REJECT(429):
                await asyncio.sleep(0.005)
        await slow.write(first[-1])
        assert canonical([await slow.read() for _ in range(2)]) == canonical(ROUTE(A, body=body))
        assert await served.replies(REQ(body)) == canonical(ROUTE(A, body=body))


async def test_a_stream_that_is_cut_gives_its_memory_back(serve_ext_proc: Serve) -> None:
    async with serve_ext_proc(one(waiting(A=0)), max_collected_bytes=100) as served:
        for _ in range(5):
            assert await served.replies(REQ(BODY)[:-1]) == []
            assert await served.replies(REQ(BODY[:30], BODY[30:])[:-1]) == []
        assert await served.replies(REQ()) == canonical(ROUTE(A))


async def test_an_unknown_body_mode_ends_the_stream_with_a_clear_error(serve_ext_proc: Serve) -> None:
    request = REQ()[:1]
    request[0].protocol_config.request_body_mode = 5
    async with serve_ext_proc(one(waiting(A=0))) as served:
        stream = await served.sent(request)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stream.read()
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "GRPC" in (error.value.details() or "")


async def test_a_full_duplex_body_without_headers_is_an_error_that_says_so(serve_ext_proc: Serve) -> None:
    async with serve_ext_proc(one(waiting(A=0))) as served:
        stream = await served.sent(in_modes(REQ()[1:], request="FULL_DUPLEX_STREAMED"))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stream.read()
        assert "request_header_mode" in (error.value.details() or "")


async def test_one_server_speaks_all_modes_at_once(serve_ext_proc: Serve) -> None:
    ledger = pool([A, B, C])
    async with serve_ext_proc(one(ledger)) as served:
        picker, single = served.client.open(), served.client.open()
        request = REQ()
        await picker.write(request[0])
        await single.write(ProcessingRequest(request_body=HttpBody(body=BODY, end_of_stream=True)))
        assert (await single.read()).WhichOneof("response") == "request_body"
        await picker.write(request[1])
        assert canonical([await picker.read() for _ in range(2)]) == canonical(ROUTE(B))
        assert sum(open_reservations(ledger).values()) == 2
