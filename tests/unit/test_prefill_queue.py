"""How far a rank is with the prompts it was given, told from its counter and the time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ext_proc.prefill_queue import PrefillQueue

RATE = 1000.0


def queue(*tokens: int) -> PrefillQueue[str]:
    """A rank that was given prompts a, b, … of so many tokens at time 0."""
    prefills: PrefillQueue[str] = PrefillQueue()
    for name, count in zip("abcdefgh", tokens, strict=False):
        prefills.push(name, count, 0.0)
    return prefills


def owners(prefills: PrefillQueue[str], reported: int, now_s: float) -> list[str]:
    return [prefill.owner for prefill in prefills.first_tokens_reported(reported, now_s)]


def test_prompts_are_computed_one_after_the_other() -> None:
    prefills = queue(1000, 2000)
    assert prefills.remaining_tokens(0.0, RATE) == 3000
    assert prefills.remaining_tokens(0.5, RATE) == 2500
    assert owners(prefills, 1, 1.0) == ["a"]
    assert prefills.remaining_tokens(1.5, RATE) == 1500


def test_the_first_prompt_has_begun_and_the_next_once_there_was_time_for_those_before() -> None:
    prefills = queue(1000, 2000, 500)
    assert [prefills.begun(at_s, RATE) for at_s in (0.0, 1.0, 1.1, 3.0, 3.1, 99.0)] == [1, 1, 2, 2, 3, 3]
    prefills.first_tokens_reported(1, 1.5)
    assert [prefills.begun(at_s, RATE) for at_s in (1.5, 3.5, 3.6)] == [1, 1, 2]
    assert queue().begun(1.0, RATE) == 0


def test_a_prompt_is_not_taken_for_done_before_its_rank_says_so() -> None:
    assert queue(1000).remaining_tokens(99.0, RATE) == pytest.approx(50)


def test_a_first_token_seen_as_an_ended_request_is_not_counted_again() -> None:
    prefills = queue(10, 20, 30)
    prefills.leave("a", 0.1, had_first_token=True)
    assert owners(prefills, 2, 0.2) == ["b"]


def test_a_request_given_up_before_its_first_token_is_not_in_the_next_report() -> None:
    prefills = queue(10, 20, 30)
    prefills.leave("a", 0.1, had_first_token=False)
    assert owners(prefills, 1, 0.2) == ["b"]


def test_a_wrong_assumption_lasts_until_the_next_report_and_no_longer() -> None:
    prefills = queue(10, 20, 30)
    assert prefills.assume_head_done(5.0).owner == "a"
    assert owners(prefills, 0, 6.0) == []
    assert owners(prefills, 1, 7.0) == ["b"]


def test_first_tokens_of_others_empty_the_queue_but_never_more() -> None:
    assert owners(queue(10), 5, 1.0) == ["a"]


def test_one_in_the_middle_may_leave() -> None:
    prefills = queue(10, 20, 30)
    assert prefills.leave("b", 0.1, had_first_token=False)
    assert not prefills.leave("b", 0.1, had_first_token=False)
    assert prefills.tokens == 40


_steps = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(1, 5000)),
        st.tuples(st.just("report"), st.integers(0, 3)),
        st.tuples(st.just("leave"), st.integers(0, 20)),
        st.tuples(st.just("wait"), st.integers(1, 3)),
    ),
    max_size=60,
)


@given(_steps)
def test_the_sum_is_that_of_the_prompts_in_it_whatever_happens(steps: list[tuple[str, int]]) -> None:
    prefills: PrefillQueue[int] = PrefillQueue()
    inside: dict[int, int] = {}
    now_s = 0.0
    for number, (what, value) in enumerate(steps):
        if what == "push":
            prefills.push(number, value, now_s)
            inside[number] = value
        elif what == "report":
            for prefill in prefills.first_tokens_reported(value, now_s):
                assert prefill.owner == min(inside), "first come, first computed"
                del inside[prefill.owner]
        elif what == "leave" and inside:
            owner = sorted(inside)[value % len(inside)]
            assert prefills.leave(owner, now_s, had_first_token=value % 2 == 0)
            del inside[owner]
        else:
            now_s += value
        assert prefills.tokens == sum(inside.values())
        assert len(prefills) == len(inside)
        assert 0 <= prefills.remaining_tokens(now_s, RATE) <= prefills.tokens
