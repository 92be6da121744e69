"""One-message mode: headers are not sent, the body comes in one message, the pick goes back in its reply.

The cheapest mode that sees the prompt. Also serves BUFFERED_PARTIAL, where the message may hold only the
first part of the body. Routing is by dynamic metadata alone: Envoy has let the headers through before.
"""

from __future__ import annotations

from collections.abc import Iterable

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

from ext_proc import messages
from ext_proc.body_modes import BUFFERED
from ext_proc.facts import read_facts, read_facts_of_prefix
from ext_proc.protocol import ProtocolSettings, Step
from ext_proc.request_head import RequestHead, head_of_attributes


class OneMessage:
    """The request phases of one stream."""

    __slots__ = ("_asked", "_mode", "_settings", "head")

    def __init__(self, mode: int, settings: ProtocolSettings) -> None:
        self._mode = mode
        self._settings = settings
        self.head = RequestHead(path="", request_id="")
        self._asked = False

    def on_message(self, kind: str, message: ProcessingRequest) -> Step:
        """The first body message decides; everything else passes."""
        if self._asked or kind != "request_body":
            return (messages.passed(kind),)
        self._asked = True
        self.head = head = head_of_attributes(message, self._settings.head_names)
        body = message.request_body
        if body.end_of_stream or self._mode == BUFFERED:
            return read_facts(head.path, body.body, head.request_id, self._settings.tokenise)
        return read_facts_of_prefix(head.path, body.body, head.request_id)

    def on_placed(self, endpoints: tuple[str, ...]) -> Iterable[bytes]:
        """The reply to the body."""
        return (messages.routed(endpoints),)

    def renamed(self) -> None:
        """Names are not changed in this mode."""

    def discard(self) -> None:
        """Nothing is kept."""
