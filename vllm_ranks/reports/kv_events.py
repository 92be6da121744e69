"""What a rank publishes about its prefix cache, read and put in order. Pure.

vLLM 0.32 (vllm/distributed/kv_events.py): a batch is the array `[timestamp, events, rank]`; an event is a map
with the key `type`, before vllm-project/vllm#42892 an array that begins with it. Batches are numbered from 0
in each process, so a gap in the numbers is a loss, and a lower number a restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ext_proc.cache_events import AllBlocksCleared, BlocksRemoved, BlocksStored, CacheEvent

OWN_CACHE = (None, "GPU")
"""`medium` of events about the engine's own cache, on a CPU too; others are about what it offloads."""
WHOLE_PROMPTS = (None, "full_attention", "mla_attention", "sink_full_attention")
"""`kv_cache_spec_kind` of caches that keep all of a prompt, not just the last part or a state of it."""


class UnreadableEvents(ValueError):
    """The batch is not one of vLLM's."""


_OLD_FIELDS: Mapping[str, tuple[str, ...]] = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size"),
    "BlockRemoved": ("block_hashes",),
    "AllBlocksCleared": (),
}
"""Positions of the fields that matter, after the type, where events are arrays."""

_decoder = msgspec.msgpack.Decoder()


def read_batch(payload: bytes) -> list[CacheEvent]:
    """The events of one batch, in order, but for those that are not about prompts in the rank's own cache.

    Raises UnreadableEvents.
    """
    try:
        batch = _decoder.decode(payload)
        return [event for raw in batch[1] if (event := _event(raw)) is not None]
    except (msgspec.DecodeError, AttributeError, TypeError, KeyError, IndexError, ValueError) as error:
        raise UnreadableEvents(f"not a batch of KV cache events: {error}") from error


def _event(raw: Any) -> CacheEvent | None:
    if isinstance(raw, Mapping):
        kind, fields = raw["type"], raw
    else:
        kind = raw[0]
        fields = dict(zip(_OLD_FIELDS.get(kind, ()), raw[1:], strict=False))
    if fields.get("medium") not in OWN_CACHE:
        return None
    if kind == "BlockStored":
        return _stored(fields)
    if kind == "BlockRemoved":
        return BlocksRemoved([_name(one) for one in fields["block_hashes"]], fields.get("group_idx"))
    return AllBlocksCleared() if kind == "AllBlocksCleared" else None


def _stored(fields: Mapping[str, Any]) -> BlocksStored | None:
    if fields.get("kv_cache_spec_kind") not in WHOLE_PROMPTS:
        return None
    parent, adapter = fields["parent_block_hash"], fields.get("lora_name")
    return BlocksStored(
        [_name(one) for one in fields["block_hashes"]],
        None if parent is None else _name(parent),
        list(fields["token_ids"]),
        int(fields["block_size"]),
        adapter,
        {
            position: rest
            for position, keys in enumerate(fields.get("extra_keys") or ())
            if keys and (rest := _without(adapter, keys))
        },
        fields.get("group_idx"),
    )


def _name(block_hash: int | bytes) -> int:
    """A block's hash as an integer, which is what vLLM itself makes of its low 64 bits."""
    return block_hash if isinstance(block_hash, int) else int.from_bytes(block_hash[-8:], "big")


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
