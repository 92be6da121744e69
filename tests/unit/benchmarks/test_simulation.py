"""Runs in virtual time: deterministic, complete, and as blind as a real gateway."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.score import score
from benchmarks.simulation import Deployment, Gateway, Observation, RunRecord, simulate
from benchmarks.traces import Shape, TraceRequest, generate
from ext_proc.policies import BUILT_IN
from ext_proc.settings import AdmissionSettings, Targets

TRACE = generate(Shape(3.0, (200, 12_000), (10, 200)), 20.0)
SMALL = Deployment(ranks=4)

STALLED = generate(Shape(2.5, (2_000, 16_000), (100, 300)), 90.0)
STALLED_TARGETS = Targets(ttft_s=3.0, tpot_s=0.06)
"""Eight ranks could keep these targets, if prefills did not stall everybody all the time."""


def outcomes(record: RunRecord) -> list[tuple[object, ...]]:
    return [(one.rank, one.held_s, one.first_token_s, one.finished_s) for one in record.served]


@pytest.mark.parametrize("policy", list(BUILT_IN))
def test_every_policy_serves_every_request_the_same_way_each_time(policy: str) -> None:
    record = simulate(TRACE, SMALL, Gateway(policy=policy), seed=5)
    assert all(one.finished_s is not None for one in record.served)
    assert outcomes(record) == outcomes(simulate(TRACE, SMALL, Gateway(policy=policy), seed=5))


def test_another_seed_is_another_run() -> None:
    random = Gateway(policy="random")
    assert outcomes(simulate(TRACE, SMALL, random, seed=1)) != outcomes(
        simulate(TRACE, SMALL, random, seed=2)
    )


@pytest.mark.parametrize(
    "observation",
    [
        Observation(),
        Observation(scrapes_fail=(2.0, 12.0)),
        Observation(token_estimate_factor=0.5),
        Observation(token_estimate_factor=2.0),
        Observation(scrape_interval_s=2.0),
    ],
)
def test_however_badly_it_sees_nothing_is_lost_nor_held_beyond_the_bound(observation: Observation) -> None:
    bounds = AdmissionSettings(targets=STALLED_TARGETS, max_hold_s=1.0)
    gateway = Gateway(targets=bounds.targets, admission=bounds)
    record = simulate(STALLED, Deployment(), gateway, observation, seed=5)
    assert all((one.finished_s is None) == one.refused for one in record.served)
    assert max(one.held_s for one in record.served) <= bounds.max_hold_s + 1e-6
    assert any(one.held_s > 0 for one in record.served)


def test_only_what_the_gateway_estimates_changes_with_the_estimate() -> None:
    """Engines compute the true lengths, so a policy that ignores lengths does the same."""
    blind = Gateway(policy="round_robin")
    exact = simulate(TRACE, SMALL, blind)
    assert outcomes(exact) == outcomes(simulate(TRACE, SMALL, blind, Observation(token_estimate_factor=3.0)))


def test_in_lock_step_a_slow_rank_slows_all_and_alone_only_itself() -> None:
    slow = replace(SMALL, slow_ranks={0: 4.0})
    blind = Gateway(policy="round_robin")

    def slowdown(lock_step: bool) -> float:
        """Of the ranks that are not slow themselves."""

        def of_the_others(deployment: Deployment) -> float:
            record = simulate(TRACE, replace(deployment, lock_step=lock_step), blind)
            return sum(one.tpot_s or 0.0 for one in record.served if one.rank != "g0/0")

        return of_the_others(slow) / of_the_others(SMALL)

    assert slowdown(lock_step=True) > 1.5
    assert slowdown(lock_step=False) == pytest.approx(1.0, abs=0.01)


def test_a_shared_prefix_is_computed_once() -> None:
    trace = [TraceRequest(float(n), 5 * 512 + 10, 5, blocks=(1, 2, 3, 4, 5)) for n in range(6)]
    record = simulate(trace, SMALL, Gateway())
    assert [one.cached_tokens for one in record.served] == [0, *[5 * 512] * 5]
    assert len({one.rank for one in record.served}) == 1


def test_steps_are_recorded_if_asked_for() -> None:
    assert simulate(TRACE, SMALL, Gateway()).steps == []
    (steps,) = simulate(TRACE, SMALL, Gateway(), record_steps=True).steps
    prefilled = sum(share.prefill_tokens for step in steps for share in step.ranks)
    assert prefilled == sum(one.prompt_tokens for one in TRACE)


def test_phases_serve_more_requests_well_where_prefills_stall_everybody() -> None:
    """The reason for holding requests at all; if this fails, phases are of no use."""

    def goodput(phases: bool) -> float:
        admission = AdmissionSettings(targets=STALLED_TARGETS, phases=phases)
        record = simulate(STALLED, Deployment(), Gateway(targets=STALLED_TARGETS, admission=admission))
        return score(record, STALLED_TARGETS).goodput

    assert goodput(phases=True) > 3 * goodput(phases=False)
