"""In which order those who wait get their turn."""

from __future__ import annotations

from ext_proc.vocabulary import RequestFacts
from ext_proc.waiting_room import WaitingRoom
from tests.builders import (
    request,
)


def room() -> WaitingRoom:
    return WaitingRoom(max_requests=100, max_tokens=10**9)


def order(waiting: WaitingRoom) -> list[str]:
    return [one.facts.request_id for one in sorted(waiting)]


def enter(waiting: WaitingRoom, *requests: RequestFacts) -> None:
    for number, one in enumerate(requests):
        waiting.enter(one, float(number))


def test_the_more_urgent_goes_first_then_the_earlier() -> None:
    waiting = room()
    enter(
        waiting,
        request(request_id="a"),
        request(request_id="b"),
        request(request_id="urgent", priority=-1),
        request(request_id="patient", priority=5),
    )
    assert order(waiting) == ["urgent", "a", "b", "patient"]


def test_one_tenants_burst_does_not_delay_anothers_single_request() -> None:
    waiting = room()
    enter(waiting, *(request(request_id=f"burst{n}", tenant="a") for n in range(5)))
    enter(waiting, request(request_id="single", tenant="b"))
    assert order(waiting).index("single") == 1


def test_tenants_share_by_tokens_not_by_requests() -> None:
    waiting = room()
    enter(waiting, *(request(request_id=f"long{n}", tenant="a", prompt_tokens=400) for n in range(2)))
    enter(waiting, *(request(request_id=f"short{n}", tenant="b", prompt_tokens=100) for n in range(5)))
    assert order(waiting) == ["long0", "short0", "short1", "short2", "short3", "long1", "short4"]
