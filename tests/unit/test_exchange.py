"""One stream as a state machine: whatever arrives in whatever order, one reservation at most, ended once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
)
from hypothesis import event, given
from hypothesis import strategies as st

from ext_proc.decision import Decision, DropReason, Placed, Refused
from ext_proc.exchange import Exchange
from ext_proc.ledger import Ledger
from ext_proc.protocol import CollectedBodies, ProtocolSettings
from ext_proc.reservation import Outcome
from ext_proc.vocabulary import RequestFacts
from tests.builders import balancer, group, pool
from tests.builders_protocol import BODY, REQ, RESPONSE, Messages, in_modes

RANKS = group("g0", 2)
MODES = ["NONE", "STREAMED", "BUFFERED", "BUFFERED_PARTIAL", "FULL_DUPLEX_STREAMED"]


class HeldRequest:
    """A request that waits for a test to decide."""

    def __init__(self) -> None:
        self.decision: Placed | Refused | None = None
        self.is_withdrawn = False

    def withdraw(self, _now_s: float) -> None:
        assert self.decision is None
        assert not self.is_withdrawn
        self.is_withdrawn = True


class Told:
    """A decider that places, refuses or holds as told, and counts how often it was asked."""

    def __init__(self, ledger: Ledger, answer: str) -> None:
        self._placing = balancer(ledger)
        self.answer = answer
        self.asked: list[RequestFacts] = []
        self.held = HeldRequest()

    def decide(self, facts: RequestFacts, _now_s: float) -> Decision:
        self.asked.append(facts)
        if self.answer == "place":
            return self._placing.decide(facts, 0.0)
        return Refused(429, DropReason.QUEUE_FULL) if self.answer == "refuse" else self.held

    def settle(self, *, place: bool) -> None:
        """Decide about what is held."""
        self.answer = "place" if place else "refuse"
        decision = self.decide(self.asked.pop(), 0.0)
        assert isinstance(decision, Placed | Refused)
        self.held.decision = decision


class Stream:
    """An exchange with a pool and a decider of its own."""

    def __init__(self, answer: str = "place", *, max_body_bytes: int = 1000) -> None:
        self.ledger = pool(RANKS)
        self.decider = Told(self.ledger, answer)
        self.collected = CollectedBodies(10_000)
        settings = ProtocolSettings(max_body_bytes=max_body_bytes, pass_malformed_bodies=True)
        self.exchange = Exchange(self.decider, settings, self.collected, lambda: "new-id")

    def tell(self, *messages: ProcessingRequest) -> list[ProcessingResponse]:
        """All replies to these messages."""
        return [
            ProcessingResponse.FromString(reply)
            for message in messages
            for reply in self.exchange.on_message(message, 0.0)
        ]

    @property
    def reservations(self) -> int:
        return sum(account.reservations for account in self.ledger.accounts)

    @property
    def unobserved(self) -> int:
        return sum(len(account.unobserved) for account in self.ledger.accounts)


def test_nothing_is_said_after_a_refusal() -> None:
    stream = Stream("refuse")
    assert len(stream.tell(*REQ())) == 1
    assert stream.exchange.is_over
    assert stream.tell(*REQ(), *RESPONSE(b"x")) == []
    assert len(stream.decider.asked) == 1


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (Outcome.ENDED, Outcome.CANCELLED),
        (Outcome.CANCELLED, Outcome.CANCELLED),
        (Outcome.FAILED, Outcome.FAILED),
    ],
)
def test_a_response_whose_end_was_not_seen_was_cut_short(end: Outcome, outcome: Outcome) -> None:
    stream = Stream()
    stream.tell(*REQ(), *RESPONSE(b"x", b"y")[:2])
    assert isinstance(stream.exchange.decided, Placed)
    stream.exchange.end(end, 1.0)
    assert stream.exchange.decided.reservation.outcome is outcome


def test_a_response_whose_end_was_seen_has_ended_however_its_stream_ends() -> None:
    stream = Stream()
    stream.tell(*REQ(), *RESPONSE(b"x"))
    stream.exchange.end(Outcome.CANCELLED, 1.0)
    assert isinstance(stream.exchange.decided, Placed)
    assert stream.exchange.decided.reservation.outcome is Outcome.ENDED


def test_what_fails_is_released_where_an_end_would_leave_it_unobserved() -> None:
    stream = Stream()
    stream.tell(*in_modes(REQ()[:1], request="NONE"))
    stream.exchange.end(Outcome.FAILED, 1.0)
    assert (stream.reservations, stream.unobserved) == (0, 0)


def decisions_told(replies: Sequence[ProcessingResponse]) -> list[str]:
    """The decisions in words that replies carry as dynamic metadata."""
    return [
        reply.dynamic_metadata["wavegate"]["decision"]
        for reply in replies
        if "wavegate" in reply.dynamic_metadata.fields
    ]


def destinations(replies: Sequence[ProcessingResponse]) -> list[str]:
    """Where replies send the request, by dynamic metadata."""
    return [
        reply.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"]
        for reply in replies
        if "envoy.lb" in reply.dynamic_metadata.fields
    ]


@pytest.mark.parametrize("mode", MODES)
def test_a_client_that_asks_is_told_the_decision_with_the_route(mode: str) -> None:
    curious = REQ(headers=[("x-wavegate-explain", "1")])
    stream = Stream()
    replies = stream.tell(*in_modes(curious, request=mode))
    (told,) = decisions_told(replies)
    assert told.startswith("rank=g0/0 reason=policy held_ms=0; g0/0 ")
    assert stream.decider.asked[0].wants_explanation
    others = Stream().tell(*in_modes(REQ(), request=mode))
    assert decisions_told(others) == []
    assert destinations(replies) == destinations(others) != []


def test_what_is_known_of_a_request_before_its_body_is_part_of_its_facts() -> None:
    headers = [("x-wavegate-priority", "-2"), ("x-wavegate-tenant", "red")]
    stream = Stream()
    stream.tell(*REQ(headers=headers))
    assert (stream.decider.asked[0].priority, stream.decider.asked[0].tenant) == (-2, "red")


def test_where_the_response_passes_by_the_decision_is_added_to_its_headers() -> None:
    curious = REQ(headers=[("x-wavegate-explain", "1")])
    _, *response = Stream().tell(*curious, *RESPONSE(b"x"))[1:]
    shown = {
        option.header.key: option.header.raw_value.decode()
        for option in response[0].response_headers.response.header_mutation.set_headers
    }
    assert shown["x-wavegate-decision"].startswith("rank=g0/0")


def test_a_priority_that_is_no_number_is_told_of_in_the_decision() -> None:
    for priority, is_told in (("high", True), ("7", False)):
        headers = [("x-wavegate-explain", "1"), ("x-wavegate-priority", priority)]
        (told,) = decisions_told(Stream().tell(*REQ(headers=headers)))
        assert (
            told.endswith("; x-wavegate-priority is ignored, being no integer of up to 9 digits") is is_told
        )


_bodies = st.sampled_from([b"", BODY, BODY[:17], BODY[17:], b"x" * 400])
_messages = st.one_of(
    st.builds(lambda e: ProcessingRequest(request_headers=HttpHeaders(end_of_stream=e)), st.booleans()),
    st.builds(
        lambda b, e: ProcessingRequest(request_body=HttpBody(body=b, end_of_stream=e)), _bodies, st.booleans()
    ),
    st.builds(lambda: ProcessingRequest(request_trailers=HttpTrailers())),
    st.builds(lambda e: ProcessingRequest(response_headers=HttpHeaders(end_of_stream=e)), st.booleans()),
    st.builds(
        lambda b, e: ProcessingRequest(response_body=HttpBody(body=b, end_of_stream=e)),
        _bodies,
        st.booleans(),
    ),
    st.builds(lambda: ProcessingRequest(response_trailers=HttpTrailers())),
    st.builds(ProcessingRequest),
)


def begun(mode: str, response_mode: str, messages: Sequence[ProcessingRequest]) -> Messages:
    """The messages, of which a full-duplex stream's first are its headers, with modes on the first."""
    copies = [ProcessingRequest.FromString(message.SerializeToString()) for message in messages]
    if mode == "FULL_DUPLEX_STREAMED":
        copies.insert(0, ProcessingRequest(request_headers=HttpHeaders()))
    return in_modes(copies, request=mode, response=response_mode)


@given(
    st.sampled_from(MODES),
    st.sampled_from(MODES),
    st.lists(_messages, min_size=1, max_size=8),
    st.sampled_from(["place", "refuse", "hold"]),
    st.sampled_from([True, False, None]),
    st.sampled_from([Outcome.ENDED, Outcome.CANCELLED, Outcome.FAILED]),
    st.booleans(),
)
def test_any_messages_take_one_reservation_at_most_and_leave_nothing_behind(
    mode: str,
    response_mode: str,
    messages: Sequence[ProcessingRequest],
    answer: str,
    settles: bool | None,
    outcome: Outcome,
    promises: bool,
) -> None:
    stream = Stream(answer)
    for message in begun(mode, response_mode, messages):
        was_over = stream.exchange.is_over
        replies = stream.tell(message)
        assert not (was_over and replies)
        assert stream.reservations <= 1
        if stream.exchange.held is not None and settles is not None:
            stream.decider.settle(place=settles)
            for reply in stream.exchange.on_decision():
                ProcessingResponse.FromString(reply)
    assert len(stream.decider.asked) <= 1
    event(f"decided: {type(stream.exchange.decided).__name__}")
    stream.exchange.end(outcome, 1.0, ends_with_response=promises)
    assert stream.collected.bytes == 0
    assert stream.reservations == stream.unobserved
    if promises or outcome is Outcome.FAILED or response_mode != "NONE":
        assert stream.unobserved == 0
    waited = stream.exchange.held is not None
    assert stream.decider.held.is_withdrawn == waited


@given(st.binary(max_size=3000), st.lists(st.integers(0, 3000), max_size=6), st.booleans())
def test_an_endpoint_picker_passes_any_body_on_as_it_came(
    body: bytes, cuts: list[int], trailers: bool
) -> None:
    edges = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    chunks = [body[start:end] for start, end in pairwise(edges)]
    replies = Stream(max_body_bytes=3000).tell(*REQ(*chunks, trailers=trailers))
    kinds = [reply.WhichOneof("response") for reply in replies]
    assert kinds == [
        "request_headers",
        *["request_body"] * (len(kinds) - 1 - trailers),
        *["request_trailers"] * trailers,
    ]
    pieces = [
        r.request_body.response.body_mutation.streamed_response for r in replies if r.HasField("request_body")
    ]
    assert b"".join(piece.body for piece in pieces) == body
    assert [piece.end_of_stream for piece in pieces] == [False] * (len(pieces) - 1) + [not trailers]
