"""Decisions explain themselves: in the pick, in one line of text, and before they are made."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ext_proc.admission import Admission
from ext_proc.decision import DropReason, Placed, Refused
from ext_proc.explanation import in_one_line
from ext_proc.picker import Busy, Readiness
from ext_proc.policies import BUILT_IN
from ext_proc.settings import AdmissionSettings
from ext_proc.vocabulary import Pick, RequestFacts
from tests.builders import (
    BLOCK_TOKENS,
    TIGHT,
    admission,
    behind,
    group,
    picker,
    pool,
    rank,
    request,
)


def curious(**fields: object) -> RequestFacts:
    return replace(request(**fields), wants_explanation=True)  # type: ignore[arg-type]


def placed(decider: Admission, facts: RequestFacts) -> Placed:
    decision = decider.decide(facts, 0.0)
    assert isinstance(decision, Placed)
    return decision


def test_a_pick_tells_the_costs_of_its_rank_and_of_the_cheapest_others_where_asked() -> None:
    ledger = pool(group("g0", 5))
    blocks = range(10)
    ledger.reserve(rank(0), request(prompt_tokens=10 * BLOCK_TOKENS, blocks=blocks), 0.0)
    facts = curious(prompt_tokens=20 * BLOCK_TOKENS, blocks=blocks)
    pick = placed(admission(ledger), facts).pick
    assert len(pick.costs) == 3
    assert pick.costs[0].rank == pick.first
    assert [one.cost for one in pick.costs] == sorted(one.cost for one in pick.costs)
    assert {one.rank: one.cached_tokens for one in pick.costs}[rank(0)] == 10 * BLOCK_TOKENS
    assert set(pick.costs[0].parts) == {"wait", "prefill", "others", "late", "decode", "kv", "full"}
    assert placed(admission(ledger), request()).pick.costs == ()


def test_every_pick_tells_its_costs_where_decisions_are_logged() -> None:
    decider = admission(pool(group("g0", 2)), AdmissionSettings(explains_all=True))
    assert len(placed(decider, request()).pick.costs) == 2


def test_an_explained_pick_is_the_same_as_one_that_is_not() -> None:
    ledger = pool([*group("a", 4), *group("b", 4)])
    for index in range(3):
        ledger.reserve(rank(index, group="a"), request(prompt_tokens=5000), 0.0)
    plain = picker(ledger).pick(request(), 0.0)
    explained = picker(ledger).pick(request(), 0.0, explain=True)
    assert isinstance(plain, Pick)
    assert isinstance(explained, Pick)
    assert (plain.ranks, plain.reason) == (explained.ranks, explained.reason)


def test_one_line_says_what_was_decided_and_what_it_would_have_cost_elsewhere() -> None:
    line = in_one_line(placed(admission(pool(group("g0", 2))), curious(prompt_tokens=1000)))
    head, first, second = line.split("; ")
    assert head == "rank=g0/0 reason=policy held_ms=0"
    total, parts = re.fullmatch(r"g0/0 ([\d.]+): (.*) cached 0", first).groups()  # type: ignore[union-attr]
    values = [float(value) for value in parts.split()[1::2]]
    assert abs(sum(values) - float(total)) < 0.01
    assert second.startswith("g0/1 ")
    assert line.isascii()
    assert line.isprintable()


def test_what_would_be_decided_is_told_and_nothing_is_reserved_or_held() -> None:
    ledger = pool(group("g0", 3))
    decider = admission(ledger)
    before = ledger.loads(0.0)
    prospect = decider.prospect(request(prompt_tokens=1000), 0.0)
    assert isinstance(prospect.outcome, Pick)
    assert prospect.outcome.first == rank(0)
    assert [state for _, state in prospect.ranks] == [Readiness.READY] * 3
    assert (ledger.loads(0.0), decider.held_requests, ledger.picks) == (before, 0, 0)
    assert placed(decider, request(prompt_tokens=1000)).pick.first == rank(0)


@pytest.mark.parametrize("policy", BUILT_IN)
def test_the_rank_that_would_be_picked_is_the_cheapest_shown(policy: str) -> None:
    """Of policies that draw, too: both come from one draw."""
    ledger = pool(group("g0", 8))
    decider = Admission(ledger, picker(ledger, policy), AdmissionSettings())
    for _ in range(20):
        prospect = decider.prospect(request(), 0.0)
        assert isinstance(prospect.outcome, Pick)
        cheapest = prospect.ranks[0][0].cost
        assert cheapest == next(one.cost for one, _ in prospect.ranks if one.rank == prospect.outcome.first)


def test_a_prospect_says_for_which_rank_a_request_would_wait() -> None:
    ledger = pool(group("g0", 1))
    decider = admission(ledger)
    placed(decider, request(prompt_tokens=50_000))
    outcome = decider.prospect(request(), 0.0).outcome
    assert isinstance(outcome, Busy)
    assert outcome.account.rank == rank(0)


def test_a_prospect_between_phases_is_to_wait() -> None:
    prospect = admission(behind(), AdmissionSettings(targets=TIGHT)).prospect(request(), 1.0)
    assert prospect.outcome is None
    assert {state for _, state in prospect.ranks} == {Readiness.CLOSED}


def test_a_prospect_tells_of_refusals() -> None:
    ledger = pool(group("g0", 1))
    decider = admission(ledger, AdmissionSettings(max_held_requests=1))
    placed(decider, request(prompt_tokens=50_000))
    decider.decide(request(), 0.0)
    full = decider.prospect(request(), 0.0)
    assert full.outcome == Refused(429, DropReason.QUEUE_FULL, retry_after_s=10.0)
    ledger.set_rotation("g0", False)
    nowhere = decider.prospect(request(), 0.0)
    assert nowhere.outcome == Refused(503, DropReason.NO_RANK, retry_after_s=10.0)
    assert nowhere.ranks == ()
