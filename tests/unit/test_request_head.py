"""What is read from a request's headers, in whatever spelling they come."""

from __future__ import annotations

import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpHeaders
from hypothesis import given
from hypothesis import strategies as st

from ext_proc.request_head import RequestHead, head_of_headers


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
