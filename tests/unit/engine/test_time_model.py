"""How long steps take."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from vllm_ranks.engine.time_model import DEFAULT_PRESET, PRESETS, StepTimeModel


@dataclass
class Load:
    prefill_tokens: int = 0
    decode_sequences: int = 0
    resident_kv_tokens: int = 0


def test_the_default_is_the_documented_formula() -> None:
    load = Load(prefill_tokens=1_000, decode_sequences=10, resident_kv_tokens=100_000)
    assert PRESETS[DEFAULT_PRESET].step_s(load, random.Random(0)) == pytest.approx(
        0.020 + 0.080 + 0.001 + 0.002
    )


def test_a_dummy_batch_has_its_own_cost() -> None:
    assert StepTimeModel(dummy_s=0.012).dummy_step_s(random.Random(0)) == 0.012


def test_a_slow_rank_needs_a_multiple_for_everything() -> None:
    model = StepTimeModel(slowdown=8.0)
    assert model.step_s(Load(prefill_tokens=1_000), random.Random(0)) == pytest.approx(0.8)
    assert model.dummy_step_s(random.Random(0)) == pytest.approx(0.16)


def test_jitter_stays_within_its_ratio_averages_out_and_repeats_with_its_seed() -> None:
    model = StepTimeModel(fixed_s=1.0, jitter_ratio=0.2)
    rng, again = random.Random(7), random.Random(7)
    steps = [model.step_s(Load(), rng) for _ in range(2_000)]
    assert min(steps) >= 0.8
    assert max(steps) <= 1.2
    assert len(set(steps)) > 1_000
    assert sum(steps) / len(steps) == pytest.approx(1.0, abs=0.02)
    assert steps == [model.step_s(Load(), again) for _ in range(2_000)]


@pytest.mark.parametrize("field", ["fixed_s", "per_prefill_token_s", "per_kv_token_s", "dummy_s"])
def test_costs_are_never_negative(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must not be negative"):
        replace(StepTimeModel(), **{field: -1e-9})


def test_jitter_and_slowdown_must_leave_time_positive() -> None:
    with pytest.raises(ValueError, match="jitter_ratio"):
        StepTimeModel(jitter_ratio=1.0)
    with pytest.raises(ValueError, match="slowdown"):
        StepTimeModel(slowdown=0.0)


def test_the_large_moe_preset_gives_back_the_figures_it_was_derived_from() -> None:
    model = PRESETS["moe-671b-8-gpus"]
    decode_s = model.step_s(Load(decode_sequences=88, resident_kv_tokens=88 * 4_989), random.Random(0))
    assert 88 / decode_s * 8 == pytest.approx(14_800, rel=0.05)
    assert 1 / model.per_prefill_token_s * 8 == pytest.approx(73_700 * 0.437, rel=0.05)


def test_the_small_dense_preset_decodes_a_single_stream_at_the_speed_of_reading_its_weights() -> None:
    step_s = PRESETS["dense-8b-h100"].step_s(
        Load(decode_sequences=1, resident_kv_tokens=1_000), random.Random(0)
    )
    assert 1 / step_s == pytest.approx(152, rel=0.05)
