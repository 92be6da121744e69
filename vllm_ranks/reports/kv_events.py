"""What a rank publishes about its prefix cache, read and put in order. Pure.

vLLM 0.32 (vllm/distributed/kv_events.py): a batch is the array `[timestamp, events, rank]`; an event is a map
with the key `type`, before vllm-project/vllm#42892 an array that begins with it. Batches are numbered from 0
in each process, so a gap in the numbers is a loss, and a lower number a restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

BlockHash: TypeAlias = int | bytes


class UnreadableEvents(ValueError):
    """The batch is not one of vLLM's."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Full blocks of one prompt, one after the other, are in the cache."""

    block_hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    """The block before the first; `None` at the beginning of a prompt."""
    token_ids: tuple[int, ...]
    """Of all these blocks."""
    block_size: int


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks have left the cache."""

    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The cache is empty."""


KvEvent = BlocksStored | BlocksRemoved | AllBlocksCleared

_OLD_FIELDS: Mapping[str, tuple[str, ...]] = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size"),
    "BlockRemoved": ("block_hashes",),
    "AllBlocksCleared": (),
}
"""Positions of the fields that matter, after the type, where events are arrays."""

_decoder = msgspec.msgpack.Decoder()


def read_batch(payload: bytes) -> list[KvEvent]:
    """The events of one batch, in order; kinds that are not known are left out. Raises UnreadableEvents."""
    try:
        batch = _decoder.decode(payload)
        return [event for raw in batch[1] if (event := _event(raw)) is not None]
    except (msgspec.DecodeError, TypeError, KeyError, IndexError, ValueError) as error:
        raise UnreadableEvents(f"not a batch of KV cache events: {error}") from error


def _event(raw: Any) -> KvEvent | None:
    if isinstance(raw, Mapping):
        kind, fields = raw["type"], raw
    else:
        kind = raw[0]
        fields = dict(zip(_OLD_FIELDS.get(kind, ()), raw[1:], strict=False))
    if kind == "BlockStored":
        return BlocksStored(
            tuple(fields["block_hashes"]),
            fields["parent_block_hash"],
            tuple(fields["token_ids"]),
            int(fields["block_size"]),
        )
    if kind == "BlockRemoved":
        return BlocksRemoved(tuple(fields["block_hashes"]))
    return AllBlocksCleared() if kind == "AllBlocksCleared" else None


@dataclass(frozen=True, slots=True)
class Batch:
    """One published message."""

    sequence: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Gap:
    """Batches that did not arrive."""

    first: int
    end: int
    """The first after them."""
    restarted: bool
    """Whether the publisher has started anew, so that everything known of the cache is void."""


class EventOrder:
    """Where one is in what a rank publishes."""

    def __init__(self) -> None:
        self._next_sequence = 0
        self._replayed: dict[int, bytes] = {}

    def replayed(self, batches: Iterable[Batch]) -> None:
        """These have been sent again on request; some of them are still to come on the ordinary way."""
        self._replayed = {batch.sequence: batch.payload for batch in batches}
        self._next_sequence = max([self._next_sequence, *(sequence + 1 for sequence in self._replayed)])

    def is_known(self, batch: Batch) -> bool:
        """Whether the batch is one of those sent again: its time stamp makes it unlike any other."""
        return self._replayed.get(batch.sequence) == batch.payload

    def accept(self, batch: Batch) -> Gap | None:
        """Take note of a batch that has arrived; what is missing before it, if anything."""
        expected, self._next_sequence = self._next_sequence, batch.sequence + 1
        if batch.sequence >= expected:
            return None if batch.sequence == expected else Gap(expected, batch.sequence, restarted=False)
        self._replayed = {}
        return Gap(0, batch.sequence, restarted=True)


class CacheView:
    """The blocks that one rank says are in its prefix cache, found by the tokens they hold."""

    def __init__(self, max_blocks: int) -> None:
        """Remember at most `max_blocks`; beyond that something is wrong, and it starts afresh."""
        self._max_blocks = max_blocks
        self._keys: dict[BlockHash, int] = {}
        self._hashes: dict[int, BlockHash] = {}
        self.block_size: int | None = None
        """Tokens of a block, once a block has been stored."""

    def __len__(self) -> int:
        return len(self._keys)

    def apply(self, events: Iterable[KvEvent]) -> None:
        """Follow what happened to the cache."""
        for event in events:
            if isinstance(event, BlocksStored):
                self._store(event)
            elif isinstance(event, BlocksRemoved):
                for block_hash in event.block_hashes:
                    key = self._keys.pop(block_hash, None)
                    if key is not None and self._hashes.get(key) == block_hash:
                        del self._hashes[key]
            else:
                self.clear()

    def clear(self) -> None:
        """Nothing is known to be in the cache."""
        self._keys.clear()
        self._hashes.clear()

    def cached_tokens(self, token_ids: Sequence[int]) -> int:
        """How many tokens at the beginning of a prompt are in the cache."""
        size = self.block_size
        if size is None:
            return 0
        key, found = _ROOT, 0
        while found + size <= len(token_ids):
            key = _key(key, token_ids[found : found + size])
            if key not in self._hashes:
                break
            found += size
        return found

    def _store(self, event: BlocksStored) -> None:
        if len(self._keys) + len(event.block_hashes) > self._max_blocks:
            self.clear()
        parent = _ROOT if event.parent is None else self._keys.get(event.parent)
        size = self.block_size = event.block_size
        for position, block_hash in enumerate(event.block_hashes):
            if parent is None:
                return  # its beginning was never seen: it cannot be found by its tokens
            parent = _key(parent, event.token_ids[position * size : (position + 1) * size])
            self._keys[block_hash] = parent
            self._hashes[parent] = block_hash


_ROOT = 0


def _key(parent: int, token_ids: Sequence[int]) -> int:
    """What a block is found by: its own tokens after all tokens before it."""
    return hash((parent, tuple(token_ids)))
