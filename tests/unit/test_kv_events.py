"""What ranks publish about their prefix caches: reading it, keeping it in order, following it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ext_proc.cache_events import AllBlocksCleared, BlocksRemoved, BlocksStored
from vllm_ranks.reports.kv_events import Batch, EventOrder, Gap, UnreadableEvents, read_batch


def batch(sequence: int, text: str = "") -> Batch:
    """A batch whose payload is its number, or something else."""
    return Batch(sequence, (text or str(sequence)).encode())


STORED: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [5, 6],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}


def read(*events: Any) -> list[Any]:
    """The events of a batch."""
    return list(read_batch(msgspec.msgpack.encode([1.5, list(events), 0])))


# --- Reading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [{**STORED, "something_new": 1}, ["BlockStored", [5, 6], None, [1, 2, 3, 4], 2, None, "GPU"]],
    ids=["map", "array"],
)
def test_events_are_read_as_maps_and_as_the_arrays_of_older_versions(event: Any) -> None:
    assert read(event) == [BlocksStored([5, 6], None, [1, 2, 3, 4], 2)]


def test_kinds_of_events_that_are_not_known_are_left_out() -> None:
    assert read({"type": "BlockMoved"}, {"type": "AllBlocksCleared"}) == [AllBlocksCleared()]


def test_the_events_of_a_batch_keep_their_order() -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"}
    assert read({"type": "AllBlocksCleared"}, removed) == [AllBlocksCleared(), BlocksRemoved([7])]


def test_hashes_that_are_published_as_bytes_count_by_their_low_64_bits() -> None:
    whole = bytes(24) + (7).to_bytes(8, "big")
    (event,) = read({**STORED, "block_hashes": [whole], "parent_block_hash": whole})
    assert (event.block_hashes, event.parent) == ([7], 7)


def test_what_a_rank_has_offloaded_is_not_in_its_cache() -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [7], "medium": "CPU"}
    assert read({**STORED, "medium": "STORAGE"}, removed) == []


def test_caches_that_do_not_keep_whole_prompts_are_left_out() -> None:
    assert read({**STORED, "kv_cache_spec_kind": "sliding_window", "group_idx": 1}) == []
    (kept,) = read({**STORED, "kv_cache_spec_kind": "full_attention", "group_idx": 0})
    assert kept.cache_group == 0


def test_what_besides_its_tokens_makes_a_block_is_told_apart_from_its_adapter() -> None:
    image = ["picture", 3]
    (event,) = read({**STORED, "lora_name": "l", "extra_keys": [["l", "salt"], ["l", image]]})
    assert (event.adapter, event.extra_keys) == ("l", {0: ("salt",), 1: (image,)})
    (plain,) = read({**STORED, "lora_name": "l", "extra_keys": [["l"], ["l"]]})
    assert plain.extra_keys == {}


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
