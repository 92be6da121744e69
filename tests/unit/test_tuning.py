"""Trying engine settings out: what is tried, in which order, and what is said about it."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner, Result

from benchmarks.simulation import Deployment
from benchmarks.traces import Shape, generate
from benchmarks.tuning import EngineSettings, Trial, tune
from ext_proc.settings import Targets
from gateway.cli import main


def test_the_budget_that_serves_most_requests_well_comes_first() -> None:
    """One rank, where nothing can be aligned, and a target of 45 ms: a chunk of 8,192 tokens takes 675 ms."""
    trace = generate(Shape(1.2, (2_000, 8_000), (20, 40)), 60.0)
    tried: list[tuple[Trial, int]] = []
    trials = tune(
        trace,
        Deployment(ranks=1),
        Targets(ttft_s=30.0, tpot_s=0.045),
        budgets=[256, 8192],
        on_tried=lambda trial, total: tried.append((trial, total)),
    )
    assert trials[0].settings.max_num_batched_tokens == 256
    assert [trial.score.goodput for trial in trials] == sorted(
        (trial.score.goodput for trial in trials), reverse=True
    )
    assert [total for _, total in tried] == [4] * 4
    assert {
        (one.settings.long_prefill_token_threshold, one.settings.prefill_schedule_interval) for one in trials
    } == {
        (0, 1),
        (128, 1),
        (0, 8),
    }


def test_settings_are_written_as_options_of_vllm() -> None:
    assert EngineSettings(512).options() == "--max-num-batched-tokens 512"
    assert EngineSettings(512, 256, 8).options() == (
        "--max-num-batched-tokens 512 --long-prefill-token-threshold 256 --prefill-schedule-interval 8"
    )


def advised(*options: str) -> Result:
    return CliRunner().invoke(main, ["tune", "--slo-ttft-ms", "2000", *options])


def test_without_a_gateway_step_times_can_be_assumed() -> None:
    shown = advised("--slo-tpot-ms", "100", "--model-preset", "lockstep-moe", "--kv-tokens", "0")
    assert shown.exit_code == 0
    assert "Best: --max-num-batched-tokens 896" in shown.output


def test_a_target_out_of_reach_is_told_as_such() -> None:
    shown = advised("--slo-tpot-ms", "15", "--model-preset", "lockstep-moe")
    assert shown.exit_code == 0
    assert "No budget keeps 15 ms" in shown.output


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--model-preset", "abacus"), "'abacus' is none of"),
        (("--admin", "http://127.0.0.1:1"), "say --model-preset"),
    ],
)
def test_what_cannot_be_asked_is_explained(options: tuple[str, ...], complaint: str) -> None:
    refused = advised("--slo-tpot-ms", "100", *options)
    assert refused.exit_code in (1, 2)
    assert complaint in refused.output
