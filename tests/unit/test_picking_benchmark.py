"""The measurement of a decision's cost: every part is measured, for every size asked for."""

from __future__ import annotations

from benchmarks.picking import DecisionCost, run


def test_every_part_of_a_decision_is_measured_for_every_size() -> None:
    told: list[DecisionCost] = []
    costs = run([8, 16], prompt_tokens=512, least_s=0.001, on_done=told.append)
    assert [cost.ranks for cost in costs] == [8, 16]
    assert told == costs
    for cost in costs:
        assert cost.read_us > 0
        assert cost.decision_us > cost.pick_us > 0
