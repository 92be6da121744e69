"""Token counts are found in a response however it is cut, and nothing in it can break the search."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ext_proc.usage import MAX_USAGE_BYTES, Usage, UsageReader


def usage_of(*chunks: bytes) -> Usage | None:
    reader = UsageReader()
    for chunk in chunks:
        reader.feed(chunk)
    return reader.usage


SSE = (
    b'data: {"choices":[{"text":"\\"usage\\":{"}],"usage":null}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"total_tokens":17,"completion_tokens":10,'
    b'"prompt_tokens_details":{"cached_tokens":3}}}\n\ndata: [DONE]\n\n'
)


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        (SSE, Usage(7, 10)),
        (b'{"choices":[],"usage": {"prompt_tokens": 7, "completion_tokens": 10}}', Usage(7, 10)),
        (b'{"usage":{"input_tokens":7,"output_tokens":10},"object":"response"}', Usage(7, 10)),
        (b'{"usage":{"prompt_tokens":7,"total_tokens":7}}', Usage(7, 0)),
        (
            b'data: {"usage":{"prompt_tokens":7,"completion_tokens":1}}\n\ndata: {"usage":'
            b'{"prompt_tokens":7,"completion_tokens":2}}\n\n',
            Usage(7, 2),
        ),
        (b'{"usage":"none"}', None),
        (b'{"usage":{"prompt_tokens":"7"}}', None),
        (b'{"usage":{"prompt_tokens":7', None),
        (b"", None),
    ],
)
def test_the_last_usage_object_counts(body: bytes, usage: Usage | None) -> None:
    assert usage_of(body) == usage


@given(st.lists(st.integers(0, len(SSE)), max_size=20))
def test_the_counts_do_not_depend_on_where_chunks_end(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(SSE)]
    assert usage_of(*(SSE[a:b] for a, b in pairwise(edges))) == Usage(7, 10)


@given(st.lists(st.binary() | st.sampled_from([b'"usage"', b'"usage":{', b'{"a":"', b"}", b'"', b"\\"])))
def test_no_bytes_break_the_search(chunks: list[bytes]) -> None:
    usage_of(*chunks)


def test_an_endless_usage_object_is_given_up() -> None:
    reader = UsageReader()
    reader.feed(b'{"usage":{"a":"')
    for _ in range(64):
        reader.feed(b"x" * (MAX_USAGE_BYTES // 16))
    reader.feed(b'"},"usage":{"prompt_tokens":7,"completion_tokens":10}}')
    assert reader.usage == Usage(7, 10)
