"""Chained hashes of a prompt's blocks, by which two prompts that begin alike are recognised.

The prompt is put into one canonical form, whatever API carries it: tool definitions, then each message's role
and content in order, as a chat template would print them. Text is cut by bytes, about four of which make a
token, so a block stands for `block_tokens` tokens without any tokenizer. The chain starts from model and
cache salt: what another model or tenant has computed is no help. Pure; must never keep the text.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import msgspec
import xxhash

BYTES_PER_TOKEN = 4
"""Text of about so many bytes of UTF-8 is one token, in most languages."""
MAX_BLOCKS = 4_096
"""Blocks hashed of one prompt; longer prompts are recognised by their beginning."""

_HASH_BITS = (1 << 60) - 1
"""Python integers of up to 60 bits take 32 bytes, longer ones more."""


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


def canonical_prompt(tools: bytes, parts: tuple[object, ...]) -> bytes:
    """One byte string for a prompt: prompts that begin alike begin alike in it too.

    Args:
        tools: JSON text of the tool definitions, empty if there are none.
        parts: prompt, messages or input, as parsed from JSON: text, token ids, or lists and messages of them.
    """
    return b"".join((tools, *(piece for part in parts for piece in _pieces(part))))


def _pieces(part: object) -> Iterator[bytes]:
    if isinstance(part, str):
        yield part.encode("utf-8", "surrogatepass")
    elif isinstance(part, list):
        if part and all(type(token) is int and 0 <= token < 1 << 32 for token in part):
            yield array("I", part).tobytes()
        else:
            for item in part:
                yield from _pieces(item)
    elif isinstance(part, dict):
        yield from _message(part)


def _message(message: dict[object, object]) -> Iterator[bytes]:
    role = message.get("role")
    if isinstance(role, str):
        yield b"\x1e" + role.encode("utf-8", "surrogatepass") + b"\x1f"
        yield from _pieces(message.get("content"))
        if message.get("tool_calls"):
            yield msgspec.json.encode(message["tool_calls"])
    elif isinstance(message.get("text"), str):
        yield from _pieces(message["text"])
    else:
        # Images and the like count by what they refer to.
        yield msgspec.json.encode(message)
