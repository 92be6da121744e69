"""Reads request facts out of an OpenAI-style request, without ever failing.

A body that is not JSON, or whose fields have unexpected types, yields facts with those parts absent: the
request is then balanced by load and the rank answers it. Must never change the body or raise.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from ext_proc.cut_json import complete
from ext_proc.decision import DropReason
from ext_proc.prompt_blocks import (
    BYTES_PER_TOKEN,
    MAX_PARTS,
    block_hashes,
    bytes_recognised,
    canonical_prompt,
)
from ext_proc.prompt_tokens import PromptTokens
from ext_proc.vocabulary import CallKind, RequestFacts

BLOCK_TOKENS = 64
"""Tokens of a block by which prompts are recognised: short beside a system prompt, yet few for a long one."""

PREFIX_BYTES = 128 * 1024
"""How much of a body that was cut off is read."""

MAX_BODY_PARTS = 50_000
"""Of a body in more strings, containers or (40 for one) numbers only the beginning is read: all of it would
take seconds."""

MOST_TOKENS = 1 << 31
"""A client that asks for more does not get them."""
MOST_SEQUENCES = 1_024
"""What a request is counted as at most: vLLM decodes no more at once, unless told to (`max_num_seqs`)."""
MOST_URGENT, LEAST_URGENT = -(10**9), 10**9
"""A priority beyond is taken for these."""

Tokenise = Callable[[RequestFacts, bytes], PromptTokens | None]
"""Makes tokens of the prompt in a whole body as its rank would; `None` where it cannot be sure."""

_CUT_IN_MODEL = re.compile(rb'"model"\s*:\s*"(?>(?:[^"\\]|\\.)*)\\?\Z', re.DOTALL)

_KIND_BY_PATH_SUFFIX = {
    "/chat/completions": CallKind.CHAT,
    "/completions": CallKind.COMPLETION,
    "/embeddings": CallKind.EMBEDDING,
    "/responses": CallKind.RESPONSE,
}


class BodyFields(msgspec.Struct):
    """The fields wavegate reads; `Any`, since a value of the wrong type must not hide the others."""

    model: Any = None
    stream: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n: Any = None
    prompt: Any = None
    prompt_embeds: Any = None
    messages: Any = None
    input: Any = None
    instructions: Any = None
    tools: msgspec.Raw = msgspec.Raw()
    cache_salt: Any = None
    priority: Any = None


_decoder = msgspec.json.Decoder(BodyFields)

_PROMPT_FIELDS = {
    CallKind.CHAT: ("messages",),
    CallKind.COMPLETION: ("prompt", "prompt_embeds"),
    CallKind.EMBEDDING: ("input", "messages"),
    CallKind.RESPONSE: ("input", "prompt"),
}
"""Of these at least one must be there."""


def call_kind(path: str) -> CallKind:
    """Which API `path` calls, by its suffix, so that prefixes of a reverse proxy do not matter."""
    path = path.partition("?")[0].rstrip("/")
    for suffix, kind in _KIND_BY_PATH_SUFFIX.items():
        if path.endswith(suffix):
            return kind
    return CallKind.OTHER


def read_facts(path: str, body: bytes, request_id: str, tokenise: Tokenise | None = None) -> RequestFacts:
    """The facts of one request; unreadable parts are absent, never guessed.

    Args:
        path: request path, with or without a query.
        body: whole request body.
        request_id: the gateway's id of the request (`x-request-id`).
        tokenise: without it, prompts are known as text only.
    """
    return with_tokens(facts_of(call_kind(path), parse(body), request_id), body, tokenise)


def with_tokens(facts: RequestFacts, body: bytes, tokenise: Tokenise | None) -> RequestFacts:
    """The facts with the prompt's tokens, and its length by them, where they can be had."""
    tokens = tokenise(facts, body) if tokenise is not None else None
    return facts if tokens is None else replace(facts, tokens=tokens, prompt_tokens=tokens.count)


def read_facts_of_prefix(
    path: str, prefix: bytes, request_id: str, total_bytes: int | None = None
) -> RequestFacts:
    """The facts of a request of whose body only the first part is known.

    What the rest of the body holds is taken to be like the part that is known: the length of the prompt is
    scaled up to `total_bytes`, or is that of the known part if the body's length is not known either.
    """
    known = prefix[:PREFIX_BYTES]
    facts = read_facts(path, complete(known), request_id)
    if _CUT_IN_MODEL.search(known, max(0, len(known) - 512)):
        facts = replace(facts, model=None)
    if total_bytes is None or total_bytes <= len(known):
        total_bytes = max(len(prefix), 1)
    return replace(
        facts,
        prompt_chars=facts.prompt_chars * total_bytes // max(len(known), 1),
        prompt_tokens=facts.prompt_tokens * total_bytes // max(len(known), 1),
    )


def facts_without_body(path: str, request_id: str, total_bytes: int | None) -> RequestFacts:
    """The facts of a request of whose body nothing is known but its length.

    The prompt is most of a body that calls one of the APIs, so the body's length stands for the prompt's.
    """
    kind = call_kind(path)
    if kind is CallKind.OTHER or total_bytes is None:
        return RequestFacts(kind=kind, request_id=request_id)
    return RequestFacts(kind=kind, request_id=request_id, prompt_tokens=total_bytes // BYTES_PER_TOKEN)


def parse(body: bytes) -> BodyFields | None:
    """The fields of a body, or of the beginning of one in countless parts; `None` if it is no JSON object."""
    if _has_countless_parts(body):
        body = complete(body[:PREFIX_BYTES])
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _has_countless_parts(body: bytes) -> bool:
    if len(body) <= MAX_BODY_PARTS:
        return False
    containers, strings, items = body.count(b"[") + body.count(b"{"), body.count(b'"') // 2, body.count(b",")
    return containers + strings + items // 40 > MAX_BODY_PARTS


def fault_of(kind: CallKind, fields: BodyFields | None) -> DropReason | None:
    """What is missing in a body that calls `kind`, so that no rank could serve it; `None`: nothing."""
    needed = _PROMPT_FIELDS.get(kind)
    if needed is None:
        return None
    if fields is None:
        return DropReason.MALFORMED_BODY
    if not isinstance(fields.model, str) or not fields.model:
        return DropReason.NO_MODEL
    if all(getattr(fields, name) is None for name in needed):
        return DropReason.NO_PROMPT
    return None


def facts_of(kind: CallKind, fields: BodyFields | None, request_id: str) -> RequestFacts:
    """The facts that the fields of a body tell."""
    if fields is None:
        return RequestFacts(kind=kind, request_id=request_id)
    chars, tokens = _prompt_length(fields)
    return RequestFacts(
        kind=kind,
        request_id=request_id,
        model=fields.model if isinstance(fields.model, str) else None,
        stream=fields.stream is True,
        prompt_chars=chars,
        prompt_tokens=tokens,
        max_tokens=_positive_int(fields.max_completion_tokens, MOST_TOKENS)
        or _positive_int(fields.max_tokens, MOST_TOKENS)
        or _positive_int(fields.max_output_tokens, MOST_TOKENS),
        n=_positive_int(fields.n, MOST_SEQUENCES) or 1,
        prompt_blocks=_prompt_blocks(fields),
        priority=_priority(fields.priority),
    )


def _positive_int(value: object, most: int) -> int | None:
    return min(value, most) if type(value) is int and value > 0 else None


def _priority(value: object) -> int:
    return max(MOST_URGENT, min(value, LEAST_URGENT)) if type(value) is int else 0


def _prompt_blocks(fields: BodyFields) -> tuple[int, ...]:
    parts = (fields.instructions, fields.prompt, fields.messages, fields.input)
    model, salt = (one if isinstance(one, str) else None for one in (fields.model, fields.cache_salt))
    chain_start = f"{model}\0{salt}"
    canonical = canonical_prompt(bytes(fields.tools), parts, bytes_recognised(BLOCK_TOKENS))
    return block_hashes(chain_start, canonical, BLOCK_TOKENS)


def _prompt_length(fields: BodyFields) -> tuple[int, int]:
    """Characters of all prompt text, and tokens: given token ids counted, text estimated."""
    length = _Length()
    length.add_tool_definitions(bytes(fields.tools))
    for part in (fields.prompt, fields.messages, fields.input, fields.instructions):
        length.add(part)
    return length.chars, length.token_ids + -(-length.utf8_bytes // BYTES_PER_TOKEN)


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
        for _ in range(MAX_PARTS):
            if not pending:
                break
            item = pending.pop()
            if isinstance(item, str):
                self.chars += len(item)
                self.utf8_bytes += len(item) if item.isascii() else len(item.encode("utf-8", "surrogatepass"))
            elif isinstance(item, list):
                if item and type(item[0]) is int:
                    self.token_ids += len(item)
                else:
                    pending.extend(item[:MAX_PARTS])
            elif isinstance(item, dict):
                pending.append(item.get("content"))
                pending.append(item.get("text"))
