"""What counts as a request well served."""

from __future__ import annotations

import pytest

from benchmarks.score import Score, score, spread
from benchmarks.simulation import RunRecord, Served
from benchmarks.traces import TraceRequest
from ext_proc.settings import Targets

TARGETS = Targets(ttft_s=2.0, tpot_s=0.1)


def served(
    *,
    ttft_s: float | None = 1.0,
    tpot_s: float = 0.05,
    at_s: float = 10.0,
    tokens: int = 11,
    **fields: object,
) -> Served:
    """A request that got its first token and the others so fast; `ttft_s=None`: nothing."""
    one = Served(TraceRequest(at_s, 100, tokens), **fields)  # type: ignore[arg-type]
    if ttft_s is not None:
        one.first_token_s = at_s + ttft_s
        one.finished_s = one.first_token_s + tpot_s * (tokens - 1)
    return one


def judged(*requests: Served) -> Score:
    return score(RunRecord(list(requests), lost_share=0.0, steps=[]), TARGETS)


@pytest.mark.parametrize(
    ("one", "well"),
    [
        (served(), True),
        (served(ttft_s=2.1), False),
        (served(tpot_s=0.11), False),
        (served(ttft_s=2.1, tpot_s=0.11), False),
        (served(tokens=1), True),
        (served(ttft_s=None), False),
        (served(ttft_s=None, refused=True), False),
    ],
)
def test_a_request_is_well_served_if_it_meets_both_targets(one: Served, well: bool) -> None:
    assert judged(one).goodput == well


def test_each_target_is_also_counted_by_itself() -> None:
    result = judged(served(ttft_s=3.0), served(tpot_s=0.2), served(), served(ttft_s=None, refused=True))
    assert (result.goodput, result.ttft_met, result.tpot_met) == (0.25, 0.5, 0.5)
    assert result.refused == 1


def test_a_stream_that_broke_off_has_no_time_per_token() -> None:
    broken = served()
    broken.finished_s = None
    assert judged(broken).goodput == 0
    assert judged(broken).ttft_met == 1


def test_a_single_token_says_nothing_about_the_pace() -> None:
    assert judged(served(tokens=1), served(tpot_s=0.07)).tpot_s.p50 == pytest.approx(0.07)


def test_time_waited_in_the_gateway_is_part_of_the_time_to_the_first_token() -> None:
    result = judged(served(ttft_s=1.5, held_s=1.2))
    assert result.ttft_s.p50 == pytest.approx(1.5)
    assert result.longest_hold_s == 1.2


def test_percentiles_are_of_values_that_occur() -> None:
    values = spread([float(n) for n in range(100)])
    assert (values.p50, values.p90, values.p99) == (50, 90, 99)
    assert spread([]).p99 == 0
