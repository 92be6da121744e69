"""The KV cache: what is found, what is evicted, what is told of it (vLLM 0.32 vllm/v1/core/block_pool.py)."""

from __future__ import annotations

import pytest

from tests.builders_engine import BLOCK, engine_request, scheduler, step
from vllm_ranks.engine.kv_cache import AllBlocksCleared, Block, BlocksRemoved, BlocksStored, KVCache, KvEvent
from vllm_ranks.engine.request import EngineRequest

REQUEST = EngineRequest("r", 0.0, 100, 1)


def stored(cache: KVCache, *hashes: str, request: EngineRequest = REQUEST) -> list[Block]:
    """Blocks in use by a request, full, with these hashes."""
    cache.allocate(len(hashes))
    return cache.store(request, 0, hashes, None)


def found(cache: KVCache, *hashes: str, longest: int = 99) -> list[object]:
    return [block.block_hash for block in cache.cached_prefix(hashes, longest)]


def test_the_longest_run_from_the_start_is_found() -> None:
    cache = KVCache(8, BLOCK)
    stored(cache, "a", "b", "d")
    assert found(cache, "a", "b", "c", "d") == ["a", "b"]
    assert found(cache, "b") == ["b"]
    assert found(cache, "c", "a") == []
    assert found(cache, "a", "b", longest=1) == ["a"]


def test_content_outlives_its_request_until_the_blocks_are_needed() -> None:
    cache = KVCache(4, BLOCK)
    cache.release(stored(cache, "a", "b"), 0)
    assert (cache.free_blocks, cache.usage) == (4, 0.0)
    cache.allocate(2)
    assert found(cache, "a", "b") == ["a", "b"]
    cache.allocate(1)
    assert found(cache, "a", "b") == ["a"]


def test_blocks_without_content_are_taken_before_any_is_evicted() -> None:
    cache = KVCache(4, BLOCK)
    blocks = stored(cache, "a")
    cache.allocate(3)
    cache.release(blocks, 3)
    cache.allocate(3)
    assert found(cache, "a") == ["a"]


def test_the_least_recently_used_content_is_evicted_first() -> None:
    cache = KVCache(2, BLOCK)
    for name in "ab":
        cache.release(stored(cache, name), 0)
    hits = cache.cached_prefix(["a"], 9)
    cache.claim(hits)
    cache.release(hits, 0)
    cache.allocate(1)
    assert (found(cache, "a"), found(cache, "b")) == (["a"], [])


def test_the_end_of_a_prompt_is_evicted_before_its_beginning() -> None:
    cache = KVCache(3, BLOCK)
    cache.release(stored(cache, "a", "b", "c"), 0)
    cache.allocate(1)
    assert found(cache, "a", "b", "c") == ["a", "b"]


def test_shared_blocks_are_counted_once_and_free_with_their_last_user() -> None:
    cache = KVCache(4, BLOCK)
    first = stored(cache, "a", "b")
    hits = cache.cached_prefix(["a", "b"], 9)
    assert cache.idle_among(hits) == 0
    cache.claim(hits)
    assert cache.usage == 0.5
    cache.release(first, 0)
    assert cache.usage == 0.5
    cache.release(hits, 0)
    assert cache.usage == 0.0


def test_claiming_idle_blocks_takes_them_from_the_free_ones() -> None:
    cache = KVCache(2, BLOCK)
    cache.release(stored(cache, "a"), 0)
    hits = cache.cached_prefix(["a"], 9)
    assert cache.idle_among(hits) == 1
    cache.claim(hits)
    assert cache.free_blocks == 1


def test_the_same_content_computed_twice_is_found_until_both_are_evicted() -> None:
    events: list[KvEvent] = []
    cache = KVCache(2, BLOCK, listener=events.append)
    both = [stored(cache, "a"), stored(cache, "a")]
    for blocks in both:
        cache.release(blocks, 0)
    cache.allocate(1)
    assert found(cache, "a") == ["a"]
    cache.allocate(1)
    assert found(cache, "a") == []
    assert events[2:] == [BlocksRemoved(("a",)), BlocksRemoved(("a",))]


def test_more_blocks_than_are_free_is_an_error() -> None:
    cache = KVCache(2, BLOCK)
    cache.allocate(1)
    with pytest.raises(ValueError, match="2 blocks asked for, 1 free"):
        cache.allocate(2)


def test_a_cache_needs_blocks_and_tokens() -> None:
    for blocks, size in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="needs blocks and tokens"):
            KVCache(blocks, size)


def test_a_reset_forgets_everything_but_only_while_nothing_is_in_use() -> None:
    events: list[KvEvent] = []
    cache = KVCache(4, BLOCK, listener=events.append)
    blocks = stored(cache, "a")
    assert not cache.reset()
    cache.release(blocks, 0)
    assert cache.reset()
    assert found(cache, "a") == []
    assert cache.free_blocks == 4
    assert events[-1] == AllBlocksCleared()
    cache.allocate(4)


def test_events_tell_of_a_requests_blocks_as_they_fill() -> None:
    events: list[KvEvent] = []
    engine = scheduler(budget=BLOCK * 2, events=events)
    request = engine_request("a", prompt=3 * BLOCK + 2, output=4)
    engine.add(request)
    while engine.has_unfinished:
        step(engine)
    a = [("a", 0), ("a", 1), ("a", 2)]
    assert events == [
        BlocksStored(request, 0, (a[0], a[1]), None),
        BlocksStored(request, 2, (a[2],), a[1]),
        BlocksStored(request, 3, (("a", 3),), a[2]),
    ]


def test_events_tell_of_evictions_one_block_at_a_time() -> None:
    events: list[KvEvent] = []
    cache = KVCache(2, BLOCK, listener=events.append)
    cache.release(stored(cache, "a", "b"), 0)
    cache.allocate(2)
    assert events[1:] == [BlocksRemoved(("b",)), BlocksRemoved(("a",))]
