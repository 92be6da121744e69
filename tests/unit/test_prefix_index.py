"""The prefix index: what a rank was sent lately is found, within bounded memory."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ext_proc.prefix_index import PrefixIndex, matched_blocks_each


def test_a_prompt_is_found_as_far_as_it_agrees() -> None:
    index = PrefixIndex(1000)
    index.add([1, 2, 3, 4])
    assert index.matched_blocks([1, 2, 3, 4]) == 4
    assert index.matched_blocks([1, 2, 3, 99]) == 3
    assert index.matched_blocks([1, 2, 98, 99]) == 2
    assert index.matched_blocks([97, 98]) == 0
    assert index.matched_blocks([]) == 0


def test_what_was_used_last_is_kept_and_the_rest_forgotten() -> None:
    index = PrefixIndex(8)
    index.add([1, 2])
    for other in range(10, 30, 2):
        index.add([other, other + 1])
        index.add([1, 2])
    assert index.matched_blocks([1, 2]) == 2
    assert index.matched_blocks([10, 11]) == 0


def test_trim_forgets_the_prompt_not_used_for_longest() -> None:
    index = PrefixIndex(100)
    index.add([1, 2, 3])
    index.add([11, 12, 13])
    index.add([1, 2, 3])
    index.add([21, 22, 23])
    index.trim(6)
    assert [index.matched_blocks([n + 1, n + 2, n + 3]) for n in (0, 10, 20)] == [3, 0, 3]


def test_trim_forgets_the_end_of_a_prompt_and_keeps_its_beginning() -> None:
    index = PrefixIndex(100)
    index.add([1, 2, 3, 4])
    index.trim(3)
    assert [block in index for block in (1, 2, 3, 4)] == [True, True, True, False]


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=30),
    st.integers(12, 60),
    st.integers(0, 40),
)
def test_trim_forgets_by_age_and_never_a_block_before_those_it_leads_to(
    added: list[list[int]], bound: int, left: int
) -> None:
    index = PrefixIndex(bound)
    last_use: dict[tuple[int, ...], int] = {}
    for use, prompt in enumerate(added):
        chain = [tuple(prompt[: n + 1]) for n in range(len(prompt))]
        index.add([hash(block) for block in chain])
        last_use.update(dict.fromkeys(chain, use))
    known = {block for block in last_use if hash(block) in index}
    index.trim(left)
    kept = {block for block in known if hash(block) in index}
    assert len(kept) == len(index) <= left
    assert len(kept) >= min(len(known), left - left // 8)
    assert all(block[:-1] in kept for block in kept if len(block) > 1)
    newest_forgotten = max((last_use[block] for block in known - kept), default=-1)
    assert all(last_use[block] >= newest_forgotten for block in kept)


def test_evicted_blocks_are_forgotten_when_the_rank_says_so() -> None:
    index = PrefixIndex(100)
    index.add([1, 2, 3])
    index.discard([3, 77])
    assert index.matched_blocks([1, 2, 3]) == 2
    index.clear()
    assert len(index) == 0


def test_of_a_prompt_longer_than_the_index_the_beginning_is_kept() -> None:
    index = PrefixIndex(8)
    index.add(list(range(100)))
    assert index.matched_blocks(list(range(100))) == 4
    assert len(index) <= 8


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 12)).map(
            lambda p: [p[0] * 100 + depth for depth in range(p[1])]
        ),
        max_size=40,
    ),
    st.integers(2, 40),
)
def test_the_bound_holds_and_the_last_prompt_is_always_known(prompts: list[list[int]], bound: int) -> None:
    index = PrefixIndex(bound)
    for prompt in prompts:
        index.add(prompt)
        assert len(index) <= bound
        kept = min(len(prompt), bound // 2)
        assert index.matched_blocks(prompt) >= kept
        assert all(block in index for block in prompt[:kept])


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), max_size=30), st.lists(st.integers(0, 5))
)
def test_with_room_for_all_the_match_is_exactly_the_longest_common_beginning(
    added: list[list[int]], asked: list[int]
) -> None:
    def chained(prompt: list[int]) -> list[int]:
        return [hash(tuple(prompt[: n + 1])) for n in range(len(prompt))]

    index = PrefixIndex(10_000)
    for prompt in added:
        index.add(chained(prompt))
    held = {block for prompt in added for block in chained(prompt)}
    blocks = chained(asked)
    longest = next((n for n, block in enumerate(blocks) if block not in held), len(blocks))
    assert index.matched_blocks(blocks) == longest


@pytest.mark.parametrize("bound", [1_000, 20_000, 31_250, 125_000])
def test_a_block_takes_at_most_a_hundred_bytes(bound: int) -> None:
    index, rng = PrefixIndex(bound), random.Random(0)
    for _ in range(3 * bound // 64):
        index.add([rng.getrandbits(60) for _ in range(64)])
        if len(index) > bound // 2:
            assert index.memory_bytes() <= 100 * len(index)


def test_too_small_a_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        PrefixIndex(1)


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=6),
    st.lists(st.integers(0, 2), max_size=8),
)
def test_many_indexes_are_asked_at_once_with_the_same_answer(
    added: list[list[int]], asked: list[int]
) -> None:
    def chained(prompt: list[int]) -> list[int]:
        return [hash(tuple(prompt[: n + 1])) for n in range(len(prompt))]

    indexes = []
    for prompt in added:
        index = PrefixIndex(16)
        index.add(chained(prompt))
        indexes.append(index)
    blocks = chained(asked)
    assert matched_blocks_each(indexes, blocks) == [index.matched_blocks(blocks) for index in indexes]
