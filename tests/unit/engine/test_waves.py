"""The wave protocol, rule by rule (vLLM 0.32 coordinator.py, core.py DPEngineCoreProc, core_client.py)."""

from __future__ import annotations

import pytest

from vllm_ranks.engine.waves import (
    CoordinatorReady,
    CoordinatorState,
    EngineCounts,
    EngineStats,
    FirstRequest,
    FrontEndWaves,
    StartDpWave,
    StatsOutOfOrder,
    WaveComplete,
    WavePublication,
    WaveStarted,
    WaveState,
)


def engine(rank: int = 1, *, wave: int = 0, running: bool = False, dp_sync_interval: int = 16) -> WaveState:
    state = WaveState(rank, dp_sync_interval)
    state.current_wave = wave
    state.running = running
    return state


def step(state: WaveState, *, any_unfinished: bool = True) -> bool:
    """One step; whether the group agreed after it."""
    due = state.step_done()
    if due:
        state.agree(any_unfinished)
    return due


class TestEngine:
    def test_agrees_after_the_first_step_and_every_sync_interval(self) -> None:
        state = engine(dp_sync_interval=4)
        assert [step(state) for _ in range(9)] == [True, False, False, True, False, False, False, True, False]

    def test_between_agreements_it_takes_for_granted_that_work_goes_on(self) -> None:
        state = engine(running=False)
        step(state)
        step(state)
        assert state.running

    def test_a_wave_ends_with_a_new_number_and_step_zero(self) -> None:
        state = engine(wave=3, running=True)
        step(state, any_unfinished=False)
        assert (state.current_wave, state.running, state.step_counter) == (4, False, 0)

    def test_rank_0_alone_tells_of_the_end(self) -> None:
        first, second = engine(0, wave=3, running=True), engine(1, wave=3, running=True)
        step(first, any_unfinished=False)
        step(second, any_unfinished=False)
        assert first.take_messages() == [WaveComplete(3)]
        assert second.take_messages() == []

    def test_rank_0_alone_tells_that_a_pause_has_ended(self) -> None:
        first, second = engine(0), engine(1)
        first.on_start_dp_wave(0, None)
        second.on_start_dp_wave(0, None)
        for _ in range(3):
            step(first)
            step(second)
        assert first.take_messages() == [WaveStarted(0)]
        assert second.take_messages() == []

    def test_a_wave_of_one_step_is_only_heard_of_when_it_is_over(self) -> None:
        state = engine(0)
        state.on_start_dp_wave(0, None)
        step(state, any_unfinished=False)
        assert state.take_messages() == [WaveComplete(0)]

    def test_each_pause_that_ends_is_told_of_again(self) -> None:
        state = engine(0)
        for _ in range(2):
            step(state, any_unfinished=True)
            while state.running:
                step(state, any_unfinished=False)
        assert state.take_messages() == [WaveStarted(0), WaveComplete(0), WaveStarted(1), WaveComplete(1)]

    def test_a_request_of_an_older_wave_wakes_a_sleeping_engine_which_tells_the_coordinator(self) -> None:
        state = engine(1, wave=3)
        state.on_add(2)
        assert state.running
        assert state.take_messages() == [WaveStarted(3)]

    def test_a_request_of_an_older_wave_is_nothing_special_while_running(self) -> None:
        state = engine(1, wave=3, running=True)
        state.on_add(2)
        assert state.take_messages() == []

    def test_a_request_of_the_current_wave_wakes_nobody_by_itself(self) -> None:
        state = engine(1, wave=3)
        state.on_add(3)
        assert not state.running
        assert state.take_messages() == []

    def test_a_request_of_a_newer_wave_raises_the_wave(self) -> None:
        state = engine(1, wave=3)
        state.on_add(5)
        assert (state.current_wave, state.running, state.take_messages()) == (5, False, [])

    @pytest.mark.parametrize(("wave", "wakes"), [(2, False), (3, True), (4, True)])
    def test_start_dp_wave_wakes_for_this_wave_or_a_later_one(self, wave: int, wakes: bool) -> None:
        state = engine(1, wave=3)
        state.on_start_dp_wave(wave, None)
        assert state.running == wakes
        assert state.current_wave == max(wave, 3)

    def test_only_its_own_number_excludes_an_engine(self) -> None:
        for exclude, wakes in ((1, False), (0, True), (None, True), (b"\x01\x00", True)):
            state = engine(1)
            state.on_start_dp_wave(0, exclude)
            assert state.running == wakes, exclude

    def test_messages_are_taken_once(self) -> None:
        state = engine(1, wave=1)
        state.on_add(0)
        assert state.take_messages()
        assert state.take_messages() == []

    def test_the_sync_interval_must_be_positive(self) -> None:
        with pytest.raises(ValueError, match="dp_sync_interval"):
            WaveState(0, 0)


class TestFrontEnd:
    def test_tells_of_the_first_request_only(self) -> None:
        front_end = FrontEndWaves()
        assert front_end.on_request(b"\x02\x00") == FirstRequest(b"\x02\x00", 0)
        assert front_end.on_request(b"\x02\x00") is None

    def test_believes_the_coordinator(self) -> None:
        front_end = FrontEndWaves()
        front_end.on_request(0)
        front_end.on_publication(WavePublication(None, 1, running=False))
        assert front_end.current_wave == 1
        assert front_end.on_request(0) == FirstRequest(0, 1)
        front_end.on_publication(WavePublication(None, 1, running=True))
        assert front_end.on_request(0) is None


def coordinator(engines: int = 2, *, lock_step: bool = True, now_s: float = 0.0) -> CoordinatorState:
    state = CoordinatorState(engines, lock_step)
    for _ in range(engines):
        state.on_subscription(now_s)
    return state


def in_wave(wave: int, *, running: bool) -> CoordinatorState:
    state = coordinator()
    if running:
        state.on_engine_outputs(0, 0.0, start_wave=wave)
    elif wave:
        state.on_engine_outputs(0, 0.0, wave_complete=wave - 1)
    assert (state.current_wave, state.engines_running) == (wave, running)
    return state


class TestCoordinator:
    def test_ready_goes_out_with_the_last_subscription_and_again_for_later_ones(self) -> None:
        state = CoordinatorState(2)
        sent = [state.on_subscription(0.0) for _ in range(3)]
        assert sent == [[], [CoordinatorReady()], [CoordinatorReady()]]

    def test_a_first_request_wakes_everybody_but_its_target(self) -> None:
        state = in_wave(2, running=False)
        assert state.on_first_request(FirstRequest(b"\x01\x00", 2), 1.0) == [StartDpWave(2, b"\x01\x00")]

    def test_it_does_not_take_its_own_wake_up_for_evidence_that_engines_run(self) -> None:
        state = in_wave(2, running=False)
        state.on_first_request(FirstRequest(1, 2), 1.0)
        assert not state.engines_running
        assert state.on_first_request(FirstRequest(0, 2), 1.1) == [StartDpWave(2, 0)]

    def test_a_first_request_of_an_older_wave_wakes_its_target_too(self) -> None:
        state = in_wave(2, running=False)
        assert state.on_first_request(FirstRequest(1, 1), 1.0) == [StartDpWave(2, None)]

    def test_a_first_request_is_ignored_while_engines_run(self) -> None:
        assert in_wave(2, running=True).on_first_request(FirstRequest(1, 2), 1.0) == []

    def test_the_end_of_a_wave_is_published_at_once(self) -> None:
        state = in_wave(2, running=True)
        assert state.on_engine_outputs(0, 1.0, wave_complete=2) == [WavePublication(None, 3, running=False)]

    def test_the_end_of_a_wave_that_it_did_not_know_of_counts(self) -> None:
        state = in_wave(2, running=False)
        assert state.on_engine_outputs(0, 1.0, wave_complete=5) == [WavePublication(None, 6, running=False)]

    def test_the_end_of_an_older_wave_is_ignored(self) -> None:
        assert in_wave(2, running=True).on_engine_outputs(0, 1.0, wave_complete=1) == []

    def test_a_started_wave_is_broadcast_and_published(self) -> None:
        for wave in (2, 4):
            state = in_wave(2, running=False)
            assert state.on_engine_outputs(1, 1.0, start_wave=wave) == [
                StartDpWave(wave, 1),
                WavePublication(None, wave, running=True),
            ]

    def test_a_newer_wave_is_started_even_while_it_believes_the_older_one_runs(self) -> None:
        state = in_wave(2, running=True)
        assert StartDpWave(3, 1) in state.on_engine_outputs(1, 1.0, start_wave=3)

    def test_a_wave_started_twice_or_of_the_past_is_ignored(self) -> None:
        state = in_wave(2, running=True)
        assert state.on_engine_outputs(1, 1.0, start_wave=2) == []
        assert state.on_engine_outputs(1, 1.0, start_wave=1) == []

    def test_the_end_of_a_wave_hides_a_start_in_the_same_message(self) -> None:
        state = in_wave(2, running=True)
        sent = state.on_engine_outputs(0, 1.0, wave_complete=2, start_wave=7)
        assert sent == [WavePublication(None, 3, running=False)]

    def test_a_dense_model_has_no_waves(self) -> None:
        state = coordinator(lock_step=False)
        assert state.on_first_request(FirstRequest(0, 0), 0.0) == []
        assert state.on_engine_outputs(0, 0.0, start_wave=0) == []
        assert state.on_engine_outputs(0, 0.0, wave_complete=0) == []


def stats(waiting: int, running: int, *, wave: int = 0, step: int = 0) -> EngineStats:
    return EngineStats(EngineCounts(waiting, running, 0.5), wave, step)


def counts(state: CoordinatorState, now_s: float) -> list[tuple[int, int]] | None:
    """What is published when the clock reaches `now_s`."""
    published = state.on_time(now_s)
    if not published:
        return None
    [publication] = published
    assert isinstance(publication, WavePublication)
    assert publication.counts is not None
    return [(c.waiting, c.running) for c in publication.counts]


class TestStatsPublication:
    def test_nothing_is_due_before_all_engines_have_subscribed(self) -> None:
        state = CoordinatorState(2)
        state.on_subscription(0.0)
        assert state.next_publication_s() == float("inf")

    def test_first_heartbeat_after_the_quiet_time_then_every_5_seconds_all_zero_in_external_mode(
        self,
    ) -> None:
        state = coordinator(now_s=10.0)
        assert state.next_publication_s() == pytest.approx(10.05)
        assert counts(state, 10.04) is None
        assert counts(state, 10.06) == [(0, 0), (0, 0)]
        assert state.next_publication_s() == pytest.approx(15.06)

    def test_changed_counts_wait_for_100_ms_since_the_last_publication(self) -> None:
        state = coordinator(now_s=0.0)
        assert counts(state, 1.0) is not None
        state.on_engine_outputs(0, 1.01, stats=stats(1, 2))
        assert state.next_publication_s() == pytest.approx(1.1)
        assert counts(state, 1.1) == [(1, 2), (0, 0)]
        assert state.next_publication_s() == pytest.approx(6.1)

    def test_every_event_restarts_the_50_ms_in_which_a_steps_stats_gather(self) -> None:
        state = coordinator(now_s=0.0)
        counts(state, 1.0)
        state.on_engine_outputs(0, 1.08, stats=stats(1, 2))
        assert state.next_publication_s() == pytest.approx(1.13)
        state.on_engine_outputs(1, 1.12, stats=stats(3, 4))
        assert state.next_publication_s() == pytest.approx(1.17)

    def test_a_dense_model_needs_no_quiet_time(self) -> None:
        state = coordinator(lock_step=False)
        counts(state, 1.0)
        state.on_engine_outputs(0, 1.5, stats=stats(1, 2))
        assert state.next_publication_s() == pytest.approx(1.5)
        assert counts(state, 1.5) == [(1, 2), (0, 0)]

    def test_the_first_word_of_a_new_step_freezes_the_previous_step_which_is_published_whole(self) -> None:
        state = coordinator(now_s=0.0)
        counts(state, 1.0)
        state.on_engine_outputs(0, 1.01, stats=stats(1, 0, step=1))
        state.on_engine_outputs(1, 1.02, stats=stats(2, 0, step=1))
        state.on_engine_outputs(0, 1.09, stats=stats(9, 0, step=2))
        assert counts(state, 1.1) == [(1, 0), (2, 0)]
        assert counts(state, 1.21) == [(9, 0), (2, 0)]

    def test_a_new_wave_is_newer_whatever_its_step(self) -> None:
        state = coordinator()
        state.on_engine_outputs(0, 1.0, stats=stats(1, 0, wave=1, step=9))
        assert state.on_engine_outputs(1, 1.0, stats=stats(2, 0, wave=2, step=1)) == []
        assert counts(state, 2.0) == [(1, 0), (0, 0)]

    def test_stats_of_an_older_step_are_taken_but_noted(self) -> None:
        state = coordinator()
        state.on_engine_outputs(0, 1.0, stats=stats(1, 0, wave=1, step=9))
        note = state.on_engine_outputs(1, 1.0, stats=stats(2, 0, wave=1, step=8))
        assert note == [StatsOutOfOrder(1, 1, 8, 1, 9)]
        assert counts(state, 2.0) == [(1, 0), (2, 0)]

    def test_counts_carry_the_wave_and_its_state(self) -> None:
        state = in_wave(2, running=True)
        [publication] = state.on_time(9.0)
        assert isinstance(publication, WavePublication)
        assert (publication.wave, publication.running) == (2, True)

    def test_stats_of_an_unknown_engine_are_ignored(self) -> None:
        state = coordinator(2)
        assert state.on_engine_outputs(2, 1.0, stats=stats(1, 1)) == []
        assert counts(state, 2.0) == [(0, 0), (0, 0)]
