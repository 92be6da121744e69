"""Who waits, how long, and in which order. Steps: 20 ms decoding, 120 ms with prefill of 1,000 tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ext_proc.admission import Admission
from ext_proc.decision import DropReason, Placed, Refused
from ext_proc.ledger import Ledger, Outcome, Reservation
from ext_proc.settings import AdmissionSettings, Targets
from ext_proc.vocabulary import RankCounters, RequestFacts
from ext_proc.waiting_room import Held, WaitingRoom
from tests.builders import admission, counters, group, picker, pool, rank, report, request

TIGHT = Targets(ttft_s=2.0, tpot_s=0.05)
SETTINGS = AdmissionSettings(targets=TIGHT, max_hold_s=10.0)


def decoding_pool(ranks: int = 4, now_s: float = 1.0) -> Ledger:
    """A lock-step group that decodes one request on rank 0 and has no lead left."""
    ledger = pool(group("g0", ranks), targets=TIGHT)
    ledger.reserve(rank(0), request(), now_s - 0.1)
    ledger.record_report(rank(0), report(now_s, running=1, counters=counters(first_tokens=1)))
    ledger.groups[0].lead.tokens = 0.0
    return ledger


def held(decision: Placed | Refused | Held) -> Held:
    assert isinstance(decision, Held)
    return decision


def placed(decision: Placed | Refused | Held | None) -> Placed:
    assert isinstance(decision, Placed)
    return decision


def test_in_an_idle_group_a_request_is_placed_at_once() -> None:
    decision = admission(pool(group("g0", 4), targets=TIGHT), SETTINGS).decide(request(), 0.0)
    assert placed(decision).held_s == 0.0


def test_where_prefill_would_break_the_target_a_request_waits_for_a_phase() -> None:
    decider = admission(decoding_pool(), SETTINGS)
    waiting = held(decider.decide(request(prompt_tokens=4000), 1.0))
    decider.advance(1.05)
    assert waiting.decision is None
    decider.advance(1.11)
    assert placed(waiting.decision).held_s == pytest.approx(0.11)
    assert decider.take_decided() == [waiting]
    assert decider.take_decided() == []


def test_requests_that_pack_well_start_together_on_different_ranks() -> None:
    decider = admission(decoding_pool(), SETTINGS)
    first = held(decider.decide(request(prompt_tokens=4000), 1.0))
    second = decider.decide(request(prompt_tokens=4000), 1.06)
    assert placed(first.decision).pick.first != placed(second).pick.first


def test_a_prompt_that_ends_before_the_longest_joins_a_phase_and_a_longer_one_does_not() -> None:
    ledger = decoding_pool()
    decider = admission(ledger, SETTINGS)
    decider.decide(request(prompt_tokens=4000), 1.0)
    decider.advance(1.2)
    ledger.groups[0].lead.tokens = 0.0
    assert placed(decider.decide(request(prompt_tokens=1000), 1.25))
    assert held(decider.decide(request(prompt_tokens=9000), 1.25))


def test_a_rank_with_a_backlog_gets_no_more_and_the_best_rank_is_waited_for() -> None:
    ledger = pool(group("g0", 1))
    decider = admission(ledger, AdmissionSettings())
    placed(decider.decide(request(prompt_tokens=8000), 0.0))
    waiting = held(decider.decide(request(prompt_tokens=100), 0.0))
    ledger.record_report(
        rank(0), report(1.0, running=1, counters=counters(first_tokens=1, computed_prompt_tokens=8000))
    )
    decider.advance(1.0)
    assert placed(waiting.decision).held_s == 1.0


def test_nobody_waits_longer_than_the_bound() -> None:
    ledger = pool(group("g0", 1))
    decider = admission(ledger, AdmissionSettings(max_hold_s=3.0))
    placed(decider.decide(request(prompt_tokens=500_000), 0.0))
    waiting = held(decider.decide(request(), 0.0))
    decider.advance(2.99)
    assert waiting.decision is None
    decider.advance(3.0)
    assert placed(waiting.decision).held_s == 3.0


def test_requests_that_can_still_be_in_time_go_before_those_that_cannot() -> None:
    ledger = pool(group("g0", 1))
    decider = admission(ledger, AdmissionSettings())
    placed(decider.decide(request(prompt_tokens=8000), 0.0))
    hopeless = held(decider.decide(request(prompt_tokens=60_000), 0.0))
    in_time = held(decider.decide(request(prompt_tokens=1000), 0.1))
    ledger.record_report(
        rank(0), report(1.0, running=1, counters=counters(first_tokens=1, computed_prompt_tokens=8000))
    )
    decider.advance(1.0)
    assert in_time.decision is not None
    assert hopeless.decision is not None or placed(in_time.decision)


def test_a_full_room_refuses_with_429_and_says_when_to_try_again() -> None:
    ledger = pool(group("g0", 1))
    decider = admission(ledger, AdmissionSettings(max_held_requests=2))
    placed(decider.decide(request(prompt_tokens=80_000), 0.0))
    assert [type(decider.decide(request(), 0.0)) for _ in range(3)] == [Held, Held, Refused]
    refused = decider.decide(request(), 0.0)
    assert refused == Refused(429, DropReason.QUEUE_FULL, retry_after_s=10.0)


def test_a_prompt_larger_than_the_room_may_wait_alone() -> None:
    ledger = pool(group("g0", 1))
    decider = admission(ledger, AdmissionSettings(max_held_tokens=1000))
    placed(decider.decide(request(prompt_tokens=80_000), 0.0))
    assert held(decider.decide(request(prompt_tokens=5000), 0.0))
    assert isinstance(decider.decide(request(prompt_tokens=1), 0.0), Refused)


def test_a_rank_without_kv_memory_gets_nothing_and_waiting_ends_with_503() -> None:
    ledger = pool(group("g0", 1))
    decider = admission(ledger, AdmissionSettings(max_hold_s=3.0))
    full = report(0.0, running=9, waiting=1, kv=0.99, counters=counters())
    ledger.record_report(rank(0), full)
    waiting = held(decider.decide(request(), 0.0))
    ledger.record_report(rank(0), replace(full, taken_at_s=3.0))
    decider.advance(3.0)
    assert waiting.decision == Refused(503, DropReason.SATURATED, retry_after_s=3.0)


def test_what_waits_while_the_last_group_leaves_rotation_is_told_so_in_the_end() -> None:
    ledger = pool(group("g0", 1))
    decider = admission(ledger, AdmissionSettings(max_hold_s=3.0))
    placed(decider.decide(request(prompt_tokens=80_000), 0.0))
    waiting = held(decider.decide(request(), 0.0))
    ledger.set_rotation("g0", False)
    decider.advance(2.9)
    assert waiting.decision is None
    decider.advance(3.0)
    assert waiting.decision == Refused(503, DropReason.NO_RANK, retry_after_s=3.0)


def test_what_waits_goes_when_its_group_is_back() -> None:
    ledger = pool(group("g0", 1))
    decider = admission(ledger)
    first = placed(decider.decide(request(prompt_tokens=80_000), 0.0))
    waiting = held(decider.decide(request(), 0.0))
    ledger.set_rotation("g0", False)
    first.reservation.release(Outcome.CANCELLED, 1.0)
    decider.advance(1.0)
    assert waiting.decision is None
    ledger.set_rotation("g0", True)
    decider.advance(1.1)
    assert isinstance(waiting.decision, Placed)


def test_a_stale_report_never_counts_as_full() -> None:
    ledger = pool(group("g0", 1))
    ledger.record_report(rank(0), report(0.0, running=9, waiting=1, kv=0.99, counters=counters()))
    assert placed(admission(ledger).decide(request(), 5.0))


def test_who_has_gone_waits_no_longer() -> None:
    decider = admission(decoding_pool(), SETTINGS)
    waiting = held(decider.decide(request(prompt_tokens=4000), 1.0))
    waiting.withdraw(1.05)
    decider.advance(9.0)
    assert waiting.decision is None
    assert (decider.held_requests, decider.held_tokens) == (0, 0)
    assert decider.next_wake_s(9.0) is None


@pytest.mark.parametrize("policy", ["round_robin", "vllm_internal", "cache_aware"])
def test_the_baselines_never_hold(policy: str) -> None:
    ledger = decoding_pool()
    decider = Admission(ledger, picker(ledger, policy), SETTINGS)
    for _ in range(50):
        assert placed(decider.decide(request(prompt_tokens=50_000), 1.0))


def test_dense_ranks_have_no_phases() -> None:
    ledger = pool([rank(0), rank(1)], lock_step=False, targets=TIGHT)
    ledger.reserve(rank(0), request(), 0.9)
    ledger.record_report(rank(0), report(1.0, running=1, counters=counters(first_tokens=1)))
    ledger.groups[0].lead.tokens = 0.0
    assert placed(admission(ledger, SETTINGS).decide(request(prompt_tokens=4000), 1.0))


# --- The waiting room -------------------------------------------------------------------------------


def room() -> WaitingRoom:
    return WaitingRoom(max_requests=100, max_tokens=10**9)


def order(waiting: WaitingRoom) -> list[str]:
    return [one.facts.request_id for one in sorted(waiting)]


def enter(waiting: WaitingRoom, *requests: RequestFacts) -> None:
    for number, one in enumerate(requests):
        waiting.enter(one, float(number))


def test_the_more_urgent_goes_first_then_the_earlier() -> None:
    waiting = room()
    enter(
        waiting,
        request(request_id="a"),
        request(request_id="b"),
        request(request_id="urgent", priority=-1),
        request(request_id="patient", priority=5),
    )
    assert order(waiting) == ["urgent", "a", "b", "patient"]


def test_one_tenants_burst_does_not_delay_anothers_single_request() -> None:
    waiting = room()
    enter(waiting, *(request(request_id=f"burst{n}", tenant="a") for n in range(5)))
    enter(waiting, request(request_id="single", tenant="b"))
    assert order(waiting).index("single") == 1


def test_tenants_share_by_tokens_not_by_requests() -> None:
    waiting = room()
    enter(waiting, *(request(request_id=f"long{n}", tenant="a", prompt_tokens=400) for n in range(2)))
    enter(waiting, *(request(request_id=f"short{n}", tenant="b", prompt_tokens=100) for n in range(5)))
    assert order(waiting) == ["long0", "short0", "short1", "short2", "short3", "long1", "short4"]


# --- Whatever happens -------------------------------------------------------------------------------


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
        self.order_kept = True

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


@given(st.lists(st.sampled_from([100, 1000, 6000, 30_000]), min_size=2, max_size=10))
def test_within_a_tenant_no_request_is_overtaken_by_one_that_needs_as_much_or_more(
    prompts: list[int],
) -> None:
    """Shorter ones may fit where an earlier, longer one does not; a later one of the same length may not."""
    ledger = pool(group("g0", 1), targets=TIGHT)
    decider = admission(ledger, SETTINGS)
    decider.decide(request(prompt_tokens=9000), 0.0)
    waiting = []
    for number, tokens in enumerate(prompts):
        decision = decider.decide(request(request_id=str(number), prompt_tokens=tokens), 0.0)
        waiting.append(held(decision))
    went: list[Held] = []
    seen = 0
    now_s = 0.0
    while len(went) < len(prompts):
        now_s += 0.25
        seen += 1
        said = report(now_s, running=1, counters=counters(first_tokens=seen))
        ledger.record_report(rank(0), said)
        decider.advance(now_s)
        went += decider.take_decided()
    for earlier, later in pairwise(went):
        if later.sequence < earlier.sequence:
            assert earlier.facts.prompt_tokens < later.facts.prompt_tokens
