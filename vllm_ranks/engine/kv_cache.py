"""The KV cache of one rank as counted blocks: prefix hits, reference counts, least-recently-used eviction.

Same behaviour as vLLM's block pool (vLLM 0.32 vllm/v1/core/block_pool.py) without the memory: a block
that is not full has no content anybody could reuse, so it is only counted; a full one is a `Block` that
can be found by its hash. vLLM's free list always holds the blocks without content before the cached
ones, so here the free blocks are a number and a queue. Must never decide who gets blocks; the scheduler does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from vllm_ranks.engine.request import EngineRequest


@dataclass(slots=True, eq=False)
class Block:
    """One full block with known content; equal to nothing but itself."""

    block_hash: Hashable
    references: int = 1
    """Running requests that use it; at 0 it waits for a hit or for eviction."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Full blocks of a request became findable (`BlockStored` of vLLM's KV events)."""

    request: EngineRequest
    first_block: int
    """Index of the first of them within the request: its tokens start at this × block size."""
    block_hashes: tuple[Hashable, ...]
    parent_hash: Hashable | None
    """Hash of the block before the first; `None` at the start of the prompt."""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks lost their content (`BlockRemoved`)."""

    block_hashes: tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The whole prefix cache was reset (`AllBlocksCleared`)."""


KvEvent = BlocksStored | BlocksRemoved | AllBlocksCleared


class KVCache:
    """Blocks of one rank."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        listener: Callable[[KvEvent], None] | None = None,
    ) -> None:
        """`num_blocks`: usable blocks (vLLM's `num_gpu_blocks` counts one more that it never uses).

        `listener` is told of every KV event, while the cache changes: it must only take note.
        """
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a KV cache needs blocks and tokens, got {num_blocks} × {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.free_blocks = num_blocks
        """Blocks no running request uses, cached or not."""
        self._listener = listener
        self._blank_blocks = num_blocks
        """Those of the free blocks that have no content: always taken first."""
        self._idle: OrderedDict[Block, None] = OrderedDict()
        """The other free blocks, least recently used first."""
        self._by_hash: dict[Hashable, Block] = {}
        self._twins: dict[Hashable, list[Block]] = {}
        """Further blocks of the same content: requests that computed it at the same time."""

    @property
    def usage(self) -> float:
        """Share of the blocks that running requests use, 0 to 1 (`vllm:kv_cache_usage_perc`)."""
        return 1.0 - self.free_blocks / self.num_blocks

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def cached_prefix(self, block_hashes: Iterable[Hashable], max_blocks: int) -> list[Block]:
        """The longest run of cached blocks from the start, at most `max_blocks`; nothing is claimed yet."""
        hits: list[Block] = []
        if not self.enable_prefix_caching:
            return hits
        by_hash = self._by_hash
        for block_hash in block_hashes:
            if len(hits) == max_blocks:
                break
            block = by_hash.get(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def idle_among(self, blocks: Sequence[Block]) -> int:
        """How many of these no running request uses: claiming them takes free blocks."""
        return sum(block.references == 0 for block in blocks)

    def claim(self, blocks: Sequence[Block]) -> None:
        """Use cached blocks for one more request."""
        for block in blocks:
            if block.references == 0:
                del self._idle[block]
                self.free_blocks -= 1
            block.references += 1

    def allocate(self, count: int) -> None:
        """Take `count` blocks without content, evicting cached ones if need be.

        Raises ValueError if there are not that many free blocks.
        """
        if count > self.free_blocks:
            raise ValueError(f"{count} blocks asked for, {self.free_blocks} free")
        self.free_blocks -= count
        evict = count - self._blank_blocks
        if evict <= 0:
            self._blank_blocks -= count
            return
        self._blank_blocks = 0
        for _ in range(evict):
            block, _none = self._idle.popitem(last=False)
            self._forget(block)

    def store(
        self, request: EngineRequest, first_block: int, block_hashes: Sequence[Hashable], parent: Block | None
    ) -> list[Block]:
        """Allocated blocks of `request`, from index `first_block` on, are full now: make them findable."""
        stored = []
        for block_hash in block_hashes:
            block = Block(block_hash)
            if block_hash in self._by_hash:
                self._twins.setdefault(block_hash, []).append(block)
            else:
                self._by_hash[block_hash] = block
            stored.append(block)
        if self._listener is not None:
            parent_hash = None if parent is None else parent.block_hash
            self._listener(BlocksStored(request, first_block, tuple(block_hashes), parent_hash))
        return stored

    def release(self, blocks: Sequence[Block], blank_blocks: int) -> None:
        """A request gives back its full blocks, in their order, and those without reusable content."""
        self._blank_blocks += blank_blocks
        self.free_blocks += blank_blocks
        # The end of a prompt is the least likely to be asked for again: evict it first.
        for block in reversed(blocks):
            block.references -= 1
            if block.references == 0:
                self._idle[block] = None
                self.free_blocks += 1

    def reset(self) -> bool:
        """Forget all content. False, and nothing happens, while any block is in use."""
        if self.free_blocks != self.num_blocks:
            return False
        self._blank_blocks = self.num_blocks
        self._idle.clear()
        self._by_hash.clear()
        self._twins.clear()
        if self._listener is not None:
            self._listener(AllBlocksCleared())
        return True

    def _forget(self, block: Block) -> None:
        block_hash = block.block_hash
        twins = self._twins.get(block_hash)
        if twins is None:
            del self._by_hash[block_hash]
        else:
            if self._by_hash[block_hash] is block:
                self._by_hash[block_hash] = twins.pop(0)
            else:
                twins.remove(block)
            if not twins:
                del self._twins[block_hash]
        if self._listener is not None:
            self._listener(BlocksRemoved((block_hash,)))
