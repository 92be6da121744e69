"""Changes the model's name in a request, and back in its response, leaving every other byte as it is.

Only where the configuration maps a name (`ext_proc.model_names`). Must never re-serialise a body.
"""

from __future__ import annotations

import re

import msgspec

_TOKEN = re.compile(rb'"(?>(?:[^"\\]++|\\.)*)"|[{}\[\]]', re.DOTALL)
_STRING_VALUE = re.compile(rb'\s*:\s*("(?>(?:[^"\\]++|\\.)*)")', re.DOTALL)
_KEY = "model"


def with_model(body: bytes, name: str) -> bytes:
    """`body`, a JSON object, with the string at its key `model` replaced by `name`.

    Of several such keys the last is the one that counts to JSON parsers, so it is the one that changes.
    """
    depth = 0
    span: tuple[int, int] | None = None
    for token in _TOKEN.finditer(body):
        text = token[0]
        if text in (b"{", b"["):
            depth += 1
        elif text in (b"}", b"]"):
            depth -= 1
        elif depth == 1 and _is_key(text):
            value = _STRING_VALUE.match(body, token.end())
            if value is not None:
                span = value.span(1)
    if span is None:
        return body
    return body[: span[0]] + msgspec.json.encode(name) + body[span[1] :]


def _is_key(text: bytes) -> bool:
    return text == b'"model"' or (b"\\" in text and len(text) < 64 and msgspec.json.decode(text) == _KEY)


class NameRestorer:
    """Puts the name that the client knows back into a streamed response, wherever chunks may end.

    It replaces the value of every key `model` that is the rank's name for it. What looks like such a key
    within a string is not touched: its quotes are escaped there. The two ways of writing the key are those
    of Python's JSON encoders, with and without a space after the colon.
    """

    def __init__(self, *, rank_name: str, client_name: str) -> None:
        found, wanted = msgspec.json.encode(rank_name), msgspec.json.encode(client_name)
        self._changes = [(key + found, key + wanted) for key in (b'"model":', b'"model": ')]
        self._longest = max(len(found) for found, _ in self._changes)
        self._held = b""

    def feed(self, chunk: bytes, *, end_of_stream: bool) -> bytes:
        """What can be passed on of all that has been fed: all of it at the end, else all that is decided."""
        data = self._held + chunk
        for found, wanted in self._changes:
            data = data.replace(found, wanted)
        self._held = b""
        if not end_of_stream:
            start = self._undecided(data)
            self._held = data[start:]
            data = data[:start]
        return data

    def _undecided(self, data: bytes) -> int:
        """Where a key and value begin of which `data` may hold only the first part; its length if none do."""
        start = data.find(b'"', max(0, len(data) - self._longest + 1))
        while start >= 0:
            if any(found.startswith(data[start:]) for found, _ in self._changes):
                return start
            start = data.find(b'"', start + 1)
        return len(data)
