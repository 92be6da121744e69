"""What a rank is believed to have cached: exact where it tells and prompts are tokens, else an estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ext_proc.cache_events import AllBlocksCleared, BlocksRemoved, BlocksStored, CacheEvent
from ext_proc.ledger import Ledger
from ext_proc.prompt_tokens import PromptTokens
from ext_proc.reservation import Outcome
from ext_proc.vocabulary import RankReport, RequestFacts
from tests.builders import BLOCK_TOKENS, counters, pool, rank, report, request

SIZE = 16
PROMPT = list(range(100))
FULL_BLOCKS = 6


def with_tokens(token_ids: Sequence[int], *, model: str = "m", salt: str | None = None) -> RequestFacts:
    """A request whose prompt is known as tokens."""
    tokens = PromptTokens(token_ids, cache_salt=salt)
    return replace(request(prompt_tokens=tokens.count, model=model), tokens=tokens)


def reported(at_s: float, *, first_tokens: int = 0, capacity_tokens: int = 64_000) -> RankReport:
    """A report that tells the size of the cache, in blocks of 16 tokens."""
    plain = report(at_s, counters=counters(first_tokens=first_tokens))
    return replace(plain, kv_capacity_tokens=capacity_tokens, kv_block_tokens=SIZE)


def exact_pool(*, told: bool = True) -> Ledger:
    """A ledger over one rank, to which prompts are tokens; `told`: its events are followed from the start."""
    ledger = pool([rank(0)], by_tokens=True)
    ledger.record_report(rank(0), reported(0.1))
    if told:
        ledger.forget_cache_events(rank(0), all_to_come=True)
    return ledger


def cached(ledger: Ledger, facts: RequestFacts) -> int:
    """Tokens of a prompt that the rank is believed to have."""
    (tokens,) = ledger.cached_tokens_each(ledger.accounts, facts)
    return tokens


def stored(token_ids: Sequence[int], first_name: int = 1, adapter: str | None = None) -> BlocksStored:
    """The full blocks of a prompt."""
    count = len(token_ids) // SIZE
    names = range(first_name, first_name + count)
    return BlocksStored(names, None, token_ids[: count * SIZE], SIZE, adapter)


def tell(ledger: Ledger, *events: CacheEvent) -> None:
    ledger.record_cache_events(rank(0), events)


# --- Known exactly ------------------------------------------------------------------------------------


def test_what_a_rank_says_it_has_is_credited_and_no_more() -> None:
    ledger = exact_pool()
    assert cached(ledger, with_tokens(PROMPT)) == 0
    tell(ledger, stored(PROMPT))
    assert cached(ledger, with_tokens(PROMPT)) == FULL_BLOCKS * SIZE
    assert cached(ledger, with_tokens([*PROMPT[:40], *PROMPT])) == 32
    tell(ledger, BlocksRemoved([FULL_BLOCKS, FULL_BLOCKS - 1]))
    assert cached(ledger, with_tokens(PROMPT)) == (FULL_BLOCKS - 2) * SIZE
    tell(ledger, AllBlocksCleared())
    assert cached(ledger, with_tokens(PROMPT)) == 0


def test_the_last_token_is_always_computed_and_with_it_its_block() -> None:
    ledger = exact_pool()
    tell(ledger, stored(PROMPT[:96]))
    assert cached(ledger, with_tokens(PROMPT[:96])) == 80
    assert cached(ledger, with_tokens(PROMPT[:97])) == 96


def test_a_prompt_on_its_way_counts_until_it_is_computed_then_the_ranks_word_does() -> None:
    ledger = exact_pool()
    ledger.reserve(rank(0), with_tokens(PROMPT), 0.2)
    assert cached(ledger, with_tokens(PROMPT)) == FULL_BLOCKS * SIZE
    tell(ledger, stored(PROMPT[:48]))
    ledger.record_report(rank(0), reported(1.0, first_tokens=1))
    assert cached(ledger, with_tokens(PROMPT)) == 48


def test_prompts_that_a_rank_knows_by_other_tokens_are_noticed() -> None:
    """As with the tokenizer of another model: what the rank tells then never matches."""
    ledger = exact_pool()
    for number, told in enumerate((PROMPT, range(500, 600)), start=1):
        ledger.reserve(rank(0), with_tokens(PROMPT), float(number))
        tell(ledger, AllBlocksCleared(), stored(told))
        ledger.record_report(rank(0), reported(number + 0.5, first_tokens=number))
        ledger.record_report(rank(0), reported(number + 0.6, first_tokens=number))
    cache = ledger.accounts[0].cache
    assert (cache.prompts_found, cache.prompts_missing) == (1, 1)


def test_events_may_come_a_little_after_the_report_of_the_first_token() -> None:
    ledger = exact_pool()
    ledger.reserve(rank(0), with_tokens(PROMPT), 1.0)
    ledger.record_report(rank(0), reported(1.5, first_tokens=1))
    tell(ledger, stored(PROMPT))
    ledger.record_report(rank(0), reported(1.6, first_tokens=1))
    cache = ledger.accounts[0].cache
    assert (cache.prompts_found, cache.prompts_missing) == (1, 0)


def test_of_a_cache_that_was_cleared_meanwhile_nothing_is_missing() -> None:
    ledger = exact_pool()
    ledger.reserve(rank(0), with_tokens(PROMPT), 1.0)
    ledger.record_report(rank(0), reported(1.5, first_tokens=1))
    tell(ledger, AllBlocksCleared())
    ledger.record_report(rank(0), reported(1.6, first_tokens=1))
    cache = ledger.accounts[0].cache
    assert (cache.prompts_found, cache.prompts_missing) == (0, 0)


def test_a_prompt_that_was_given_up_does_not_count() -> None:
    ledger = exact_pool()
    ledger.reserve(rank(0), with_tokens(PROMPT), 0.2).release(Outcome.CANCELLED, 0.3)
    assert cached(ledger, with_tokens(PROMPT)) == 0


def test_what_others_had_computed_and_what_was_generated_counts_too() -> None:
    ledger = exact_pool()
    tell(ledger, stored(PROMPT), BlocksStored([90], FULL_BLOCKS, range(96, 112), SIZE))
    assert cached(ledger, with_tokens(range(200))) == 112


def test_a_prompt_known_as_text_only_takes_no_credit() -> None:
    ledger = exact_pool()
    text = request(prompt_tokens=1000, blocks=range(10))
    ledger.reserve(rank(0), text, 0.2)
    assert cached(ledger, text) == 0


def test_salts_and_adapters_keep_prompts_apart() -> None:
    ledger = exact_pool()
    tell(ledger, stored(PROMPT, adapter="l"), stored(PROMPT[:32], first_name=50))
    assert cached(ledger, with_tokens(PROMPT, model="l")) == 96
    assert cached(ledger, with_tokens(PROMPT, model="m")) == 32
    assert cached(ledger, with_tokens(PROMPT, model="an alias")) == 32
    assert cached(ledger, with_tokens(PROMPT, salt="mine")) == 0


def test_a_restart_seen_in_the_counters_empties_the_cache() -> None:
    ledger = exact_pool()
    ledger.record_report(rank(0), reported(0.2, first_tokens=5))
    tell(ledger, stored(PROMPT))
    ledger.record_report(rank(0), reported(0.3, first_tokens=0))
    assert cached(ledger, with_tokens(PROMPT)) == 0


def test_a_restart_seen_in_the_events_first_is_not_counted_twice() -> None:
    ledger = exact_pool()
    ledger.record_report(rank(0), reported(0.2, first_tokens=5))
    ledger.forget_cache_events(rank(0), all_to_come=True)
    tell(ledger, stored(PROMPT))
    ledger.record_report(rank(0), reported(0.3, first_tokens=1))
    assert cached(ledger, with_tokens(PROMPT)) == 96


# --- Prompts as tokens, but not all is told -----------------------------------------------------------


def test_without_events_what_was_sent_is_remembered() -> None:
    ledger = exact_pool(told=False)
    ledger.reserve(rank(0), with_tokens(PROMPT), 0.2)
    ledger.record_report(rank(0), reported(1.0, first_tokens=1))
    assert cached(ledger, with_tokens(PROMPT)) == 96


def test_after_lost_events_both_what_was_sent_and_what_is_told_count() -> None:
    ledger = exact_pool()
    ledger.forget_cache_events(rank(0), all_to_come=False)
    others = list(range(500, 600))
    ledger.reserve(rank(0), with_tokens(PROMPT), 0.2)
    tell(ledger, stored(others))
    ledger.record_report(rank(0), reported(1.0, first_tokens=1))
    assert (cached(ledger, with_tokens(PROMPT)), cached(ledger, with_tokens(others))) == (96, 96)
    tell(ledger, stored(PROMPT, first_name=20), BlocksRemoved([25]))
    assert cached(ledger, with_tokens(PROMPT)) == 80


def test_until_the_size_of_a_ranks_blocks_is_known_nothing_is_credited() -> None:
    ledger = pool([rank(0)], by_tokens=True)
    ledger.reserve(rank(0), with_tokens(PROMPT), 0.2)
    assert cached(ledger, with_tokens(PROMPT)) == 0


# --- Prompts as text ----------------------------------------------------------------------------------


@pytest.fixture
def text_pool() -> Ledger:
    """A ledger over one rank whose events are followed, and to which prompts are text."""
    ledger = pool([rank(0)])
    ledger.forget_cache_events(rank(0), all_to_come=True)
    return ledger


def as_text(first: int, count: int = 10) -> RequestFacts:
    """A prompt of so many blocks of text."""
    return request(prompt_tokens=count * BLOCK_TOKENS + 1, blocks=range(first, first + count))


def computed(ledger: Ledger, facts: RequestFacts, at_s: float, first_name: int) -> None:
    """A request is placed and computed, and the rank says so."""
    ledger.reserve(rank(0), facts, at_s).release(Outcome.ENDED, at_s + 1.0)
    tell(ledger, stored(range(facts.prompt_tokens), first_name=first_name))


def test_what_was_sent_is_believed_as_long_as_the_rank_holds_as_much(text_pool: Ledger) -> None:
    computed(text_pool, as_text(0), 1.0, 1)
    computed(text_pool, as_text(100), 3.0, 101)
    assert cached(text_pool, as_text(0)) == cached(text_pool, as_text(100)) == 10 * BLOCK_TOKENS


def test_a_rank_that_holds_less_than_was_sent_has_lost_something(text_pool: Ledger) -> None:
    computed(text_pool, as_text(0), 1.0, 1)
    computed(text_pool, as_text(100), 3.0, 101)
    tell(text_pool, BlocksRemoved(range(1, 35)), BlocksRemoved(range(101, 136)))
    # 11 blocks of 16 tokens are left, so 2 of 64 by the estimate, which may be wrong by a factor of two.
    assert len(text_pool.accounts[0].cache) == 5
    tell(text_pool, BlocksRemoved(range(35, 41)), BlocksRemoved(range(136, 141)))
    assert cached(text_pool, as_text(0)) == cached(text_pool, as_text(100)) == 0


def test_a_prompt_on_its_way_is_not_taken_for_lost(text_pool: Ledger) -> None:
    text_pool.reserve(rank(0), as_text(0), 1.0)
    tell(text_pool, stored(PROMPT))
    assert cached(text_pool, as_text(0)) == 10 * BLOCK_TOKENS


def test_a_cleared_cache_holds_nothing(text_pool: Ledger) -> None:
    computed(text_pool, as_text(0), 1.0, 1)
    tell(text_pool, AllBlocksCleared())
    assert cached(text_pool, as_text(0)) == 0


def test_a_rank_that_has_not_told_all_bounds_nothing() -> None:
    ledger = pool([rank(0)])
    ledger.forget_cache_events(rank(0), all_to_come=False)
    computed(ledger, as_text(0), 1.0, 1)
    tell(ledger, BlocksRemoved(range(1, 41)))
    assert cached(ledger, as_text(0)) == 10 * BLOCK_TOKENS
