"""Reads request facts out of an OpenAI-style request, without ever failing.

A body that is not JSON, or whose fields have unexpected types, yields facts with those parts absent: the
request is then balanced by load and the rank answers it. Must never change the body or raise.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ext_proc.vocabulary import CallKind, RequestFacts

UTF8_BYTES_PER_TOKEN = 4
"""Estimate for text whose tokenizer is unknown: about four bytes of UTF-8 a token, in most languages."""

_KIND_BY_PATH_SUFFIX = {
    "/chat/completions": CallKind.CHAT,
    "/completions": CallKind.COMPLETION,
    "/embeddings": CallKind.EMBEDDING,
    "/responses": CallKind.RESPONSE,
}


class _Body(msgspec.Struct):
    """The fields wavegate reads; `Any`, since a value of the wrong type must not hide the others."""

    model: Any = None
    stream: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n: Any = None
    prompt: Any = None
    messages: Any = None
    input: Any = None
    instructions: Any = None
    tools: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_Body)


def call_kind(path: str) -> CallKind:
    """Which API `path` calls, by its suffix, so that prefixes of a reverse proxy do not matter."""
    path = path.partition("?")[0].rstrip("/")
    for suffix, kind in _KIND_BY_PATH_SUFFIX.items():
        if path.endswith(suffix):
            return kind
    return CallKind.OTHER


def read_facts(path: str, body: bytes, request_id: str) -> RequestFacts:
    """The facts of one request; unreadable parts are absent, never guessed.

    Args:
        path: request path, with or without a query.
        body: whole request body.
        request_id: the gateway's id of the request (`x-request-id`).
    """
    kind = call_kind(path)
    try:
        fields = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return RequestFacts(kind=kind, request_id=request_id)
    chars, tokens = _prompt_length(fields)
    return RequestFacts(
        kind=kind,
        request_id=request_id,
        model=fields.model if isinstance(fields.model, str) else None,
        stream=fields.stream is True,
        prompt_chars=chars,
        prompt_tokens=tokens,
        max_tokens=_positive_int(fields.max_completion_tokens)
        or _positive_int(fields.max_tokens)
        or _positive_int(fields.max_output_tokens),
        n=_positive_int(fields.n) or 1,
    )


def _positive_int(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def _prompt_length(fields: _Body) -> tuple[int, int]:
    """Characters of all prompt text, and tokens: given token ids counted, text estimated."""
    length = _Length()
    length.add_tool_definitions(bytes(fields.tools))
    for part in (fields.prompt, fields.messages, fields.input, fields.instructions):
        length.add(part)
    return length.chars, length.token_ids + -(-length.utf8_bytes // UTF8_BYTES_PER_TOKEN)


class _Length:
    """Sums the length of prompt parts of any accepted shape."""

    __slots__ = ("chars", "token_ids", "utf8_bytes")

    def __init__(self) -> None:
        self.chars = 0
        self.utf8_bytes = 0
        self.token_ids = 0

    def add_tool_definitions(self, json_text: bytes) -> None:
        # Chat templates print tool definitions into the prompt much as they were sent.
        self.chars += len(json_text)
        self.utf8_bytes += len(json_text)

    def add(self, part: object) -> None:
        """Text, token ids, a list of either, or chat messages with text or typed content parts."""
        pending = [part]
        while pending:
            item = pending.pop()
            if isinstance(item, str):
                self.chars += len(item)
                self.utf8_bytes += len(item) if item.isascii() else len(item.encode("utf-8", "surrogatepass"))
            elif isinstance(item, list):
                if item and type(item[0]) is int:
                    self.token_ids += len(item)
                else:
                    pending.extend(item)
            elif isinstance(item, dict):
                pending.append(item.get("content"))
                pending.append(item.get("text"))
