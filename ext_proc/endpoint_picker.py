"""Endpoint-picker mode (FULL_DUPLEX_STREAMED): how Istio, Envoy Gateway, kgateway and GKE talk to a picker.

The reply to the headers is withheld until the body has ended; then go headers, body in pieces, trailers.
The body is passed on as it came (but for the model's name, where the configuration maps it). It is kept
until then, within bounds; once passed on it is forgotten.

Protocol 1.0.0 of gateway-api-inference-extension (proposal 004) and the practice of its gateways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

from ext_proc import messages
from ext_proc.body_modes import UnsupportedModeError
from ext_proc.decision import DropReason, Refused
from ext_proc.facts import call_kind, facts_of, facts_without_body, fault_of, parse, with_tokens
from ext_proc.model_names import with_model
from ext_proc.protocol import CollectedBodies, ProtocolSettings, Step
from ext_proc.request_head import REQUEST_ID_HEADER, RequestHead, head_of_headers


class EndpointPicker:
    """The request phases of one stream."""

    __slots__ = (
        "_chunks",
        "_collected",
        "_collected_bytes",
        "_has_begun",
        "_has_body",
        "_has_ended",
        "_has_trailers",
        "_new_headers",
        "_new_request_id",
        "_renamed",
        "_request_id",
        "_settings",
        "head",
    )

    def __init__(
        self, settings: ProtocolSettings, collected: CollectedBodies, new_request_id: Callable[[], str]
    ) -> None:
        self._settings = settings
        self._collected = collected
        self._new_request_id = new_request_id
        self.head = RequestHead(path="", request_id="")
        self._has_begun = False
        self._request_id = ""
        self._new_headers: dict[str, str] = {}
        self._chunks: list[bytes] = []
        self._collected_bytes = 0
        self._has_body = False
        self._has_trailers = False
        self._has_ended = False
        self._renamed: tuple[str, str] | None = None

    def on_message(self, kind: str, message: ProcessingRequest) -> Step:
        """Silence until the request has ended, then its facts; silence again after that.

        Some Envoys send the last chunk of a large body twice (envoyproxy/envoy#46237).
        """
        if self._has_ended:
            return ()
        if kind == "request_headers":
            return self._on_headers(message)
        if not self._has_begun:
            raise UnsupportedModeError("full-duplex bodies need request_header_mode SEND")
        if kind == "request_trailers":
            self._has_trailers = True
            return self._end()
        refused = self._collect(message.request_body.body)
        if refused is not None:
            return refused
        return self._end() if message.request_body.end_of_stream else ()

    def on_placed(self, endpoints: tuple[str, ...]) -> Iterator[bytes]:
        """Headers, body, trailers, in that order."""
        body = b"".join(self._chunks)
        new_headers = self._new_headers
        if self._has_body and not self._has_trailers:
            new_headers = {**new_headers, "content-length": str(len(body))}
        yield messages.headers_routed(endpoints, overwrite=new_headers, remove=self.head.control_headers)
        if self._has_body:
            yield from messages.streamed("request_body", body, end_of_stream=not self._has_trailers)
        if self._has_trailers:
            yield messages.passed("request_trailers")
        self.discard()

    def renamed(self) -> tuple[str, str] | None:
        """The model's name to the ranks and to the client, if they differ."""
        return self._renamed

    def discard(self) -> None:
        """Give back the memory that the body takes."""
        self._collected.bytes -= self._collected_bytes
        self._collected_bytes = 0
        self._chunks = []

    def _on_headers(self, message: ProcessingRequest) -> Step:
        self._has_begun = True
        self.head = head_of_headers(message.request_headers, self._settings.head_names)
        self._request_id = self.head.request_id or self._new_request_id()
        if not self.head.request_id:
            self._new_headers = {REQUEST_ID_HEADER: self._request_id}
        if message.request_headers.end_of_stream:
            self._has_ended = True
            return facts_without_body(self.head.path, self._request_id, None)
        # A length above the limit is not refused yet: a client that sends all before it reads, as OpenAI's
        # does, sees the refusal only if it can send nearly all; else the connection is closed under it.
        return ()

    def _collect(self, chunk: bytes) -> Refused | None:
        self._has_body = True
        if self._collected_bytes + len(chunk) > self._settings.max_body_bytes:
            return Refused(413, DropReason.BODY_TOO_LARGE)
        if not self._collected.has_room(len(chunk)):
            return Refused(429, DropReason.TOO_MANY_BODIES)
        if chunk:
            self._chunks.append(chunk)
            self._collected_bytes += len(chunk)
            self._collected.bytes += len(chunk)
        return None

    def _end(self) -> Step:
        self._has_ended = True
        body = b"".join(self._chunks)
        kind = call_kind(self.head.path)
        fields = parse(body)
        fault = None if self._settings.pass_malformed_bodies else fault_of(kind, fields)
        if fault is not None:
            return Refused(400, fault)
        facts = with_tokens(facts_of(kind, fields, self._request_id), body, self._settings.tokenise)
        rank_name = self._settings.model_names.get(facts.model or "")
        if rank_name is not None and facts.model is not None:
            self._renamed = (rank_name, facts.model)
            body = with_model(body, rank_name)
            facts = replace(facts, model=rank_name)
        self._chunks = [body]
        return facts
