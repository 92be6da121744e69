"""What `wavegate status` says of groups: steps, phases, and budgets that do not fit the targets."""

from __future__ import annotations

import io
from typing import Any

import msgspec
from rich.console import Console

from gateway.config import Config
from gateway.decision import build_ledger
from gateway.status import status
from gateway.status_client import (
    GroupStatus,
    HeldStatus,
    Status,
    StepTimeStatus,
    TargetsStatus,
    parse_status,
)
from gateway.status_view import size, status_view, warnings
from tests.builders import admission, pool, rank, request

STEP_TIME = StepTimeStatus(20.0, 80.0, 100.0, 20.0)


def group(name: str = "g0", **fields: Any) -> GroupStatus:
    """A group that decodes 100 sequences."""
    values: dict[str, Any] = {
        "lock_step": True,
        "decode_step_ms": 40.0,
        "prefill_step_ms": 203.8,
        "prefill_tokens_per_s": 10_050.0,
        "budget_tokens": 2048,
        "decoding_sequences": 100.0,
        "kv_tokens": 500_000.0,
        "step_time": STEP_TIME,
        "index_bytes": 12_345_678,
    }
    return GroupStatus(name, "adopted", **{"healthy": True, **values, **fields})


def told(*groups: GroupStatus, tpot_ms: float = 100.0, held: HeldStatus = HeldStatus()) -> Status:  # noqa: B008
    return Status("0", (), groups, TargetsStatus(2000.0, tpot_ms), held)


def shown(view: Status, width: int = 80) -> list[str]:
    output = io.StringIO()
    Console(file=output, width=width).print(status_view(view, width=width))
    return [" ".join(line.split()) for line in output.getvalue().splitlines()]


def test_a_groups_steps_budget_lead_and_memory_are_shown() -> None:
    lines = shown(told(group(lead_tokens=-7.4), tpot_ms=1000))
    assert lines[-3:] == [
        "decode prefill prefill",
        "group now step step budget tokens/s lead index",
        "g0 decodes 40.0 ms 203.8 ms 2,048 10,050 -7 12.3 MB",
    ]


def test_what_a_group_does_is_one_word() -> None:
    groups = (
        group("a", is_prefilling=True),
        group("b", decoding_sequences=0.0),
        group("c", healthy=False),
        group("d", lock_step=False),
    )
    rows = [line.split() for line in shown(told(*groups, tpot_ms=1000))[-4:]]
    assert [row[1] for row in rows] == ["prefills", "idle", "out", "decodes"]
    assert [row[-3] for row in rows] == ["+0", "–", "+0", "–"]


def test_held_requests_are_told_while_there_are_some() -> None:
    assert "held: 3 requests with 12,000 prompt tokens" in shown(told(group(), held=HeldStatus(3, 12_000)))
    assert not any("held" in line for line in shown(told(group())))


def test_a_budget_too_large_for_the_target_is_warned_of_with_a_better_one() -> None:
    (warning,) = warnings(told(group()))
    assert warning.startswith("g0: steps with prefill take 204 ms, the TPOT target is 100 ms.")
    assert "--max-num-batched-tokens 640 instead of 2048" in warning
    assert list(warnings(told(group(prefill_step_ms=91.2, budget_tokens=640)))) == []
    assert list(warnings(Status("0", (), (group(),)))) == []


def test_a_budget_that_nobody_told_or_learned_is_neither_shown_nor_warned_of() -> None:
    config = Config.model_validate(
        {"groups": [{"engine": "adopted", "name": "g0", "model": "m", "endpoints": ["10.0.0.1:8000"]}]}
    )
    ledger = build_ledger(config)
    read = parse_status(msgspec.json.encode(status(config, ledger, admission(ledger), 0.5)))
    assert read.groups[0].prefill_step_ms > 100.0
    assert list(warnings(read)) == []
    *_, row = (line.split() for line in shown(read) if line.startswith("g0 idle"))
    assert row[6] == "–"


def test_steps_seen_are_enough_to_tell_that_no_budget_would_do() -> None:
    for observations, count in ((0, 0), (20, 1)):
        unknown = group(budget_tokens=None, observations=observations)
        assert len(list(warnings(told(unknown, tpot_ms=30.0)))) == count


def test_a_target_that_no_budget_can_keep_is_told_as_such() -> None:
    (warning,) = warnings(told(group(), tpot_ms=30.0))
    assert "steps take 40 ms even without prefill" in warning
    assert "no token budget can keep it" in warning


def test_it_fits_a_terminal_of_80_columns() -> None:
    output = io.StringIO()
    view = told(group("group-with-a-long-name"), group("g1"), held=HeldStatus(1_000, 16_000_000))
    Console(file=output, width=80).print(status_view(view, width=80))
    assert max(len(line) for line in output.getvalue().splitlines()) <= 80
    assert "…" not in output.getvalue()


def test_sizes_are_in_units_that_people_read() -> None:
    assert [size(n) for n in (0, 999, 1_000, 2_560_000, 3_200_000_000)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "2.6 MB",
        "3.2 GB",
    ]


def test_the_gateways_own_status_can_be_shown() -> None:
    config = Config.model_validate(
        {"groups": [{"engine": "adopted", "name": "g0", "model": "m", "endpoints": ["10.0.0.1:8000"]}]}
    )
    ledger = pool([rank(0)])
    ledger.reserve(rank(0), request(prompt_tokens=5000), 0.0)
    read = parse_status(msgspec.json.encode(status(config, ledger, admission(ledger), 0.5)))
    assert read.groups[0].step_time == StepTimeStatus(20.0, 100.0, 100.0, 1.0)
    assert any("prefills" in line for line in shown(read))


def test_a_tokenizer_that_is_not_the_ranks_own_is_warned_of() -> None:
    right = group(prefill_step_ms=90.0, prompts_found=500, prompts_missing=40)
    assert list(warnings(told(right))) == []
    (warning,) = warnings(told(group(prefill_step_ms=90.0, prompts_found=3, prompts_missing=40)))
    assert warning.startswith("g0: of 43 prompts computed by its ranks 40 are not among")
    assert "field tokenizer" in warning
