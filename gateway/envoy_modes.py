"""The ways in which Envoy can talk to the gateway: what it sends of a request and its response, and when.

Data alone; must never know a configuration. What each mode needs beside the processing mode was found on
Envoy 1.40.0 and is kept true by tests/e2e/test_body_modes.py; envoy/README.md compares the modes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

SKIP, SEND = "SKIP", "SEND"
NONE, BUFFERED, BUFFERED_PARTIAL = "NONE", "BUFFERED", "BUFFERED_PARTIAL"
FULL_DUPLEX = "FULL_DUPLEX_STREAMED"


class EnvoyMode(StrEnum):
    """Names of the modes, as configurations spell them."""

    ONE_MESSAGE = "one_message"
    HEADER_ONLY = "header_only"
    PARTIAL_BODY = "partial_body"
    ENDPOINT_PICKER = "endpoint_picker"
    ENDPOINT_PICKER_REQUESTS = "endpoint_picker_requests"


@dataclass(frozen=True, slots=True)
class ModeTraits:
    """What Envoy sends, in the words of ext_proc's ProcessingMode, and what follows from it."""

    request_header: str
    request_body: str
    request_trailer: str = SKIP
    response_header: str = SKIP
    response_body: str = NONE
    response_trailer: str = SKIP
    holds_headers: bool = False
    """A buffer filter after ext_proc keeps the headers from the router until the body is complete and picked
    for. Only where ext_proc gets all of the body: after one that gets none, Envoy 1.40 leaves clients without
    an answer whose bodies are too large."""

    @property
    def sends_headers(self) -> bool:
        """Whether the gateway gets the request's headers; otherwise it gets the attributes it asks for."""
        return self.request_header == SEND

    @property
    def sends_part_of_body(self) -> bool:
        """Whether bodies that are too long for Envoy's buffers are sent without their end."""
        return self.request_body == BUFFERED_PARTIAL

    @property
    def sees_responses(self) -> bool:
        """Whether responses pass through the gateway."""
        return self.response_body != NONE

    @property
    def promises_stream_end(self) -> bool:
        """Whether the gateway has to be told that streams end with the response: it cannot see that, because
        which trailers are sent is not in what Envoy tells it."""
        return self.sends_headers and not self.sees_responses


MODES: Mapping[EnvoyMode, ModeTraits] = {
    EnvoyMode.ONE_MESSAGE: ModeTraits(SKIP, BUFFERED, holds_headers=True),
    # Sending the response's trailers, which hardly any has, keeps the stream open until the response ends.
    EnvoyMode.HEADER_ONLY: ModeTraits(SEND, NONE, response_trailer=SEND),
    EnvoyMode.PARTIAL_BODY: ModeTraits(SEND, BUFFERED_PARTIAL, response_trailer=SEND),
    EnvoyMode.ENDPOINT_PICKER: ModeTraits(
        SEND,
        FULL_DUPLEX,
        request_trailer=SEND,
        response_header=SEND,
        response_body=FULL_DUPLEX,
        response_trailer=SEND,
    ),
    EnvoyMode.ENDPOINT_PICKER_REQUESTS: ModeTraits(
        SEND, FULL_DUPLEX, request_trailer=SEND, response_trailer=SEND
    ),
}
"""Every mode that is rendered. In each a stream lives as long as its request."""
