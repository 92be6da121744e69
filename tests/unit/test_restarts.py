"""When something that failed is started again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.restarts import RestartLimits, Restarts

LIMITS = RestartLimits(first_backoff_s=1.0, max_backoff_s=8.0, stable_after_s=60.0, max_in_a_row=6)


def test_each_failure_in_a_row_is_waited_for_longer_up_to_a_limit_and_then_given_up() -> None:
    restarts = Restarts(LIMITS)
    assert [restarts.failed(served_s=0) for _ in range(6)] == [1.0, 2.0, 4.0, 8.0, 8.0, None]


def test_what_served_long_enough_starts_afresh() -> None:
    restarts = Restarts(LIMITS)
    for _ in range(4):
        restarts.failed(served_s=59.9)
    assert restarts.failed(served_s=60.0) == 1.0
    assert restarts.failures_in_a_row == 1


@given(st.integers(1, 5000))
def test_without_a_limit_nothing_is_given_up(failures: int) -> None:
    restarts = Restarts(RestartLimits(first_backoff_s=0.5, max_backoff_s=30.0))
    waits = [restarts.failed(served_s=0) for _ in range(failures)]
    assert all(wait is not None and 0.5 <= wait <= 30.0 for wait in waits)
