"""Which budget suits the targets."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ext_proc.advice import (
    GRANULE_TOKENS,
    LARGEST_BUDGET_TOKENS,
    SAFE_SHARE,
    Load,
    best_budget_tokens,
    effect,
)
from ext_proc.settings import Targets
from ext_proc.step_times import StepCosts

COSTS = StepCosts(fixed_s=0.020, per_prefill_token_s=80e-6, per_decode_sequence_s=100e-6, per_kv_token_s=2e-8)
TARGETS = Targets(ttft_s=2.0, tpot_s=0.1)


def test_with_the_usual_costs_a_target_of_100_ms_asks_for_a_budget_below_1024() -> None:
    assert best_budget_tokens(COSTS, Load(0, 0), TARGETS) == 896
    assert best_budget_tokens(COSTS, Load(100, 500_000), TARGETS) == 640


def test_where_decoding_alone_breaks_the_target_no_budget_helps() -> None:
    assert best_budget_tokens(COSTS, Load(256, 2_000_000), Targets(tpot_s=0.05)) is None


def test_a_target_that_any_step_keeps_asks_for_no_more_than_is_useful() -> None:
    assert best_budget_tokens(COSTS, Load(0, 0), Targets(tpot_s=60.0)) == LARGEST_BUDGET_TOKENS


def test_a_budgets_effect_is_its_step_its_rate_and_the_prompt_it_can_serve_in_time() -> None:
    small, large = (effect(COSTS, Load(0, 0), TARGETS, budget) for budget in (512, 2048))
    assert small.longest_step_s == pytest.approx(0.020 + 512 * 80e-6)
    assert small.prefill_tokens_per_s == pytest.approx(512 / small.longest_step_s)
    assert small.longest_prompt_tokens == int(2.0 * small.prefill_tokens_per_s)
    assert large.prefill_tokens_per_s > small.prefill_tokens_per_s


seconds = st.floats(1e-7, 1e-2)


@given(
    st.builds(StepCosts, st.floats(1e-4, 0.1), seconds, seconds, st.floats(1e-10, 1e-6)),
    st.builds(Load, st.floats(0, 1000), st.floats(0, 5e6)),
    st.floats(0.005, 2.0),
)
def test_the_best_budget_keeps_the_target_and_the_next_larger_one_does_not(
    costs: StepCosts, load: Load, tpot_s: float
) -> None:
    targets = Targets(tpot_s=tpot_s)
    best = best_budget_tokens(costs, load, targets)
    limit_s = SAFE_SHARE * tpot_s
    if best is None:
        smallest = (
            costs.decode_step_s(load.decoding_sequences, load.kv_tokens)
            + GRANULE_TOKENS * costs.per_prefill_token_s
        )
        assert smallest >= limit_s * (1 - 1e-9)
        return
    assert effect(costs, load, targets, best).longest_step_s <= limit_s * (1 + 1e-9)
    assume(best < LARGEST_BUDGET_TOKENS)
    larger = effect(costs, load, targets, best + GRANULE_TOKENS)
    assert larger.longest_step_s >= limit_s * (1 - 1e-9)
