"""What is known of a request before its body: read from its headers, or from Envoy's request attributes.

Reads only; must never decide or fail. Names are compared without regard to case; the first of several values
counts, and `raw_value` is preferred to `value`, as the endpoint-picker protocol asks.
"""

from __future__ import annotations

from dataclasses import dataclass

from envoy.service.ext_proc.v3.external_processor_pb2 import HttpHeaders, ProcessingRequest

REQUEST_ID_HEADER = "x-request-id"
TEST_SELECTION_HEADER = "test-epp-endpoint-selection"

CONTROL_HEADERS = frozenset(
    {
        "x-gateway-destination-endpoint-fallback",
        "x-gateway-inference-objective",
        "x-gateway-inference-fairness-id",
        "x-gateway-model-name-rewrite",
        "x-llm-d-inference-objective",
        "x-llm-d-inference-fairness-id",
        "x-llm-d-model-name-rewrite",
        TEST_SELECTION_HEADER,
        # To vLLM an index local to the server: anything but 0 is a 400 in external mode.
        "x-data-parallel-rank",
    }
)
"""Meant for the endpoint picker: they end here."""

_FILTER_NAME = "envoy.filters.http.ext_proc"
PATH_ATTRIBUTE = "request.path"
REQUEST_ID_ATTRIBUTE = "request.id"


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The parts of a request's headers that matter here."""

    path: str
    request_id: str
    """Empty if the request has none."""
    content_length_bytes: int | None = None
    control_headers: tuple[str, ...] = ()
    """Which of `CONTROL_HEADERS` the request carries."""
    test_selection: str | None = None
    """What the conformance tests' header asks for."""


def head_of_headers(message: HttpHeaders) -> RequestHead:
    """The head of a request whose headers were sent."""
    headers = values(message)
    return RequestHead(
        path=headers.get(":path", ""),
        request_id=headers.get(REQUEST_ID_HEADER, ""),
        content_length_bytes=_length(headers.get("content-length", "")),
        control_headers=tuple(sorted(CONTROL_HEADERS & headers.keys())),
        test_selection=headers.get(TEST_SELECTION_HEADER),
    )


def head_of_attributes(message: ProcessingRequest) -> RequestHead:
    """The head of a request whose headers were not sent: what attributes say, empty what they do not."""
    attributes = message.attributes
    if _FILTER_NAME not in attributes:
        return RequestHead(path="", request_id="")
    fields = attributes[_FILTER_NAME].fields
    return RequestHead(
        path=fields[PATH_ATTRIBUTE].string_value if PATH_ATTRIBUTE in fields else "",
        request_id=fields[REQUEST_ID_ATTRIBUTE].string_value if REQUEST_ID_ATTRIBUTE in fields else "",
    )


def values(message: HttpHeaders) -> dict[str, str]:
    """All headers by their name in lower case."""
    found: dict[str, str] = {}
    for header in message.headers.headers:
        raw: bytes = header.raw_value
        found.setdefault(header.key.lower(), raw.decode("utf-8", "replace") if raw else header.value)
    return found


def _length(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None
