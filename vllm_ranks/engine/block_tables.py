"""Which blocks of the KV cache each sequence holds, and under which hashes its full ones can be found.

Must never decide who gets blocks, or take them from anybody: the scheduler asks first what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from vllm_ranks.engine.kv_cache import Block, KVCache
from vllm_ranks.engine.request import EngineRequest
from vllm_ranks.engine.sequence import SequenceState

BlockHasher = Callable[[EngineRequest, int, Hashable | None], Hashable]
"""(request, index of a full block beyond the prompt, hash of the block before it) → hash of the block."""


def unique_block_hash(request: EngineRequest, block_index: int, parent_hash: Hashable | None) -> Hashable:
    """A `BlockHasher` for generated text that nobody will ask for again."""
    return request.request_id, block_index


class BlockTables:
    """The sequences' shares of one KV cache."""

    def __init__(self, kv_cache: KVCache, block_hasher: BlockHasher) -> None:
        self.kv_cache = kv_cache
        self._block_hasher = block_hasher

    def cached_prefix(self, sequence: SequenceState) -> list[Block]:
        """Cached blocks of all it knows, but never of its last token: that one's output is what is wanted."""
        if not sequence.findable:
            return []
        longest = (sequence.known_tokens - 1) // self.kv_cache.block_size
        return self.kv_cache.cached_prefix(sequence.known_hashes(), longest)

    def adopt(self, sequence: SequenceState, hits: list[Block]) -> None:
        """It starts with these cached blocks."""
        self.kv_cache.claim(hits)
        sequence.blocks = hits
        sequence.block_count = len(hits)

    def missing(self, sequence: SequenceState, end: int) -> int:
        """How many more blocks it needs for `end` tokens."""
        return max(self.kv_cache.blocks_for(end) - sequence.block_count, 0)

    def extend(self, sequence: SequenceState, end: int) -> None:
        """Give it blocks for `end` tokens; those that will be full become findable."""
        kv_cache = self.kv_cache
        if (missing := self.missing(sequence, end)) > 0:
            kv_cache.allocate(missing)
            sequence.block_count += missing
        first, full = len(sequence.blocks), end // kv_cache.block_size
        if sequence.findable and full > first:
            parent = sequence.blocks[-1] if first else None
            hashes = self._hashes(sequence, first, full)
            sequence.blocks += kv_cache.store(sequence.request, first, hashes, parent)

    def release(self, sequence: SequenceState) -> None:
        """Take all its blocks; those with content stay findable until they are needed."""
        self.kv_cache.release(sequence.blocks, sequence.block_count - len(sequence.blocks))
        sequence.blocks = []
        sequence.block_count = 0

    def _hashes(self, sequence: SequenceState, first: int, end: int) -> list[Hashable]:
        """Hashes of its blocks from `first` to before `end`."""
        request, generated = sequence.request, sequence.generated_hashes
        prompt = request.prompt_block_hashes
        for index in range(len(prompt) + len(generated), end):
            last_known = generated or prompt
            generated.append(self._block_hasher(request, index, last_known[-1] if last_known else None))
        return [*prompt[first:end], *generated[max(first - len(prompt), 0) : max(end - len(prompt), 0)]]
