"""The measurement of a decision's cost: every part is measured, for every size asked for."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.picking import DecisionCost, run
from ext_proc.picker import Picker
from ext_proc.prefix_index import matched_blocks_each


def test_every_part_of_a_decision_is_measured_for_every_size() -> None:
    told: list[DecisionCost] = []
    costs = run([8, 16], prompt_tokens=512, least_s=0.001, on_done=told.append)
    assert [cost.ranks for cost in costs] == [8, 16]
    assert told == costs
    for cost in costs:
        assert cost.read_us > 0
        assert cost.decision_us > cost.pick_us > 0


def test_every_pick_that_is_measured_looks_the_prompt_up(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups, picks = 0, 0
    pick = Picker.pick

    def counting_lookups(*arguments: Any) -> list[int]:
        nonlocal lookups
        lookups += 1
        return matched_blocks_each(*arguments)

    def counting_picks(*arguments: Any, **named: Any) -> Any:
        nonlocal picks
        picks += 1
        return pick(*arguments, **named)

    monkeypatch.setattr("ext_proc.ledger.matched_blocks_each", counting_lookups)
    monkeypatch.setattr(Picker, "pick", counting_picks)
    run([8], prompt_tokens=512, least_s=0.001)
    assert lookups >= picks > 0
