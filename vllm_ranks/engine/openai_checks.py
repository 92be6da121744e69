"""What a request must satisfy, what the embedded engine cannot do, and the tokens of a prompt.

What it cannot do is refused by name where a client would be misled (log probabilities, forced tool calls,
images), and ignored where the answer stays one a model might give: sampling parameters, `tools` with
`tool_choice` auto, `response_format` (the text is prose, not JSON). Checks and texts of the rest are
vLLM 0.32's (vllm/sampling_params.py, vllm/renderers/params.py). Must never talk to an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from vllm_ranks.engine.openai_requests import (
    ApiError,
    ChatMessage,
    ChatRequest,
    CommonRequest,
    CompletionRequest,
)
from vllm_ranks.engine.text import BYTES_PER_TOKEN, VOCABULARY_SIZE, chat_prompt, tokenize

MAX_CHOICES = 128
MAX_PROMPTS = 1_024
MAX_STOP_STRINGS = 128
MAX_STOP_CHARS = 1_024
MAX_CACHE_SALT_CHARS = 1_024
_EMBEDDED = "the embedded engine generates placeholder text; use `vllm serve` for this"


def check_common(request: CommonRequest) -> None:
    """What both kinds of request must satisfy (vLLM vllm/sampling_params.py `_verify_args`).

    Raises:
        ApiError: naming the parameter.
    """
    if not 1 <= request.choices <= MAX_CHOICES:
        raise ApiError(f"n must be between 1 and {MAX_CHOICES}, got {request.n}.", param="n")
    if request.min_tokens < 0:
        raise ApiError(
            f"min_tokens must be greater than or equal to 0, got {request.min_tokens}.", param="min_tokens"
        )
    for name in ("seed", "priority"):
        check_int64(name, getattr(request, name))
    if request.temperature is not None and not request.temperature >= 0:
        raise ApiError(f"temperature must be non-negative, got {request.temperature}.", param="temperature")
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise ApiError(f"top_p must be in (0, 1], got {request.top_p}.", param="top_p")
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(request, name)
        if value is not None and not -2 <= value <= 2:
            raise ApiError(f"{name} must be in [-2, 2], got {value}.", param=name)
    stops = request.stop_strings
    if any(not stop for stop in stops):
        raise ApiError("stop cannot contain an empty string.", param="stop")
    if len(stops) > MAX_STOP_STRINGS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise ApiError(
            f"stop may have at most {MAX_STOP_STRINGS} strings of {MAX_STOP_CHARS} characters.", param="stop"
        )
    if request.stream_options is not None and not request.stream:
        raise ApiError("Stream options can only be defined when `stream=True`.", param="stream_options")
    if request.cache_salt is not None and not 0 < len(request.cache_salt) <= MAX_CACHE_SALT_CHARS:
        raise ApiError(f"cache_salt must have 1 to {MAX_CACHE_SALT_CHARS} characters.", param="cache_salt")
    if request.prompt_logprobs is not None:
        raise ApiError(f"`prompt_logprobs` is not supported: {_EMBEDDED}.", param="prompt_logprobs")


def check_int64(name: str, value: int | None) -> None:
    """Raises ApiError for an integer that cannot be sent to an engine."""
    if value is not None and not -(1 << 63) <= value < 1 << 63:
        raise ApiError(f"{name} must fit into 64 bits, got {value}.", param=name)


def completion_prompts(request: CompletionRequest, max_model_len: int) -> list[list[int]]:
    """Token ids of each prompt.

    Raises:
        ApiError: no prompt, or a shape that is neither text, token ids, nor a list of either.
    """
    if request.logprobs is not None:
        raise ApiError(f"`logprobs` is not supported: {_EMBEDDED}.", param="logprobs")
    prompt = request.prompt
    if prompt is None or prompt in ("", []):
        raise ApiError("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    if isinstance(prompt, str):
        return [_tokens(prompt, max_model_len)]
    if all(isinstance(item, int) for item in prompt):
        return [_checked_ids(prompt)]
    if len(prompt) > MAX_PROMPTS:
        raise ApiError(f"prompt may be a list of at most {MAX_PROMPTS} prompts.", param="prompt")
    prompts = []
    for item in prompt:
        if isinstance(item, int) or not item:
            raise ApiError("prompt must be text, token ids, or a list of either, none empty.", param="prompt")
        prompts.append(_tokens(item, max_model_len) if isinstance(item, str) else _checked_ids(item))
    return prompts


def _tokens(text: str, max_model_len: int) -> list[int]:
    _check_length(len(text), max_model_len)
    return tokenize(text)


def _check_length(characters: int, max_model_len: int) -> None:
    """Refuse what is certainly too long before it is tokenized."""
    limit = max_model_len * BYTES_PER_TOKEN
    if characters > limit:
        raise ApiError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{characters} characters (more than {limit} characters, which is the upper bound for "
            f"{max_model_len} input tokens). Please reduce the length of the input prompt.",
            param="input_text",
        )


def _checked_ids(ids: Sequence[Any]) -> list[int]:
    for token in (min(ids), max(ids)):
        if not 0 <= token < VOCABULARY_SIZE:
            raise ApiError(f"Token id {token} is out of vocabulary", param="prompt")
    return list(ids)


def chat_tokens(request: ChatRequest, max_model_len: int) -> list[int]:
    """Token ids of a conversation.

    Raises:
        ApiError: something in it that the embedded engine cannot answer truthfully.
    """
    if request.logprobs:
        raise ApiError(f"`logprobs` is not supported: {_EMBEDDED}.", param="logprobs")
    if request.top_logprobs:
        raise ApiError("when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
    if request.tools is not None and not request.tools:
        raise ApiError(
            "`tools` must not be an empty array. "
            "Either provide at least one tool or omit the field entirely.",
            param="tools",
        )
    if request.tool_choice not in (None, "none", "auto"):
        raise ApiError(
            f"`tool_choice` can be none or auto, no call can be forced: {_EMBEDDED}.", param="tool_choice"
        )
    characters = sum(len(message.content) for message in request.messages if isinstance(message.content, str))
    _check_length(characters, max_model_len)
    return message_tokens(
        request.messages, request.add_generation_prompt and not request.continue_final_message
    )


def message_tokens(messages: Sequence[ChatMessage], add_generation_prompt: bool) -> list[int]:
    """Token ids of messages; raises ApiError for content that is not text."""
    if not messages:
        raise ApiError("messages must not be empty.", param="messages")
    return chat_prompt(
        ((message.role, _content_text(message)) for message in messages), add_generation_prompt
    )


def _content_text(message: ChatMessage) -> str:
    content = message.content
    if content is None:
        # A tool call sent back: it counts as the text it would have been.
        return msgspec.json.encode(message.tool_calls).decode() if message.tool_calls else ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        text = part.get("text")
        if part.get("type") not in ("text", "input_text", "output_text", "refusal") or not isinstance(
            text, str
        ):
            raise ApiError(
                f"content parts of type {part.get('type')!r} are not supported, only text: {_EMBEDDED}.",
                param="messages",
            )
        texts.append(text)
    return "\n".join(texts)


def output_limit(max_tokens: int | None, prompt_tokens: int, max_model_len: int, *, allow_zero: bool) -> int:
    """How many tokens a prompt may be continued by (vLLM `get_max_tokens`).

    Raises:
        ApiError: the prompt leaves no room, or the limit makes no sense.
    """
    if prompt_tokens > max_model_len:
        raise ApiError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{prompt_tokens} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt.",
            param="input_tokens",
        )
    if prompt_tokens == max_model_len:
        raise ApiError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{prompt_tokens} input tokens, which leaves no room for output tokens. "
            "Please reduce the length of the input prompt.",
            param="input_tokens",
        )
    if max_tokens is not None and max_tokens > max_model_len:
        raise ApiError(
            f"max_tokens={max_tokens} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
            param="max_tokens",
        )
    if max_tokens is not None and max_tokens < (0 if allow_zero else 1):
        raise ApiError(f"max_tokens must be at least 1, got {max_tokens}.", param="max_tokens")
    room = max_model_len - prompt_tokens
    return room if max_tokens is None else min(max_tokens, room)


def check_min_tokens(min_tokens: int, limit: int) -> None:
    """Raises ApiError if fewer tokens may be generated than must be."""
    if min_tokens > limit:
        raise ApiError(
            f"min_tokens must be less than or equal to max_tokens={limit}, got {min_tokens}.",
            param="min_tokens",
        )
