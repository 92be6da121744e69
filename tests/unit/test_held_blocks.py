"""What a rank has told of its cache is known exactly: which prompts it holds, and how far."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ext_proc.cache_events import AllBlocksCleared, BlocksRemoved, BlocksStored, CacheEvent
from ext_proc.held_blocks import HeldBlocks
from ext_proc.prefix_index import PrefixIndex
from ext_proc.prompt_tokens import PromptTokens

PROMPT = list(range(100, 112))
SIZE = 4


def stored(
    *names: int, parent: int | None = None, token_ids: Sequence[int], **fields: object
) -> BlocksStored:
    """Blocks of four tokens."""
    return BlocksStored(names, parent, token_ids, SIZE, **fields)  # type: ignore[arg-type]


def removed(*names: int) -> BlocksRemoved:
    return BlocksRemoved(names)


def held(*events: CacheEvent, room: int = 100) -> HeldBlocks:
    """What a rank has by these events, the first since it started."""
    blocks = HeldBlocks(room)
    blocks.forget(all_to_come=True)
    blocks.apply(events)
    return blocks


def tokens_held(
    blocks: HeldBlocks, token_ids: Sequence[int], *, adapter: str | None = None, salt: str | None = None
) -> int:
    """How many tokens at the beginning of a prompt are there."""
    return SIZE * blocks.matched_blocks(PromptTokens(token_ids, cache_salt=salt).blocks(SIZE, adapter))


def test_a_prompt_is_found_as_far_as_its_blocks_are_stored() -> None:
    blocks = held(stored(1, 2, token_ids=PROMPT[:8]))
    assert tokens_held(blocks, PROMPT) == 8
    assert tokens_held(blocks, PROMPT[:7]) == 4
    assert tokens_held(blocks, [1, *PROMPT]) == 0
    assert (len(blocks), blocks.block_tokens) == (2, SIZE)


def test_blocks_stored_later_continue_those_before() -> None:
    blocks = held(stored(1, token_ids=PROMPT[:4]), stored(2, 3, parent=1, token_ids=PROMPT[4:]))
    assert tokens_held(blocks, PROMPT) == 12


def test_a_removed_block_ends_what_is_found() -> None:
    blocks = held(stored(1, 2, 3, token_ids=PROMPT))
    gone = blocks.apply([removed(2)])
    assert gone == [PromptTokens(PROMPT).blocks(SIZE, None)[1]]
    assert tokens_held(blocks, PROMPT) == 4
    assert blocks.apply([removed(2, 99)]) == []
    assert len(blocks) == 2


def test_a_block_that_comes_back_is_followed_again_by_those_that_stayed() -> None:
    blocks = held(stored(1, 2, 3, token_ids=PROMPT), removed(2))
    blocks.apply([stored(2, parent=1, token_ids=PROMPT[4:8])])
    assert tokens_held(blocks, PROMPT) == 12


def test_of_two_copies_one_may_go() -> None:
    """Requests that came together each computed the block; the rank removes the copies one by one."""
    blocks = held(stored(1, token_ids=PROMPT[:4]), stored(1, token_ids=PROMPT[:4]), removed(1))
    assert tokens_held(blocks, PROMPT) == 4
    blocks.apply([removed(1)])
    assert tokens_held(blocks, PROMPT) == 0


def test_a_cleared_cache_holds_nothing_and_is_known_wholly() -> None:
    blocks = HeldBlocks(100)
    assert not blocks.is_whole
    blocks.apply([stored(1, token_ids=PROMPT[:4]), AllBlocksCleared()])
    assert (tokens_held(blocks, PROMPT), len(blocks), blocks.is_whole) == (0, 0, True)


def test_blocks_whose_beginning_was_never_seen_are_not_found() -> None:
    blocks = held(stored(2, parent=1, token_ids=PROMPT[4:8]))
    assert (tokens_held(blocks, PROMPT), tokens_held(blocks, PROMPT[4:]), len(blocks)) == (0, 0, 0)


def test_the_same_tokens_after_others_are_another_block() -> None:
    blocks = held(stored(1, 2, token_ids=[1] * 8))
    assert tokens_held(blocks, [1] * 12) == 8


def test_a_salt_keeps_prompts_apart() -> None:
    blocks = held(stored(1, 2, token_ids=PROMPT[:8], extra_keys={0: ("mine",)}))
    assert tokens_held(blocks, PROMPT, salt="mine") == 8
    assert tokens_held(blocks, PROMPT, salt="yours") == 0
    assert tokens_held(blocks, PROMPT) == 0


def test_an_adapter_keeps_prompts_apart() -> None:
    blocks = held(stored(1, token_ids=PROMPT[:4], adapter="l"), stored(2, parent=1, token_ids=PROMPT[4:8]))
    assert tokens_held(blocks, PROMPT, adapter="l") == 8
    assert tokens_held(blocks, PROMPT, adapter="other") == 0
    assert tokens_held(blocks, PROMPT) == 0


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_prompt_without_an_image_is_not_found_from_where_one_with_it_has_the_image(position: int) -> None:
    blocks = held(stored(1, 2, 3, token_ids=PROMPT, extra_keys={position: (["picture", 1],)}))
    assert tokens_held(blocks, PROMPT) == 4 * position


def test_an_image_in_blocks_that_continue_others_counts_too() -> None:
    with_image = stored(2, 3, parent=1, token_ids=PROMPT[4:], extra_keys={0: (["picture", 1],)})
    blocks = held(stored(1, token_ids=PROMPT[:4]), with_image)
    assert tokens_held(blocks, PROMPT) == 4
    blocks.apply([removed(1)])
    assert tokens_held(blocks, PROMPT) == 0


def test_other_caches_of_a_hybrid_model_are_not_mixed_in() -> None:
    blocks = held(stored(1, 2, token_ids=PROMPT[:8], cache_group=0))
    blocks.apply([BlocksRemoved((1, 2), cache_group=1), stored(3, token_ids=PROMPT[8:], cache_group=1)])
    assert (tokens_held(blocks, PROMPT), len(blocks)) == (8, 2)
    blocks.apply([BlocksRemoved((2,), cache_group=0)])
    assert tokens_held(blocks, PROMPT) == 4


def test_blocks_of_which_some_were_left_out_are_not_guessed() -> None:
    blocks = held(BlocksStored((1, 2), None, PROMPT, SIZE))
    assert len(blocks) == 0


def test_prompts_on_their_way_count_with_what_is_there() -> None:
    blocks, expected = held(stored(1, token_ids=PROMPT[:4])), PrefixIndex(100)
    prompt = PromptTokens(PROMPT).blocks(SIZE, None)
    expected.add(prompt[1:])
    assert blocks.matched_blocks(prompt, expected) == 3


def test_more_copies_than_the_cache_has_room_for_cannot_be_so_nothing_is_believed() -> None:
    blocks = held(room=2)
    for name in range(4):
        blocks.apply([stored(name, token_ids=[name] * 4)])
    assert (len(blocks), blocks.is_whole) == (4, True)
    blocks.apply([stored(9, token_ids=[9] * 4)])
    assert (len(blocks), blocks.is_whole) == (0, False)


@pytest.mark.parametrize("room", [1_000, 20_000, 31_250, 125_000])
def test_a_block_takes_at_most_a_hundred_bytes(room: int) -> None:
    blocks, rng = held(room=room), random.Random(0)
    names = [rng.getrandbits(64) for _ in range(room)]
    for start in range(0, room, 100):
        batch = names[start : start + 100]
        blocks.apply([stored(*batch, token_ids=[rng.getrandbits(17) for _ in range(SIZE * len(batch))])])
        if len(blocks) > room // 2:
            assert blocks.memory_bytes() <= 100 * len(blocks)


class CacheUnderAnyInterleaving(RuleBasedStateMachine):
    """Blocks stored, removed and cleared in any order, against a plain model of what the rank holds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = held(room=1000)
        self.copies = Counter[tuple[int, ...]]()
        """Copies of blocks, each known by all tokens up to its end."""

    @rule(chosen=st.lists(st.integers(0, 1), min_size=1, max_size=9), data=st.data())
    def compute(self, chosen: list[int], data: st.DataObject) -> None:
        """A request computes a prompt, from where the rank has it in its cache, or from before that."""
        token_ids = [token for token in chosen for _ in range(SIZE)][: data.draw(st.integers(1, 36))]
        ends = range(SIZE, len(token_ids) + 1, SIZE)
        cached = next(
            (end - SIZE for end in ends if not self.copies[tuple(token_ids[:end])]), len(ends) * SIZE
        )
        start = data.draw(st.sampled_from(range(0, cached + 1, SIZE)))
        prompts = [tuple(token_ids[:end]) for end in ends if end > start]
        if prompts:
            parent = name_of(tuple(token_ids[:start])) if start else None
            names = map(name_of, prompts)
            self.blocks.apply([stored(*names, parent=parent, token_ids=token_ids[start : len(prompts[-1])])])
            self.copies.update(prompts)

    @precondition(lambda self: +self.copies)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        gone = data.draw(st.lists(st.sampled_from(sorted(self.copies.elements())), min_size=1, max_size=3))
        gone = list((Counter(gone) & self.copies).elements())
        self.blocks.apply([removed(*map(name_of, gone))])
        self.copies -= Counter(gone)

    @rule()
    def clear(self) -> None:
        self.blocks.apply([AllBlocksCleared()])
        self.copies.clear()

    @invariant()
    def what_is_credited_is_exactly_what_is_there_of_a_prompts_beginning(self) -> None:
        assert len(self.blocks) == len(+self.copies)
        for prompt in [*self.copies, (0,) * 5 * SIZE]:
            there = 0
            while there < len(prompt) and self.copies[prompt[: there + SIZE]]:
                there += SIZE
            assert tokens_held(self.blocks, prompt) == there


def name_of(prompt: tuple[int, ...]) -> int:
    """What the rank calls the last block of a prompt."""
    return hash(prompt) & (1 << 64) - 1


TestCacheUnderAnyInterleaving = CacheUnderAnyInterleaving.TestCase


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=4), max_size=30))
def test_nonsense_never_raises_nor_grows_beyond_the_bound(names: list[list[int]]) -> None:
    blocks = held(room=6)
    for position, some in enumerate(names):
        parent = some[0] if position % 3 else None
        blocks.apply([stored(*some, parent=parent, token_ids=some * SIZE), removed(*some[1:])])
        assert len(blocks) <= blocks.max_copies
