"""Groups of ranks in virtual time: what happens when, and what their metrics say of it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders_engine import LONG_S, engine_request, until_idle
from vllm_ranks.engine.kv_cache import BlocksStored, KvEvent
from vllm_ranks.engine.queue_limits import QueueLimits
from vllm_ranks.engine.request import FinishReason
from vllm_ranks.engine.scheduler import SchedulerLimits
from vllm_ranks.engine.time_model import StepTimeModel
from vllm_ranks.engine.virtual import VirtualEngine
from vllm_ranks.engine.virtual_events import Finished, FirstToken, GroupSpec, Refused, VirtualEvent

STEP_S = 0.1
EVEN = StepTimeModel(STEP_S, 0.0, 0.0, 0.0, STEP_S)
"""Every step takes 100 ms, whatever it computes."""
PREFILL_BOUND = StepTimeModel(0.010, 0.001, 0.0, 0.0, 0.010)
"""10 ms a step, 1 ms a prefill token."""
DELAY_S = 0.001


def dense(ranks: int = 1, *, time_model: StepTimeModel = EVEN, **spec: object) -> GroupSpec:
    return replace(GroupSpec(ranks, lock_step=False, time_model=time_model, block_size=4), **spec)  # type: ignore[arg-type]


def lock_step(ranks: int = 2, *, time_model: StepTimeModel = EVEN, **spec: object) -> GroupSpec:
    return replace(GroupSpec(ranks, time_model=time_model, block_size=4), **spec)  # type: ignore[arg-type]


def virtual(*groups: GroupSpec, trace: bool = False, delay_s: float = DELAY_S) -> VirtualEngine:
    return VirtualEngine(groups, message_delay_s=delay_s, trace=trace)


def times(events: list[VirtualEvent]) -> dict[str, float]:
    """When what happened: `first a`, `end a`."""
    words = {FirstToken: "first", Finished: "end", Refused: "refused"}
    return {f"{words[type(event)]} {event.request_id}": pytest.approx(event.at_s) for event in events}


class TestOneRank:
    def test_a_request_runs_from_its_arrival_to_its_last_token(self) -> None:
        engine = virtual(dense())
        engine.submit(0, 0, engine_request("a", output=3), at_s=1.0)
        events = list(until_idle(engine))
        assert times(events) == {"first a": 1.0 + DELAY_S + STEP_S, "end a": 1.0 + DELAY_S + 3 * STEP_S}

    def test_the_end_tells_all_about_the_request(self) -> None:
        engine = virtual(dense())
        engine.submit(0, 0, engine_request("a", prompt=9, output=1, family="f"))
        engine.submit(0, 0, engine_request("b", prompt=9, output=3, family="f"), at_s=1.0)
        *_, end = until_idle(engine)
        assert isinstance(end, Finished)
        assert (end.group, end.rank, end.request_id, end.reason) == (0, 0, "b", FinishReason.STOP)
        assert (end.generated_tokens, end.cached_tokens, end.preemptions) == (3, 8, 0)
        assert end.first_token_s == pytest.approx(1.0 + DELAY_S + STEP_S)

    @pytest.mark.parametrize("spec", [dense(), lock_step()])
    def test_before_its_first_request_and_after_its_last_a_rank_rests(self, spec: GroupSpec) -> None:
        engine = virtual(spec, trace=True)
        assert list(until_idle(engine)) == []
        engine.submit(0, 0, engine_request("a"))
        *_, end = until_idle(engine)
        steps = engine.steps(0)
        assert engine.now_s - LONG_S < steps[0].start_s < end.at_s
        assert steps[-1].start_s < end.at_s + 2 * spec.dp_sync_interval * STEP_S

    def test_time_stands_where_it_was_advanced_to(self) -> None:
        engine = virtual(dense())
        engine.submit(0, 0, engine_request("a"), at_s=2.0)
        assert list(engine.advance_to(1.0)) == []
        assert engine.now_s == 1.0
        with pytest.raises(ValueError, match="in the past"):
            engine.submit(0, 0, engine_request("b"), at_s=0.5)

    def test_the_reader_can_act_at_the_very_moment_of_an_event(self) -> None:
        engine = virtual(dense())
        engine.submit(0, 0, engine_request("a", output=2))
        seen = []
        for event in engine.advance_to(10.0):
            seen.append(event)
            if isinstance(event, Finished) and event.request_id == "a":
                assert engine.now_s == event.at_s
                engine.submit(0, 0, engine_request("b", output=1))
        end_of_a = DELAY_S + 2 * STEP_S
        assert times(seen)["first b"] == end_of_a + DELAY_S + STEP_S

    def test_events_not_read_yet_are_read_later(self) -> None:
        engine = virtual(dense())
        for name in "ab":
            engine.submit(0, 0, engine_request(name, output=1))
        assert next(engine.advance_to(10.0)).request_id == "a"
        assert engine.now_s < 10.0
        assert [e.request_id for e in engine.advance_to(10.0)] == ["a", "b", "b"]


class TestLockStep:
    def test_a_step_lasts_as_long_as_its_slowest_rank(self) -> None:
        engine = virtual(lock_step(time_model=PREFILL_BOUND), delay_s=0.0)
        engine.submit(0, 0, engine_request("decoding", prompt=1, output=100))
        engine.submit(0, 1, engine_request("long", prompt=500, output=1), at_s=0.1)
        list(until_idle(engine))
        metrics = engine.metrics(0, 0)
        # 99 steps after the first token, one of which computed 500 prefill tokens on the other rank.
        assert metrics.inter_token_latency_seconds_sum == pytest.approx(99 * 0.010 + 0.5)

    def test_dense_ranks_do_not_wait_for_each_other(self) -> None:
        engine = virtual(dense(2, time_model=PREFILL_BOUND), delay_s=0.0)
        engine.submit(0, 0, engine_request("decoding", prompt=1, output=100))
        engine.submit(0, 1, engine_request("long", prompt=500, output=1), at_s=0.1)
        list(until_idle(engine))
        assert engine.metrics(0, 0).inter_token_latency_seconds_sum == pytest.approx(99 * 0.010)
        assert engine.lost_share(0) == pytest.approx(0.0)

    def test_the_first_step_waits_until_every_rank_has_been_woken(self) -> None:
        engine = virtual(lock_step(4))
        engine.submit(0, 2, engine_request("a", output=1), at_s=1.0)
        # Front end → coordinator → engines.
        assert times(list(until_idle(engine)))["first a"] == 1.0 + 2 * DELAY_S + STEP_S

    def test_a_wave_ends_at_its_first_step_or_a_multiple_of_the_sync_interval(self) -> None:
        for output, steps in ((1, 1), (2, 16), (16, 16), (17, 32)):
            engine = virtual(lock_step(3), trace=True)
            engine.submit(0, 1, engine_request("a", output=output))
            list(until_idle(engine))
            assert len(engine.steps(0)) == steps

    def test_idle_ranks_run_dummy_batches_as_long_as_the_wave_lasts(self) -> None:
        engine = virtual(lock_step(2), trace=True)
        engine.submit(0, 1, engine_request("a", output=16))
        list(until_idle(engine))
        assert [share.plan is None for step in engine.steps(0) for share in step.ranks] == [True, False] * 16

    def test_at_rest_all_ranks_are_in_the_same_new_wave(self) -> None:
        engine = virtual(lock_step(3))
        for wave in range(3):
            engine.submit(0, wave, engine_request(f"r{wave}", output=5), at_s=10.0 * wave)
        list(until_idle(engine))
        assert [engine.core(0, rank).stats().current_wave for rank in range(3)] == [3, 3, 3]

    def test_a_request_that_overtakes_the_news_of_the_waves_end_wakes_the_group_itself(self) -> None:
        engine = virtual(lock_step(2), delay_s=0.03)
        engine.submit(0, 0, engine_request("a", output=1))
        end_of_wave = 0.06 + STEP_S
        engine.submit(0, 1, engine_request("b", output=1), at_s=end_of_wave + 0.01)
        assert "end b" in times(list(until_idle(engine)))

    def test_the_slowest_rank_makes_the_others_lose_time(self) -> None:
        slow = StepTimeModel(2 * STEP_S, 0.0, 0.0, 0.0, 2 * STEP_S)
        engine = virtual(lock_step(4, rank_time_models={3: slow}))
        engine.submit(0, 0, engine_request("a", output=16))
        list(until_idle(engine))
        assert engine.lost_share(0) == pytest.approx(3 / 8)

    def test_a_group_of_one_has_no_waves(self) -> None:
        engine = virtual(lock_step(1), trace=True)
        engine.submit(0, 0, engine_request("a", output=5))
        list(until_idle(engine))
        assert len(engine.steps(0)) == 5


class TestAbort:
    def test_nothing_more_is_heard_of_the_request_and_its_memory_is_free(self) -> None:
        engine = virtual(dense(limits=SchedulerLimits(max_num_batched_tokens=256)))
        engine.submit(0, 0, engine_request("a", prompt=2_000))
        engine.abort(0, 0, "a", at_s=2.5 * STEP_S)
        assert list(until_idle(engine)) == []
        metrics = engine.metrics(0, 0)
        assert (metrics.num_requests_running, metrics.kv_cache_usage_perc) == (0, 0.0)
        assert not engine.core(0, 0).has_unfinished

    def test_in_the_step_of_its_last_token_it_is_in_time(self) -> None:
        engine = virtual(dense())
        engine.submit(0, 0, engine_request("a", output=1))
        engine.abort(0, 0, "a", at_s=0.5 * STEP_S)
        assert list(until_idle(engine)) == []
        assert engine.metrics(0, 0).generation_tokens == 0

    def test_right_after_the_request_it_is_as_if_nothing_had_been(self) -> None:
        engine = virtual(lock_step(2))
        engine.submit(0, 0, engine_request("a"))
        engine.abort(0, 0, "a")
        assert list(until_idle(engine)) == []

    def test_too_late_or_of_an_unknown_request_it_does_nothing(self) -> None:
        engine = virtual(dense())
        engine.submit(0, 0, engine_request("a", output=1))
        engine.abort(0, 0, "a", at_s=5.0)
        engine.abort(0, 0, "never seen")
        assert [type(e) for e in until_idle(engine)] == [FirstToken, Finished]


class TestRefusals:
    def test_a_full_queue_answers_at_once(self) -> None:
        engine = virtual(dense(queue_limits=QueueLimits(max_num_queued_reqs=1)))
        for name in "ab":
            engine.submit(0, 0, engine_request(name, output=1), at_s=1.0)
        engine.submit(0, 0, engine_request("c", output=1), at_s=2.0)
        refused = [e for e in until_idle(engine) if isinstance(e, Refused)]
        assert refused == [Refused(1.0, 0, 0, "b", "max_num_queued_reqs")]

    def test_queued_tokens_are_prompts_without_a_first_token(self) -> None:
        engine = virtual(dense(queue_limits=QueueLimits(max_num_queued_tokens=100)))
        engine.submit(0, 0, engine_request("a", prompt=100, output=50))
        engine.submit(0, 0, engine_request("b", prompt=1), at_s=0.05)
        engine.submit(0, 0, engine_request("c", prompt=1), at_s=0.15)
        refused = [e.request_id for e in engine.advance_to(1.0) if isinstance(e, Refused)]
        assert refused == ["b"]

    def test_a_prompt_beyond_the_models_length_is_told_why(self) -> None:
        engine = virtual(dense(limits=SchedulerLimits(max_model_len=100)))
        engine.submit(0, 0, engine_request("a", prompt=100))
        [refused] = until_idle(engine)
        assert isinstance(refused, Refused)
        assert "1 to 99 tokens" in refused.reason
        engine.submit(0, 0, engine_request("b", prompt=99))
        assert list(until_idle(engine))


class TestMetrics:
    def test_gauges_are_as_of_the_last_step_that_produced_something(self) -> None:
        engine = virtual(dense(limits=SchedulerLimits(max_num_seqs=1)))
        engine.submit(0, 0, engine_request("a", output=3))
        engine.submit(0, 0, engine_request("b", output=1), at_s=0.5 * STEP_S)
        seen = []
        for at_s in (0.9, 1.1, 2.1, 3.1, 4.1):
            list(engine.advance_to(DELAY_S + at_s * STEP_S))
            metrics = engine.metrics(0, 0)
            seen.append((metrics.num_requests_running, metrics.num_requests_waiting))
        # b came during the first step: unseen until the second one has ended.
        assert seen == [(0, 0), (1, 0), (1, 1), (0, 1), (0, 0)]

    def test_dummy_steps_change_nothing(self) -> None:
        engine = virtual(lock_step(2))
        engine.submit(0, 0, engine_request("a", output=10))
        list(engine.advance_to(0.5))
        assert engine.metrics(0, 1).snapshot() == virtual(lock_step(2)).metrics(0, 1)

    def test_a_snapshot_does_not_change_with_the_rank(self) -> None:
        engine = virtual(dense())
        before = engine.metrics(0, 0).snapshot()
        engine.submit(0, 0, engine_request("a"))
        list(until_idle(engine))
        assert before.request_success[FinishReason.STOP] == before.generation_tokens == 0
        assert engine.metrics(0, 0).request_success[FinishReason.STOP] == 1


@st.composite
def pools(draw: st.DrawFn) -> list[GroupSpec]:
    groups = []
    for _ in range(draw(st.integers(1, 2))):
        seqs = draw(st.integers(1, 6))
        blocks = draw(st.integers(20, 60))
        limits = SchedulerLimits(
            max_num_seqs=seqs,
            max_num_batched_tokens=seqs + draw(st.sampled_from([0, 4, 30])),
            max_model_len=80,
            long_prefill_token_threshold=draw(st.sampled_from([0, 8])),
            prefill_schedule_interval=draw(st.sampled_from([1, 4])),
        )
        groups.append(
            GroupSpec(
                ranks=draw(st.integers(1, 5)),
                lock_step=draw(st.booleans()),
                limits=limits,
                policy=draw(st.sampled_from(["fcfs", "priority"])),
                num_blocks=blocks,
                block_size=4,
                time_model=StepTimeModel(0.01, 0.001, 0.001, 1e-5, 0.01, draw(st.sampled_from([0.0, 0.3]))),
                dp_sync_interval=draw(st.integers(1, 16)),
            )
        )
    return groups


def drive(groups: list[GroupSpec], rng: random.Random, delay_s: float, aborts: bool) -> list[object]:
    """A random workload; checks that everything ends well, and returns all that could be seen of it."""
    engine = VirtualEngine(groups, seed=rng.randrange(100), message_delay_s=delay_s, trace=True)
    alive: dict[tuple[int, int, str], float] = {}
    seen: list[object] = []
    finished: list[Finished] = []
    prompts = {}
    at_s = 0.0

    def watch(until_s: float) -> None:
        for event in engine.advance_to(until_s):
            seen.append(event)
            assert event.at_s == engine.now_s
            if isinstance(event, Finished):
                finished.append(event)
                del alive[event.group, event.rank, event.request_id]

    for number in range(rng.randint(1, 40)):
        at_s += rng.choice([0.0, rng.expovariate(50), rng.expovariate(2)])
        watch(at_s)
        group = rng.randrange(len(groups))
        rank = rng.randrange(groups[group].ranks)
        prompt = rng.randint(1, 60)
        prompts[f"r{number}"] = prompt
        engine.submit(
            group,
            rank,
            engine_request(
                f"r{number}",
                prompt,
                rng.randint(1, 30),
                family=rng.choice("xyz"),
                priority=rng.randint(0, 1),
                arrival_s=at_s,
            ),
        )
        alive[group, rank, f"r{number}"] = at_s
        if aborts and rng.random() < 0.3:
            victim = rng.choice(sorted(alive))
            engine.abort(*victim)
            del alive[victim]
    watch(at_s + LONG_S)

    assert not alive, "a request was lost"
    for group, spec in enumerate(groups):
        cores = [engine.core(group, rank) for rank in range(spec.ranks)]
        for rank, core in enumerate(cores):
            assert not core.has_unfinished
            assert core.scheduler.kv_cache.usage == 0
            metrics = engine.metrics(group, rank)
            assert (metrics.num_requests_running, metrics.num_requests_waiting) == (0, 0)
            if not aborts:
                check_metrics(engine, group, rank, finished, prompts)
        waves = {core.stats().current_wave for core in cores}
        waves |= {rank.waves.current_wave for rank in engine._groups[group]}
        assert len(waves) == 1, "engines and front ends disagree about the wave"
        assert not any(rank.waves.engines_running for rank in engine._groups[group])
        assert 0 <= engine.lost_share(group) < 1
    return [*seen, *(engine.steps(group) for group in range(len(groups)))]


def check_metrics(
    engine: VirtualEngine, group: int, rank: int, finished: list[Finished], prompts: dict[str, int]
) -> None:
    """Counters and histograms are what the events of the same requests add up to."""
    mine = [event for event in finished if (event.group, event.rank) == (group, rank)]
    metrics = engine.metrics(group, rank)
    generated = sum(event.generated_tokens for event in mine)
    computed = sum(prompts[event.request_id] - event.cached_tokens for event in mine)
    assert metrics.generation_tokens == generated
    assert metrics.prompt_tokens == sum(prompts[event.request_id] for event in mine)
    assert metrics.prompt_tokens_cached == metrics.prompt_tokens - computed
    assert metrics.iteration_tokens_total_sum == computed + generated
    assert metrics.num_preemptions == sum(event.preemptions for event in mine)
    assert sum(metrics.request_success.values()) == len(mine)
    assert metrics.time_to_first_token_seconds_count == len(mine)
    assert metrics.inter_token_latency_seconds_count == generated - len(mine)
    decoding_s = sum(event.at_s - event.first_token_s for event in mine)
    assert metrics.inter_token_latency_seconds_sum == pytest.approx(decoding_s)
    e2e_s, ttft_s = metrics.e2e_request_latency_seconds_sum, metrics.time_to_first_token_seconds_sum
    assert e2e_s - ttft_s == pytest.approx(decoding_s)
    assert metrics.request_queue_time_seconds_count == len(mine)


@settings(max_examples=150, deadline=None)
@given(pools(), st.integers(0, 1 << 32), st.sampled_from([0.0, 0.0005, 0.02, 0.3]), st.booleans())
def test_any_workload_ends_with_every_request_served_and_every_counter_right(
    groups: list[GroupSpec], seed: int, delay_s: float, aborts: bool
) -> None:
    drive(groups, random.Random(seed), delay_s, aborts)


@settings(max_examples=20, deadline=None)
@given(pools(), st.integers(0, 1 << 32))
def test_the_same_seed_gives_the_same_run(groups: list[GroupSpec], seed: int) -> None:
    runs = [drive(groups, random.Random(seed), 0.001, aborts=True) for _ in range(2)]
    assert runs[0] == runs[1]


def test_another_seed_gives_other_jitter() -> None:
    ends = set()
    for seed in range(2):
        engine = VirtualEngine([dense(time_model=replace(EVEN, jitter_ratio=0.1))], seed=seed)
        engine.submit(0, 0, engine_request("a"))
        *_, end = until_idle(engine)
        ends.add(end.at_s)
    assert len(ends) == 2


def test_groups_know_nothing_of_each_other() -> None:
    alone, beside = virtual(lock_step(2)), virtual(lock_step(2), lock_step(3))
    for engine in (alone, beside):
        engine.submit(0, 1, engine_request("a", output=20))
    for rank in range(3):
        beside.submit(1, rank, engine_request("a", prompt=500, output=20), at_s=0.3)
    assert list(until_idle(alone)) == [e for e in until_idle(beside) if e.group == 0]


def test_traced_steps_say_who_computed_what_and_how_long_that_took() -> None:
    engine = virtual(lock_step(2, time_model=PREFILL_BOUND), trace=True)
    engine.submit(0, 0, engine_request("a", prompt=30, output=2))
    list(until_idle(engine))
    first, second, *_ = engine.steps(0)
    assert (first.start_s, first.duration_s) == (2 * DELAY_S, pytest.approx(0.040))
    assert [(share.rank, share.prefill_tokens, share.decode_sequences) for share in first.ranks] == [
        (0, 30, 0),
        (1, 0, 0),
    ]
    assert [share.cost_s for share in first.ranks] == [pytest.approx(0.040), pytest.approx(0.010)]
    assert first.ranks[0].plan is not None
    assert first.ranks[0].plan.prefills == (("a", 30),)
    assert second.start_s == pytest.approx(first.start_s + first.duration_s)
    assert second.ranks[0].decode_sequences == 1


def test_kv_events_come_with_the_rank_they_happen_on() -> None:
    events: list[tuple[int, int, KvEvent]] = []
    engine = VirtualEngine(
        [dense(), dense(2)], kv_listener=lambda group, rank, event: events.append((group, rank, event))
    )
    request = engine_request("a", prompt=8)
    engine.submit(1, 1, request)
    list(until_idle(engine))
    assert events == [(1, 1, BlocksStored(request, 0, (("a", 0), ("a", 1)), None))]
