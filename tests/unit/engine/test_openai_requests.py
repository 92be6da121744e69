from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ranks.engine import openai_checks as checks
from vllm_ranks.engine.openai_requests import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    read_body,
    unknown_model,
)
from vllm_ranks.engine.text import VOCABULARY_SIZE, tokenize


def completion(**fields: Any) -> CompletionRequest:
    request = read_body(json.dumps({"prompt": "hi", **fields}).encode(), CompletionRequest)
    checks.check_common(request)
    return request


def chat(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    body = {"messages": messages or [{"role": "user", "content": "hi"}], **fields}
    request = read_body(json.dumps(body).encode(), ChatRequest)
    checks.check_common(request)
    return request


def completion_prompts(request: CompletionRequest, max_model_len: int = 1_000) -> list[list[int]]:
    return checks.completion_prompts(request, max_model_len)


def chat_tokens(request: ChatRequest, max_model_len: int = 1_000) -> list[int]:
    return checks.chat_tokens(request, max_model_len)


def test_unknown_fields_are_accepted_and_numbers_may_be_strings() -> None:
    request = completion(max_tokens="7", some_future_field={"a": 1}, logit_bias={"1": 2})
    assert request.max_tokens == 7


def test_a_completion_generates_16_tokens_unless_told_otherwise() -> None:
    assert completion().max_tokens == 16


@pytest.mark.parametrize("body", [b"", b"{", b'{"prompt": "\xff"}', b"[]", b'"text"', b"null"])
def test_a_body_that_is_no_json_object_is_a_400(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read_body(body, CompletionRequest)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 10_000}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": "x" * 2_000}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"seed": 2**63}, "seed"),
        ({"priority": -(2**63) - 1}, "priority"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"stream": 5}, "stream"),
    ],
)
def test_a_bad_parameter_is_a_400_that_names_it(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    error = caught.value.body()["error"]
    assert (error["code"], error["param"], error["type"]) == (400, param, "BadRequestError")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello", [tokenize("hello")]),
        (["hello", "you"], [tokenize("hello"), tokenize("you")]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["hello", [3]], [tokenize("hello"), [3]]),
    ],
)
def test_a_prompt_is_text_or_tokens_or_a_list_of_either(prompt: Any, expected: list[list[int]]) -> None:
    assert completion_prompts(completion(prompt=prompt)) == expected


@pytest.mark.parametrize("prompt", [None, "", [], [[]], [""], [1, "a"], [VOCABULARY_SIZE], [[1], -1], [-1]])
def test_a_prompt_that_is_none_of_these_is_a_400(prompt: Any) -> None:
    with pytest.raises(ApiError) as caught:
        completion_prompts(completion(prompt=prompt))
    assert caught.value.param == "prompt"


def test_log_probabilities_are_refused_instead_of_invented() -> None:
    with pytest.raises(ApiError, match="vllm serve") as caught:
        completion_prompts(completion(logprobs=0))
    assert caught.value.param == "logprobs"
    with pytest.raises(ApiError) as caught:
        chat_tokens(chat(logprobs=True, top_logprobs=3))
    assert caught.value.param == "logprobs"


def test_content_may_be_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    as_parts = chat_tokens(chat({"role": "user", "content": parts}))
    assert as_parts == chat_tokens(chat({"role": "user", "content": "a\nb"}))


def test_an_image_is_refused() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(ApiError, match="image_url") as caught:
        chat_tokens(chat({"role": "user", "content": [part]}))
    assert caught.value.param == "messages"


def test_a_tool_call_in_the_conversation_counts_as_text() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
    longer = chat_tokens(chat({"role": "user", "content": "x"}, call))
    assert len(longer) > len(chat_tokens(chat({"role": "user", "content": "x"})))


@pytest.mark.parametrize("tool_choice", [None, "none", "auto"])
def test_tools_are_accepted_as_long_as_no_call_is_forced(tool_choice: str | None) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert chat_tokens(chat(tools=tools, tool_choice=tool_choice))


@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_forced_tool_call_is_refused(tool_choice: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(ApiError) as caught:
        chat_tokens(chat(tools=tools, tool_choice=tool_choice))
    assert caught.value.param == "tool_choice"


def test_a_response_format_is_accepted_and_ignored() -> None:
    assert chat_tokens(chat(response_format={"type": "json_object"}))


def test_the_newer_name_of_the_output_limit_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=9).output_limit == 9
    assert chat(max_tokens=5).output_limit == 5
    assert chat().output_limit is None


@pytest.mark.parametrize(
    ("max_tokens", "prompt_tokens", "expected"),
    [(10, 50, 10), (None, 50, 50), (80, 50, 50), (100, 99, 1)],
    ids=["as asked", "as much as fits", "cut to what fits", "one token of room"],
)
def test_the_output_is_limited_by_the_models_length(
    max_tokens: int | None, prompt_tokens: int, expected: int
) -> None:
    assert checks.output_limit(max_tokens, prompt_tokens, 100, allow_zero=False) == expected


@pytest.mark.parametrize(
    ("max_tokens", "prompt_tokens", "param"),
    [(10, 101, "input_tokens"), (10, 100, "input_tokens"), (101, 5, "max_tokens"), (0, 5, "max_tokens")],
)
def test_what_exceeds_the_models_length_is_a_400(max_tokens: int, prompt_tokens: int, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        checks.output_limit(max_tokens, prompt_tokens, 100, allow_zero=False)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_text_that_is_certainly_too_long_is_refused_before_it_is_tokenized() -> None:
    with pytest.raises(ApiError, match="more than 40 characters") as caught:
        completion_prompts(completion(prompt="x" * 41), max_model_len=10)
    assert caught.value.param == "input_text"
    with pytest.raises(ApiError, match="more than 40 characters"):
        chat_tokens(chat({"role": "user", "content": "x" * 41}), max_model_len=10)
    assert len(completion_prompts(completion(prompt="x" * 40), max_model_len=10)[0]) == 10


def test_an_unknown_model_is_a_404_in_vllms_words() -> None:
    assert unknown_model("gpt-9", ["m", "alias"]).body() == {
        "error": {
            "message": "The model `gpt-9` does not exist. Valid aliases: m, alias.",
            "type": "NotFoundError",
            "param": "model",
            "code": 404,
        }
    }


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
fields = st.sampled_from(
    [
        "model",
        "prompt",
        "messages",
        "n",
        "stop",
        "stream",
        "max_tokens",
        "stream_options",
        "tools",
        "temperature",
    ]
)


def answer(body: bytes) -> set[int]:
    """Status codes both endpoints would answer a body with, 200 standing for "generates"."""
    statuses = set()
    for kind, tokens in (
        (CompletionRequest, completion_prompts),
        (ChatRequest, chat_tokens),
    ):
        try:
            request = read_body(body, kind)  # type: ignore[type-var]
            checks.check_common(request)
            tokens(request)  # type: ignore[operator]
            statuses.add(200)
        except ApiError as error:
            statuses.add(int(error.status))
    return statuses


@given(st.dictionaries(fields, json_values))
def test_no_json_object_causes_anything_but_an_answer_or_a_400(body: dict[str, Any]) -> None:
    assert answer(json.dumps(body).encode()) <= {200, 400}
