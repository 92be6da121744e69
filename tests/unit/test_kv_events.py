"""What ranks publish about their prefix caches: reading it, keeping it in order, following it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ranks.reports.kv_events import (
    AllBlocksCleared,
    Batch,
    BlocksRemoved,
    BlocksStored,
    CacheView,
    EventOrder,
    Gap,
    KvEvent,
    UnreadableEvents,
    read_batch,
)

PROMPT = list(range(100, 112))


def batch(sequence: int, text: str = "") -> Batch:
    """A batch whose payload is its number, or something else."""
    return Batch(sequence, (text or str(sequence)).encode())


def stored(*hashes: int, parent: int | None = None, token_ids: list[int], size: int = 4) -> BlocksStored:
    """Blocks of four tokens."""
    return BlocksStored(hashes, parent, tuple(token_ids), size)


# --- Reading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        {"type": "BlockStored", "block_hashes": [5, 6], "parent_block_hash": None, "token_ids": [1, 2, 3, 4],
         "block_size": 2, "lora_id": None, "medium": "GPU", "something_new": 1},
        ["BlockStored", [5, 6], None, [1, 2, 3, 4], 2, None, "GPU"],
    ],
    ids=["map", "array"],
)  # fmt: skip
def test_events_are_read_as_maps_and_as_the_arrays_of_older_versions(event: Any) -> None:
    payload = msgspec.msgpack.encode([1.5, [event], 0])
    assert read_batch(payload) == [BlocksStored((5, 6), None, (1, 2, 3, 4), 2)]


def test_kinds_of_events_that_are_not_known_are_left_out() -> None:
    payload = msgspec.msgpack.encode([1.5, [{"type": "BlockMoved"}, {"type": "AllBlocksCleared"}], 0])
    assert read_batch(payload) == [AllBlocksCleared()]


def test_the_events_of_a_batch_keep_their_order() -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [b"x"], "medium": "GPU"}
    payload = msgspec.msgpack.encode([1.5, [{"type": "AllBlocksCleared"}, removed], 0])
    assert read_batch(payload) == [AllBlocksCleared(), BlocksRemoved((b"x",))]


@given(
    st.binary()
    | st.recursive(st.none() | st.integers(0, 300) | st.text(), st.lists).map(msgspec.msgpack.encode)
)
def test_anything_else_is_refused_as_unreadable(payload: bytes) -> None:
    try:
        assert isinstance(read_batch(payload), list)
    except UnreadableEvents:
        pass


# --- Order --------------------------------------------------------------------------------------------


def test_batches_in_order_leave_no_gap() -> None:
    order = EventOrder()
    assert [order.accept(batch(number)) for number in range(3)] == [None] * 3


def test_a_missing_batch_is_a_gap() -> None:
    order = EventOrder()
    order.accept(batch(0))
    assert order.accept(batch(3)) == Gap(1, 3, restarted=False)
    assert order.accept(batch(4)) is None


def test_a_lower_number_is_a_restart() -> None:
    order = EventOrder()
    for number in range(5):
        order.accept(batch(number))
    assert order.accept(batch(2, "another")) == Gap(0, 2, restarted=True)
    assert order.accept(batch(3)) is None


def test_what_was_sent_again_is_known_when_it_comes_by_itself() -> None:
    order = EventOrder()
    order.replayed([batch(0), batch(1), batch(2)])
    assert order.is_known(batch(1))
    assert not order.is_known(batch(1, "of a publisher that has started anew"))
    assert not order.is_known(batch(3))
    assert order.accept(batch(3)) is None


# --- The cache ----------------------------------------------------------------------------------------


def test_a_prompt_is_found_as_far_as_its_blocks_are_stored() -> None:
    view = CacheView(100)
    view.apply([stored(1, 2, token_ids=PROMPT[:8])])
    assert view.cached_tokens(PROMPT) == 8
    assert view.cached_tokens(PROMPT[:7]) == 4
    assert view.cached_tokens([1, *PROMPT]) == 0
    assert len(view) == 2


def test_blocks_stored_later_continue_those_before() -> None:
    view = CacheView(100)
    view.apply([stored(1, token_ids=PROMPT[:4]), stored(2, 3, parent=1, token_ids=PROMPT[4:])])
    assert view.cached_tokens(PROMPT) == 12


def test_a_removed_block_ends_what_is_found() -> None:
    view = CacheView(100)
    view.apply([stored(1, 2, 3, token_ids=PROMPT), BlocksRemoved((2,))])
    assert view.cached_tokens(PROMPT) == 4
    view.apply([BlocksRemoved((2, 99))])
    assert len(view) == 2


def test_a_cleared_cache_holds_nothing() -> None:
    view = CacheView(100)
    view.apply([stored(1, token_ids=PROMPT[:4]), AllBlocksCleared()])
    assert (view.cached_tokens(PROMPT), len(view)) == (0, 0)


def test_blocks_whose_beginning_was_never_seen_are_not_found() -> None:
    view = CacheView(100)
    view.apply([stored(2, parent=1, token_ids=PROMPT[4:8])])
    assert (view.cached_tokens(PROMPT), len(view)) == (0, 0)


def test_the_same_tokens_after_others_are_another_block() -> None:
    view = CacheView(100)
    view.apply([stored(1, 2, token_ids=[1, 1, 1, 1, 1, 1, 1, 1])])
    assert view.cached_tokens([1] * 12) == 8


EVENTS: st.SearchStrategy[KvEvent] = st.one_of(
    st.builds(
        lambda hashes, parent: BlocksStored(tuple(hashes), parent, tuple(hashes) * 2, 2),
        st.lists(st.integers(0, 20), max_size=4),
        st.none() | st.integers(0, 20),
    ),
    st.builds(lambda hashes: BlocksRemoved(tuple(hashes)), st.lists(st.integers(0, 20), max_size=4)),
    st.just(AllBlocksCleared()),
)


@given(st.lists(EVENTS, max_size=30))
def test_the_view_never_grows_beyond_its_bound(events: list[KvEvent]) -> None:
    view = CacheView(6)
    for event in events:
        view.apply([event])
        assert len(view) <= 6
