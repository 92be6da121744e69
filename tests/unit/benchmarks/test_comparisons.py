"""Comparing policies: at their best budgets, by capacity, over cases and situations, and as commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from benchmarks.capacity import Capacity, capacity, highest_load
from benchmarks.matrix import Cell, best_budgets, run_matrix
from benchmarks.robustness import Outcome, Situation, run_situations, situations
from benchmarks.score import Score, Spread
from benchmarks.simulation import Deployment
from benchmarks.suite import CASES, CapacityVerdict, Verdict, run_suite
from benchmarks.tables import summary_markdown
from benchmarks.traces import Shape, generate
from ext_proc.policies import BUILT_IN
from ext_proc.settings import Targets
from gateway.cli import main

EASY = Targets(ttft_s=60.0, tpot_s=10.0)
STRICT = Targets(ttft_s=2.0, tpot_s=0.05)
SMALL = Deployment(ranks=2)


def mooncake_file(folder: Path, *, count: int = 60, gap_ms: int = 1000, prompt_tokens: int = 4000) -> Path:
    """A trace of equal requests that share nothing, a second apart."""
    blocks = prompt_tokens // 512 + 1
    path = folder / "trace.jsonl"
    rows = [
        {
            "timestamp": n * gap_ms,
            "input_length": prompt_tokens,
            "output_length": 20,
            "hash_ids": list(range(n * blocks, (n + 1) * blocks)),
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class TestMatrix:
    TRACE = generate(Shape(2.0, (500, 8_000), (10, 60)), 20.0)

    def cells(self, *policies: str) -> list[Cell]:
        return run_matrix(
            self.TRACE, SMALL, policies=policies, budgets=[256, 2048], targets=[EASY, STRICT], seed=1
        )

    def test_there_is_a_cell_for_each_policy_budget_and_pair_of_targets(self) -> None:
        keys = [(c.policy, c.budget_tokens, c.tpot_target_ms) for c in self.cells("lockstep", "random")]
        assert sorted(keys) == sorted(
            (policy, budget, tpot_ms)
            for policy in ("lockstep", "random")
            for budget in (256, 2048)
            for tpot_ms in (10_000, 50)
        )

    def test_each_policy_is_compared_at_the_budget_that_suits_it_best(self) -> None:
        cells = self.cells("lockstep", "random")
        best = best_budgets(cells)
        assert len(best) == 4
        for cell in best:
            same = [c for c in cells if (c.policy, c.tpot_target_ms) == (cell.policy, cell.tpot_target_ms)]
            assert cell.score.goodput == max(c.score.goodput for c in same)

    def test_processes_side_by_side_change_nothing(self) -> None:
        assert self.cells("lockstep") == self.cells("lockstep")


class TestCapacity:
    def found(self, trace: Path, targets: Targets, speeds: tuple[float, float]) -> Capacity:
        return capacity(
            "least_request",
            trace,
            "mooncake",
            SMALL,
            budgets=[2048],
            targets=targets,
            duration_s=60.0,
            speeds=speeds,
        )

    def test_it_is_the_highest_load_at_which_enough_requests_meet_their_targets(self, tmp_path: Path) -> None:
        """A prompt takes 0.37 s of one of two ranks, so that some five a second can be read."""
        trace = mooncake_file(tmp_path, count=1000, gap_ms=100)
        found = self.found(trace, Targets(ttft_s=2.0, tpot_s=10.0), (0.1, 1.6))
        assert 0.3 < found.speed < 0.8
        assert found.goodput >= 0.8

    def test_it_is_zero_if_even_the_lowest_load_is_too_much(self, tmp_path: Path) -> None:
        found = self.found(mooncake_file(tmp_path), Targets(ttft_s=0.01, tpot_s=1.0), (0.1, 1.0))
        assert (found.speed, found.goodput) == (0.0, 0.0)

    def test_it_is_the_highest_even_where_lower_loads_do_not_pass(self) -> None:
        """As where goodput is about what is asked for, and goes up and down from one load to the next."""

        def passes(load: float) -> bool:
            return load < 0.3 or 0.38 < load < 0.45 or 0.55 < load < 0.62

        assert 0.38 < (highest_load(lambda load: load < 0.3 or 0.38 < load < 0.45, 0.1, 3.2) or 0) < 0.45
        assert 0.55 < (highest_load(passes, 0.1, 3.2) or 0) < 0.62

    @given(st.floats(0.1, 3.2))
    def test_a_single_limit_is_found_to_five_hundredths(self, limit: float) -> None:
        found = highest_load(lambda load: load <= limit, 0.1, 3.2)
        assert found is not None
        assert 0.95 * limit <= found <= limit


@pytest.mark.parametrize(("ours", "reached"), [(1.2, True), (0.8, False)])
def test_the_default_policy_must_carry_half_as_much_again_as_any_peer(ours: float, reached: bool) -> None:
    found = (("lockstep", ours), ("llm_d", 0.7), ("random", 0.1))
    verdict = CapacityVerdict(tuple(Capacity(name, speed, 512, 0.8) for name, speed in found))
    assert (verdict.best_peer.policy, verdict.reached) == ("llm_d", reached)


def cell(
    policy: str, *, goodput: float = 0.9, ttft_s: tuple[float, float] = (1.0, 5.0), hold_s: float = 0.0
) -> Cell:
    """One policy's result; `ttft_s`: median and 99th percentile."""
    any_s = Spread(0.1, 0.1, 0.1)
    score = Score(
        requests=100,
        goodput=goodput,
        ttft_met=1.0,
        tpot_met=1.0,
        ttft_s=Spread(ttft_s[0], ttft_s[0], ttft_s[1]),
        tpot_s=any_s,
        e2e_s=any_s,
        held_s=any_s,
        longest_hold_s=hold_s,
        refused=0,
        cache_hit_share=0.0,
        lost_share=0.0,
    )
    return Cell(policy, 2048, 2000.0, 100.0, score)


@pytest.mark.parametrize(
    ("ours", "missed"),
    [
        (cell("lockstep", ttft_s=(1.6, 10.0), hold_s=10.0), ()),
        (cell("lockstep", goodput=0.7), ("goodput",)),
        (cell("lockstep", ttft_s=(1.7, 5.0)), ("median TTFT",)),
        (cell("lockstep", ttft_s=(1.0, 10.1)), ("p99 TTFT",)),
        (cell("lockstep", hold_s=10.1), ("longest hold",)),
    ],
)
def test_a_case_tells_what_was_asked_for_and_missed(ours: Cell, missed: tuple[str, ...]) -> None:
    peer = cell("llm_d", goodput=0.5)
    assert Verdict("A", ours, peer, 1.0, 5.0, 0.8, (1.6, 2.0), (ours, peer)).missed == missed


def test_at_a_fifth_of_the_load_no_more_time_to_the_first_token_is_allowed_than_a_twentieth() -> None:
    assert {case.at_a_fifth().ttft_within for case in CASES} == {(1.05, 1.05)}


def test_each_case_of_the_suite_runs_at_its_load_and_at_a_fifth(tmp_path: Path) -> None:
    case = replace(CASES[0], duration_s=20.0, ranks=2, speed=1.0)
    first, fifth = run_suite({"mooncake": mooncake_file(tmp_path)}, [case, CASES[2]], with_a_fifth=True)
    assert {cell.policy for cell in first.cells} == set(BUILT_IN)
    assert first.ours.policy == "lockstep"
    assert first.best_peer.policy != "lockstep"
    assert first.best_peer.score.goodput == max(
        cell.score.goodput for cell in first.cells if cell.policy != "lockstep"
    )
    assert first.ours.score.requests > 3 * fifth.ours.score.requests
    assert "goodput" not in fifth.missed
    *_, row, _ = summary_markdown([first, fifth]).splitlines()
    assert row.startswith(f"| {case.name} | 100 ms | {first.best_peer.score.goodput:.3f} ")


def test_a_peer_that_is_clearly_better_makes_a_loss() -> None:
    (outcome,) = run_situations([replace_deployment(situations()[0])], budgets=[2048])
    ours, peer = outcome.ours, outcome.best_peer
    assert not outcome.is_loss
    assert Outcome("the other way round", peer, ours).is_loss == (
        peer.score.goodput < 0.9 * ours.score.goodput
    )


def replace_deployment(situation: Situation) -> Situation:
    """The same for less work."""
    return replace(situation, requests=situation.requests[:100])


def test_outputs_become_longer_for_as_many_requests_as_before() -> None:
    named = {one.name: one.requests for one in situations()}
    before, longer = named["mixed"], named["outputs ten times longer than learned"]
    assert [one.at_s for one in longer] == [one.at_s for one in before]
    for one, other in zip(before, longer, strict=True):
        assert other.output_tokens == (one.output_tokens if one.at_s < 120 else 10 * one.output_tokens)


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments])


def test_quality_prints_a_table_and_writes_everything_as_json(tmp_path: Path) -> None:
    written = tmp_path / "cells.json"
    shown = bench(
        *("quality", "--trace", str(mooncake_file(tmp_path, count=10)), "--ranks", "2", "--duration", "20"),
        *("--policy", "lockstep", "--policy", "random", "--slo", "2000/100", "--slo", "500/50"),
        *("--json", str(written)),
    )
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("lockstep") == 2
    cells = json.loads(written.read_bytes())
    assert [(cell["policy"], cell["tpot_target_ms"]) for cell in cells] == [
        ("lockstep", 100),
        ("lockstep", 50),
        ("random", 100),
        ("random", 50),
    ]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--policy", "magic"), "--policy: 'magic' is none of"),
        (("--budget", "many"), "--budget: 'many' should be `fixed` or numbers"),
        (("--slo", "fast"), "--slo: 'fast' is not TTFT/TPOT in ms"),
        (("--slo", "0/100"), "--slo: '0/100' is not TTFT/TPOT in ms"),
        (("--format", "csv"), "--format: 'csv' is none of"),
        (("--format", "azure"), "KeyError"),
        (("--step-fixed-ms", "-5"), "--step-fixed-ms"),
        (("--json", "nowhere/x.json"), "there is no folder nowhere: make it first"),
        (("--plot", "nowhere/x.png"), "there is no folder nowhere: make it first"),
        (("--json", "."), "is a folder"),
    ],
)
def test_what_cannot_be_measured_is_explained(
    tmp_path: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    refused = bench("quality", "--trace", str(mooncake_file(tmp_path)), *arguments)
    assert refused.exit_code == 2
    assert complaint in " ".join(refused.output.replace("│", " ").split())


def test_sizes_of_pools_that_are_no_numbers_are_explained() -> None:
    refused = bench("picks", "--ranks", "abc")
    assert refused.exit_code == 2
    assert "--ranks: 'abc' should be numbers such as 8,64" in refused.output
