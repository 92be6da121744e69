"""One ext_proc stream as a state machine: a message in, a reply out, at most one reservation held.

Pure: `service` owns the socket, the clock and the one place that ends an exchange.
"""

from __future__ import annotations

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

from ext_proc import messages
from ext_proc.balancer import Balancer
from ext_proc.facts import read_facts
from ext_proc.ledger import Outcome, Reservation
from ext_proc.vocabulary import Pick


class Exchange:
    """Follows one request from its body to the end of its response."""

    __slots__ = ("_balancer", "_reservation", "pick")

    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer
        self._reservation: Reservation | None = None
        self.pick: Pick | None = None
        """The decision, once made."""

    def on_message(self, message: ProcessingRequest, now_s: float) -> bytes:
        """The serialised reply to one message of Envoy's.

        The first message with the whole request body is answered with a pick; everything else passes.
        """
        is_whole_body = message.HasField("request_body") and message.request_body.end_of_stream
        if not is_whole_body or self.pick is not None:
            return messages.passed(message)
        facts = read_facts(
            path=messages.attribute(message, "request.path"),
            body=message.request_body.body,
            request_id=messages.attribute(message, "request.id"),
        )
        self.pick, self._reservation = self._balancer.pick_and_reserve(facts, now_s)
        return messages.routed(tuple(rank.endpoint for rank in self.pick.ranks))

    def end(self, outcome: Outcome, now_s: float) -> None:
        """Release what the exchange holds. Called once per stream, whatever happened."""
        if self._reservation is not None:
            self._reservation.release(outcome, now_s)
