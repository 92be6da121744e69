"""What is known of a request before its body: read from its headers, or from Envoy's request attributes.

Reads only; must never decide or fail. Names are compared without regard to case; the first of several values
counts, and `raw_value` is preferred to `value`, as the endpoint-picker protocol asks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import xxhash
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpHeaders, ProcessingRequest

from ext_proc.protocol_names import EXPLAIN_HEADER, GATEWAY_HEADERS, PRIORITY_HEADER, TENANT_HEADER
from ext_proc.vocabulary import RequestFacts

REQUEST_ID_HEADER = "x-request-id"
TEST_SELECTION_HEADER = "test-epp-endpoint-selection"

FAIRNESS_HEADERS = ("x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id")
"""What gateways of the endpoint-picker protocol call a tenant."""

CONTROL_HEADERS = frozenset(
    {
        *GATEWAY_HEADERS,
        *FAIRNESS_HEADERS,
        "x-gateway-destination-endpoint-fallback",
        "x-gateway-inference-objective",
        "x-gateway-model-name-rewrite",
        "x-llm-d-inference-objective",
        "x-llm-d-model-name-rewrite",
        TEST_SELECTION_HEADER,
        # To vLLM an index local to the server: anything but 0 is a 400 in external mode.
        "x-data-parallel-rank",
    }
)
"""Meant for the endpoint picker: they end here."""

MAX_TENANT_CHARS = 128
"""Of a longer name of a tenant only the beginning counts."""

_FILTER_NAME = "envoy.filters.http.ext_proc"
PATH_ATTRIBUTE = "request.path"
REQUEST_ID_ATTRIBUTE = "request.id"
_INTEGER = re.compile(r"[+-]?[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class HeadNames:
    """The headers whose names a configuration chooses, in lower case."""

    tenant: str = TENANT_HEADER
    session: str | None = None
    """`None`: requests belong to no sessions."""
    explain: str | None = EXPLAIN_HEADER
    """`None`: clients are shown no decisions."""


DEFAULT_NAMES = HeadNames()


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
    priority: int | None = None
    """`None`: what the body says counts."""
    priority_is_ignored: bool = False
    """Whether the header that names the priority holds something else than an integer of up to 9 digits."""
    tenant: str = ""
    session: int | None = None
    """A hash of the session's name, so that its length does not matter."""
    wants_explanation: bool = False

    def complete(self, facts: RequestFacts) -> RequestFacts:
        """The facts of the request with what its head says of it."""
        if self.priority is None and not self.tenant and self.session is None and not self.wants_explanation:
            return facts
        return replace(
            facts,
            priority=facts.priority if self.priority is None else self.priority,
            tenant=self.tenant,
            session=self.session,
            wants_explanation=self.wants_explanation,
        )


def request_attributes(names: HeadNames) -> tuple[str, ...]:
    """The request attributes that Envoy must send where it does not send headers."""
    headers = (PRIORITY_HEADER, names.tenant, names.session, names.explain)
    return (PATH_ATTRIBUTE, REQUEST_ID_ATTRIBUTE, *(_attribute(name) for name in headers if name is not None))


def head_of_headers(message: HttpHeaders, names: HeadNames = DEFAULT_NAMES) -> RequestHead:
    """The head of a request whose headers were sent."""
    return head_of_values(values(message), names)


def head_of_values(headers: Mapping[str, str], names: HeadNames) -> RequestHead:
    """The same from headers by their name in lower case."""

    def header(name: str) -> str:
        return headers.get(name, "")

    return RequestHead(
        path=header(":path"),
        request_id=header(REQUEST_ID_HEADER),
        content_length_bytes=_length(header("content-length")),
        control_headers=tuple(sorted(CONTROL_HEADERS & headers.keys())),
        test_selection=headers.get(TEST_SELECTION_HEADER),
        priority=_priority(header(PRIORITY_HEADER)),
        priority_is_ignored=_is_ignored(header(PRIORITY_HEADER)),
        tenant=_tenant(header, (names.tenant, *FAIRNESS_HEADERS)),
        session=_session(header, names),
        wants_explanation=_wants_explanation(header, names),
    )


def head_of_attributes(message: ProcessingRequest, names: HeadNames = DEFAULT_NAMES) -> RequestHead:
    """The head of a request whose headers were not sent: what attributes say, empty what they do not."""
    attributes = message.attributes
    if _FILTER_NAME not in attributes:
        return RequestHead(path="", request_id="")
    fields = attributes[_FILTER_NAME].fields

    def text(attribute: str) -> str:
        return fields[attribute].string_value if attribute in fields else ""

    def header(name: str) -> str:
        return text(_attribute(name))

    return RequestHead(
        path=text(PATH_ATTRIBUTE),
        request_id=text(REQUEST_ID_ATTRIBUTE),
        priority=_priority(header(PRIORITY_HEADER)),
        priority_is_ignored=_is_ignored(header(PRIORITY_HEADER)),
        tenant=_tenant(header, (names.tenant,)),
        session=_session(header, names),
        wants_explanation=_wants_explanation(header, names),
    )


def values(message: HttpHeaders) -> dict[str, str]:
    """All headers by their name in lower case."""
    found: dict[str, str] = {}
    for header in message.headers.headers:
        raw: bytes = header.raw_value
        found.setdefault(header.key.lower(), raw.decode("utf-8", "replace") if raw else header.value)
    return found


def _attribute(header: str) -> str:
    return f"request.headers['{header}']"


def _priority(text: str) -> int | None:
    return int(text) if _INTEGER.fullmatch(text) else None


def _is_ignored(priority: str) -> bool:
    return bool(priority) and _priority(priority) is None


def _tenant(header: Callable[[str], str], names: tuple[str, ...]) -> str:
    return next((value for name in names if (value := header(name))), "")[:MAX_TENANT_CHARS]


def _session(header: Callable[[str], str], names: HeadNames) -> int | None:
    value = header(names.session) if names.session is not None else ""
    return xxhash.xxh3_64_intdigest(value.encode("utf-8", "surrogatepass")) if value else None


def _wants_explanation(header: Callable[[str], str], names: HeadNames) -> bool:
    return names.explain is not None and header(names.explain) not in ("", "0")


def _length(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None
