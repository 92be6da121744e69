"""JSON that was cut off anywhere is completed to valid JSON that says the same, only less."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ext_proc.cut_json import MAX_DEPTH, complete


@pytest.mark.parametrize(
    ("cut", "completed"),
    [
        (b'{"model": "m", "messages": [{"role": "user", "content": "hel', None),
        (b'{"a": 1, "b": 2', b'{"a": 1}'),
        (b'{"a": 1, "b": tru', b'{"a": 1}'),
        (b'{"a": "x", "b"', b'{"a": "x"}'),
        (b'{"a": "x", "b', b'{"a": "x"}'),
        (b'{"a": "x"', b'{"a": "x"}'),
        (b'{"a": [1, 2, 34', b'{"a": [1, 2]}'),
        (b'{"a": [[1, 2], 3', b'{"a": [[1, 2]]}'),
        (b'{"a": ["x", "y', b'{"a": ["x", "y"]}'),
        (b'{"a": {"b": 1}, "c": ', b'{"a": {"b": 1}}'),
        (b'{"a": "one \\', b'{"a": "one "}'),
        (b'{"a": "one \\u00e', b'{"a": "one "}'),
        (b'{"a": "caf\xc3', b'{"a": "caf"}'),
        (b'{"a": "} ] \\" {', b'{"a": "} ] \\" {"}'),
        (b"{", b"{}"),
        (b"[", b"[]"),
    ],
)
def test_what_is_incomplete_is_dropped_and_brackets_are_closed(cut: bytes, completed: bytes | None) -> None:
    assert complete(cut) == (completed if completed is not None else cut + b'"}]}')


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=25,
)
_documents = st.dictionaries(st.text(max_size=5), _json) | st.lists(_json)


def is_beginning(part: Any, whole: Any) -> bool:
    """Whether `part` is what `whole` says, up to some point."""
    if isinstance(whole, dict) and isinstance(part, dict):
        return list(part) == list(whole)[: len(part)] and all(is_beginning(part[k], whole[k]) for k in part)
    if isinstance(whole, list) and isinstance(part, list):
        return len(part) <= len(whole) and all(map(is_beginning, part, whole))
    if isinstance(whole, str) and isinstance(part, str):
        # A cut may fall between the two escapes of one character.
        return whole.encode("utf-16-be", "surrogatepass").startswith(
            part.encode("utf-16-be", "surrogatepass")
        )
    return bool(part == whole)


@given(_documents, st.booleans(), st.sampled_from([None, 1]), st.data())
def test_any_cut_of_any_document_reads_as_its_beginning(
    document: Any, ascii_only: bool, indent: int | None, data: st.DataObject
) -> None:
    text = json.dumps(document, ensure_ascii=ascii_only, indent=indent).encode()
    cut = text[: data.draw(st.integers(1, len(text)))]
    assert is_beginning(json.loads(complete(cut)), document)


def test_a_text_nested_deeper_than_any_request_is_left_as_it_is() -> None:
    assert complete(b"[" * MAX_DEPTH) == b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert complete(b"[" * (MAX_DEPTH + 1)) == b"[" * (MAX_DEPTH + 1)


@given(st.binary() | st.text(alphabet='{}[]",:\\u0a ').map(str.encode))
def test_no_bytes_break_the_completion(text: bytes) -> None:
    complete(text)


@pytest.mark.parametrize(
    "unit", [b"[", b"{", b'"', b"\\", b'{"', b'["', b'[""],', b"[],", b'"\\', b"1,", b'"a",']
)
def test_the_time_grows_with_the_length_and_no_faster(unit: bytes) -> None:
    text = b'{"a": [' + unit * (131_072 // len(unit))
    started_s = time.perf_counter()
    complete(text)
    assert time.perf_counter() - started_s < 2.0
