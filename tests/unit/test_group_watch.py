"""Whether a group serves, from what its ranks show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ext_proc.vocabulary import Rank, RankReport
from gateway.group_watch import (
    DOUBT_SHARE,
    MISSED_HEALTH_LIMIT,
    SILENCE_FACTOR,
    GroupWatch,
    Placed,
    Trouble,
    Verdict,
)

RANKS = tuple(Rank("g", index, f"10.0.0.1:{8000 + index}") for index in range(2))
HANG_AFTER_S = 2.0
DOUBT_AFTER_S = DOUBT_SHARE * HANG_AFTER_S


def placed_at(*times_s: float) -> Placed:
    """Open requests that were placed on rank 0 then."""

    def placed(rank: Rank, after_s: float) -> float | None:
        return min((at_s for at_s in times_s if rank == RANKS[0] and at_s > after_s), default=None)

    return placed


class Scene:
    """A watched group of two."""

    def __init__(self) -> None:
        self.watch = GroupWatch(RANKS, hang_after_s=HANG_AFTER_S)
        self.steps = [0, 0]

    def report(
        self,
        at_s: float,
        rank: int = 0,
        *,
        running: int = 0,
        waiting: int = 0,
        kv: float = 0.0,
        steps: int | None = 0,
    ) -> None:
        """A rank's report; `steps` more than before, None if it does not tell."""
        if steps is not None:
            self.steps[rank] += steps
        told = None if steps is None else self.steps[rank]
        report = RankReport(at_s, running=running, waiting=waiting, kv_cache_usage=kv, engine_steps=told)
        self.watch.saw_report(RANKS[rank], report)

    def trouble(self, now_s: float, *, placed_at_s: Sequence[float] = ()) -> Trouble | None:
        """What is wrong, with open requests that were placed on rank 0 then."""
        return self.watch.trouble(now_s, placed_at(*placed_at_s))

    def doubts(self, *placed_at_s: float) -> list[Rank]:
        """Which ranks are doubted, with such requests."""
        return self.watch.doubts(placed_at(*placed_at_s))

    def hang(self) -> None:
        """Let rank 0 hang from 10 s on, which shows at 12 s."""
        for now_s in (10.0, 12.0):
            self.report(now_s, running=1)
        assert self.is_hung(12.0)

    def is_hung(self, now_s: float, *, placed_at_s: Sequence[float] = ()) -> bool:
        """Whether the group is held to hang."""
        trouble = self.trouble(now_s, placed_at_s=placed_at_s)
        return trouble is not None and trouble.verdict is Verdict.HUNG


@pytest.fixture
def scene() -> Scene:
    """Both ranks idle since the time 0."""
    scene = Scene()
    for rank in (0, 1):
        scene.report(0.0, rank)
        scene.watch.saw_health(RANKS[rank], 200, 0.0)
    return scene


def test_a_group_of_which_nothing_is_known_is_not_in_trouble() -> None:
    assert Scene().trouble(100.0) is None


def test_an_idle_group_may_be_idle_for_ever(scene: Scene) -> None:
    assert scene.trouble(1e6) is None


def test_one_rank_without_engine_takes_the_group_out(scene: Scene) -> None:
    scene.watch.saw_health(RANKS[1], 503, 3.0)
    assert scene.trouble(3.0) == Trouble(Verdict.DEAD, RANKS[1], 3.0, "rank g/1: /health answers 503")


def test_a_refused_connection_is_a_death(scene: Scene) -> None:
    scene.watch.saw_refusal(RANKS[0], 3.0)
    trouble = scene.trouble(4.0)
    assert trouble is not None
    assert (trouble.verdict, trouble.since_s) == (Verdict.DEAD, 3.0)


def test_a_single_missed_answer_is_not(scene: Scene) -> None:
    for _ in range(MISSED_HEALTH_LIMIT - 1):
        scene.watch.missed_health(RANKS[0], 3.0)
    scene.watch.saw_health(RANKS[0], 200, 4.0)
    scene.watch.missed_health(RANKS[0], 5.0)
    assert scene.trouble(5.0) is None


def test_missed_answers_in_a_row_are(scene: Scene) -> None:
    for second in range(MISSED_HEALTH_LIMIT):
        scene.watch.missed_health(RANKS[0], float(second))
    reason = f"rank g/0: /health was not answered {MISSED_HEALTH_LIMIT} times in a row"
    assert scene.trouble(5.0) == Trouble(Verdict.HUNG, RANKS[0], 0.0, reason)
    scene.watch.saw_health(RANKS[0], 200, 6.0)
    assert scene.trouble(6.0) is None


def test_a_dead_rank_that_answers_again_is_alive(scene: Scene) -> None:
    scene.watch.saw_refusal(RANKS[0], 3.0)
    scene.watch.saw_health(RANKS[0], 200, 9.0)
    assert scene.trouble(9.0) is None


def test_the_first_death_is_the_groups(scene: Scene) -> None:
    scene.watch.saw_refusal(RANKS[1], 3.0)
    scene.watch.saw_refusal(RANKS[0], 4.0)
    trouble = scene.trouble(5.0)
    assert trouble is not None
    assert trouble.rank == RANKS[1]


def test_a_rank_that_runs_requests_without_steps_hangs(scene: Scene) -> None:
    scene.report(10.0, running=3, steps=1)
    scene.report(11.9, running=3)
    assert not scene.is_hung(11.9)
    scene.report(12.0, running=3)
    trouble = scene.trouble(12.0)
    assert trouble is not None
    assert (trouble.verdict, trouble.rank, trouble.since_s) == (Verdict.HUNG, RANKS[0], 10.0)
    assert trouble.reason == "rank g/0: no step of its engine for 2.0 s, with requests on it"


def test_a_rank_that_does_not_even_report_may_only_be_late(scene: Scene) -> None:
    scene.report(10.0, running=3, steps=1)
    assert not scene.is_hung(12.0)
    scene.report(12.5, running=3, steps=1)
    assert not scene.is_hung(14.5)


def test_a_rank_with_requests_that_reports_nothing_for_long_hangs(scene: Scene) -> None:
    scene.report(10.0, running=3, steps=1)
    trouble = scene.trouble(10.0 + SILENCE_FACTOR * HANG_AFTER_S)
    assert trouble is not None
    assert trouble.reason == "rank g/0: no report for 2.8 s, with requests on it"


def test_silence_says_nothing_while_the_gateway_itself_did_not_run(scene: Scene) -> None:
    scene.report(10.0, running=3, steps=1)
    scene.watch.was_blind(12.7)
    assert not scene.is_hung(12.8)
    assert not scene.is_hung(15.4)
    assert scene.is_hung(15.5)


def test_a_request_on_a_rank_that_has_stopped_reporting_is_judged_from_its_arrival(scene: Scene) -> None:
    assert not scene.is_hung(20.0, placed_at_s=[18.0])
    assert scene.is_hung(21.0, placed_at_s=[18.0])


def test_steps_however_few_are_progress(scene: Scene) -> None:
    for tenth in range(100, 300):
        scene.report(tenth / 10, running=3, steps=int(tenth % 15 == 0))
        assert not scene.is_hung(tenth / 10)


@pytest.mark.parametrize("waiting", [0, 3])
def test_a_rank_that_runs_nothing_is_never_held_to_hang_for_a_request_it_has_not_begun_with(
    scene: Scene, waiting: int
) -> None:
    """Its body is arriving, an image being fetched, a grammar compiled: nobody can tell from outside."""
    for tenth in range(100, 700):
        now_s = tenth / 10
        scene.report(now_s, waiting=waiting)
        assert not scene.is_hung(now_s, placed_at_s=[10.0, 11.0, 30.0])


@pytest.mark.parametrize(("waiting", "placed_at_s"), [(0, [10.0]), (3, [10.0]), (3, [])])
def test_but_it_is_doubted(scene: Scene, waiting: int, placed_at_s: list[float]) -> None:
    scene.report(10.0, waiting=waiting)
    scene.report(10.0 + DOUBT_AFTER_S - 0.1, waiting=waiting)
    assert scene.doubts(*placed_at_s) == []
    scene.report(10.0 + DOUBT_AFTER_S, waiting=waiting)
    assert scene.doubts(*placed_at_s) == [RANKS[0]]


def test_a_rank_that_runs_requests_needs_no_doubt(scene: Scene) -> None:
    for now_s in (10.0, 11.9):
        scene.report(now_s, running=1, waiting=1)
    assert scene.doubts(10.0) == []


def test_a_request_that_has_just_begun_to_run_is_given_all_the_time(scene: Scene) -> None:
    for now_s in (10.0, 14.0):
        scene.report(now_s, waiting=1)
    for now_s in (14.1, 16.0):
        scene.report(now_s, running=1)
        assert not scene.is_hung(now_s, placed_at_s=[10.0])
    scene.report(16.1, running=1)
    assert scene.is_hung(16.1, placed_at_s=[10.0])


def test_a_request_that_came_just_before_progress_was_reported_may_have_had_no_part_in_it(
    scene: Scene,
) -> None:
    scene.report(9.9)
    scene.report(10.0, steps=1)
    scene.report(10.0 + DOUBT_AFTER_S)
    assert scene.doubts(9.95) == [RANKS[0]]
    assert scene.doubts(9.9) == []


def test_an_answer_ends_a_doubt_until_a_later_request_is_not_begun_with(scene: Scene) -> None:
    scene.report(11.0)
    scene.watch.saw_life(RANKS[0], 11.1)
    for now_s in (15.0, 20.0):
        scene.report(now_s)
        assert scene.doubts(10.0) == []
    assert scene.doubts(10.0, 18.0) == [RANKS[0]]


def test_a_doubted_rank_that_neither_answers_nor_steps_hangs(scene: Scene) -> None:
    scene.report(11.0)
    scene.watch.saw_late_request(RANKS[0], "a request was not answered within 2 s", 11.0)
    assert scene.trouble(13.0) == Trouble(
        Verdict.HUNG,
        RANKS[0],
        11.0,
        "rank g/0: a request was not answered within 2 s, and its engine has made no step since",
    )
    assert scene.watch.suspects() == [RANKS[0]]
    scene.report(14.0, steps=1)
    assert scene.trouble(14.0) is None


def test_one_that_is_late_with_an_answer_but_makes_steps_is_busy(scene: Scene) -> None:
    scene.report(11.0)
    scene.report(12.0, running=1, steps=1)
    scene.watch.saw_late_request(RANKS[0], "a request was not answered within 2 s", 11.0)
    assert scene.trouble(13.0) is None


def test_an_answer_that_this_process_had_no_time_to_read_is_not_late(scene: Scene) -> None:
    scene.report(11.0)
    scene.watch.was_blind(12.9)
    scene.watch.saw_late_request(RANKS[0], "a request was not answered within 2 s", 11.0)
    assert scene.trouble(13.0) is None


def test_a_rank_that_does_not_tell_its_steps_may_be_late() -> None:
    scene = Scene()
    scene.report(0.0, steps=None)
    scene.watch.saw_late_request(RANKS[0], "a request was not answered within 2 s", 1.0)
    assert scene.trouble(3.0) is None


def test_a_slow_reader_of_a_finished_answer_is_no_hang(scene: Scene) -> None:
    scene.report(11.0, running=1, steps=5)
    scene.report(12.0, running=0, steps=5)
    scene.report(60.0)
    assert not scene.is_hung(60.0, placed_at_s=[10.0])
    assert scene.doubts(10.0) == []


def test_a_long_prompt_is_progress_though_no_step_is_counted_before_its_last(scene: Scene) -> None:
    for chunk in range(20):
        scene.report(10.0 + chunk, running=1, kv=0.01 * chunk)
        assert not scene.is_hung(10.0 + chunk, placed_at_s=[9.9])
    scene.report(31.0, running=1, kv=0.19)
    assert scene.is_hung(31.0, placed_at_s=[9.9])


@pytest.mark.parametrize("change", [{"running": 2}, {"running": 1, "waiting": 1}, {"running": 1, "kv": 0.1}])
def test_whatever_an_engine_tells_anew_ends_a_hang(scene: Scene, change: dict[str, Any]) -> None:
    """A hanging one tells nothing, not even that its clients have given up."""
    scene.hang()
    scene.report(30.0, **change)
    assert not scene.is_hung(30.0)


def test_work_after_a_long_rest_is_judged_from_its_beginning(scene: Scene) -> None:
    for now_s in (1000.0, 1001.9):
        scene.report(now_s, running=1)
        assert not scene.is_hung(now_s)
    scene.report(1002.0, running=1)
    assert scene.is_hung(1002.0)


def test_without_step_counts_nothing_is_held_to_hang() -> None:
    scene = Scene()
    scene.report(0.0, running=1, steps=None)
    assert not scene.is_hung(100.0)


def test_a_hang_ends_with_progress(scene: Scene) -> None:
    scene.hang()
    scene.report(30.0, running=1, steps=1)
    assert not scene.is_hung(30.0)


def test_a_hang_does_not_end_because_its_clients_have_given_up(scene: Scene) -> None:
    scene.hang()
    scene.report(13.0, running=1)
    assert scene.is_hung(13.0)
    assert scene.watch.suspects() == [RANKS[0]]


def test_a_hang_ends_with_an_answer(scene: Scene) -> None:
    scene.hang()
    scene.watch.saw_life(RANKS[0], 12.5)
    assert not scene.is_hung(12.6)
    assert scene.watch.suspects() == []


def test_a_rank_that_fails_requests_is_out_whatever_steps_it_makes(scene: Scene) -> None:
    scene.watch.saw_failed_request(RANKS[1], "a request was answered 500", 10.0)
    scene.report(11.0, 1, running=1, steps=5)
    expected = Trouble(Verdict.HUNG, RANKS[1], 10.0, "rank g/1: a request was answered 500")
    assert scene.trouble(11.0) == expected
    assert scene.watch.suspects() == [RANKS[1]]
    scene.watch.saw_life(RANKS[1], 12.0)
    assert scene.trouble(12.0) is None


def test_a_death_counts_before_a_hang(scene: Scene) -> None:
    scene.hang()
    scene.watch.saw_health(RANKS[1], 503, 13.0)
    trouble = scene.trouble(13.0)
    assert trouble is not None
    assert trouble.verdict is Verdict.DEAD


def test_a_rank_that_was_restarted_starts_afresh(scene: Scene) -> None:
    scene.report(10.0, running=1, steps=50)
    scene.watch.saw_refusal(RANKS[0], 11.0)
    scene.steps[0] = 0
    scene.report(40.0, running=0)
    scene.watch.saw_health(RANKS[0], 200, 40.0)
    assert scene.trouble(40.0) is None
    scene.report(41.0, running=1)
    assert not scene.is_hung(42.0)
