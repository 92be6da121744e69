"""Modes in which headers are sent and bodies are not streamed both ways.

Header-only (NONE, STREAMED): the decision is made on the headers, before any of the body is known.
BUFFERED and BUFFERED_PARTIAL: it is made on the body or its first part, while Envoy still holds the headers;
a request without a body is decided on its headers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

from ext_proc import messages
from ext_proc.body_modes import BUFFERED, NONE, STREAMED
from ext_proc.facts import facts_without_body, read_facts, read_facts_of_prefix
from ext_proc.protocol import ProtocolSettings, Step
from ext_proc.protocol_names import DESTINATION
from ext_proc.request_head import REQUEST_ID_HEADER, RequestHead, head_of_headers
from ext_proc.vocabulary import RequestFacts


class HeadersFirst:
    """The request phases of one stream."""

    __slots__ = (
        "_decided_by",
        "_mode",
        "_new_headers",
        "_new_request_id",
        "_request_id",
        "_settings",
        "head",
    )

    def __init__(self, mode: int, settings: ProtocolSettings, new_request_id: Callable[[], str]) -> None:
        self._mode = mode
        self._settings = settings
        self._new_request_id = new_request_id
        self.head = RequestHead(path="", request_id="")
        self._request_id = ""
        self._new_headers: dict[str, str] = {}
        self._decided_by: str | None = None

    def on_message(self, kind: str, message: ProcessingRequest) -> Step:
        """Headers, then perhaps a body; the first of them that tells all it will tell decides."""
        if self._decided_by is not None:
            return (messages.passed(kind),)
        if kind == "request_headers":
            return self._on_headers(message)
        self._decided_by = kind
        if kind == "request_body":
            return self._facts_of_body(message)
        return facts_without_body(self.head.path, self._request_id, None)

    def on_placed(self, endpoints: tuple[str, ...]) -> Iterable[bytes]:
        """The reply to the message that decided."""
        if self._decided_by == "request_body":
            return (messages.routed_with_header(endpoints),)
        if self._decided_by == "request_trailers":
            return (messages.routed_by_trailers(endpoints),)
        remove = self.head.control_headers
        return (messages.headers_routed(endpoints, overwrite=self._new_headers, remove=remove),)

    def renamed(self) -> None:
        """Names are not changed in these modes."""

    def discard(self) -> None:
        """Nothing is kept."""

    def _on_headers(self, message: ProcessingRequest) -> Step:
        self.head = head = head_of_headers(message.request_headers, self._settings.head_names)
        self._request_id = head.request_id or self._new_request_id()
        if not head.request_id:
            self._new_headers = {REQUEST_ID_HEADER: self._request_id}
        has_body = not message.request_headers.end_of_stream
        if not has_body or self._mode in (NONE, STREAMED):
            self._decided_by = "request_headers"
            length = self._announced_bytes if has_body else None
            return facts_without_body(head.path, self._request_id, length)
        return (
            messages.headers_changed(
                "request_headers",
                overwrite=self._new_headers,
                remove=(DESTINATION, *head.control_headers),
            ),
        )

    def _facts_of_body(self, message: ProcessingRequest) -> RequestFacts:
        head, body = self.head, message.request_body
        if body.end_of_stream or self._mode == BUFFERED:
            return read_facts(head.path, body.body, self._request_id, self._settings.tokenise)
        return read_facts_of_prefix(head.path, body.body, self._request_id, self._announced_bytes)

    @property
    def _announced_bytes(self) -> int | None:
        """How long the client says its body is; not believed beyond what a body may be."""
        announced = self.head.content_length_bytes
        return None if announced is None else min(announced, self._settings.max_body_bytes)
