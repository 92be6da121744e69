"""Who waits, and how long. Steps: 20 ms decoding, 120 ms with prefill of 1,000 tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ext_proc.admission import (
    LOOK_AGAIN_S,
    Admission,
)
from ext_proc.decision import DropReason, Placed, Refused
from ext_proc.reservation import Outcome
from ext_proc.settings import AdmissionSettings
from ext_proc.waiting_room import Held
from tests.builders import (
    DOWN_AFTER_FAILURES,
    TIGHT,
    admission,
    behind,
    counters,
    got_tokens,
    group,
    held,
    picker,
    placed,
    pool,
    rank,
    report,
    request,
)

SETTINGS = AdmissionSettings(targets=TIGHT, max_hold_s=10.0)


def test_in_an_idle_group_a_request_is_placed_at_once() -> None:
    decision = admission(pool(group("g0", 4), targets=TIGHT), SETTINGS).decide(request(), 0.0)
    assert placed(decision).held_s == 0.0


def test_what_waits_while_decoding_is_behind_starts_together_when_it_has_caught_up() -> None:
    ledger = behind()
    decider = admission(ledger, SETTINGS)
    waiting = [held(decider.decide(request(prompt_tokens=4000), 1.0)) for _ in range(3)]
    decider.advance(1.2)
    assert [one.decision for one in waiting] == [None] * 3
    for index in range(4):
        got_tokens(ledger, index, 1.4, tokens=60, each_after_s=0.02)
    decider.advance(1.41)
    started = [placed(one.decision) for one in waiting]
    assert [one.held_s for one in started] == pytest.approx([0.41] * 3)
    assert len({one.pick.first for one in started}) == 3
    assert decider.take_decided() == waiting
    assert decider.take_decided() == []


@pytest.mark.parametrize("idle", ["none", "for another model", "out of rotation", "with a rank down"])
def test_an_idle_group_that_cannot_take_it_delays_no_request_for_whose_phase_it_is_time(idle: str) -> None:
    ledger = behind(
        idle=[] if idle == "none" else group("idle", 2),
        models={"g0": ["m"], "idle": ["x"]} if idle == "for another model" else None,
    )
    if idle == "out of rotation":
        ledger.set_rotation("idle", False)
    if idle == "with a rank down":
        for _ in range(DOWN_AFTER_FAILURES):
            ledger.record_failed_scrape(rank(0, group="idle"))
    decider = admission(ledger, SETTINGS)
    waiting = [held(decider.decide(request(prompt_tokens=4000), 1.0)) for _ in range(3)]
    for index in range(4):
        got_tokens(ledger, index, 1.1, tokens=60, each_after_s=0.02)
    decider.advance(1.11)
    assert all(one.decision is not None for one in waiting)


def test_a_prompt_that_ends_before_the_longest_joins_a_phase_and_a_longer_one_does_not() -> None:
    ledger = behind()
    ledger.reserve(rank(0), request(prompt_tokens=4000), 1.0)
    decider = admission(ledger, SETTINGS)
    assert placed(decider.decide(request(prompt_tokens=1000), 1.05))
    assert held(decider.decide(request(prompt_tokens=9000), 1.05))


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
    assert held(decider.decide(request(prompt_tokens=60_000), 0.0))
    in_time = held(decider.decide(request(prompt_tokens=1000), 0.1))
    ledger.record_report(
        rank(0), report(1.0, running=1, counters=counters(first_tokens=1, computed_prompt_tokens=8000))
    )
    decider.advance(1.0)
    assert decider.take_decided()[0] is in_time


def test_a_full_room_refuses_with_429_and_says_when_to_try_again() -> None:
    ledger = pool(group("g0", 1))
    decider = admission(ledger, AdmissionSettings(max_held_requests=2))
    placed(decider.decide(request(prompt_tokens=80_000), 0.0))
    assert [type(decider.decide(request(), 0.0)) for _ in range(3)] == [Held, Held, Refused]
    refused = decider.decide(request(), 0.0)
    assert refused == Refused(429, DropReason.QUEUE_FULL, retry_after_s=10.0)


def test_a_full_room_refuses_nobody_whose_rank_is_ready() -> None:
    ledger = pool([rank(0, group="a"), rank(0, group="b")], models={"a": ["alpha"], "b": ["beta"]})
    decider = admission(ledger, AdmissionSettings(max_held_requests=1))
    placed(decider.decide(request(model="alpha", prompt_tokens=80_000), 0.0))
    assert held(decider.decide(request(model="alpha"), 0.0))
    assert isinstance(decider.decide(request(model="alpha"), 0.0), Refused)
    assert placed(decider.decide(request(model="beta"), 0.0)).pick.first.group == "b"


def test_what_becomes_free_while_the_room_is_full_goes_to_those_who_wait_not_to_who_comes() -> None:
    ledger = pool(group("g0", 1))
    decider = admission(ledger, AdmissionSettings(max_held_requests=2))
    placed(decider.decide(request(prompt_tokens=20_000), 0.0))
    waiting = [held(decider.decide(request(prompt_tokens=4000), 0.0)) for _ in range(2)]
    ledger.record_report(rank(0), report(2.4, running=1, counters=counters(first_tokens=1)))
    assert held(decider.decide(request(prompt_tokens=4000), 2.4))
    assert [one.decision is None for one in waiting] == [False, True]


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
    decider.advance(1.0 + LOOK_AGAIN_S)
    assert isinstance(waiting.decision, Placed)


def test_a_stale_report_never_counts_as_full() -> None:
    ledger = pool(group("g0", 1))
    ledger.record_report(rank(0), report(0.0, running=9, waiting=1, kv=0.99, counters=counters()))
    assert placed(admission(ledger).decide(request(), 5.0))


def test_who_has_gone_waits_no_longer() -> None:
    decider = admission(behind(), SETTINGS)
    waiting = held(decider.decide(request(prompt_tokens=4000), 1.0))
    waiting.withdraw(1.05)
    decider.advance(9.0)
    assert waiting.decision is None
    assert (decider.held_requests, decider.held_tokens) == (0, 0)
    assert decider.next_wake_s(9.0) is None


@pytest.mark.parametrize("policy", ["round_robin", "vllm_internal", "cache_aware"])
def test_the_baselines_never_hold(policy: str) -> None:
    ledger = behind()
    decider = Admission(ledger, picker(ledger, policy), SETTINGS)
    for _ in range(50):
        assert placed(decider.decide(request(prompt_tokens=50_000), 1.0))


def test_dense_ranks_have_no_phases() -> None:
    assert placed(admission(behind(lock_step=False), SETTINGS).decide(request(prompt_tokens=4000), 1.0))
