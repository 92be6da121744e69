"""The policies to be measured against: what each is said to do."""

from __future__ import annotations

from collections import Counter

import pytest

from ext_proc.ledger import Ledger
from ext_proc.reservation import Outcome
from ext_proc.vocabulary import Pick
from tests.builders import BLOCK_TOKENS, group, picker, pool, rank, report, request


def place(ledger: Ledger, policy: str, *, prompt_tokens: int = 100) -> str:
    """Pick and reserve one request; the rank's name."""
    facts = request(prompt_tokens=prompt_tokens)
    pick = picker(ledger, policy).pick(facts, 0.0)
    assert isinstance(pick, Pick)
    ledger.reserve(pick.first, facts, 0.0)
    return pick.first.name


class TestRoundRobin:
    def test_each_rank_has_its_turn_whatever_is_on_it(self) -> None:
        ledger = pool(group("g0", 3))
        places = [place(ledger, "round_robin", prompt_tokens=100 + 5_000 * n) for n in range(6)]
        assert places == ["g0/0", "g0/1", "g0/2"] * 2


@pytest.mark.parametrize("policy", ["round_robin", "vllm_internal", "vllm_original"])
def test_models_asked_in_turn_each_reach_all_their_idle_ranks(policy: str) -> None:
    ledger = pool([*group("a", 2), *group("b", 2)], models={"a": ["alpha"], "b": ["beta"]})
    places: Counter[str] = Counter()
    for n in range(40):
        facts = request(model=("alpha", "beta")[n % 2])
        pick = picker(ledger, policy).pick(facts, 0.1 * n)
        assert isinstance(pick, Pick)
        places[pick.first.name] += 1
        ledger.reserve(pick.first, facts, 0.1 * n).release(Outcome.ENDED, 0.1 * n)
        for one in (*group("a", 2), *group("b", 2)):
            ledger.record_report(one, report(0.1 * n + 0.05))
    assert places == {"a/0": 10, "a/1": 10, "b/0": 10, "b/1": 10}


class TestDynamoCost:
    def test_prefill_to_come_and_prompts_in_flight_are_added_in_blocks_of_16_tokens(self) -> None:
        ledger = pool(group("g0", 2))
        blocks = range(4)
        ledger.reserve(rank(0), request(prompt_tokens=4 * BLOCK_TOKENS + 10, blocks=blocks), 0.0)
        new = request(prompt_tokens=4 * BLOCK_TOKENS + 100, blocks=blocks)
        costs = {one.rank: one.cost for one in picker(ledger, "dynamo_cost").prospect(new, 0.0)[1]}
        in_flight = 4 * BLOCK_TOKENS + 10
        assert costs[rank(0)] == pytest.approx((in_flight + 100 + in_flight) / 16, abs=1e-5)
        assert costs[rank(1)] == pytest.approx((4 * BLOCK_TOKENS + 100) / 16, abs=1e-5)
