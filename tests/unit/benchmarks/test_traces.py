"""Reading public traces, and generating the shapes that none of them has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.traces import Shape, TraceError, generate, load

MOONCAKE = [
    {"timestamp": 0, "input_length": 1030, "output_length": 52, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 1536, "output_length": 0, "hash_ids": [0, 1, 7]},
    {"timestamp": 60000, "input_length": 10, "output_length": 3, "hash_ids": [9]},
]
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690,396,109\n"
)


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    """A small trace in Mooncake's format."""
    path = tmp_path / "mooncake.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in MOONCAKE))
    return path


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    """A small trace in Azure's format."""
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    return path


class TestMooncake:
    def test_full_blocks_are_kept_since_only_they_can_be_cached(self, mooncake: Path) -> None:
        first, second, third = load(mooncake, "mooncake")
        assert (first.blocks, second.blocks, third.blocks) == ((0, 1), (0, 1, 7), ())

    def test_every_request_has_at_least_one_token_of_output(self, mooncake: Path) -> None:
        assert [one.output_tokens for one in load(mooncake, "mooncake")] == [52, 1, 3]

    def test_requests_are_spread_over_their_bucket_of_3_s(self, mooncake: Path) -> None:
        first, second, third = (one.at_s for one in load(mooncake, "mooncake"))
        assert 0 <= first < 3 <= second < 6 < 60 <= third < 63

    def test_the_same_seed_spreads_them_alike(self, mooncake: Path) -> None:
        assert load(mooncake, "mooncake", seed=3) == load(mooncake, "mooncake", seed=3)
        assert load(mooncake, "mooncake", seed=3) != load(mooncake, "mooncake", seed=4)


def test_azure_requests_share_nothing_and_begin_at_zero(azure: Path) -> None:
    first, second = load(azure, "azure")
    assert (first.at_s, first.prompt_tokens, first.output_tokens, first.blocks) == (0.0, 374, 44, ())
    assert second.at_s == pytest.approx(4.314579)


def test_twice_the_speed_is_half_the_time(azure: Path) -> None:
    assert load(azure, "azure", speed=2)[1].at_s == pytest.approx(load(azure, "azure")[1].at_s / 2)


def test_the_duration_counts_at_that_speed(mooncake: Path) -> None:
    assert len(load(mooncake, "mooncake", duration_s=10)) == 2
    assert len(load(mooncake, "mooncake", speed=10, duration_s=10)) == 3


def test_what_is_skipped_counts_by_the_traces_own_clock(mooncake: Path) -> None:
    (last,) = load(mooncake, "mooncake", speed=10, skip_s=50)
    assert 1 <= last.at_s < 1.3
    with pytest.raises(TraceError, match="no request left after 90 s"):
        load(mooncake, "mooncake", skip_s=90)


@pytest.mark.parametrize(
    ("trace_format", "text", "complaint"),
    [
        ("mooncake", '{"timestamp": 0, "input_length": 1}\n', ":1: .*output_length"),
        ("mooncake", json.dumps(MOONCAKE[0]) + "\nnonsense\n", ":2: "),
        ("azure", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,1\n", ":2: KeyError.*GeneratedTokens"),
        ("azure", AZURE + "yesterday,1,1\n", ":4: ValueError"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
    ],
)
def test_what_is_not_such_a_trace_is_refused_with_its_line(
    tmp_path: Path, trace_format: str, text: str, complaint: str
) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(TraceError, match=complaint):
        load(path, trace_format, duration_s=60)


@given(
    rate_per_s=st.floats(0.5, 50),
    prompt_tokens=st.tuples(st.integers(1, 500), st.integers(500, 50_000)),
    burst=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_generated_requests_come_in_order_within_their_bounds(
    rate_per_s: float, prompt_tokens: tuple[int, int], burst: int, seed: int
) -> None:
    shape = Shape(rate_per_s, prompt_tokens, (1, 10), burst)
    requests = generate(shape, 5.0, seed)
    times = [one.at_s for one in requests]
    assert times == sorted(times)
    assert all(0 <= at_s < 5 for at_s in times)
    assert all(prompt_tokens[0] <= one.prompt_tokens <= prompt_tokens[1] for one in requests)
    assert len(requests) % burst == 0
