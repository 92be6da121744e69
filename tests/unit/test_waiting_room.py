"""In which order those who wait get their turn."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ext_proc.vocabulary import RequestFacts
from ext_proc.waiting_room import MAX_TENANTS, Held, WaitingRoom
from tests.builders import (
    request,
)


def room() -> WaitingRoom:
    return WaitingRoom(max_requests=100, max_tokens=10**9)


def order(waiting: WaitingRoom) -> list[str]:
    return [one.facts.request_id for one in sorted(waiting)]


def enter(waiting: WaitingRoom, *requests: RequestFacts) -> list[Held]:
    return [waiting.enter(one, float(number)) for number, one in enumerate(requests)]


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


@given(st.lists(st.integers(0, 99), max_size=30), st.lists(st.integers(-1, 1), min_size=10, max_size=40))
def test_whoever_of_a_burst_goes_first_anothers_single_request_waits_for_one_of_it_at_most(
    leavers: list[int], priorities: list[int]
) -> None:
    waiting = room()
    burst = enter(waiting, *(request(request_id="burst", tenant="a", priority=one) for one in priorities))
    for which in leavers[: len(burst) - 1]:
        waiting.leave(burst.pop(which % len(burst)))
    enter(waiting, request(request_id="single", tenant="b"))
    before = sum(one.priority == 0 for one in sorted(waiting)[: order(waiting).index("single")])
    assert before <= 1


def test_a_tenants_share_at_one_priority_is_not_held_against_it_at_another() -> None:
    waiting = room()
    enter(waiting, *(request(tenant="a", priority=-1) for _ in range(5)))
    enter(waiting, request(request_id="b", tenant="b"), request(request_id="a", tenant="a"))
    assert order(waiting)[5:] == ["b", "a"]
    enter(waiting, request(request_id="b2", tenant="b"))
    assert order(waiting)[5:] == ["b", "a", "b2"]


def test_what_tenants_had_is_forgotten_with_the_last_that_waits_at_their_priority() -> None:
    waiting = room()
    enter(waiting, request(request_id="stays", priority=1))
    (had_much,) = enter(waiting, request(tenant="a", prompt_tokens=10_000))
    waiting.leave(had_much)
    enter(waiting, request(request_id="a", tenant="a"), request(request_id="b", tenant="b"))
    assert order(waiting) == ["a", "b", "stays"]


def test_what_is_remembered_of_tenants_is_bounded() -> None:
    waiting = room()
    enter(waiting, request(tenant="first"), request(tenant="first", priority=1))
    for number in range(MAX_TENANTS):
        waiting.leave(*enter(waiting, request(tenant=str(number), priority=number % 2)))
    (again,) = enter(waiting, request(tenant="first"))
    assert again.fair_start == 0
