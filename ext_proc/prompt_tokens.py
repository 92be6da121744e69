"""A prompt as the tokens that an engine computes, and the chained hashes of its blocks.

Blocks have the size of the engine's own, and their hashes cover what the engine's cover: all tokens before
them, the LoRA adapter, the cache salt. So what an engine tells of its cache can be compared. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from ext_proc.prompt_blocks import chained, start_of_chain

MAX_TOKEN_BLOCKS = 16_384
"""Blocks hashed of one prompt; longer prompts are recognised by their beginning."""


class PromptTokens:
    """One prompt."""

    __slots__ = ("_blocks", "_ids", "_salt", "count")

    def __init__(
        self, ids: Sequence[int], *, cache_salt: str | None = None, count: int | None = None
    ) -> None:
        """A prompt that begins with the tokens `ids`.

        Args:
            ids: the tokens, or as many as are known for certain, none if nothing is; each below 2^32.
            cache_salt: the request's `cache_salt`.
            count: length of the prompt in tokens; by default that of `ids`.
        """
        self._ids = pack(ids)
        self._salt = cache_salt
        self.count = len(ids) if count is None else count
        """Length of the prompt in tokens."""
        self._blocks: tuple[int, str | None, tuple[int, ...]] = (0, None, ())

    def blocks(self, block_tokens: int, adapter: str | None) -> tuple[int, ...]:
        """Hashes of the full blocks that are known.

        Args:
            block_tokens: size of the engine's blocks.
            adapter: LoRA adapter that the request is for.
        """
        if self._blocks[:2] != (block_tokens, adapter):
            salts = (self._salt,) if self._salt else ()
            start = first_parent(adapter, salts)
            hashes = chained(start, self._ids, block_tokens * BYTES_PER_ID, MAX_TOKEN_BLOCKS)
            self._blocks = (block_tokens, adapter, hashes)
        return self._blocks[2]


BYTES_PER_ID = 4


def pack(ids: Sequence[int]) -> bytes:
    """Tokens as bytes. Raises OverflowError if one is not in 0 to 2^32 - 1."""
    return array("I", ids).tobytes()


def first_parent(adapter: str | None, extra_keys: tuple[object, ...]) -> int:
    """What stands for the block before the first of a prompt.

    Args:
        adapter: LoRA adapter.
        extra_keys: what else makes the content of the first block: the cache salt, or what no prompt given
            as text or tokens has.
    """
    return start_of_chain(msgspec.msgpack.encode((adapter, extra_keys)))


def with_extra_keys(parent: int, extra_keys: tuple[object, ...]) -> int:
    """`parent` for a block that has more to it than its tokens, so that no prompt of mere tokens has it."""
    return start_of_chain(msgspec.msgpack.encode((parent, extra_keys)))
