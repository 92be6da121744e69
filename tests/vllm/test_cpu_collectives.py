"""The collectives that the CPU plugin adds to vLLM, over gloo, against what they mean in plain lists."""

from __future__ import annotations

from typing import Any

import pytest

from tests.builders_vllm import ask_vllm

Rows = list[list[float]]

RANKS = 3
SIZES: dict[str, list[int] | None] = {"unequal": [2, 3, 1], "one empty": [4, 0, 1], "all equal": None}

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def rows_of(rank: int, count: int) -> Rows:
    """Rows that differ in rank, row and column; in bfloat16 integers this small and their sums are exact."""
    return [[float(24 * rank + 3 * row + column) for column in range(3)] for row in range(count)]


def counts_of(sizes: list[int] | None) -> list[int]:
    """How many rows each rank has or gets."""
    return sizes or [2] * RANKS


def gathered(sizes: list[int] | None) -> list[Rows]:
    """What each rank brings to a gather."""
    return [rows_of(rank, count) for rank, count in enumerate(counts_of(sizes))]


def scattered(sizes: list[int] | None) -> list[Rows]:
    """What each rank adds to a reduction."""
    return [rows_of(rank, sum(counts_of(sizes))) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, str], Any]:
    """What the ranks answered, by call and name of the sizes, in one run: vLLM is slow to import."""
    calls = {"gather": gathered, "scatter": scattered}
    keys = [(call, name) for call in calls for name in SIZES]
    questions = [{call: calls[call](SIZES[name]), "sizes": SIZES[name]} for call, name in keys]
    return dict(zip(keys, ask_vllm("collectives", questions), strict=True))


@pytest.mark.parametrize("name", SIZES)
def test_all_gatherv_gives_every_rank_all_rows_in_order_of_rank(
    name: str, answers: dict[tuple[str, str], Any]
) -> None:
    everything = [row for rows in gathered(SIZES[name]) for row in rows]
    doubled = [[2 * number for number in row] for row in everything]
    expected = {"alone": everything, "first": everything, "second": doubled}
    assert answers["gather", name] == [expected] * RANKS


@pytest.mark.parametrize("name", SIZES)
def test_reduce_scatterv_gives_every_rank_its_rows_of_the_sum(
    name: str, answers: dict[tuple[str, str], Any]
) -> None:
    added = zip(*scattered(SIZES[name]), strict=True)
    total = [[sum(numbers) for numbers in zip(*rows, strict=True)] for rows in added]
    counts = counts_of(SIZES[name])
    for rank, answer in enumerate(answers["scatter", name]):
        own = total[sum(counts[:rank]) :][: counts[rank]]
        assert answer == {"along_rows": own, "along_columns": own, "input_is_unchanged": True}
