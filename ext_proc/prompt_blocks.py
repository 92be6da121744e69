"""Chained hashes of a prompt's blocks, by which two prompts that begin alike are recognised.

The prompt is put into one canonical form, whatever API carries it: tool definitions, then each message's role
and content in order, as a chat template would print them. Text is cut by bytes, about four of which make a
token, so a block stands for `block_tokens` tokens without any tokenizer. The chain starts from model and
cache salt: what another model or tenant has computed is no help. Pure; must never keep the text.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
import xxhash

BYTES_PER_TOKEN = 4
"""Text of about so many bytes of UTF-8 is one token, in most languages."""
MAX_BLOCKS = 4_096
"""Blocks hashed of one prompt; longer prompts are recognised by their beginning."""
MAX_PARTS = 65_536
"""Messages, pieces of content and nested lists looked at in one prompt; what comes after them is not."""

_HASH_BITS = (1 << 60) - 1
"""Python integers of up to 60 bits take 32 bytes, longer ones more."""


def bytes_recognised(block_tokens: int) -> int:
    """By how much of its canonical form, at most, a prompt is recognised."""
    return MAX_BLOCKS * block_tokens * BYTES_PER_TOKEN


def block_hashes(chain_start: str, canonical: bytes, block_tokens: int) -> tuple[int, ...]:
    """Hashes of the full blocks of a canonical prompt; each depends on all blocks before it."""
    start = start_of_chain(chain_start.encode("utf-8", "surrogatepass"))
    return chained(start, canonical, block_tokens * BYTES_PER_TOKEN, MAX_BLOCKS)


def start_of_chain(salt: bytes) -> int:
    """What stands for the block before the first, so that only prompts with the same `salt` have the same."""
    return xxhash.xxh3_64_intdigest(salt) & _HASH_BITS


def chained(parent: int, data: bytes, block_bytes: int, max_blocks: int) -> tuple[int, ...]:
    """Hashes of the full blocks of `data`, which follow the block `parent`; at most `max_blocks` of them."""
    hashes = []
    for start in range(0, min(len(data) // block_bytes, max_blocks) * block_bytes, block_bytes):
        parent = xxhash.xxh3_64_intdigest(data[start : start + block_bytes], parent) & _HASH_BITS
        hashes.append(parent)
    return tuple(hashes)


def canonical_prompt(tools: bytes, parts: Sequence[object], max_bytes: int) -> bytes:
    """One byte string for a prompt: prompts that begin alike begin alike in it too.

    Args:
        tools: JSON text of the tool definitions, empty if there are none.
        parts: prompt, messages or input, as parsed from JSON: text, token ids, or lists and messages of them,
            nested however deeply.
        max_bytes: no more than that much of it is made, nor made from more than MAX_PARTS parts.
    """
    pieces = [tools[:max_bytes]]
    left = max_bytes - len(pieces[0])
    pending = list(reversed(parts))
    for _ in range(MAX_PARTS):
        if left <= 0 or not pending:
            break
        part = pending.pop()
        if isinstance(part, list) and not _is_tokens(part[: left // 4 + 1]):
            pending.extend(reversed(part[:MAX_PARTS]))
        elif isinstance(part, dict):
            pending.extend(reversed(_of_message(part)))
        else:
            pieces.append(_as_bytes(part, left))
            left -= len(pieces[-1])
    return b"".join(pieces)


def _is_tokens(items: list[object]) -> bool:
    return bool(items) and all(type(token) is int and 0 <= token < 1 << 32 for token in items)


def _as_bytes(part: object, max_bytes: int) -> bytes:
    """Text, token ids, or what is bytes already, cut to `max_bytes`; nothing of anything else."""
    if isinstance(part, str):
        return part[:max_bytes].encode("utf-8", "surrogatepass")[:max_bytes]
    if isinstance(part, list):
        return array("I", part[: max_bytes // 4 + 1]).tobytes()[:max_bytes]
    return part[:max_bytes] if isinstance(part, bytes) else b""


def _of_message(message: dict[object, object]) -> tuple[object, ...]:
    """What a message, or a part of its content, adds to the prompt, in order."""
    role = message.get("role")
    if isinstance(role, str):
        calls = message.get("tool_calls")
        return (f"\x1e{role}\x1f", message.get("content"), _json(calls) if calls else None)
    if isinstance(message.get("text"), str):
        return (message["text"],)
    # Images and the like count by what they refer to.
    return (_json(message),)


def _json(value: object) -> bytes:
    try:
        return msgspec.json.encode(value)
    except RecursionError:
        return b""
