"""What one rank's prefix cache is believed to hold: by what was sent there, and by what the rank tells of it.

Three kinds of knowledge, the best one that is to be had:
- The rank tells of its cache, and prompts are known as tokens: the blocks are known exactly. To them come
  those of prompts that were sent and are still to be computed.
- It tells, but prompts are known as text only: what was sent is remembered, within what the rank says it
  holds at all; beyond, what was not used for longest is forgotten.
- It does not tell: the same, within the size of its cache.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ext_proc.cache_events import AllBlocksCleared, BlocksStored, CacheEvent
from ext_proc.held_blocks import HeldBlocks
from ext_proc.prefix_index import PrefixIndex
from ext_proc.vocabulary import RequestFacts

MIN_BLOCKS = 64
"""Blocks remembered of even the smallest KV cache."""
MAX_BLOCKS = 1 << 24
"""And of the largest, whatever a rank says of its size."""
ESTIMATE_SLACK = 2
"""How many times too long the estimate of a prompt may be, and nothing that is there is forgotten."""


class HeldCount:
    """How much is in the cache of a rank whose blocks cannot be told apart."""

    __slots__ = ("_block_tokens", "_cache_group", "_copies")

    def __init__(self) -> None:
        self._copies: int | None = None
        self._block_tokens = 0
        self._cache_group: int | None = None

    @property
    def tokens(self) -> int | None:
        """Tokens in it, those of several copies counted several times; `None`: not known."""
        return None if self._copies is None else max(0, self._copies) * self._block_tokens

    def forget(self, *, all_to_come: bool) -> None:
        """Know nothing any more. `all_to_come`: the rank tells everything from an empty cache on."""
        self._copies = 0 if all_to_come else None

    def apply(self, events: Iterable[CacheEvent]) -> None:
        """Follow what happened to the cache."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._copies = 0
            elif self._copies is not None:
                if isinstance(event, BlocksStored) and self._block_tokens == 0:
                    self._cache_group, self._block_tokens = event.cache_group, event.block_tokens
                if event.cache_group == self._cache_group:
                    more = 1 if isinstance(event, BlocksStored) else -1
                    self._copies += more * len(event.block_hashes)


class RankCache:
    """The prefix cache of one rank."""

    __slots__ = (
        "_by_tokens",
        "_count",
        "_max_blocks",
        "_relearned",
        "_text_block_tokens",
        "_told_block_tokens",
        "_unconfirmed",
        "held",
        "index",
        "prompts_found",
        "prompts_missing",
    )

    def __init__(self, *, by_tokens: bool, text_block_tokens: int, max_blocks: int) -> None:
        """A cache of which nothing is known.

        Args:
            by_tokens: whether prompts to this rank are known as tokens.
            text_block_tokens: size of the blocks of prompts known as text.
            max_blocks: blocks to remember until the size of the cache is known.
        """
        self.index = PrefixIndex(max_blocks)
        """Blocks of prompts that were sent; where the cache is known exactly, of those not yet computed."""
        self.held: HeldBlocks | None = None
        """Blocks that the rank says are there, once it tells; only where prompts are known as tokens."""
        self.prompts_found = 0
        """Prompts that the rank has computed and then said it holds …"""
        self.prompts_missing = 0
        """… and such as it did not: the tokens that it made of them were others."""
        self._by_tokens = by_tokens
        self._text_block_tokens = text_block_tokens
        self._told_block_tokens: int | None = None
        self._max_blocks = max_blocks
        self._count = HeldCount()
        self._relearned = False
        """Whether what the rank had told was given up since its last report."""
        self._unconfirmed: list[int] = []
        """First blocks of prompts that it has computed by its last report, and not said yet that it holds."""

    def __len__(self) -> int:
        return len(self.index) + (len(self.held) if self.held is not None else 0)

    @property
    def is_exact(self) -> bool:
        """Whether the rank's blocks are known, not guessed."""
        return self.held is not None and self.held.is_whole

    @property
    def block_tokens(self) -> int | None:
        """Size of the blocks by which prompts are recognised; `None`: not known yet."""
        if not self._by_tokens:
            return self._text_block_tokens
        told = self.held.block_tokens if self.held is not None else None
        return told or self._told_block_tokens

    # --- Prompts -------------------------------------------------------------------------------------

    def blocks_of(self, facts: RequestFacts, adapter: str | None) -> tuple[int, ...]:
        """The blocks of a prompt as this cache knows them; none if it cannot be recognised here."""
        if not self._by_tokens:
            return facts.prompt_blocks
        size = self.block_tokens
        return facts.tokens.blocks(size, adapter) if facts.tokens is not None and size is not None else ()

    def cached_tokens(self, facts: RequestFacts, adapter: str | None) -> int:
        """Prompt tokens that are there or will be before the prompt is computed; never all of them.

        The last token is always computed, and an engine takes only whole blocks from its cache.
        """
        blocks, size = self.blocks_of(facts, adapter), self.block_tokens
        if not blocks or size is None:
            return 0
        if self.held is None:
            matched = self.index.matched_blocks(blocks)
        else:
            matched = self.held.matched_blocks(blocks, self.index)
        if self._by_tokens:
            return min(matched, (facts.prompt_tokens - 1) // size) * size
        return min(matched * size, max(0, facts.prompt_tokens - 1))

    def expect(self, blocks: Sequence[int]) -> None:
        """A prompt with these blocks was sent to the rank."""
        self.index.add(blocks)

    def settle(self, blocks: Sequence[int], *, is_computed: bool) -> None:
        """That prompt is computed, for certain if `is_computed`, or will not be: now the rank's word counts.

        Only where the cache is known exactly. Events come on another way than reports, perhaps a little
        later: so they have until the next report.
        """
        self.index.discard(blocks)
        if is_computed and blocks and self.held is not None:
            if self.held.matched_blocks(blocks[:1]):
                self.prompts_found += 1
            else:
                self._unconfirmed.append(blocks[0])

    # --- What the rank tells -------------------------------------------------------------------------

    def apply(self, events: Sequence[CacheEvent], tokens_to_come: int) -> None:
        """Follow what happened to the cache.

        Args:
            events: in their order.
            tokens_to_come: of prompts sent to the rank and not yet computed, which it cannot tell of.
        """
        if AllBlocksCleared() in events:
            self.index.clear()
            self._unconfirmed.clear()
        if self._by_tokens:
            if self.held is None:
                self.held = HeldBlocks(self._max_blocks)
            left = self.held.apply(events)
            if not self.is_exact:
                self.index.discard(left)
            return
        self._count.apply(events)
        held_tokens = self._count.tokens
        if held_tokens is not None:
            self.index.trim(ESTIMATE_SLACK * (held_tokens + tokens_to_come) // self._text_block_tokens)

    def forget_events(self, *, all_to_come: bool) -> None:
        """What the rank has told so far is void. `all_to_come`: it will tell all from an empty cache on."""
        self._relearned = True
        self._unconfirmed.clear()
        self._count.forget(all_to_come=all_to_come)
        if self._by_tokens:
            self.held = HeldBlocks(self._max_blocks)
            self.held.forget(all_to_come=all_to_come)
            if all_to_come:
                self.index.clear()

    def resize(self, capacity_tokens: int, block_tokens: int | None) -> None:
        """The rank has a KV cache of so many tokens, in blocks of `block_tokens` if it says so."""
        self._told_block_tokens = block_tokens
        blocks = capacity_tokens // (self.block_tokens or self._text_block_tokens)
        self._max_blocks = min(MAX_BLOCKS, max(MIN_BLOCKS, blocks))
        self.index.resize(self._max_blocks)
        if self.held is not None:
            self.held.max_copies = 2 * self._max_blocks

    def note_report(self) -> None:
        """The rank has reported, and has not started anew since its report before."""
        self._relearned = False
        if self.held is not None:
            for block in self._unconfirmed:
                if self.held.matched_blocks((block,)):
                    self.prompts_found += 1
                else:
                    self.prompts_missing += 1
        self._unconfirmed.clear()

    def note_restart(self) -> None:
        """The rank's report shows that it has started anew, with an empty cache."""
        self._unconfirmed.clear()
        if not self._relearned:
            self.index.clear()
            self._count.forget(all_to_come=self._count.tokens is not None)
            if self.held is not None:
                self.held.forget(all_to_come=self.held.is_whole)
        self._relearned = False

    def memory_bytes(self) -> int:
        """Memory that is occupied."""
        return self.index.memory_bytes() + (self.held.memory_bytes() if self.held is not None else 0)
