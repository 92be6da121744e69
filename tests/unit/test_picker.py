"""Which rank a request goes to, and where it goes next when that one refuses."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ext_proc.decision import DropReason, Refused
from ext_proc.ledger import Ledger
from ext_proc.picker import Busy, Picker, Readiness
from ext_proc.policies.least_request import LeastRequest
from ext_proc.policy import PickView
from ext_proc.reservation import Outcome
from ext_proc.vocabulary import Pick, PickReason, Rank, RequestFacts, Subset
from tests.builders import (
    DOWN_AFTER_FAILURES,
    balancer,
    group,
    picker,
    placed,
    pool,
    rank,
    report,
    request,
)


def must_pick(ledger: Ledger, facts: RequestFacts | None = None, *, pick_list_length: int = 3) -> Pick:
    pick = picker(ledger, pick_list_length=pick_list_length).pick(facts or request(), 0.0)
    assert isinstance(pick, Pick)
    return pick


def test_the_rank_with_the_fewest_requests_is_picked() -> None:
    ledger = pool(group("g0", 3))
    ledger.record_report(rank(0), report(running=2))
    ledger.record_report(rank(1), report(running=1, waiting=4))
    assert must_pick(ledger).first == rank(2)


def test_a_burst_spreads_evenly_before_any_new_report() -> None:
    decider = balancer(pool(group("g0", 4)))
    picked = Counter(placed(decider.decide(request(), 0.0)).pick.first for _ in range(42))
    assert max(picked.values()) - min(picked.values()) <= 1


def test_equal_ranks_take_turns() -> None:
    decider = balancer(pool(group("g0", 3)))
    order = []
    for _ in range(6):
        decision = placed(decider.decide(request(), 0.0))
        decision.reservation.release(Outcome.CANCELLED, 0.0)
        order.append(decision.pick.first.index)
    assert order == [0, 1, 2, 0, 1, 2]


def test_the_second_choice_is_in_another_group() -> None:
    ledger = pool([*group("a", 3), *group("b", 3)])
    for index in range(3):
        ledger.record_report(rank(index, group="b"), report(running=50))
    picked = must_pick(ledger).ranks
    assert [one.group for one in picked] == ["a", "b", "a"]


def test_a_pick_is_no_longer_than_the_configured_list() -> None:
    assert len(must_pick(pool(group("g0", 8)), pick_list_length=2).ranks) == 2


def test_a_group_with_a_dead_rank_gets_nothing() -> None:
    ledger = pool([*group("a", 2), *group("b", 2)])
    for _ in range(DOWN_AFTER_FAILURES):
        ledger.record_failed_scrape(rank(1, group="a"))
    pick = must_pick(ledger)
    assert {one.group for one in pick.ranks} == {"b"}
    assert pick.reason is PickReason.POLICY


def test_with_every_group_down_requests_are_still_spread() -> None:
    ledger = pool(group("g0", 2))
    for _ in range(DOWN_AFTER_FAILURES):
        ledger.record_failed_scrape(rank(0))
    pick = must_pick(ledger)
    assert set(pick.ranks) == set(group("g0", 2))
    assert pick.reason is PickReason.NO_HEALTHY_GROUP


def test_a_group_out_of_rotation_gets_nothing_however_healthy_it_looks() -> None:
    ledger = pool([*group("a", 2), *group("b", 2)])
    for _ in range(DOWN_AFTER_FAILURES):
        ledger.record_failed_scrape(rank(0, group="b"))
    ledger.set_rotation("a", False)
    pick = must_pick(ledger)
    assert {one.group for one in pick.ranks} == {"b"}
    ledger.set_rotation("a", True)
    assert {one.group for one in must_pick(ledger).ranks} == {"a"}


def test_with_every_group_out_of_rotation_requests_are_refused_for_a_while() -> None:
    ledger = pool(group("g0", 2))
    ledger.set_rotation("g0", False)
    refused = balancer(ledger).decide(request(), 0.0)
    assert isinstance(refused, Refused)
    assert (refused.status, refused.reason) == (503, DropReason.NO_RANK)
    assert refused.retry_after_s is not None
    assert picker(ledger).pick(request(), 0.0) is None
    assert ledger.loads(0.0) == [0.0, 0.0]


def only(*endpoints: str, addresses: Sequence[str] = ()) -> RequestFacts:
    return replace(request(), subset=Subset(frozenset(endpoints), frozenset(addresses)))


def test_a_request_goes_only_where_its_subset_allows() -> None:
    ledger = pool(group("g0", 3))
    for _ in range(5):
        ledger.reserve(rank(2), request(), 0.0)
    assert must_pick(ledger, only(rank(2).endpoint)).ranks == (rank(2),)


def test_a_subset_whose_groups_are_all_down_is_still_served() -> None:
    ledger = pool([*group("a", 2), *group("b", 2)])
    for _ in range(DOWN_AFTER_FAILURES):
        ledger.record_failed_scrape(rank(1, group="a"))
    pick = must_pick(ledger, only(rank(0, group="a").endpoint))
    assert pick.ranks == (rank(0, group="a"),)
    assert pick.reason is PickReason.NO_HEALTHY_GROUP


def test_a_request_that_may_go_nowhere_is_refused_and_reserves_nothing() -> None:
    ledger = pool(group("g0", 2))
    assert balancer(ledger).decide(only("203.0.113.1:1"), 0.0) == Refused(503, DropReason.NO_RANK)
    assert balancer(pool([])).decide(request(), 0.0) == Refused(503, DropReason.NO_RANK)
    assert ledger.loads(0.0) == [0.0, 0.0]


def test_an_address_in_a_subset_stands_for_all_its_ports() -> None:
    ranks = [Rank("g0", 0, "[::1]:8000"), Rank("g0", 1, "[::1]:8001"), Rank("g0", 2, "10.0.0.1:8000")]
    assert set(must_pick(pool(ranks), only(addresses=["::1"])).ranks) == set(ranks[:2])


class Priced:
    """A policy that costs what a test says."""

    name = "priced"
    holds = False

    def __init__(self, *costs: float) -> None:
        self._costs = costs

    def costs(self, view: PickView) -> Sequence[float]:
        return self._costs

    def explain(self, view: PickView) -> Sequence[dict[str, float]]:
        return [{"price": cost} for cost in self._costs]


def priced(*costs: float, among: Sequence[Rank] = (), pick_list_length: int = 8) -> Picker:
    """A picker over as many ranks as there are costs."""
    ledger = pool(among or group("g0", len(costs)))
    return Picker(ledger, Priced(*costs), pick_list_length=pick_list_length, rng=random.Random(0))


def indexes(pick: Pick | Busy | None) -> list[int]:
    assert isinstance(pick, Pick)
    return [one.index for one in pick.ranks]


def test_alternatives_are_in_order_of_cost() -> None:
    assert indexes(priced(3.0, 1.0, 2.0, 1.5).pick(request(), 0.0)) == [1, 3, 2, 0]


def test_what_costs_infinitely_much_is_no_alternative() -> None:
    assert indexes(priced(math.inf, 1.0, math.inf).pick(request(), 0.0)) == [1]
    assert len(indexes(priced(math.inf, math.inf).pick(request(), 0.0))) == 1


def test_the_first_ready_rank_in_order_of_cost_is_picked_and_a_busy_one_waited_for() -> None:
    states = {0: Readiness.CLOSED, 1: Readiness.CLOSED, 2: Readiness.READY, 3: Readiness.BUSY}
    pick = priced(1.0, 2.0, 3.0, 4.0).pick(request(), 0.0, lambda account, _: states[account.rank.index])
    assert indexes(pick) == [2, 0, 1, 3]
    busy = priced(1.0, 4.0, 3.0, 2.0).pick(request(), 0.0, lambda account, _: states[account.rank.index])
    assert isinstance(busy, Busy)
    assert busy.account.rank.index == 3
    assert priced(1.0, 2.0).pick(request(), 0.0, lambda account, _: states[account.rank.index]) is None


@given(
    st.lists(st.tuples(st.sampled_from([1.0, 2.0, 3.0]), st.sampled_from("abc")), min_size=1, max_size=12),
    st.integers(1, 8),
)
def test_a_pick_names_the_cheapest_then_the_cheapest_elsewhere_then_the_rest_in_order(
    ranks: list[tuple[float, str]], length: int
) -> None:
    members = [rank(index, group=name) for index, (_, name) in enumerate(sorted(ranks, key=lambda r: r[1]))]
    costs = [cost for cost, _ in sorted(ranks, key=lambda r: r[1])]
    pick = priced(*costs, among=members, pick_list_length=length).pick(request(), 0.0)
    assert isinstance(pick, Pick)
    cost_of = dict(zip(members, costs, strict=True))
    first, *others = pick.ranks
    assert len(set(pick.ranks)) == len(pick.ranks) == min(length, len(members))
    assert cost_of[first] == min(costs)
    elsewhere = [cost_of[one] for one in members if one.group != first.group]
    if others and elsewhere:
        assert others[0].group != first.group
        assert cost_of[others.pop(0)] == min(elsewhere)
    left = sorted(cost_of[one] for one in members if one not in pick.ranks)
    named = [cost_of[one] for one in others]
    assert named == sorted(named)
    assert not (named and left) or named[-1] <= left[0]


class Failing(LeastRequest):
    """A policy that gives `answer`, or raises it."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def costs(self, view: PickView) -> Sequence[float]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[no-any-return]


@pytest.mark.parametrize("explain", [False, True])
@pytest.mark.parametrize(
    "answer",
    [ValueError("no"), [], [1.0], [1.0] * 4, [math.nan] * 3, [1.0, math.nan, 2.0], ["a"] * 3, None, 7],
)
def test_a_policy_that_fails_leaves_requests_to_the_rank_with_the_fewest(answer: Any, explain: bool) -> None:
    ledger = pool(group("g0", 3))
    for index in (0, 2):
        ledger.reserve(rank(index), request(), 0.0)
    told: list[Exception] = []
    failing = Picker(
        ledger, Failing(answer), pick_list_length=2, rng=random.Random(0), on_policy_failure=told.append
    )
    pick = failing.pick(request(), 0.0, explain=explain)
    assert isinstance(pick, Pick)
    assert (pick.first, pick.reason) == (rank(1), PickReason.POLICY_FAILED)
    assert len(told) == 1
    assert [one.cost for one in failing.prospect(request(), 0.0)[1]] == [1.0, 0.0, 1.0]
