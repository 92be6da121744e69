"""What the demo asks for, and when it calls itself a success."""

from __future__ import annotations

import io

from rich.console import Console

from gateway.demo_drive import DemoResult, demo_requests
from gateway.demo_view import problems_of, show_result, summary

REQUESTS = demo_requests(8)


def answered(rank: str, number: int = 1) -> DemoResult:
    """A request that this rank answered."""
    return DemoResult(REQUESTS[number - 1], rank=rank, prompt_tokens=1234, completion_tokens=16, total_s=1.0)


def failed(number: int = 1) -> DemoResult:
    """A request that was not answered."""
    return DemoResult(REQUESTS[number - 1], total_s=0.5, error="Connection [error]")


def shown(result: DemoResult) -> str:
    """Its line in an 80-column terminal."""
    output = io.StringIO()
    show_result(Console(file=output, width=80), result)
    return output.getvalue()


def test_all_kinds_of_calls_are_made_in_turn() -> None:
    kinds = [request.kind for request in REQUESTS]
    assert kinds == ["chat", "chat, streamed", "completion", "completion, streamed"] * 2


def test_prompts_differ_in_length_by_more_than_a_hundred_times() -> None:
    lengths = [len(request.prompt.split()) for request in REQUESTS]
    assert max(lengths) > 100 * min(lengths)


def test_no_two_prompts_are_alike_and_all_are_the_same_again() -> None:
    many = demo_requests(100)
    assert len({request.prompt for request in many}) == 100
    assert demo_requests(100) == many


def test_it_is_a_success_when_all_is_answered_and_every_rank_served() -> None:
    assert problems_of([answered("g0/0"), answered("g0/1")], ["g0/0", "g0/1"]) == []


def test_failed_requests_and_idle_ranks_are_problems() -> None:
    assert problems_of([answered("g0/0"), failed()], ["g0/0", "g0/1"]) == [
        "1 of 2 requests failed",
        "no request was served by g0/1",
    ]


def test_the_summary_counts_by_rank() -> None:
    results = [answered("g0/1"), answered("g0/0"), answered("g0/1"), failed()]
    assert summary(results) == "3 of 4 requests answered: g0/0 1, g0/1 2"


def test_a_result_is_one_line_that_names_the_rank_or_the_error() -> None:
    assert shown(answered("g0/1")) == "#1   chat                     1,234 → 16   g0/1    1.00 s  \n"
    assert shown(failed(2)) == "#2   chat, streamed       failed after 0.5 s: Connection [error]\n"
