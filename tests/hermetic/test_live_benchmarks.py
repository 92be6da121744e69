"""What the wall-clock benchmarks see of live ranks: which requests came through, and lock step itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.lock_step import DecodeSpeed, measure
from benchmarks.replay import prompt_text, replay
from benchmarks.traces import TraceRequest
from gateway.cli import main
from tests.builders_group import RankProcess, group

MODEL = "wavegate-embedded"


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[RankProcess]]:
    """A group of two."""
    with group(2, "--max-model-len", "20000") as started:
        yield started


class TestReplay:
    async def test_every_request_is_sent_when_due_and_timed_from_then(self, ranks: list[RankProcess]) -> None:
        requests = [TraceRequest(at_s, 200, 5) for at_s in (0.0, 0.3, 0.3)]
        result = await replay(ranks[0].url, MODEL, requests)
        assert result.statuses == {"200": 3}
        for served in result.served:
            assert served.first_token_s is not None
            assert served.finished_s is not None
            assert served.request.at_s < served.first_token_s < served.finished_s
        assert ranks[0].metric("vllm:prompt_tokens_total") == 600

    async def test_with_a_concurrency_arrival_times_do_not_matter(self, ranks: list[RankProcess]) -> None:
        requests = [TraceRequest(3600.0 * n, 20, 2) for n in range(6)]
        result = await replay(ranks[0].url, MODEL, requests, concurrency=3)
        assert result.statuses == {"200": 6}

    async def test_what_is_refused_is_counted_by_status(self, ranks: list[RankProcess]) -> None:
        too_long = TraceRequest(0.0, 30_000, 5)
        result = await replay(ranks[0].url, MODEL, [too_long, TraceRequest(0.0, 20, 5)])
        assert result.statuses == {"400": 1, "200": 1}
        assert [served.refused for served in result.served] == [True, False]

    async def test_a_server_that_is_not_there_is_counted_too(self) -> None:
        result = await replay("http://127.0.0.1:9", MODEL, [TraceRequest(0.0, 20, 5)])
        assert result.statuses == {"ClientConnectorError": 1}

    def test_where_nothing_is_answered_nothing_is_shown_as_measured(self, tmp_path: Path) -> None:
        trace = tmp_path / "trace.csv"
        trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,20,5\n")
        command = ("bench", "replay", "--trace", str(trace), "--format", "azure", "--model", MODEL)
        shown = CliRunner().invoke(main, [*command, "--url", "http://127.0.0.1:9"])
        assert shown.exit_code == 1
        assert "no request was answered: 1 × ClientConnectorError" in shown.output
        assert "TTFT" not in shown.output

    def test_equal_blocks_become_equal_text(self) -> None:
        one = prompt_text(TraceRequest(0.0, 1100, 1, blocks=(7, 8)), number=1)
        other = prompt_text(TraceRequest(0.0, 1100, 1, blocks=(7, 9)), number=2)
        assert one[: 512 * 4] == other[: 512 * 4]
        assert one[512 * 4 :] != other[512 * 4 :]
        assert len(one) == 1100 * 4


async def test_lock_step_shows_on_a_rank_that_has_nothing_to_read(ranks: list[RankProcess]) -> None:
    """A prompt of 8,000 tokens takes 0.7 s; two of them in turn take most of a period of 2 s."""
    seen = await measure([rank.url for rank in ranks], MODEL, prompt_tokens=8_000, periods=2, period_s=2.0)
    by_situation: dict[str, DecodeSpeed] = {speed.situation: speed for speed in seen}
    quiet = by_situation["no prompts"]
    assert by_situation["to the first rank alone"].tokens_per_s < 0.8 * quiet.tokens_per_s
    assert by_situation["to both in turn"].stalled_share > by_situation["to both at once"].stalled_share


def test_a_rank_that_is_not_there_is_told_in_a_line() -> None:
    ranks = ("--rank", "http://127.0.0.1:9", "--rank", "http://127.0.0.1:9")
    shown = CliRunner().invoke(main, ["bench", "lock-step", *ranks, "--model", MODEL])
    assert shown.exit_code == 1
    assert "a rank did not answer as it should: Cannot connect" in shown.output
