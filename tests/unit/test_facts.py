"""What is read out of a request, and that nothing a client sends can break the reading."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ext_proc.decision import DropReason
from ext_proc.facts import (
    LEAST_URGENT,
    MAX_BODY_PARTS,
    MOST_SEQUENCES,
    MOST_TOKENS,
    MOST_URGENT,
    PREFIX_BYTES,
    call_kind,
    facts_without_body,
    fault_of,
    parse,
    read_facts,
    read_facts_of_prefix,
)
from ext_proc.vocabulary import CallKind, RequestFacts

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def facts_of(path: str = CHAT, **body: Any) -> RequestFacts:
    return read_facts(path, json.dumps(body, ensure_ascii=False).encode(), "r")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/chat/completions", CallKind.CHAT),
        ("/v1/completions", CallKind.COMPLETION),
        ("/proxy/openai/v1/completions?x=1", CallKind.COMPLETION),
        ("/v1/completions/", CallKind.COMPLETION),
        ("/v1/embeddings", CallKind.EMBEDDING),
        ("/v1/responses", CallKind.RESPONSE),
        ("/tokenize", CallKind.OTHER),
        ("", CallKind.OTHER),
    ],
)
def test_the_kind_of_call_is_told_by_the_end_of_the_path(path: str, kind: CallKind) -> None:
    assert call_kind(path) is kind


def test_a_chat_request_is_read() -> None:
    facts = facts_of(
        model="m",
        stream=True,
        max_completion_tokens=64,
        n=2,
        messages=[{"role": "system", "content": "12345678"}, {"role": "user", "content": "abcd"}],
    )
    assert facts == RequestFacts(
        kind=CallKind.CHAT,
        request_id="r",
        model="m",
        stream=True,
        prompt_chars=12,
        prompt_tokens=3,
        max_tokens=64,
        n=2,
    )


@pytest.mark.parametrize(
    ("prompt", "chars", "tokens"),
    [
        ("abcdefgh", 8, 2),
        (["abcd", "efgh"], 8, 2),
        ([1, 2, 3], 0, 3),
        ([[1, 2, 3], [4, 5]], 0, 5),
        ("日本語の文章", 6, 5),  # 18 bytes of UTF-8
        ("", 0, 0),
        ([], 0, 0),
    ],
)
def test_every_form_of_a_prompt_has_a_length(prompt: Any, chars: int, tokens: int) -> None:
    facts = facts_of(COMPLETIONS, model="m", prompt=prompt)
    assert (facts.prompt_chars, facts.prompt_tokens) == (chars, tokens)


def test_typed_content_parts_count_by_their_text() -> None:
    parts = [{"type": "text", "text": "abcd"}, {"type": "image_url", "image_url": {"url": "data:,xxxx"}}]
    assert facts_of(messages=[{"role": "user", "content": parts}]).prompt_chars == 4


def test_tool_definitions_count_as_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    with_tools = facts_of(messages=[{"role": "user", "content": "abcd"}], tools=tools)
    assert with_tools.prompt_chars == 4 + len(json.dumps(tools))


def test_max_completion_tokens_wins_over_the_older_name() -> None:
    assert facts_of(max_tokens=10, max_completion_tokens=20).max_tokens == 20


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": "m"', b'"' + b"[" * 5000, b"[" * 100_000]
)
def test_a_body_that_is_not_a_json_object_leaves_everything_absent(body: bytes) -> None:
    assert read_facts(CHAT, body, "r") == RequestFacts(kind=CallKind.CHAT, request_id="r")


def test_one_field_of_a_wrong_type_does_not_hide_the_others() -> None:
    facts = facts_of(model=7, max_tokens="many", n=-1, stream="yes", messages=[{"content": "abcd"}])
    assert (facts.model, facts.max_tokens, facts.n, facts.stream) == (None, None, 1, False)
    assert facts.prompt_tokens == 1


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
_fields = ["model", "messages", "prompt", "stream", "max_tokens", "n", "tools", "input", "content", "text"]


@given(st.dictionaries(st.sampled_from(_fields), _json) | _json)
def test_no_json_value_breaks_the_reading(body: Any) -> None:
    facts = read_facts(CHAT, json.dumps(body).encode(), "r")
    assert facts.prompt_tokens >= 0
    assert facts.n >= 1


@given(st.binary())
def test_no_bytes_break_the_reading(body: bytes) -> None:
    read_facts(CHAT, body, "r")


@pytest.mark.parametrize("depth", [50, 600, 5_000, 100_000])
@pytest.mark.parametrize(
    ("opening", "closing"),
    [("[", "]"), ('{"role":"user","content":', "}"), ('{"a":', "}"), ('[{"text":', "}]")],
)
def test_no_depth_of_nesting_breaks_the_reading(depth: int, opening: str, closing: str) -> None:
    nested = opening * depth + '"deep"' + closing * depth
    body = f'{{"model": "m", "messages": [{nested}], "prompt": {nested}, "tools": {nested}}}'.encode()
    assert read_facts(CHAT, body, "r").prompt_tokens >= 0
    assert read_facts_of_prefix(CHAT, body, "r").prompt_tokens >= 0


@pytest.mark.parametrize("part", ["[]", '"a"', "{}", "[9]", '{"role":"user","content":"a"}'])
def test_of_a_body_in_countless_parts_the_beginning_is_read(part: str) -> None:
    for_prompt = ",".join([part] * (MAX_BODY_PARTS + 1))
    body = f'{{"model": "m", "max_tokens": 5, "messages": [{for_prompt}], "n": 3}}'.encode()
    fields = parse(body)
    assert fields is not None
    assert len(fields.messages) <= PREFIX_BYTES // 2
    assert fault_of(CallKind.CHAT, fields) is None
    facts = read_facts(CHAT, body, "r")
    assert (facts.model, facts.max_tokens, facts.n) == ("m", 5, 1)


@given(st.integers(), st.integers(0, 400))
def test_no_number_is_believed_beyond_what_a_rank_could_do(factor: int, zeros: int) -> None:
    number = f"{factor}" + "0" * zeros
    body = f'{{"model": "m", "n": {number}, "max_tokens": {number}, "priority": {number}}}'.encode()
    facts = read_facts(CHAT, body, "r")
    assert 1 <= facts.n <= MOST_SEQUENCES
    assert facts.max_tokens is None or 0 < facts.max_tokens <= MOST_TOKENS
    assert MOST_URGENT <= facts.priority <= LEAST_URGENT


@given(st.text(min_size=1))
def test_text_is_never_estimated_at_nothing(prompt: str) -> None:
    # ASCII escapes keep lone surrogates, which JSON may carry and UTF-8 may not.
    facts = read_facts(COMPLETIONS, json.dumps({"prompt": prompt}).encode(), "r")
    assert 1 <= facts.prompt_tokens <= max(1, len(prompt))


def test_a_cut_off_chat_request_is_read_as_far_as_it_goes() -> None:
    body = (
        b'{"model": "m", "stream": true, "max_tokens": 7, "messages": [{"role": "user", "content": "abcdefgh'
    )
    assert read_facts_of_prefix(CHAT, body, "r") == RequestFacts(
        kind=CallKind.CHAT,
        request_id="r",
        model="m",
        stream=True,
        prompt_chars=8,
        prompt_tokens=2,
        max_tokens=7,
    )


def test_a_model_name_that_was_cut_off_is_no_model() -> None:
    for body in (b'{"model": "meta-lla', b'{"model": "a\\"b', b'{"model": "a\\'):
        assert read_facts_of_prefix(CHAT, body, "r").model is None


def test_the_unknown_rest_of_a_body_is_taken_to_be_like_the_known_part() -> None:
    prompt = "abcd" * 50_000
    whole = json.dumps({"model": "m", "prompt": prompt}).encode()
    facts = read_facts_of_prefix(COMPLETIONS, whole[:100_000], "r", total_bytes=len(whole))
    assert facts.prompt_tokens == pytest.approx(50_000, rel=0.01)


def test_token_ids_of_a_cut_off_body_are_scaled_too() -> None:
    whole = json.dumps({"model": "m", "prompt": [12345] * 40_000}).encode()
    facts = read_facts_of_prefix(COMPLETIONS, whole[:50_000], "r", total_bytes=len(whole))
    assert facts.prompt_tokens == pytest.approx(40_000, rel=0.01)


def test_an_announced_length_below_what_is_there_is_not_believed() -> None:
    cut = b'{"prompt": "' + b"abcd" * 1000
    assert read_facts_of_prefix(COMPLETIONS, cut, "r", total_bytes=1).prompt_tokens == 1000


def test_no_more_than_a_bounded_part_of_a_cut_off_body_is_read() -> None:
    body = b'{"prompt": "' + b"abcd" * PREFIX_BYTES
    facts = read_facts_of_prefix(COMPLETIONS, body, "r")
    assert facts.prompt_tokens == pytest.approx(PREFIX_BYTES, rel=0.01)


def test_without_a_body_its_length_stands_for_the_prompt() -> None:
    assert facts_without_body(CHAT, "r", 4_000).prompt_tokens == 1_000
    assert facts_without_body(CHAT, "r", None).prompt_tokens == 0
    assert facts_without_body("/tokenize", "r", 4_000).prompt_tokens == 0


@given(
    st.text(min_size=1, max_size=50),
    st.booleans(),
    st.text(max_size=300),
    st.booleans(),
    st.data(),
)
def test_a_prefix_never_tells_more_than_the_whole(
    model: str, stream: bool, prompt: str, ascii_only: bool, data: st.DataObject
) -> None:
    body = {"model": model, "stream": stream, "max_tokens": 5, "prompt": prompt}
    whole = json.dumps(body, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    facts, of_whole = read_facts_of_prefix(COMPLETIONS, cut, "r"), read_facts(COMPLETIONS, whole, "r")
    assert facts.model in (None, model)
    assert facts.stream in (False, stream)
    assert facts.max_tokens in (None, 5)
    assert facts.prompt_tokens <= of_whole.prompt_tokens
    if len(cut) == len(whole):
        assert facts == of_whole


@given(st.binary(), st.integers(0, 1 << 40) | st.none())
def test_no_bytes_break_the_reading_of_a_prefix(body: bytes, total_bytes: int | None) -> None:
    assert read_facts_of_prefix(CHAT, body, "r", total_bytes).prompt_tokens >= 0


@pytest.mark.parametrize(
    ("path", "body", "fault"),
    [
        (CHAT, b'{"model":"m","messages":[]}', None),
        (CHAT, b"no healthy upstream", DropReason.MALFORMED_BODY),
        (CHAT, b"[]", DropReason.MALFORMED_BODY),
        (CHAT, b'{"messages":[]}', DropReason.NO_MODEL),
        (CHAT, b'{"model":7,"messages":[]}', DropReason.NO_MODEL),
        (CHAT, b'{"model":"m","prompt":"p"}', DropReason.NO_PROMPT),
        (COMPLETIONS, b'{"model":"m","prompt_embeds":"AA=="}', None),
        (COMPLETIONS, b'{"model":"m","messages":[]}', DropReason.NO_PROMPT),
        ("/v1/embeddings", b'{"model":"m","input":["a"]}', None),
        ("/v1/responses", b'{"model":"m"}', DropReason.NO_PROMPT),
        ("/v1/audio/transcriptions", b"--boundary", None),
    ],
)
def test_a_body_that_no_rank_could_serve_has_a_fault(path: str, body: bytes, fault: DropReason) -> None:
    assert fault_of(call_kind(path), parse(body)) is fault
