"""One rank's run loop, iteration by iteration (vLLM 0.32 vllm/v1/engine/core.py run_busy_loop)."""

from __future__ import annotations

import pytest

from tests.builders_engine import BLOCK, chunks, core, engine_request, names, tokens
from vllm_ranks.engine.core import EngineCore, StepKind, StepWork
from vllm_ranks.engine.plan import StepOutcome
from vllm_ranks.engine.waves import EngineCounts, EngineStats, WaveComplete, WaveStarted


def begin(engine: EngineCore, now_s: float = 0.0) -> StepWork:
    work = engine.begin_step(now_s)
    assert work is not None
    return work


def iterate(engine: EngineCore, now_s: float = 0.0) -> tuple[StepKind, StepOutcome | None]:
    """One iteration of a rank that has something to do; alone, it agrees with itself."""
    work = begin(engine, now_s)
    outcome = engine.end_step(work, now_s + work.cost_s)
    if engine.agreement_due:
        engine.agree(engine.has_unfinished)
    return work.kind, outcome


class TestARankThatStepsAlone:
    def test_is_idle_without_requests(self) -> None:
        assert core().begin_step(0.0) is None

    def test_steps_while_it_has_work_then_reports_once_more_and_is_idle(self) -> None:
        engine = core()
        engine.add_request(engine_request("a", output=2), 0.0)
        assert [iterate(engine)[0] for _ in range(3)] == [StepKind.MODEL, StepKind.MODEL, StepKind.FLUSH]
        assert engine.begin_step(0.0) is None

    def test_a_step_costs_what_the_time_model_says(self) -> None:
        engine = core()
        engine.add_request(engine_request("a", prompt=20), 0.0)
        assert begin(engine).cost_s == pytest.approx(0.020 + 20 * 80e-6 + 20 * 2e-8)

    def test_after_an_abort_the_new_gauges_are_reported_without_a_step(self) -> None:
        engine = core()
        engine.add_request(engine_request("a"), 0.0)
        iterate(engine)
        engine.abort(["a"])
        work = begin(engine)
        assert (work.kind, work.cost_s, work.in_lock_step) == (StepKind.FLUSH, 0.0, False)
        outcome = engine.end_step(work, 0.0)
        assert outcome is not None
        assert tokens(outcome) == {}
        assert engine.stats().running == 0
        assert engine.begin_step(0.0) is None

    def test_never_agrees_with_anybody_and_has_nothing_for_a_coordinator(self) -> None:
        engine = core()
        engine.add_request(engine_request("a"), 0.0, request_wave=5)
        engine.end_step(begin(engine), 0.1)
        assert not engine.agreement_due
        assert engine.take_messages() == []

    def test_a_start_of_a_wave_means_nothing_to_it(self) -> None:
        engine = core()
        engine.start_dp_wave(0, None)
        assert engine.begin_step(0.0) is None


class TestARankOfALockStepGroup:
    def test_sleeps_until_a_wave_or_a_request_wakes_it(self) -> None:
        assert core(1).begin_step(0.0) is None
        woken = core(1)
        woken.start_dp_wave(0, None)
        assert begin(woken).kind is StepKind.DUMMY
        asked = core(1)
        asked.add_request(engine_request("a"), 0.0)
        assert begin(asked).kind is StepKind.MODEL

    def test_a_dummy_step_is_part_of_the_lock_step_and_reports_nothing(self) -> None:
        engine = core(1)
        engine.start_dp_wave(0, None)
        work = begin(engine)
        assert work.in_lock_step
        assert work.cost_s == pytest.approx(0.020)
        assert engine.end_step(work, 0.02) is None

    def test_goes_on_with_dummy_steps_until_the_group_agrees_that_the_wave_is_over(self) -> None:
        engine = core(0, interval=4)
        engine.add_request(engine_request("a", output=1), 0.0)
        engine.end_step(begin(engine), 0.0)
        assert engine.agreement_due
        engine.agree(any_rank_unfinished=True)
        kinds = []
        while (work := engine.begin_step(0.0)) is not None:
            kinds.append(work.kind)
            engine.end_step(work, 0.0)
            if engine.agreement_due:
                engine.agree(engine.has_unfinished)
        assert kinds == [StepKind.DUMMY] * 3
        assert engine.take_messages() == [WaveStarted(0), WaveComplete(0)]

    def test_requests_that_ended_are_reported_with_the_next_dummy_step(self) -> None:
        engine = core(0)
        engine.add_request(engine_request("a", output=1), 0.0)
        engine.add_request(engine_request("b", output=9), 0.0)
        iterate(engine)
        engine.abort(["b"])
        kind, outcome = iterate(engine)
        assert kind is StepKind.DUMMY
        assert outcome is not None

    def test_a_request_tagged_with_an_older_wave_wakes_the_group(self) -> None:
        engine = core(1)
        engine.start_dp_wave(3, None)
        engine.end_step(begin(engine), 0.0)
        engine.agree(any_rank_unfinished=False)
        engine.add_request(engine_request("a"), 0.0, request_wave=3)
        assert engine.take_messages() == [WaveStarted(4)]

    def test_prefills_wait_for_their_step_of_the_cadence(self) -> None:
        engine = core(0, prefill_schedule_interval=4)
        engine.add_request(engine_request("a", output=50), 0.0)
        iterate(engine)
        engine.add_request(engine_request("b"), 0.0)
        admitted_at = []
        for step_counter in range(1, 6):
            work = begin(engine)
            assert work.plan is not None
            if chunks(work.plan):
                admitted_at.append(step_counter)
            engine.end_step(work, 0.0)
            if engine.agreement_due:
                engine.agree(True)
        assert admitted_at == [4]

    def test_an_engine_that_steps_alone_has_no_cadence(self) -> None:
        engine = core(prefill_schedule_interval=4)
        engine.add_request(engine_request("a", output=50), 0.0)
        iterate(engine)
        engine.add_request(engine_request("b"), 0.0)
        plan = begin(engine).plan
        assert plan is not None
        assert chunks(plan) == {"b": BLOCK}


@pytest.mark.parametrize("rank", [None, 0])
def test_a_plan_in_which_a_request_only_preempted_itself_computes_nothing(rank: int | None) -> None:
    engine = core(rank, blocks=4, caching=False, policy="priority")
    engine.add_request(engine_request("later", prompt=2 * BLOCK - 1, output=9, priority=1), 0.0)
    iterate(engine)
    engine.add_request(engine_request("urgent", prompt=2 * BLOCK - 1, output=9, priority=0), 0.0)
    iterate(engine)
    work = begin(engine)
    assert work.kind is (StepKind.FLUSH if rank is None else StepKind.DUMMY)
    assert work.plan is not None
    assert names(work.plan.preempted) == ["later"]
    engine.end_step(work, 0.0)
    if engine.agreement_due:
        engine.agree(True)
    assert iterate(engine)[0] is StepKind.MODEL


def test_times_of_a_request_are_noted_as_it_moves() -> None:
    engine = core(seqs=1)
    first = engine.add_request(engine_request("a", output=2), 1.0)
    second = engine.add_request(engine_request("b", output=2), 1.5)
    for now_s in (2.0, 3.0, 4.0):
        engine.end_step(begin(engine, now_s), now_s + 0.5)
    assert (first.queued_s, first.scheduled_s, first.first_token_s) == (1.0, 2.0, 2.5)
    assert (second.queued_s, second.scheduled_s, second.first_token_s) == (1.5, 4.0, 4.5)


def test_a_preempted_request_was_scheduled_when_it_first_was() -> None:
    engine = core(blocks=4, caching=False)
    for name in "ab":
        engine.add_request(engine_request(name, prompt=2 * BLOCK - 1, output=6), 0.0)
    sequence = engine.scheduler.requests["b"]
    now_s = 1.0
    while engine.has_unfinished:
        iterate(engine, now_s)
        now_s += 1.0
    assert sequence.preemptions == 1
    assert (sequence.scheduled_s, sequence.first_token_s) == (1.0, pytest.approx(1.0, abs=0.1))


def test_stats_tell_queues_cache_and_wave() -> None:
    engine = core(1, seqs=1, blocks=8)
    for name in "ab":
        engine.add_request(engine_request(name, prompt=2 * BLOCK), 0.0)
    work = begin(engine)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (1, 1, 0.25)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (2 * BLOCK, 0)
    engine.end_step(work, 0.0)
    engine.agree(True)
    assert engine.stats().step_counter == 1
    assert engine.coordinator_stats() == EngineStats(EngineCounts(1, 1, 0.25), 0, 1)
