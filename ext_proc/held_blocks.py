"""Which prompt blocks a rank has in its prefix cache, by all it has told of it: no estimate, no forgetting.

A rank names blocks by hashes of its own; here they are known by ours (`prompt_tokens`), computed from the
tokens that the rank tells with them. So two tables are kept: from the rank's name of a block to ours, needed
when the rank removes the block or continues it, and by our name those that are there. A block may be there
several times: requests that came together each computed it, and the rank removes one copy after the other.
Bounded by the rank's own cache; about 75 bytes a block. Pure.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from ext_proc.cache_events import AllBlocksCleared, BlocksRemoved, BlocksStored, CacheEvent
from ext_proc.packed_table import PackedTable
from ext_proc.prompt_blocks import chained
from ext_proc.prompt_tokens import BYTES_PER_ID, first_parent, pack, with_extra_keys

ROOT = 0
"""Parent of the first block of a prompt, whatever its salt."""


class HeldBlocks:
    """The blocks of one rank."""

    __slots__ = (
        "_cache_group",
        "_copies",
        "_held",
        "_lost_parents",
        "_named",
        "block_tokens",
        "is_whole",
        "max_copies",
    )

    def __init__(self, expected_blocks: int) -> None:
        """Of a rank whose cache has room for so many blocks."""
        self._named = PackedTable(columns=3, expected_rows=expected_blocks)
        """The rank's name of a block: our name of it and of its parent, copies."""
        self._held = PackedTable(columns=2, expected_rows=expected_blocks)
        """Our name of a block: how many names the rank has for it, how many blocks it is the parent of."""
        self._lost_parents: dict[int, int] = {}
        """Blocks that are gone though the rank still has such as follow them, with the number of those."""
        self._copies = 0
        self._cache_group: int | None = None
        self.max_copies = 2 * expected_blocks
        """More copies than that cannot be: what is known must be wrong."""
        self.block_tokens: int | None = None
        """Size of the rank's blocks, once it has stored one."""
        self.is_whole = False
        """Whether nothing is in the cache but what is known here."""

    def __len__(self) -> int:
        return len(self._held)

    def forget(self, *, all_to_come: bool) -> None:
        """Know nothing any more. `all_to_come`: the rank tells everything from an empty cache on."""
        self._named.clear()
        self._held.clear()
        self._lost_parents.clear()
        self._copies = 0
        self.is_whole = all_to_come

    def apply(self, events: Iterable[CacheEvent]) -> list[int]:
        """Follow what happened to the cache. Returns the blocks that have left it."""
        left: list[int] = []
        for event in events:
            if isinstance(event, BlocksStored):
                self._store(event)
            elif isinstance(event, BlocksRemoved):
                if event.cache_group == self._cache_group:
                    for name in event.block_hashes:
                        self._remove(name, left)
            elif isinstance(event, AllBlocksCleared):
                self.forget(all_to_come=True)
        if self._copies > self.max_copies:
            self.forget(all_to_come=False)
        return left

    def matched_blocks(self, block_hashes: Sequence[int], expected: Container[int] = ()) -> int:
        """How many leading blocks of a prompt are there, or among those `expected`.

        A rank removes the end of a prompt before its beginning, so a logarithmic number of blocks is looked
        at. While it has blocks whose parent is gone, they are looked at one by one.
        """
        held = self._held
        if not block_hashes or not (block_hashes[0] in held or block_hashes[0] in expected):
            return 0
        if self._lost_parents:
            for position, block_hash in enumerate(block_hashes):
                if block_hash not in held and block_hash not in expected:
                    return position
            return len(block_hashes)
        there, missing = 0, len(block_hashes)
        while missing - there > 1:
            middle = (there + missing) // 2
            if block_hashes[middle] in held or block_hashes[middle] in expected:
                there = middle
            else:
                missing = middle
        return there + 1

    def memory_bytes(self) -> int:
        """Memory that is occupied."""
        return self._named.memory_bytes() + self._held.memory_bytes()

    def _store(self, event: BlocksStored) -> None:
        count, size = len(event.block_hashes), event.block_tokens
        if self.block_tokens is None:
            self._cache_group, self.block_tokens = event.cache_group, size
        if event.cache_group != self._cache_group or size != self.block_tokens:
            return
        if len(event.token_ids) != count * size:
            return  # some blocks were left out, and nobody says which
        if event.parent is None:
            before, parent = ROOT, first_parent(event.adapter, event.extra_keys.get(0, ()))
        else:
            row = self._named.get(event.parent)
            if row is None:
                return  # its beginning was never seen, so it cannot be told which prompt it belongs to
            before = parent = row[0]
            if 0 in event.extra_keys:
                parent = with_extra_keys(before, event.extra_keys[0])
        try:
            data = pack(event.token_ids)
        except OverflowError:
            return
        blocks = _chain(parent, data, size * BYTES_PER_ID, event.extra_keys)
        for name, block in zip(event.block_hashes, blocks, strict=True):
            self._add(name, block, before)
            before = block

    def _add(self, name: int, block: int, before: int) -> None:
        self._copies += 1
        row = self._named.get(name)
        if row is not None:
            self._named.put(name, row[0], row[1], row[2] + 1)
            return
        self._named.put(name, block, before, 1)
        names, followers = self._held.get(block) or (0, self._lost_parents.pop(block, 0))
        self._held.put(block, names + 1, followers)
        if names == 0 and before != ROOT:
            self._follow(before, 1)

    def _remove(self, name: int, left: list[int]) -> None:
        row = self._named.get(name)
        if row is None:
            return
        self._copies -= 1
        block, before, copies = row
        if copies > 1:
            self._named.put(name, block, before, copies - 1)
            return
        self._named.remove(name)
        names, followers = self._held.get(block) or (1, 0)
        if names > 1:
            self._held.put(block, names - 1, followers)
            return
        self._held.remove(block)
        left.append(block)
        if followers:
            self._lost_parents[block] = followers
        if before != ROOT:
            self._follow(before, -1)

    def _follow(self, block: int, more: int) -> None:
        """So many more blocks follow `block` than did."""
        row = self._held.get(block)
        if row is not None:
            self._held.put(block, row[0], row[1] + more)
        elif followers := self._lost_parents.pop(block, 0) + more:
            self._lost_parents[block] = followers


def _chain(
    parent: int, data: bytes, block_bytes: int, extra_keys: Mapping[int, tuple[object, ...]]
) -> Sequence[int]:
    """Our names of blocks that follow `parent`; what is extra to the first of them is in `parent` already."""
    if not any(extra_keys):
        return chained(parent, data, block_bytes, len(data))
    blocks: list[int] = []
    for position, start in enumerate(range(0, len(data), block_bytes)):
        if position and position in extra_keys:
            parent = with_extra_keys(parent, extra_keys[position])
        (parent,) = chained(parent, data[start : start + block_bytes], block_bytes, 1)
        blocks.append(parent)
    return blocks
