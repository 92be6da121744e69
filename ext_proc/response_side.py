"""The response phases of one stream: everything passes, and what the response tells is noted on the way.

Must never hold back a response, except the few bytes at the end of a chunk in which a model's name may begin.
"""

from __future__ import annotations

from collections.abc import Iterable

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

from ext_proc import messages
from ext_proc.body_modes import FULL_DUPLEX
from ext_proc.gateway_metadata import served_endpoint
from ext_proc.model_names import NameRestorer
from ext_proc.protocol_names import DECISION_HEADER
from ext_proc.request_head import values
from ext_proc.usage import Usage, UsageReader

TEST_SERVED_HEADER = "x-conformance-test-served-endpoint"


class ResponseSide:
    """One response."""

    __slots__ = (
        "_decision",
        "_full_duplex",
        "_renamed",
        "_restorer",
        "_shows_served",
        "_usage_reader",
        "has_ended",
        "served",
        "status",
    )

    def __init__(
        self, mode: int, *, renamed: tuple[str, str] | None, shows_served: bool, decision: str | None
    ) -> None:
        """A response in body mode `mode`.

        Args:
            mode: how its body travels.
            renamed: the model's name to the ranks and to the client, if they differ.
            shows_served: copy the served endpoint to a header, for the conformance tests.
            decision: the decision in words, if the client wants to see it in a header.
        """
        self._full_duplex = mode == FULL_DUPLEX
        self._renamed = renamed if self._full_duplex else None
        self._shows_served = shows_served
        self._decision = decision
        self._restorer: NameRestorer | None = None
        self._usage_reader = UsageReader()
        self.has_ended = False
        """Whether all of it was seen."""
        self.served: str | None = None
        """Endpoint that the gateway says it came from."""
        self.status: int | None = None
        """HTTP status."""

    @property
    def usage(self) -> Usage | None:
        """The tokens it says it took."""
        return self._usage_reader.usage

    def on_message(self, kind: str, message: ProcessingRequest) -> Iterable[bytes]:
        """The replies to one message. After the end, full-duplex messages are ignored (envoy#46237)."""
        if self.has_ended:
            return () if self._full_duplex else (messages.passed(kind),)
        if self.served is None:
            self.served = served_endpoint(message)
        if kind == "response_headers":
            return self._on_headers(message)
        if kind == "response_body":
            return self._on_body(message.response_body.body, message.response_body.end_of_stream)
        return self._on_trailers()

    def _on_headers(self, message: ProcessingRequest) -> Iterable[bytes]:
        headers = values(message.response_headers)
        status = headers.get(":status", "")
        self.status = int(status) if status.isascii() and status.isdigit() and len(status) == 3 else None
        self.has_ended = message.response_headers.end_of_stream
        remove = []
        if self._renamed and not self.has_ended and headers.get("content-encoding", "identity") == "identity":
            rank_name, client_name = self._renamed
            self._restorer = NameRestorer(rank_name=rank_name, client_name=client_name)
            remove.append("content-length")
        shown = {TEST_SERVED_HEADER: self.served} if self._shows_served and self.served else {}
        if self._decision is not None:
            shown[DECISION_HEADER] = self._decision
        return (messages.headers_changed("response_headers", overwrite=shown, remove=remove),)

    def _on_body(self, chunk: bytes, end_of_stream: bool) -> Iterable[bytes]:
        self._usage_reader.feed(chunk)
        self.has_ended = end_of_stream
        if not self._full_duplex:
            return (messages.passed("response_body"),)
        if self._restorer is not None:
            chunk = self._restorer.feed(chunk, end_of_stream=end_of_stream)
            if not chunk and not end_of_stream:
                return ()
        return messages.streamed("response_body", chunk, end_of_stream=end_of_stream)

    def _on_trailers(self) -> Iterable[bytes]:
        self.has_ended = True
        passed = messages.passed("response_trailers")
        rest = self._restorer.feed(b"", end_of_stream=True) if self._restorer is not None else b""
        return (*messages.streamed("response_body", rest, end_of_stream=False), passed) if rest else (passed,)
