"""What ranks publish about their prefix caches: reading it, keeping it in order, following it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ext_proc.cache_events import AllBlocksCleared, BlocksRemoved, BlocksStored
from ext_proc.held_blocks import HeldBlocks
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


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_ids": ["1", "2", "3", "4"]},
        {"token_ids": [1, 2, 3, -4]},
        {"token_ids": [1, 2, 3, 1 << 32]},
        {"token_ids": [], "block_hashes": [], "block_size": 0},
        {"block_hashes": [[5], [6]]},
        {"parent_block_hash": "5"},
        {"lora_name": 5},
        {"extra_keys": [5, 6]},
        {"group_idx": "0"},
    ],
    ids=str,
)
def test_a_field_that_is_not_what_vllm_sends_makes_the_batch_unreadable(wrong: dict[str, Any]) -> None:
    with pytest.raises(UnreadableEvents):
        read({**STORED, **wrong})


def test_hashes_that_are_published_as_negative_numbers_count_by_their_low_64_bits() -> None:
    (event,) = read({**STORED, "block_hashes": [-1, -2]})
    assert event.block_hashes == [(1 << 64) - 1, (1 << 64) - 2]


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


any_value = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
a_hash = st.integers(-3, 3) | st.binary(max_size=33)
a_stored_map = st.fixed_dictionaries(
    {},
    optional={
        "block_hashes": st.lists(a_hash, min_size=2, max_size=2) | any_value,
        "parent_block_hash": st.none() | a_hash | any_value,
        "token_ids": st.lists(st.integers(-1, 2**33), max_size=4)
        | st.lists(any_value, min_size=4, max_size=4),
        "block_size": st.integers(-1, 4) | any_value,
        "lora_name": any_value,
        "extra_keys": any_value | st.lists(any_value, max_size=2),
        "group_idx": any_value,
    },
).map(lambda fields: {**STORED, **fields})
a_removed_map = st.fixed_dictionaries(
    {"type": st.just("BlockRemoved"), "block_hashes": st.lists(a_hash, max_size=3) | any_value}
)
an_array = st.builds(
    lambda kind, rest: [kind, *rest],
    st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"]) | any_value,
    st.lists(any_value, max_size=4),
)
a_near_miss = st.builds(
    lambda time, events: [time, events, 0],
    st.floats() | any_value,
    st.lists(a_stored_map | a_removed_map | an_array | any_value, max_size=3),
)


@given(st.lists(st.binary() | (any_value | a_near_miss).map(msgspec.msgpack.encode), max_size=3))
def test_anything_else_is_refused_as_unreadable_and_what_is_not_can_be_followed(
    payloads: list[bytes],
) -> None:
    cache = HeldBlocks(100)
    cache.forget(all_to_come=True)
    for payload in payloads:
        try:
            cache.apply(read_batch(payload))
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
