"""Finds the token counts in a response that streams by: server-sent events or one JSON object.

Looks for an object at a key `usage`; the last one counts. Keeps a bounded rest between chunks and changes
nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_USAGE_BYTES = 4096
"""Longest usage object that is read."""

_KEY = b'"usage"'
_OBJECT = re.compile(rb'"usage"\s{0,8}:\s{0,8}(?=\{)')
_MAX_BEFORE_OBJECT_BYTES = len(_KEY) + 18
_TOKEN = re.compile(rb'"(?>(?:[^"\\]++|\\.)*)"|[{}]', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that a response says it took."""

    prompt_tokens: int
    completion_tokens: int


class _Fields(msgspec.Struct):
    """The counts of the completions APIs, and those of the responses API."""

    prompt_tokens: Any = None
    completion_tokens: Any = None
    input_tokens: Any = None
    output_tokens: Any = None


_decoder = msgspec.json.Decoder(_Fields)


class UsageReader:
    """Reads one response."""

    __slots__ = ("_rest", "usage")

    def __init__(self) -> None:
        self._rest = b""
        self.usage: Usage | None = None
        """The last counts seen."""

    def feed(self, chunk: bytes) -> None:
        """Take in the next part of the body."""
        data = self._rest + chunk if self._rest else chunk
        position = 0
        while (start := data.find(_KEY, position)) >= 0:
            position = start + len(_KEY)
            value = _OBJECT.match(data, start)
            if value is None:
                if len(data) - start < _MAX_BEFORE_OBJECT_BYTES:
                    self._rest = data[start:]
                    return
                continue
            end = _end_of_object(data, value.end())
            if end is not None:
                self._read(data[value.end() : end])
                position = end
            elif len(data) - start < MAX_USAGE_BYTES:
                self._rest = data[start:]
                return
        self._rest = data[max(position, len(data) - len(_KEY) + 1) :]

    def _read(self, text: bytes) -> None:
        try:
            fields = _decoder.decode(text)
        except msgspec.DecodeError:
            return
        prompt = fields.prompt_tokens if fields.prompt_tokens is not None else fields.input_tokens
        completion = (
            fields.completion_tokens if fields.completion_tokens is not None else fields.output_tokens
        )
        if type(prompt) is int and prompt >= 0:
            self.usage = Usage(prompt, completion if type(completion) is int and completion >= 0 else 0)


def _end_of_object(data: bytes, start: int) -> int | None:
    """The end of the object that begins at `start`; `None` if `data` does not reach it."""
    depth = 0
    for token in _TOKEN.finditer(data, start, start + MAX_USAGE_BYTES):
        if token[0] == b"{":
            depth += 1
        elif token[0] == b"}":
            depth -= 1
            if depth == 0:
                return token.end()
    return None
