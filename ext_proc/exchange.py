"""One ext_proc stream as a state machine: a message in, replies out, at most one reservation held.

The request phases depend on the body mode and are modules of their own; the response phases are one. What
binds them is here: the decision, the reservation and its end. Pure: `service` owns the socket, the clock and
the one place that ends an exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

from ext_proc import messages, refusals
from ext_proc.body_modes import (
    FULL_DUPLEX,
    NONE,
    ONE_MESSAGE,
    BodyModes,
    body_modes,
    stream_may_end_before_response,
)
from ext_proc.decision import Decider, Decision, DropReason, Held, Placed, Refused
from ext_proc.endpoint_picker import EndpointPicker
from ext_proc.explanation import in_one_line
from ext_proc.gateway_metadata import subset_hint, subset_of
from ext_proc.headers_first import HeadersFirst
from ext_proc.one_message import OneMessage
from ext_proc.protocol import CollectedBodies, ProtocolSettings, RequestSide
from ext_proc.reservation import Outcome, Reservation
from ext_proc.response_side import ResponseSide
from ext_proc.vocabulary import RequestFacts, Subset


class Exchange:
    """Follows one request from its first message to the end of its response."""

    __slots__ = (
        "_collected",
        "_decider",
        "_explanation",
        "_last_kind",
        "_modes",
        "_new_request_id",
        "_request",
        "_reservation",
        "_settings",
        "_subset",
        "decided",
        "held",
        "response",
    )

    def __init__(
        self,
        decider: Decider,
        settings: ProtocolSettings,
        collected: CollectedBodies,
        new_request_id: Callable[[], str],
    ) -> None:
        """An exchange of which nothing has been seen.

        Args:
            decider: decides about the request.
            settings: of the protocol.
            collected: the memory that bodies of all exchanges take.
            new_request_id: makes an id for a request that has none.
        """
        self._decider = decider
        self._settings = settings
        self._collected = collected
        self._new_request_id = new_request_id
        self._modes: BodyModes = ONE_MESSAGE
        self._request: RequestSide | None = None
        self._reservation: Reservation | None = None
        self._subset: Subset | None = None
        self._last_kind = ""
        self._explanation: str | None = None
        self.held: Held | None = None
        """Set while the decision is awaited: then call `on_decision` once it has been made."""
        self.decided: Placed | Refused | None = None
        """The decision, once made."""
        self.response: ResponseSide | None = None
        """What was seen of the response."""

    @property
    def is_over(self) -> bool:
        """Whether the gateway answers by itself: no message that may follow matters."""
        return isinstance(self.decided, Refused)

    @property
    def may_outlive_stream(self) -> bool:
        """Whether the request may go on after the stream has ended, for all that was seen on it."""
        reservation = self._reservation
        return (
            reservation is not None
            and reservation.outcome is None
            and stream_may_end_before_response(self._modes, self._last_kind)
        )

    def on_message(self, message: ProcessingRequest, now_s: float) -> Iterable[bytes]:
        """The serialised replies to one message; none if there is nothing to say yet.

        Replies are to be sent in order; large ones are made one by one, as they are taken.

        Raises:
            UnsupportedModeError: the gateway speaks a mode that this service does not know.
        """
        kind: str | None = message.WhichOneof("request")
        if kind is None or self.is_over:
            return ()
        if self._request is None:
            self._modes = body_modes(message)
            self._request = self._request_side(kind)
        self._last_kind = kind
        if kind.startswith("response"):
            return self._on_response(kind, message, now_s)
        hint = subset_hint(message)
        if hint is not None:
            self._subset = hint
        step = self._request.on_message(kind, message)
        if isinstance(step, RequestFacts):
            return self._settle(self._decider.decide(self._completed(step), now_s))
        if isinstance(step, Refused):
            return self._settle(step)
        return step

    def on_unreadable_message(self) -> Iterable[bytes]:
        """The reply to a message that does not parse.

        Request attributes are strings, which protobuf wants to be UTF-8, but Envoy 1.40 puts the bytes of
        headers there as they came.
        """
        if self.decided is not None or self.held is not None:
            return ()
        return self._settle(Refused(400, DropReason.MALFORMED_HEADER))

    def on_decision(self) -> Iterable[bytes]:
        """The replies to what was held, now that it has been decided."""
        assert self.held is not None
        decision = self.held.decision
        assert decision is not None
        self.held = None
        return self._settle(decision)

    def end(self, outcome: Outcome, now_s: float, *, ends_with_response: bool = False) -> None:
        """End what the exchange holds. Called once per stream, whatever happened.

        Args:
            outcome: how the stream ended.
            now_s: the time.
            ends_with_response: the gateway's configuration promises that its streams end no sooner.
        """
        if self._request is not None:
            self._request.discard()
        if self.held is not None:
            self._let_go(self.held, now_s)
        reservation = self._reservation
        if reservation is None or reservation.outcome is not None:
            return
        if outcome is Outcome.FAILED or ends_with_response:
            reservation.release(outcome, now_s)
        elif self.may_outlive_stream:
            reservation.leave_unobserved(now_s)
        else:
            # Where the response passes by and its end was not seen, it was cut short.
            cut_short = self._modes.response != NONE
            reservation.release(Outcome.CANCELLED if cut_short else outcome, now_s)

    def _request_side(self, kind: str) -> RequestSide:
        if self._modes.request == FULL_DUPLEX:
            return EndpointPicker(self._settings, self._collected, self._new_request_id)
        if kind == "request_headers":
            return HeadersFirst(self._modes.request, self._settings, self._new_request_id)
        return OneMessage(self._modes.request, self._settings)

    def _completed(self, facts: RequestFacts) -> RequestFacts:
        """The facts with what the head of the request says, and the ranks it is limited to."""
        assert self._request is not None
        head, subset = self._request.head, self._subset
        if self._settings.conformance_tests and head.test_selection:
            subset = subset_of([head.test_selection])
        facts = head.complete(facts)
        return replace(facts, subset=subset) if subset is not None else facts

    def _settle(self, decision: Decision) -> Iterable[bytes]:
        if isinstance(decision, Placed):
            self.decided = decision
            self._reservation = decision.reservation
            assert self._request is not None
            replies = self._request.on_placed(tuple(rank.endpoint for rank in decision.pick.ranks))
            if decision.reservation.facts.wants_explanation:
                ignored = self._request.head.priority_is_ignored
                self._explanation = in_one_line(decision, priority_is_ignored=ignored)
                return _explained(replies, self._explanation)
            return replies
        if isinstance(decision, Refused):
            self.decided = decision
            if self._request is not None:
                self._request.discard()
            return (refusals.answer(decision),)
        self.held = decision
        return ()

    def _let_go(self, held: Held, now_s: float) -> None:
        """The client has gone while its request was held, or just after it was decided."""
        if isinstance(held.decision, Placed):
            held.decision.reservation.release(Outcome.CANCELLED, now_s)
        elif held.decision is None:
            held.withdraw(now_s)

    def _on_response(self, kind: str, message: ProcessingRequest, now_s: float) -> Iterable[bytes]:
        if self.response is None:
            self.response = ResponseSide(
                self._modes.response,
                renamed=self._request.renamed() if self._request is not None else None,
                shows_served=self._settings.conformance_tests,
                decision=self._explanation,
            )
        replies = self.response.on_message(kind, message)
        if self._reservation is not None:
            if self.response.served is not None:
                self._reservation.move(self.response.served, now_s)
            if self.response.has_ended:
                self._reservation.release(Outcome.ENDED, now_s)
        return replies


def _explained(replies: Iterable[bytes], decision: str) -> Iterator[bytes]:
    """The same replies, of which the first routes the request and tells the decision in words, too."""
    remaining = iter(replies)
    yield messages.explained(next(remaining), decision)
    yield from remaining
