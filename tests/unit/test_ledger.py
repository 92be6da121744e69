"""The ledger's promises: reservations are exact, reports only ever add to them, nothing leaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from ext_proc.decision import Placed
from ext_proc.ledger import Ledger
from ext_proc.reservation import Outcome, Reservation
from ext_proc.vocabulary import RankState
from tests.builders import (
    DOWN_AFTER_FAILURES,
    STALE_AFTER_S,
    balancer,
    counters,
    group,
    pool,
    rank,
    report,
    request,
)


def test_a_reservation_counts_until_it_is_released() -> None:
    ledger = pool([rank(0)])
    reservation = ledger.reserve(rank(0), request(), now_s=0.0)
    assert ledger.loads(0.0) == [1.0]
    reservation.release(Outcome.ENDED, now_s=1.0)
    assert ledger.loads(1.0) == [0.0]


@pytest.mark.parametrize("second", list(Outcome))
def test_a_second_release_changes_nothing(second: Outcome) -> None:
    ledger = pool([rank(0)])
    kept = ledger.reserve(rank(0), request(), now_s=0.0)
    ended = ledger.reserve(rank(0), request(), now_s=0.0)
    ended.release(Outcome.CANCELLED, now_s=1.0)
    ended.release(second, now_s=2.0)
    assert ended.outcome is Outcome.CANCELLED
    assert kept.outcome is None
    assert ledger.accounts[0].reservations == 1


def test_own_requests_in_a_report_are_not_counted_twice() -> None:
    ledger = pool([rank(0)])
    for _ in range(3):
        ledger.reserve(rank(0), request(), now_s=0.0)
    ledger.record_report(rank(0), report(0.1, running=2, waiting=1))
    assert ledger.loads(0.1) == [3.0]


def test_requests_of_others_in_a_report_add_to_the_load() -> None:
    ledger = pool([rank(0)])
    ledger.reserve(rank(0), request(), now_s=0.0)
    ledger.record_report(rank(0), report(0.1, running=4, waiting=2))
    assert ledger.loads(0.1) == [6.0]


def test_a_request_that_just_ended_is_not_taken_for_somebody_elses() -> None:
    """Gauges lag by a step: the rank still reports the request whose end the gateway has seen."""
    ledger = pool([rank(0)])
    reservation = ledger.reserve(rank(0), request(), now_s=0.0)
    ledger.record_report(rank(0), report(0.1, running=1))
    reservation.release(Outcome.ENDED, now_s=0.15)
    ledger.record_report(rank(0), report(0.2, running=1))
    assert ledger.loads(0.2) == [0.0]


def test_a_report_counts_less_as_it_ages() -> None:
    ledger = pool([rank(0), rank(1)])
    ledger.record_report(rank(0), report(0.0, running=8))
    fresh = ledger.loads(0.0)[0]
    ledger.record_report(rank(1), report(STALE_AFTER_S / 2, running=0))
    aged = ledger.loads(STALE_AFTER_S / 2)[0]
    assert fresh == 8.0
    assert 0 < aged < fresh


def test_a_stale_rank_is_taken_to_be_as_loaded_as_the_others() -> None:
    stale, busy, idle = rank(0), rank(1), rank(2)
    ledger = pool([stale, busy, idle])
    ledger.record_report(busy, report(10.0, running=6))
    ledger.record_report(idle, report(10.0, running=0))
    assert ledger.state(ledger.accounts[0], 10.0) is RankState.STALE
    assert ledger.loads(10.0) == [3.0, 6.0, 0.0]


def test_a_rank_never_scraped_is_neither_idle_nor_full() -> None:
    ledger = pool(group("g0", 3), reported_at_s=None)
    ledger.record_report(rank(1), report(0.0, running=6))
    ledger.record_report(rank(2), report(0.0, running=0))
    assert ledger.state(ledger.accounts[0], 0.0) is RankState.UNKNOWN
    assert ledger.loads(0.0)[0] == 3.0


def test_repeated_failures_take_a_rank_down_and_one_answer_brings_it_back() -> None:
    ledger = pool([rank(0)])
    for _ in range(DOWN_AFTER_FAILURES):
        assert ledger.groups[0].is_healthy
        ledger.record_failed_scrape(rank(0))
    assert ledger.state(ledger.accounts[0], 0.0) is RankState.DOWN
    assert not ledger.groups[0].is_healthy
    ledger.record_report(rank(0), report(0.1))
    assert ledger.groups[0].is_healthy


def test_a_request_served_by_another_rank_counts_there() -> None:
    ledger = pool(group("g0", 2))
    reservation = ledger.reserve(rank(0), request(), now_s=0.0)
    reservation.move(rank(1).endpoint, now_s=0.5)
    assert [account.reservations for account in ledger.accounts] == [0, 1]
    reservation.move("203.0.113.1:1", now_s=0.5)
    reservation.release(Outcome.ENDED, now_s=1.0)
    assert [account.reservations for account in ledger.accounts] == [0, 0]


def test_what_was_placed_on_a_rank_after_its_last_step_is_found_whatever_came_before() -> None:
    ledger = pool([rank(0)])
    early, late, later = (ledger.reserve(rank(0), request(), now_s=float(second)) for second in (1, 2, 3))
    assert [ledger.placed_after_s(rank(0), time_s) for time_s in (0.5, 1.0, 2.5, 3.0)] == [
        1.0,
        2.0,
        3.0,
        None,
    ]
    ledger.assume_progress(60.0)
    assert ledger.placed_after_s(rank(0), 0.5) == 1.0
    for one in (early, late):
        one.release(Outcome.ENDED, now_s=61.0)
    assert ledger.placed_after_s(rank(0), 0.5) == 3.0
    later.release(Outcome.ENDED, now_s=61.0)
    assert ledger.placed_after_s(rank(0), 0.5) is None


def test_a_request_that_was_refused_counts_on_the_rank_it_was_sent_to_next() -> None:
    """As if it had been placed there: its load, its prefill, its place in the queue, and nobody else's."""
    ledger = pool(group("g0", 2))
    first, second = ledger.accounts
    ledger.reserve(rank(0), request(request_id="mine", prompt_tokens=500), now_s=0.0)
    ledger.note_retry("mine", rank(1).endpoint, now_s=0.5)
    assert (first.reservations, first.prompt_tokens_open, first.prefills.tokens) == (0, 0, 0)
    assert (second.reservations, second.prompt_tokens_open, second.prefills.tokens) == (1, 500, 500)
    assert (first.placed_after_s(-1.0), second.placed_after_s(-1.0)) == (None, 0.5)
    ledger.record_report(rank(1), report(0.6, running=1, counters=counters(first_tokens=1)))
    assert second.foreign_requests == 0
    assert (second.decoding_sequences, second.prefills.tokens) == (1, 0)


def test_a_request_that_is_not_known_for_certain_stays_where_it_is() -> None:
    ledger = pool(group("g0", 2))
    one, other = (ledger.reserve(rank(0), request(request_id="same"), now_s=0.0) for _ in range(2))
    ledger.note_retry("same", rank(1).endpoint, now_s=0.5)
    ledger.note_retry("another", rank(1).endpoint, now_s=0.5)
    assert [one.rank, other.rank] == [rank(0), rank(0)]
    one.release(Outcome.ENDED, now_s=1.0)
    ledger.note_retry("same", rank(1).endpoint, now_s=1.5)
    ledger.note_retry("same", "203.0.113.1:1", now_s=1.5)
    assert other.rank == rank(1)
    other.release(Outcome.ENDED, now_s=2.0)
    ledger.note_retry("same", rank(0).endpoint, now_s=2.5)
    assert [account.reservations for account in ledger.accounts] == [0, 0]


def test_the_rank_it_was_sent_to_next_shows_the_end_of_an_unobserved_request() -> None:
    ledger = pool(group("g0", 2))
    reservation = ledger.reserve(rank(0), request(request_id="mine"), now_s=0.0)
    reservation.leave_unobserved(now_s=0.1)
    ledger.note_retry("mine", rank(1).endpoint, now_s=0.2)
    for at_s in (0.3, 0.4, 0.5):
        ledger.record_report(rank(0), report(at_s))
        ledger.record_report(rank(1), report(at_s, running=1))
    assert reservation.outcome is None
    ledger.record_report(rank(1), report(0.6))
    assert reservation.outcome is Outcome.RETIRED


def test_an_unobserved_request_counts_until_two_reports_in_a_row_could_have_shown_it() -> None:
    ledger = pool([rank(0)])
    ledger.reserve(rank(0), request(), now_s=0.0).leave_unobserved(now_s=0.5)
    ledger.record_report(rank(0), report(0.6, running=0))
    assert ledger.accounts[0].reservations == 1
    ledger.record_report(rank(0), report(0.7, running=1))
    assert ledger.accounts[0].reservations == 1
    ledger.record_report(rank(0), report(0.8, running=0))
    assert ledger.accounts[0].reservations == 0


def test_a_report_never_retires_a_request_whose_stream_is_open() -> None:
    ledger = pool([rank(0)])
    observed = ledger.reserve(rank(0), request(), now_s=0.0)
    ledger.reserve(rank(0), request(), now_s=0.0).leave_unobserved(now_s=0.1)
    for second in range(1, 5):
        ledger.record_report(rank(0), report(float(second), running=0))
    assert observed.outcome is None
    assert ledger.accounts[0].reservations == 1


class LedgerUnderAnyInterleaving(RuleBasedStateMachine):
    """Picks, ends, cancels, reports and failed scrapes in any order: counts always match what is open."""

    reservations = Bundle("reservations")
    ended = Bundle("ended")

    def __init__(self) -> None:
        super().__init__()
        self.ranks = [*group("a", 2), *group("b", 3)]
        self.ledger = pool(self.ranks, reported_at_s=None)
        self.balancer = balancer(self.ledger)
        self.now_s = 0.0
        self.open: list[Reservation] = []
        self.taken = 0

    @rule(elapsed_s=st.floats(0, 5))
    def time_passes(self, elapsed_s: float) -> None:
        self.now_s += elapsed_s

    @rule(target=reservations, request_id=st.sampled_from("uvwxyz"))
    def pick(self, request_id: str) -> Reservation:
        decision = self.balancer.decide(request(request_id=request_id), self.now_s)
        assert isinstance(decision, Placed)
        pick, reservation = decision.pick, decision.reservation
        assert reservation.rank == pick.first
        assert len(set(pick.ranks)) == len(pick.ranks)
        self.open.append(reservation)
        self.taken += 1
        return reservation

    @rule(target=ended, reservation=consumes(reservations), outcome=st.sampled_from(Outcome))
    def end(self, reservation: Reservation, outcome: Outcome) -> Reservation:
        reservation.release(outcome, self.now_s)
        self.open.remove(reservation)
        return reservation

    @rule(reservation=consumes(reservations))
    def leave_unobserved(self, reservation: Reservation) -> None:
        reservation.leave_unobserved(self.now_s)

    @rule(reservation=reservations, index=st.integers(0, 4))
    def served_elsewhere(self, reservation: Reservation, index: int) -> None:
        reservation.move(self.ranks[index].endpoint, self.now_s)
        assert reservation.rank == self.ranks[index]

    @rule(request_id=st.sampled_from("uvwxyz"), index=st.integers(0, 4))
    def a_retry_is_told(self, request_id: str, index: int) -> None:
        before = {one: one.rank for one in self.open}
        meant = [one for one in self.open if one.facts.request_id == request_id]
        if len(meant) == 1:
            before[meant[0]] = self.ranks[index]
        self.ledger.note_retry(request_id, self.ranks[index].endpoint, self.now_s)
        assert {one: one.rank for one in self.open} == before

    @rule(reservation=ended, outcome=st.sampled_from(Outcome))
    def end_again(self, reservation: Reservation, outcome: Outcome) -> None:
        reservation.release(outcome, self.now_s)

    @rule(index=st.integers(0, 4), running=st.integers(0, 300), waiting=st.integers(0, 300))
    def report(self, index: int, running: int, waiting: int) -> None:
        self.ledger.record_report(self.ranks[index], report(self.now_s, running=running, waiting=waiting))
        self.open = [one for one in self.open if one.outcome is not Outcome.RETIRED]

    @rule()
    def all_ranks_report_that_they_are_idle(self) -> None:
        """Twice, as proof needs: then only requests with an open stream are left."""
        for _ in range(2):
            self.now_s += 0.1
            for one in self.ranks:
                self.ledger.record_report(one, report(self.now_s))
        self.open = [one for one in self.open if one.outcome is not Outcome.RETIRED]
        assert all(not account.unobserved for account in self.ledger.accounts)

    @rule(index=st.integers(0, 4))
    def scrape_fails(self, index: int) -> None:
        self.ledger.record_failed_scrape(self.ranks[index])

    @invariant()
    def every_account_counts_exactly_the_open_reservations(self) -> None:
        for account in self.ledger.accounts:
            assert account.reservations == sum(r.rank == account.rank for r in self.open)
        assert sum(account.picks for account in self.ledger.accounts) >= self.taken

    @invariant()
    def no_load_is_below_the_own_reservations(self) -> None:
        for account, load in zip(self.ledger.accounts, self.ledger.loads(self.now_s), strict=True):
            assert load >= account.reservations


TestLedgerUnderAnyInterleaving = LedgerUnderAnyInterleaving.TestCase


def steps_reported(ledger: Ledger, step_s: float, *, from_s: float, count: int) -> None:
    """`count` reports of rank 0, 0.1 s apart, between which its requests got tokens at this pace."""
    before = ledger.accounts[0].report
    assert before is not None
    assert before.counters is not None
    said = before.counters
    for n in range(count):
        said = replace(
            said,
            inter_token_sum_s=said.inter_token_sum_s + step_s,
            inter_token_count=said.inter_token_count + 1,
        )
        ledger.record_report(rank(0), report(from_s + 0.1 * n, counters=said))


def test_steps_are_learned_while_nobody_prefills() -> None:
    ledger = pool([rank(0)])
    steps_reported(ledger, 0.05, from_s=1.0, count=30)
    assert ledger.groups[0].decode_step_s == pytest.approx(0.05, rel=0.1)


def test_steps_are_not_mistaken_for_decoding_while_a_first_token_is_only_guessed() -> None:
    """A prefill that takes far longer than it should is taken for done, though it may still be under way."""
    ledger = pool([rank(0)])
    before_s = ledger.groups[0].decode_step_s
    ledger.reserve(rank(0), request(prompt_tokens=1000), 0.5)
    ledger.assume_progress(5.0)
    assert not ledger.groups[0].is_prefilling
    steps_reported(ledger, 0.2, from_s=6.0, count=50)
    assert ledger.groups[0].decode_step_s == pytest.approx(before_s, rel=0.05)


def test_a_step_shorter_than_expected_is_learned_from_at_any_time() -> None:
    ledger = pool([rank(0)])
    ledger.reserve(rank(0), request(prompt_tokens=50_000), 0.5)
    steps_reported(ledger, 0.005, from_s=1.0, count=30)
    assert ledger.groups[0].decode_step_s < 0.008
