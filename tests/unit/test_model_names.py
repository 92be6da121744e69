"""A model's name is changed in a request and back in its response, and not one other byte."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ext_proc.model_names import NameRestorer, with_model


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        (b'{"model":"m"}', b'{"model":"t"}'),
        (
            b'{ "big": 12345678901234567890123, "model" :\t"m", "a": {"model": "m"} }',
            b'{ "big": 12345678901234567890123, "model" :\t"t", "a": {"model": "m"} }',
        ),
        (
            b'{"prompt": "\\"model\\":\\"m\\"", "model": "m"}',
            b'{"prompt": "\\"model\\":\\"m\\"", "model": "t"}',
        ),
        (b'{"x": "model", "model": "m"}', b'{"x": "model", "model": "t"}'),
        (b'{"model": "first", "model": "m"}', b'{"model": "first", "model": "t"}'),
        (b'{"\\u006dodel": "m"}', b'{"\\u006dodel": "t"}'),
        (b'{"model": 7}', b'{"model": 7}'),
        (b'{"messages": []}', b'{"messages": []}'),
    ],
)
def test_only_the_value_of_the_models_key_changes(body: bytes, changed: bytes) -> None:
    assert with_model(body, "t") == changed


_json = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.just("model"), inner)
    ),
    max_leaves=15,
)


@given(st.dictionaries(st.text(max_size=8), _json), st.text(), st.text(), st.booleans(), st.data())
def test_every_other_value_of_any_request_survives(
    others: dict[str, Any], model: str, name: str, ascii_only: bool, data: st.DataObject
) -> None:
    name = name.encode("utf-8", "replace").decode()
    members = list({**others, "model": model}.items())
    body = dict(data.draw(st.permutations(members)))
    text = json.dumps(body, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    changed = with_model(text, name).decode("utf-8", "surrogatepass")
    assert json.loads(changed) == {**body, "model": name}
    assert list(json.loads(changed)) == list(body)


RESPONSE = (
    b'data: {"id":"1","model":"target/x","choices":[{"delta":{"content":"\\"model\\":\\"target/x\\""}}]}\n\n'
    b'data: {"model": "target/x", "other": {"model":"other"}}\n\ndata: [DONE]\n\n'
)
RESTORED = (
    b'data: {"id":"1","model":"mine","choices":[{"delta":{"content":"\\"model\\":\\"target/x\\""}}]}\n\n'
    b'data: {"model": "mine", "other": {"model":"other"}}\n\ndata: [DONE]\n\n'
)


@given(st.lists(st.integers(0, len(RESPONSE)), max_size=20))
def test_the_clients_name_is_restored_wherever_chunks_end(cuts: list[int]) -> None:
    restorer = NameRestorer(rank_name="target/x", client_name="mine")
    edges = [0, *sorted(cuts), len(RESPONSE)]
    out = [restorer.feed(RESPONSE[start:end], end_of_stream=False) for start, end in pairwise(edges)]
    out.append(restorer.feed(b"", end_of_stream=True))
    assert b"".join(out) == RESTORED


@given(
    st.lists(
        st.binary(max_size=40) | st.sampled_from([b'"mod', b'el":', b'"t', b'"', b'"model": ']), max_size=8
    )
)
def test_a_response_that_never_names_the_model_passes_unchanged_and_nearly_at_once(
    chunks: list[bytes],
) -> None:
    restorer = NameRestorer(rank_name="t", client_name="client")
    passed = b""
    fed = b""
    for chunk in chunks:
        fed += chunk
        passed += restorer.feed(chunk, end_of_stream=False)
        if b'"model":"t"' not in fed and b'"model": "t"' not in fed:
            assert fed.startswith(passed)
            assert len(fed) - len(passed) < len('"model": "t"')
