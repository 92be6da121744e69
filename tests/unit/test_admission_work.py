"""However many wait: how much is done about them at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ext_proc.admission import (
    LOOK_AGAIN_S,
    LOOKS_AT_ONCE,
    OVERDUE_AT_ONCE,
    TICK_S,
    VAIN_LOOKS_AT_ONCE,
    Admission,
)
from ext_proc.ledger import Ledger
from ext_proc.picker import Busy, Picker
from ext_proc.policies.lockstep import Lockstep
from ext_proc.policy import PickView
from ext_proc.settings import AdmissionSettings
from ext_proc.vocabulary import Pick
from tests.builders import (
    TIGHT,
    admission,
    behind,
    counters,
    group,
    held,
    placed,
    pool,
    rank,
    report,
    request,
)

SETTINGS = AdmissionSettings(targets=TIGHT, max_hold_s=10.0)


class Looks(Lockstep):
    """The default policy, counting how often it is asked."""

    def __init__(self) -> None:
        self.count = 0

    def costs(self, view: PickView) -> Sequence[float]:
        self.count += 1
        return super().costs(view)


def counting(ledger: Ledger, settings: AdmissionSettings) -> tuple[Admission, Looks]:
    looks = Looks()
    one = Picker(ledger, looks, pick_list_length=3, rng=random.Random(0))
    return Admission(ledger, one, settings), looks


def test_long_prompts_that_wait_cost_a_short_one_no_more_than_a_few_looks() -> None:
    ledger = behind(8)
    decider, looks = counting(ledger, replace(SETTINGS, max_hold_s=100))
    ledger.reserve(rank(0), request(prompt_tokens=2000), 1.0)
    for _ in range(200):
        assert held(decider.decide(request(prompt_tokens=5000), 1.0))
    for now_s in (1.0, 1.0 + LOOK_AGAIN_S):
        looks.count = 0
        placed(decider.decide(request(prompt_tokens=100), now_s))
        assert looks.count <= 1 + LOOKS_AT_ONCE


def test_those_that_wait_for_one_busy_rank_are_looked_at_a_few_at_a_time() -> None:
    ledger = pool(group("g0", 8), lock_step=False)
    decider, looks = counting(ledger, AdmissionSettings(max_hold_s=100))
    cached = range(300)
    home = placed(decider.decide(request(prompt_tokens=20_000, blocks=cached), 0.0)).pick.first
    ledger.reserve(home, request(prompt_tokens=4000), 0.0)
    waiting = [held(decider.decide(request(prompt_tokens=20_000, blocks=cached), 0.0)) for _ in range(100)]
    looks.count = 0
    decider.advance(LOOK_AGAIN_S)
    assert looks.count == LOOKS_AT_ONCE
    assert all(one.decision is None for one in waiting)


def test_a_rank_that_is_busy_again_is_not_asked_for_those_that_still_wait_for_it() -> None:
    ledger = pool(group("g0", 8), lock_step=False)
    decider, looks = counting(ledger, AdmissionSettings(max_hold_s=100))
    cached = range(300)
    home = placed(decider.decide(request(prompt_tokens=20_000, blocks=cached), 0.0)).pick.first
    waiting = [held(decider.decide(request(prompt_tokens=22_000, blocks=cached), 0.0)) for _ in range(20)]
    ledger.record_report(home, report(0.1, running=1, counters=counters(first_tokens=1)))
    looks.count = 0
    decider.advance(0.1)
    went = sum(one.decision is not None for one in waiting)
    assert 0 < went < len(waiting)
    assert looks.count == went


def test_a_few_looks_in_vain_are_enough_for_one_tick() -> None:
    """Here all may go, as far as their lengths tell, but the one rank that is ready has nothing of them."""
    ledger = behind(8)
    decider, looks = counting(ledger, replace(SETTINGS, max_hold_s=100))
    cached = range(100)
    ledger.reserve(rank(1), request(prompt_tokens=6400, blocks=cached), 1.0)
    waiting = [
        held(decider.decide(request(prompt_tokens=6500, blocks=cached), 1.0))
        for _ in range(3 * VAIN_LOOKS_AT_ONCE)
    ]
    ledger.reserve(rank(0), request(prompt_tokens=6401), 1.01)
    looks.count = 0
    decider.advance(1.01)
    assert looks.count <= VAIN_LOOKS_AT_ONCE
    assert any(one.decision is None for one in waiting)


def test_those_that_have_waited_long_enough_are_decided_some_at_a_time() -> None:
    decider = admission(pool(group("g0", 1)), AdmissionSettings(max_hold_s=3.0))
    placed(decider.decide(request(prompt_tokens=500_000), 0.0))
    waiting = [held(decider.decide(request(), 0.0)) for _ in range(2 * OVERDUE_AT_ONCE)]
    for tick in (1, 2):
        decider.advance(3.0 + tick * TICK_S)
        assert sum(one.decision is not None for one in waiting) == tick * OVERDUE_AT_ONCE


def test_a_decision_that_fails_leaves_nobody_behind() -> None:
    class Failing(Picker):
        def pick(self, *_: object, **__: object) -> Pick | Busy | None:
            raise RuntimeError("a defect")

    ledger = pool(group("g0", 1))
    decider = Admission(
        ledger, Failing(ledger, Lockstep(), pick_list_length=1, rng=random.Random(0)), AdmissionSettings()
    )
    with pytest.raises(RuntimeError):
        decider.decide(request(), 0.0)
    assert (decider.held_requests, decider.held_tokens) == (0, 0)
