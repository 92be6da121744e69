"""What the default policy weighs. Steps: 20 ms decoding, 120 ms with prefill of 1,000 tokens."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from ext_proc.ledger import Ledger
from ext_proc.policies.lockstep import FADES_IN_S, Lockstep
from ext_proc.policy import PickView
from ext_proc.vocabulary import Rank, RequestFacts
from tests.builders import BLOCK_TOKENS, BUDGET_TOKENS, counters, group, pool, rank, report, request

TOKENS_PER_S = BUDGET_TOKENS / 0.120


def parts(
    ledger: Ledger, facts: RequestFacts, now_s: float = 0.0, *, waited_s: float = 0.0
) -> dict[Rank, Mapping[str, float]]:
    """What each rank would cost, by part."""
    view = PickView(
        facts=facts,
        now_s=now_s,
        waited_s=waited_s,
        accounts=ledger.accounts,
        foreign_requests=ledger.foreign_requests(ledger.accounts, now_s),
        cached_tokens=ledger.cached_tokens_each(ledger.accounts, facts),
        expected_output_tokens=100,
        rng=random.Random(0),
    )
    policy = Lockstep()
    explained = policy.explain(view)
    assert [sum(one.values()) for one in explained] == pytest.approx(policy.costs(view))
    return dict(zip((account.rank for account in ledger.accounts), explained, strict=True))


def best(ledger: Ledger, facts: RequestFacts, now_s: float = 0.0) -> Rank:
    costs = parts(ledger, facts, now_s)
    return min(costs, key=lambda one: sum(costs[one].values()))


def test_prompt_tokens_ahead_cost_their_time() -> None:
    ledger = pool(group("g0", 2))
    ledger.reserve(rank(0), request(prompt_tokens=5000), 0.0)
    costs = parts(ledger, request())
    assert costs[rank(0)]["wait"] == pytest.approx(5000 / TOKENS_PER_S, rel=0.01)
    assert costs[rank(1)]["wait"] == 0


def test_a_cached_prompt_costs_only_what_is_missing() -> None:
    ledger = pool(group("g0", 2))
    blocks = range(10)
    ledger.reserve(rank(0), request(prompt_tokens=10 * BLOCK_TOKENS, blocks=blocks), 0.0)
    costs = parts(ledger, request(prompt_tokens=1000, blocks=blocks))
    saved = costs[rank(1)]["prefill"] - costs[rank(0)]["prefill"]
    assert saved == pytest.approx(10 * BLOCK_TOKENS / TOKENS_PER_S, rel=0.01)


def test_a_cache_is_worth_a_queue_up_to_twice_what_it_saves() -> None:
    document = request(prompt_tokens=100 * BLOCK_TOKENS, blocks=range(100))
    for queue_tokens, expected in ((150 * BLOCK_TOKENS, rank(0)), (250 * BLOCK_TOKENS, rank(1))):
        ledger = pool(group("g0", 2))
        ledger.reserve(rank(0), document, 0.0)
        ledger.record_report(rank(0), report(1.0, counters=counters(first_tokens=1)))
        ledger.reserve(rank(0), request(prompt_tokens=queue_tokens), 1.0)
        assert best(ledger, document, 1.0) == expected


def test_a_first_token_after_the_target_costs_half_as_much_again() -> None:
    ledger = pool(group("g0", 2))
    ledger.reserve(rank(0), request(prompt_tokens=round(1.8 * TOKENS_PER_S)), 0.0)
    prompt = request(prompt_tokens=round(0.3 * TOKENS_PER_S))
    costs = parts(ledger, prompt)
    assert costs[rank(0)]["late"] == pytest.approx((1.8 + 0.3) / 2, rel=0.01)
    assert costs[rank(1)]["late"] == 0
    assert parts(ledger, prompt, waited_s=1.7)[rank(1)]["late"] == pytest.approx((1.7 + 0.3) / 2, rel=0.01)


def test_a_cache_is_not_waited_for_where_another_rank_has_the_first_token_in_time() -> None:
    """Its queue costs 1.9 times what it saves: worth it, but not to a request that has waited for long."""
    document = request(prompt_tokens=100 * BLOCK_TOKENS, blocks=range(100))
    ledger = pool(group("g0", 2))
    ledger.reserve(rank(0), document, 0.0)
    ledger.record_report(rank(0), report(1.0, counters=counters(first_tokens=1)))
    ledger.reserve(rank(0), request(prompt_tokens=190 * BLOCK_TOKENS), 1.0)
    for waited_s, expected in ((0.0, rank(0)), (1.0, rank(1))):
        costs = parts(ledger, document, 1.0, waited_s=waited_s)
        assert min(costs, key=lambda one: sum(costs[one].values())) == expected


def test_requests_of_others_count_as_a_queue() -> None:
    ledger = pool(group("g0", 2))
    ledger.record_report(rank(0), report(0.0, waiting=3))
    assert parts(ledger, request())[rank(0)]["wait"] > 0
    assert best(ledger, request()) == rank(1)


def test_a_nearly_full_kv_cache_is_a_barrier() -> None:
    ledger = pool(group("g0", 2))
    for kv, at_least, at_most in ((0.8, 0.0, 0.0), (0.9, 0.3, 1.0), (0.99, 5.0, 100.0)):
        ledger.record_report(rank(0), report(0.0, kv=kv))
        assert at_least <= parts(ledger, request())[rank(0)]["full"] <= at_most


def learn_steps(ledger: Ledger, of: Rank, step_s: float, from_s: float) -> None:
    """A hundred reports between which the rank's requests got a token every `step_s`."""
    for n in range(100):
        said = counters(inter_token_s=step_s * 10 * n, inter_tokens=10 * n)
        ledger.record_report(of, report(from_s + n * 0.1, counters=said))


def test_a_slow_group_costs_more_until_that_is_long_ago() -> None:
    slow, fast = rank(0, group="slow"), rank(0, group="fast")
    ledger = pool([slow, fast])
    learn_steps(ledger, slow, 0.160, 1.0)
    learn_steps(ledger, fast, 0.020, 1.0)
    soon = parts(ledger, request(), 11.0)
    later = parts(ledger, request(), 11.0 + 5 * FADES_IN_S)
    assert soon[slow]["decode"] > 6 * soon[fast]["decode"]
    assert later[slow]["decode"] < 1.1 * later[fast]["decode"]


def test_of_two_equal_groups_the_one_that_prefills_less_costs_less() -> None:
    busy, quiet = rank(0, group="busy"), rank(0, group="quiet")
    ledger = pool([busy, quiet])
    ledger.reserve(busy, request(prompt_tokens=50_000), 0.0)
    ledger.pass_time(3.0)
    costs = parts(ledger, request(), 3.0)
    assert costs[busy]["decode"] > 1.5 * costs[quiet]["decode"]
