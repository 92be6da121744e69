"""The gateway learns how long a group's steps take from what its ranks report."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ext_proc.online_fit import OnlineFit
from ext_proc.step_times import FEWEST_OBSERVATIONS, StepCosts, StepTimes

PRIOR = StepCosts()
REAL = StepCosts(fixed_s=0.008, per_prefill_token_s=30e-6, per_decode_sequence_s=50e-6, per_kv_token_s=1e-8)
BUDGET = 1000


def step_s(decoding: float, kv: float, prefill: int = 0) -> float:
    return (
        REAL.fixed_s
        + REAL.per_decode_sequence_s * decoding
        + REAL.per_kv_token_s * kv
        + REAL.per_prefill_token_s * prefill
    )


def learned(*, budget_is_known: bool, believed_budget: int, outliers: float = 0.0) -> StepTimes:
    """Times after some hundred steps and prefills of an engine with the costs `REAL`."""
    times = StepTimes(PRIOR, believed_budget, budget_is_known=budget_is_known)
    rng = random.Random(1)
    for _ in range(600):
        decoding, kv = rng.randint(1, 200), rng.randint(0, 2_000_000)
        noise = 20.0 if rng.random() < outliers else rng.uniform(0.97, 1.03)
        times.observe_decode_step(step_s(decoding, kv) * noise, decoding, kv)
        times.observe_prefill_step(step_s(decoding, kv, BUDGET) * rng.uniform(0.97, 1.03), decoding, kv)
        tokens = rng.randint(500, 20_000)
        duration_s = tokens / BUDGET * step_s(decoding, kv, BUDGET) + rng.uniform(0, 0.02)
        times.observe_prefill(tokens, duration_s, decoding, kv)
    return times


@pytest.mark.parametrize(("budget_is_known", "believed_budget"), [(True, BUDGET), (False, 2048)])
def test_steps_are_predicted_after_some_hundred_observations(
    budget_is_known: bool, believed_budget: int
) -> None:
    times = learned(budget_is_known=budget_is_known, believed_budget=believed_budget)
    assert times.decode_step_s(100, 1e6) == pytest.approx(step_s(100, 1e6), rel=0.05)
    assert times.prefill_step_s(100, 1e6) == pytest.approx(step_s(100, 1e6, BUDGET), rel=0.1)
    assert times.budget_tokens == pytest.approx(BUDGET, rel=0.15)
    assert times.costs.per_prefill_token_s == pytest.approx(REAL.per_prefill_token_s, rel=0.2)


def test_a_few_wild_measurements_change_little() -> None:
    times = learned(budget_is_known=True, believed_budget=BUDGET, outliers=0.03)
    assert times.decode_step_s(100, 1e6) == pytest.approx(step_s(100, 1e6), rel=0.15)


def test_before_any_observation_the_prior_holds() -> None:
    times = StepTimes(PRIOR, 2048, budget_is_known=True)
    assert times.decode_step_s(10, 1000) == pytest.approx(0.020 + 10 * 100e-6 + 1000 * 2e-8)
    assert times.prefill_step_s(0, 0) == pytest.approx(0.020 + 2048 * 80e-6)


def test_a_known_budget_is_not_learned_away() -> None:
    assert learned(budget_is_known=True, believed_budget=BUDGET).budget_tokens == BUDGET


def test_a_budget_is_known_once_it_is_told_or_long_prefills_have_taught_it() -> None:
    assert StepTimes(PRIOR, 2048, budget_is_known=True).budget_is_known
    times = StepTimes(PRIOR, 2048, budget_is_known=False)
    for _ in range(100):  # which say nothing of the budget
        times.observe_decode_step(0.02, 1, 100)
        times.observe_prefill(100, 0.1, 1, 100)
    assert not times.budget_is_known
    for _ in range(FEWEST_OBSERVATIONS):
        times.observe_prefill(20_000, 2.0, 1, 100)
    assert times.budget_is_known


@given(
    st.lists(
        st.tuples(st.floats(1e-6, 100), st.integers(0, 1000), st.floats(0, 1e7), st.integers(0, 100_000)),
        max_size=50,
    ),
    st.booleans(),
)
def test_whatever_is_observed_predictions_stay_positive_and_finite(
    observed: list[tuple[float, int, float, int]], budget_is_known: bool
) -> None:
    times = StepTimes(PRIOR, 2048, budget_is_known=budget_is_known)
    for seconds, decoding, kv, tokens in observed:
        times.observe_decode_step(seconds, decoding, kv)
        times.observe_prefill_step(seconds, decoding, kv)
        times.observe_prefill(tokens, seconds, decoding, kv)
        for prediction in (
            times.decode_step_s(100, 1e6),
            times.prefill_step_s(100, 1e6),
            times.budget_tokens,
        ):
            assert 0 < prediction < 1e6
        assert min(times.costs.__getattribute__(name) for name in StepCosts.__slots__) >= 0


def test_a_weight_never_seen_stays_at_its_prior() -> None:
    fit = OnlineFit((1.0, 0.5))
    for _ in range(300):
        fit.observe((1.0, 0.0), 3.0)
    assert fit.weights == [pytest.approx(3.0, rel=0.02), pytest.approx(0.5)]


def test_a_fit_follows_a_change() -> None:
    fit = OnlineFit((1.0,))
    for level in (2.0, 1.0):
        for _ in range(2000):
            fit.observe((1.0,), level)
        assert fit.predict((1.0,)) == pytest.approx(level, rel=0.02)


def test_weights_must_start_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        OnlineFit((1.0, 0.0))
