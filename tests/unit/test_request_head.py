"""What is read from a request's headers, in whatever spelling they come."""

from __future__ import annotations

import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpHeaders, ProcessingRequest
from google.protobuf.struct_pb2 import Struct
from hypothesis import given
from hypothesis import strategies as st

from ext_proc.request_head import (
    CONTROL_HEADERS,
    MAX_TENANT_CHARS,
    HeadNames,
    RequestHead,
    head_of_attributes,
    head_of_headers,
    request_attributes,
)
from tests.builders import request


def headers(*pairs: tuple[str, str | bytes]) -> HttpHeaders:
    """Headers in `raw_value` where bytes are given, else in `value`."""
    message = HttpHeaders()
    for name, value in pairs:
        header = message.headers.headers.add()
        header.key = name
        if isinstance(value, bytes):
            header.raw_value = value
        else:
            header.value = value
    return message


def test_path_id_and_length_are_read() -> None:
    head = head_of_headers(
        headers((":path", b"/v1/completions"), ("x-request-id", b"r"), ("content-length", b"12"))
    )
    assert head == RequestHead(path="/v1/completions", request_id="r", content_length_bytes=12)


def test_the_first_of_several_values_counts() -> None:
    assert head_of_headers(headers(("x-request-id", b"a"), ("X-Request-Id", b"b"))).request_id == "a"


def test_raw_values_are_preferred() -> None:
    message = headers(("x-request-id", b"raw"))
    message.headers.headers[0].value = "plain"
    assert head_of_headers(message).request_id == "raw"
    assert head_of_headers(headers(("x-request-id", "plain"))).request_id == "plain"


@pytest.mark.parametrize("length", ["", "-1", "1.5", "٣", "1" * 400, "abc"])
def test_a_length_that_is_none_is_unknown(length: str) -> None:
    assert head_of_headers(headers(("content-length", length.encode()))).content_length_bytes is None


@given(st.lists(st.tuples(st.text(max_size=20), st.binary(max_size=20) | st.text(max_size=20))))
def test_no_headers_break_the_reading(pairs: list[tuple[str, str | bytes]]) -> None:
    head_of_headers(headers(*pairs))


NAMES = HeadNames(tenant="x-team", session="x-chat")


def attributes(**headers: str) -> ProcessingRequest:
    """A message with the attributes that Envoy sends for these headers (`_` for `-`), and no others."""
    sent = Struct()
    sent.update({"request.path": "/v1/completions", "request.id": "r"})
    sent.update({f"request.headers['{name.replace('_', '-')}']": value for name, value in headers.items()})
    message = ProcessingRequest()
    message.attributes["envoy.filters.http.ext_proc"].CopyFrom(sent)
    return message


def in_both(names: HeadNames = NAMES, **values: str) -> RequestHead:
    """What is read from these headers, which must be the same from headers and from attributes."""
    by_attributes = head_of_attributes(attributes(**values), names)
    pairs = [(name.replace("_", "-"), value.encode()) for name, value in values.items()]
    by_headers = head_of_headers(headers(*pairs), names)
    for field in ("priority", "priority_is_ignored", "tenant", "session", "wants_explanation"):
        assert getattr(by_attributes, field) == getattr(by_headers, field)
    return by_attributes


def test_every_header_that_is_read_is_among_the_attributes_asked_for() -> None:
    asked = set(request_attributes(NAMES))
    sent = attributes(x_wavegate_priority="1", x_team="t", x_chat="c", x_wavegate_explain="1")
    assert asked == set(sent.attributes["envoy.filters.http.ext_proc"].fields)
    assert "x-chat" not in "".join(request_attributes(HeadNames()))


@pytest.mark.parametrize(
    ("text", "priority"),
    [("-3", -3), ("0", 0), ("7", 7), ("", None), ("high", None), ("1.5", None), ("9" * 10, None)],
)
def test_a_priority_is_an_integer_or_none(text: str, priority: int | None) -> None:
    head = in_both(x_wavegate_priority=text)
    assert head.priority == priority
    assert head.priority_is_ignored is (priority is None and text != "")


def test_the_priority_of_the_header_goes_before_that_of_the_body() -> None:
    facts = request(priority=5)
    assert in_both(x_wavegate_priority="-1").complete(facts).priority == -1
    assert in_both(x_wavegate_priority="0").complete(facts).priority == 0
    assert in_both().complete(facts) is facts


def test_tenant_and_session_come_from_the_headers_that_the_configuration_names() -> None:
    head = in_both(x_team="red", x_chat="42", x_wavegate_tenant="blue")
    facts = head.complete(request())
    assert (facts.tenant, facts.session) == ("red", head.session)
    assert head.session is not None
    assert head.session != in_both(x_chat="43").session
    assert in_both(HeadNames(), x_wavegate_tenant="blue", x_chat="42").session is None


def test_a_fairness_id_of_the_endpoint_picker_protocol_names_the_tenant() -> None:
    head = head_of_headers(headers(("x-gateway-inference-fairness-id", b"green")))
    assert head.tenant == "green"


def test_of_names_of_any_length_a_bounded_part_is_kept() -> None:
    head = in_both(x_team="t" * 10_000, x_chat="c" * 10_000)
    assert len(head.tenant) == MAX_TENANT_CHARS
    assert head.session is not None
    assert head.session.bit_length() <= 64


@pytest.mark.parametrize(("value", "wanted"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_an_explanation_is_wanted_or_not(value: str, wanted: bool) -> None:
    assert in_both(x_wavegate_explain=value).wants_explanation is wanted
    assert not in_both(HeadNames(explain=None), x_wavegate_explain=value).wants_explanation


def test_headers_meant_for_the_gateway_end_there() -> None:
    assert {"x-wavegate-priority", "x-wavegate-tenant", "x-wavegate-explain"} <= CONTROL_HEADERS
    named = headers(("x-wavegate-tenant", b"a"), ("x-team", b"b"), ("x-chat", b"c"))
    assert head_of_headers(named, NAMES).control_headers == ("x-wavegate-tenant",)
