"""What a rank can tell of its prefix cache, as plain data: blocks stored, blocks removed, all of them gone.

The words are those of vLLM's KV cache events. Must never know how they travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Full blocks of one prompt, one after the other, are in the cache."""

    block_hashes: Sequence[int]
    """What the rank calls them, in 64 bits. Two copies of a block have the same name."""
    parent: int | None
    """The block before the first; `None` at the beginning of a prompt."""
    token_ids: Sequence[int]
    """Of all these blocks."""
    block_tokens: int
    adapter: str | None = None
    """The LoRA adapter that computed them."""
    extra_keys: Mapping[int, tuple[object, ...]] = field(default_factory=dict)
    """What besides tokens and adapter makes the content of a block, by its position: the cache salt in the
    first of a prompt, images where they stand."""
    cache_group: int | None = None
    """Which of the rank's caches: a hybrid model has several."""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Copies of blocks have left the cache."""

    block_hashes: Sequence[int]
    cache_group: int | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The cache is empty."""


CacheEvent = BlocksStored | BlocksRemoved | AllBlocksCleared
