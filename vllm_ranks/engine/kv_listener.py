"""From the KV cache's events to published ones: adds token ids, takes the low 64 bits of each hash.

Must never change the cache: it is called while the cache changes.
"""

from __future__ import annotations

from collections.abc import Hashable

from vllm_ranks.engine import kv_events
from vllm_ranks.engine.block_hash import block_extra_keys, event_hash
from vllm_ranks.engine.engine_requests import EngineSideRequests
from vllm_ranks.engine.kv_cache import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvent


class KvEventNotes:
    """Events of the current step, until they are published."""

    def __init__(self, requests: EngineSideRequests, block_size: int) -> None:
        self._requests = requests
        self._block_size = block_size
        self._events: list[kv_events.Event] = []

    def add(self, event: KvEvent) -> None:
        """Take note of one event."""
        match event:
            case BlocksStored():
                self._events.append(self._stored(event))
            case BlocksRemoved(block_hashes):
                self._events.append(
                    kv_events.BlockRemoved([_low_bits(h) for h in block_hashes], kv_events.MEDIUM)
                )
            case AllBlocksCleared():
                self._events.append(kv_events.AllBlocksCleared())

    def take(self) -> list[kv_events.Event]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events

    def _stored(self, event: BlocksStored) -> kv_events.BlockStored:
        kept = self._requests[event.request.request_id]
        count = len(event.block_hashes)
        extra_keys = [
            _published_keys(block_extra_keys(index, lora=kept.lora, cache_salt=kept.cache_salt))
            for index in range(event.first_block, event.first_block + count)
        ]
        return kv_events.BlockStored(
            block_hashes=[_low_bits(block_hash) for block_hash in event.block_hashes],
            parent_block_hash=None if event.parent_hash is None else _low_bits(event.parent_hash),
            token_ids=list(self._requests.block_tokens(kept, event.first_block, count)),
            block_size=self._block_size,
            lora_id=kept.lora_id,
            medium=kv_events.MEDIUM,
            lora_name=None if kept.lora is None else kept.lora[0],
            extra_keys=extra_keys,
            session_id=kept.session_id,
        )


def _published_keys(keys: tuple[tuple[str, ...], ...] | None) -> tuple[str, ...] | None:
    """Extra keys are published without their tag: a LoRA's name, the salt itself."""
    return None if keys is None else tuple(key[1] for key in keys)


def _low_bits(block_hash: Hashable) -> int:
    if not isinstance(block_hash, bytes):
        raise TypeError("block hashes of this engine are bytes")
    return event_hash(block_hash)
