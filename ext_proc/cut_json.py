"""Completes JSON that was cut off, so that an ordinary parser reads what is there.

A gateway that buffers only the first part of a body (BUFFERED_PARTIAL) sends just that. What was cut in the
middle is dropped, except the text of a string, which is kept as far as it goes. Must never raise or recurse.
"""

from __future__ import annotations

import re
from collections import deque

MAX_DEPTH = 64
"""Nesting beyond which a text is left as it is; OpenAI requests need about ten."""

_UP_TO_BRACKET = re.compile(rb'(?>(?:[^"{}\[\]]++|"(?>(?:[^"\\]{1,64}+|\\.){0,32})")*)', re.DOTALL)
"""What is skipped at once: everything but brackets and longer strings, for which there is a faster way."""
_STRING = re.compile(rb'"(?>(?:[^"\\]++|\\.)*)"', re.DOTALL)
_CLOSER = {ord("{"): ord("}"), ord("["): ord("]")}
_QUOTE = ord('"')


def complete(text: bytes) -> bytes:
    """`text` with its last, unfinished part dropped or ended and all its brackets closed.

    If `text` begins a valid JSON object or array, the result is a valid one. Other texts come back in some
    form that a parser refuses.
    """
    closers = bytearray()
    segment = position = 0
    while True:
        position = _end_of_match(_UP_TO_BRACKET, text, position)
        if position == len(text):
            break
        bracket = text[position]
        if bracket == _QUOTE:
            end = _end_of_string(text, position)
            if end is None:
                break
            position = end
            continue
        segment = position = position + 1
        if bracket in _CLOSER:
            closers.append(_CLOSER[bracket])
        elif closers and closers[-1] == bracket:
            closers.pop()
        else:
            return text
        if not closers or len(closers) > MAX_DEPTH:
            return text
    if not closers:
        return text
    return _complete_part(text, segment, position, in_object=closers[-1] == ord("}")) + closers[::-1]


def _complete_part(text: bytes, segment: int, position: int, *, in_object: bool) -> bytes:
    """`text` without what is incomplete after its last bracket, which lies before `segment`.

    `position` is the end of the text, or where its last string begins if that has no end.
    """
    if position < len(text):
        if in_object and not _is_value(text, segment, position):
            return _without_member(text, segment, position)
        return text[: _end_of_characters(text, position + 1)] + b'"'
    strings = deque(_STRING.finditer(text, segment), maxlen=1)
    rest = strings[0].end() if strings else segment
    comma = text.rfind(b",", rest)
    if comma >= 0:
        return text[:comma]
    if not strings:
        return text[:segment]
    last = strings[0]
    if in_object and (text.find(b":", rest) >= 0 or not _is_value(text, segment, last.start())):
        return _without_member(text, segment, last.start())
    return text[:rest]


def _is_value(text: bytes, segment: int, start: int) -> bool:
    """Whether the string that begins at `start` within an object is a member's value, not its key."""
    return text[segment:start].rstrip().endswith(b":")


def _without_member(text: bytes, segment: int, key: int) -> bytes:
    """`text` up to the member whose key begins at `key`, and without the comma before it."""
    return text[:segment] + text[segment:key].rstrip().removesuffix(b",")


def _end_of_string(text: bytes, start: int) -> int | None:
    """The end of the string whose opening quote is at `start`; `None` if it has none."""
    position = start + 1
    while (quote := text.find(b'"', position)) >= 0:
        if _backslashes_before(text, position, quote) % 2 == 0:
            return quote + 1
        position = quote + 1
    return None


def _end_of_characters(text: bytes, start: int) -> int:
    """The end of the last whole character of a string's content that begins at `start` and has no end."""
    end = len(text)
    backslash = text.rfind(b"\\", max(start, end - 5))
    if backslash >= 0 and _backslashes_before(text, start, backslash) % 2 == 0:
        escape = text[backslash:]
        if len(escape) == 1 or escape.startswith(b"\\u"):
            return backslash
    for back in range(1, min(3, end - start) + 1):
        byte = text[end - back]
        if byte < 0x80:
            break
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return end - back if length > back else end
    return end


def _backslashes_before(text: bytes, start: int, position: int) -> int:
    """How many backslashes stand right before `position`, none of them before `start`."""
    before = text[start:position]
    return len(before) - len(before.rstrip(b"\\"))


def _end_of_match(pattern: re.Pattern[bytes], text: bytes, start: int) -> int:
    match = pattern.match(text, start)
    return match.end() if match else start
