"""Whatever happens: nothing is lost, held too long, let go twice, or overtaken by its equal."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ext_proc.admission import TICK_S
from ext_proc.decision import Decision, Placed, Refused
from ext_proc.reservation import Outcome, Reservation
from ext_proc.settings import AdmissionSettings
from ext_proc.vocabulary import RankCounters, RequestFacts
from ext_proc.waiting_room import Held
from tests.builders import (
    TIGHT,
    admission,
    counters,
    group,
    held,
    pool,
    rank,
    report,
    request,
)

SETTINGS = AdmissionSettings(targets=TIGHT, max_hold_s=10.0)


class AdmissionUnderAnyTraffic(RuleBasedStateMachine):
    """Arrivals, first tokens, ends, departures and time in any order, over lock-step and dense ranks."""

    MAX_HOLD_S = 4.0

    def __init__(self) -> None:
        super().__init__()
        self.ranks = [*group("moe", 3), *group("dense", 1)]
        self.ledger = pool(self.ranks, targets=TIGHT)
        self.decider = admission(
            self.ledger, AdmissionSettings(targets=TIGHT, max_hold_s=self.MAX_HOLD_S, max_held_requests=12)
        )
        self.now_s = 0.0
        self.waiting: dict[str, Held] = {}
        self.open: dict[str, Reservation] = {}
        self.ended: set[str] = set()
        self.refused: set[str] = set()
        self.gone: set[str] = set()
        self.first_tokens = dict.fromkeys(self.ranks, 0)
        self.arrived: list[RequestFacts] = []

    def _settle(self, request_id: str, decision: Placed | Refused) -> None:
        assert request_id not in self.open
        assert request_id not in self.ended
        if isinstance(decision, Placed):
            assert decision.held_s <= self.MAX_HOLD_S + 1e-6
            self.open[request_id] = decision.reservation
        else:
            self.refused.add(request_id)

    def _collect(self) -> None:
        for one in self.decider.take_decided():
            assert one.decision is not None
            del self.waiting[one.facts.request_id]
            self._settle(one.facts.request_id, one.decision)

    @rule(
        tokens=st.sampled_from([1, 50, 1000, 5000, 40_000]),
        tenant=st.sampled_from("ab"),
        priority=st.integers(-1, 1),
        blocks=st.integers(0, 3),
    )
    def arrive(self, tokens: int, tenant: str, priority: int, blocks: int) -> None:
        facts = request(
            request_id=str(len(self.arrived)),
            prompt_tokens=tokens,
            tenant=tenant,
            priority=priority,
            blocks=range(min(blocks, tokens // 64)),
        )
        self.arrived.append(facts)
        decision = self.decider.decide(facts, self.now_s)
        if isinstance(decision, Held):
            self.waiting[facts.request_id] = decision
        else:
            self._settle(facts.request_id, decision)
        self._collect()

    @rule(seconds=st.sampled_from([0.001, 0.02, 0.3, 2.0]))
    def time_passes(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while (wake_s := self.decider.next_wake_s(self.now_s)) is not None and wake_s < end_s:
            self.now_s = wake_s
            self.decider.advance(self.now_s)
            self._collect()
        self.now_s = end_s
        self.decider.advance(self.now_s)
        self._collect()

    @rule(index=st.integers(0, 3), tokens=st.integers(0, 2), kv=st.sampled_from([0.1, 0.99]))
    def a_rank_reports(self, index: int, tokens: int, kv: float) -> None:
        one = self.ranks[index]
        self.first_tokens[one] += tokens
        said = RankCounters(self.first_tokens[one], 0.0, 0, 0)
        self.ledger.record_report(one, report(self.now_s, running=1, waiting=1, kv=kv, counters=said))
        self.decider.advance(self.now_s)
        self._collect()

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 99), outcome=st.sampled_from(Outcome))
    def one_ends(self, which: int, outcome: Outcome) -> None:
        request_id = sorted(self.open)[which % len(self.open)]
        self.open.pop(request_id).release(outcome, self.now_s)
        self.ended.add(request_id)
        self.decider.advance(self.now_s)
        self._collect()

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 99))
    def one_goes_away(self, which: int) -> None:
        request_id = sorted(self.waiting)[which % len(self.waiting)]
        self.waiting.pop(request_id).withdraw(self.now_s)
        self.gone.add(request_id)

    @invariant()
    def every_request_is_in_exactly_one_place(self) -> None:
        places: list[set[str]] = [
            set(self.waiting),
            set(self.open),
            self.ended,
            self.refused,
            self.gone,
        ]
        assert sum(map(len, places)) == len(self.arrived)
        assert set().union(*places) == {facts.request_id for facts in self.arrived}

    @invariant()
    def the_room_holds_exactly_those_who_wait(self) -> None:
        assert self.decider.held_requests == len(self.waiting)
        assert self.decider.held_tokens == sum(one.facts.prompt_tokens for one in self.waiting.values())

    @invariant()
    def nobody_waits_longer_than_the_bound(self) -> None:
        assert all(self.now_s - one.arrived_s <= self.MAX_HOLD_S + 0.011 for one in self.waiting.values())

    @invariant()
    def every_account_counts_exactly_the_open_reservations(self) -> None:
        for account in self.ledger.accounts:
            mine = [one for one in self.open.values() if one.rank == account.rank]
            assert account.reservations == len(mine)
            assert account.prompt_tokens_open == sum(one.facts.prompt_tokens for one in mine)
            assert len(account.prefills) + account.decoding_sequences == len(mine)


TestAdmissionUnderAnyTraffic = AdmissionUnderAnyTraffic.TestCase
TestAdmissionUnderAnyTraffic.settings = settings(max_examples=60, stateful_step_count=40)


@given(
    st.lists(st.sampled_from([100, 1000, 6000, 30_000, None]), min_size=2, max_size=14), st.integers(1, 12)
)
def test_within_a_tenant_no_request_is_overtaken_by_one_that_needs_as_much_or_more(
    events: list[int | None], room_for: int
) -> None:
    """Shorter ones may fit where an earlier, longer one does not; a later one of the same length may not.

    Events: a request of so many tokens, or (`None`) the first token of the one that is on the rank.
    """
    ledger = pool(group("g0", 1), targets=TIGHT)
    decider = admission(ledger, replace(SETTINGS, max_held_requests=room_for))
    went: list[RequestFacts] = []
    seen, now_s = 0, 0.0

    def settle(facts: RequestFacts, decision: Decision | None) -> None:
        if isinstance(decision, Placed):
            went.append(facts)

    def read_one_prompt() -> None:
        nonlocal seen
        seen += 1
        ledger.record_report(rank(0), report(now_s, running=1, counters=counters(first_tokens=seen)))

    decider.decide(request(prompt_tokens=9000), 0.0)
    for number, tokens in enumerate(events):
        now_s += 0.001
        if tokens is None:
            read_one_prompt()
            continue
        facts = request(request_id=f"{number:02}", prompt_tokens=tokens)
        decision = decider.decide(facts, now_s)
        for one in decider.take_decided():
            settle(one.facts, one.decision)
        settle(facts, decision)
    while decider.held_requests:
        now_s += 0.25
        read_one_prompt()
        decider.advance(now_s)
        for one in decider.take_decided():
            settle(one.facts, one.decision)
    for earlier, later in pairwise(went):
        if later.request_id < earlier.request_id:
            assert earlier.prompt_tokens < later.prompt_tokens


@pytest.mark.parametrize("burst", [1, 64, 65, 1000])
def test_however_many_come_at_once_none_waits_longer_than_the_bound(burst: int) -> None:
    ledger = pool(group("g0", 2), targets=TIGHT)
    decider = admission(ledger, replace(SETTINGS, max_hold_s=1.0))

    def all_are_full(now_s: float) -> None:
        for one in group("g0", 2):
            ledger.record_report(one, report(now_s, running=9, waiting=9, kv=0.99, counters=counters()))

    all_are_full(0.0)
    waiting = [held(decider.decide(request(request_id=str(n)), 0.0)) for n in range(burst)]
    now_s = 0.0
    while decider.held_requests:
        # As much later as a tick whose work takes as long as the pause after it.
        now_s += 2 * TICK_S
        if now_s > 0.5 and ledger.accounts[0].report.taken_at_s < 0.5:
            all_are_full(now_s)
        decider.advance(now_s)
    assert now_s <= 1.0 + 1e-6
    assert all(isinstance(one.decision, Refused) for one in waiting)
