"""What a rank publishes about its prefix cache, read and put in order. Pure.

vLLM 0.32 (vllm/distributed/kv_events.py): a batch is the array `[timestamp, events, rank]`; an event is a map
with the key `type`, before vllm-project/vllm#42892 an array that begins with it. Batches are numbered from 0
in each process, so a gap in the numbers is a loss, and a lower number a restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from ext_proc.cache_events import AllBlocksCleared, BlocksRemoved, BlocksStored, CacheEvent

OWN_CACHE = (None, "GPU")
"""`medium` of events about the engine's own cache, on a CPU too; others are about what it offloads."""
WHOLE_PROMPTS = (None, "full_attention", "mla_attention", "sink_full_attention")
"""`kv_cache_spec_kind` of caches that keep all of a prompt, not just the last part or a state of it."""

LOW_64_BITS = (1 << 64) - 1


class UnreadableEvents(ValueError):
    """The batch is not one of vLLM's."""


_OLD_FIELDS: Mapping[str, tuple[str, ...]] = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size"),
    "BlockRemoved": ("block_hashes",),
    "AllBlocksCleared": (),
}
"""Positions of the fields that matter, after the type, where events are arrays."""

_BlockHash = int | bytes


class _Batch(msgspec.Struct, array_like=True):
    timestamp: float
    events: list[dict[str, Any] | list[Any]]


class _Stored(msgspec.Struct):
    block_hashes: list[_BlockHash]
    parent_block_hash: _BlockHash | None
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]]
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    lora_name: str | None = None
    kv_cache_spec_kind: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None


class _Removed(msgspec.Struct):
    block_hashes: list[_BlockHash]
    group_idx: int | None = None


_decoder = msgspec.msgpack.Decoder(_Batch)


def read_batch(payload: bytes) -> list[CacheEvent]:
    """The events of one batch, in order, but for those that are not about prompts in the rank's own cache.

    Raises UnreadableEvents.
    """
    try:
        return [event for raw in _decoder.decode(payload).events if (event := _event(raw)) is not None]
    except msgspec.DecodeError as error:
        raise UnreadableEvents(f"not a batch of KV cache events: {error}") from error


def _event(raw: dict[str, Any] | list[Any]) -> CacheEvent | None:
    fields = raw if isinstance(raw, dict) else _named(raw)
    kind = fields.get("type")
    if fields.get("medium") not in OWN_CACHE:
        return None
    if kind == "BlockStored":
        return _stored(msgspec.convert(fields, _Stored))
    if kind == "BlockRemoved":
        removed = msgspec.convert(fields, _Removed)
        return BlocksRemoved([_name(one) for one in removed.block_hashes], removed.group_idx)
    return AllBlocksCleared() if kind == "AllBlocksCleared" else None


def _named(values: list[Any]) -> dict[str, Any]:
    """The fields of an event that is an array."""
    kind = values[0] if values and isinstance(values[0], str) else ""
    return dict(zip(("type", *_OLD_FIELDS.get(kind, ())), values, strict=False))


def _stored(event: _Stored) -> BlocksStored | None:
    if event.kv_cache_spec_kind not in WHOLE_PROMPTS:
        return None
    return BlocksStored(
        [_name(one) for one in event.block_hashes],
        None if event.parent_block_hash is None else _name(event.parent_block_hash),
        event.token_ids,
        event.block_size,
        event.lora_name,
        {
            position: rest
            for position, keys in enumerate(event.extra_keys or ())
            if keys and (rest := _without(event.lora_name, keys))
        },
        event.group_idx,
    )


def _name(block_hash: _BlockHash) -> int:
    """A block's hash as an integer, which is what vLLM itself makes of its low 64 bits."""
    if isinstance(block_hash, int):
        return block_hash & LOW_64_BITS
    return int.from_bytes(block_hash[-8:], "big")


def _without(adapter: str | None, keys: Iterable[object]) -> tuple[object, ...]:
    """What makes a block's content besides its adapter, whose name comes first (`to_event_extra_keys`)."""
    first, *rest = keys
    return tuple(rest) if adapter is not None and first == adapter else (first, *rest)


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
        self._replayed: dict[int, int] = {}
        """Hashes of what was sent again, by its number: payloads would take hundreds of megabytes."""

    def replayed(self, batches: Iterable[Batch]) -> None:
        """These have been sent again on request; some of them are still to come on the ordinary way."""
        self._replayed = {batch.sequence: hash(batch.payload) for batch in batches}
        self._next_sequence = max([self._next_sequence, *(sequence + 1 for sequence in self._replayed)])

    def is_known(self, batch: Batch) -> bool:
        """Whether the batch is one of those sent again: its time stamp makes it unlike any other."""
        return self._replayed.get(batch.sequence) == hash(batch.payload)

    def accept(self, batch: Batch) -> Gap | None:
        """Take note of a batch that has arrived; what is missing before it, if anything."""
        expected, self._next_sequence = self._next_sequence, batch.sequence + 1
        self._replayed = {}  # those still to come on the ordinary way would have come before
        if batch.sequence >= expected:
            return None if batch.sequence == expected else Gap(expected, batch.sequence, restarted=False)
        return Gap(0, batch.sequence, restarted=True)
