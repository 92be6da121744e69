"""Which prompt blocks a rank probably has in its prefix cache, in bounded memory.

One index per rank. A block is known by its chained hash, so holding a block implies having held all before
it, and is of no use without them. Blocks not used for longest go first, in two generations: a block used is
young; when the young reach half the bound they become the old, and the old are forgotten. So adding a prompt
searches and reorders nothing. Each block keeps the number of its last use, all of one prompt the same one:
only `trim`, which is seldom, looks at it. Pure; must never hold prompt text.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from operator import itemgetter

BYTES_PER_HASH = 32
"""Size of a Python integer of up to 60 bits, which is what a block hash is."""


class PrefixIndex:
    """Block hashes of one rank."""

    __slots__ = ("_old", "_uses", "_young", "_young_bound")

    def __init__(self, max_blocks: int) -> None:
        """Remember at most `max_blocks` blocks, and at least the half of that used last."""
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._uses = 0
        self._young_bound = 1
        self.resize(max_blocks)

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._young or block_hash in self._old

    def resize(self, max_blocks: int) -> None:
        """Change the bound; takes effect as blocks are added."""
        if max_blocks < 2:
            raise ValueError(f"max_blocks must be at least 2, got {max_blocks}")
        self._young_bound = max_blocks // 2

    def matched_blocks(self, block_hashes: Sequence[int]) -> int:
        """How many leading blocks of a prompt the rank probably holds.

        Looks at a logarithmic number of them, since the blocks held of a prompt are a prefix of it. Eviction
        may break that for a moment; the answer is then a guess, as the index is anyway.
        """
        young, old = self._young, self._old
        if not block_hashes or (block_hashes[0] not in young and block_hashes[0] not in old):
            return 0
        held, missing = 0, len(block_hashes)
        if block_hashes[-1] in young or block_hashes[-1] in old:
            return missing
        while missing - held > 1:
            middle = (held + missing) // 2
            if block_hashes[middle] in young or block_hashes[middle] in old:
                held = middle
            else:
                missing = middle
        return held + 1

    def add(self, block_hashes: Sequence[int]) -> None:
        """The rank has, or will shortly have, these blocks of one prompt; they are the last used now."""
        if len(block_hashes) > self._young_bound:
            block_hashes = block_hashes[: self._young_bound]
        if len(self._young) + len(block_hashes) > self._young_bound:
            self._old, self._young = self._young, {}
        young, old = self._young, self._old
        self._uses = use = self._uses + 1
        for block_hash in block_hashes:
            old.pop(block_hash, None)
            young[block_hash] = use

    def discard(self, block_hashes: Iterable[int]) -> None:
        """The rank has evicted these blocks."""
        for block_hash in block_hashes:
            self._young.pop(block_hash, None)
            self._old.pop(block_hash, None)

    def trim(self, max_blocks: int) -> None:
        """The rank cannot have more than `max_blocks` blocks: those not used for longest are forgotten now.

        And an eighth more, so that looking through all is not needed again with the next prompt.
        """
        if len(self) <= max_blocks:
            return
        excess = len(self) - (max_blocks - max_blocks // 8)
        forgotten = min(excess, len(self._old))
        _forget(self._old, forgotten)
        _forget(self._young, excess - forgotten)

    def clear(self) -> None:
        """The rank has lost its cache."""
        self._young.clear()
        self._old.clear()

    def memory_bytes(self) -> int:
        """Memory the index occupies, but for the numbers of uses: one small one per prompt."""
        return sys.getsizeof(self._young) + sys.getsizeof(self._old) + BYTES_PER_HASH * len(self)


def _forget(generation: dict[int, int], count: int) -> None:
    """Forget that many blocks, those not used for longest first.

    Of one prompt, the end goes first: the beginning is what others share, and what the rest is of no use
    without. A block comes into a generation after all before it in its prompt and is used with them, so the
    last to come of the same use is such an end.
    """
    if not count:
        return
    newest = sorted(generation.values())[count - 1]
    aged = [(use, block_hash) for block_hash, use in reversed(generation.items()) if use <= newest]
    aged.sort(key=itemgetter(0))
    for _, block_hash in aged[:count]:
        del generation[block_hash]


def matched_blocks_each(indexes: Iterable[PrefixIndex], block_hashes: Sequence[int]) -> list[int]:
    """`matched_blocks` of each index.

    Most ranks that hold something of a prompt hold the same system prompt, and a few all of it. So before the
    search it is tried whether a rank holds as much as the last one that did not hold all, or all.
    """
    if not block_hashes:
        return [0 for _ in indexes]
    first, final, count = block_hashes[0], block_hashes[-1], len(block_hashes)
    partly, last, beyond = 0, first, first
    matches = []
    for index in indexes:
        young, old = index._young, index._old
        if first not in young and first not in old:
            matched = 0
        elif partly and (last in young or last in old) and not (beyond in young or beyond in old):
            matched = partly
        elif final in young or final in old:
            matched = count
        else:
            matched = partly = index.matched_blocks(block_hashes)
            last, beyond = block_hashes[partly - 1], block_hashes[partly]
        matches.append(matched)
    return matches
