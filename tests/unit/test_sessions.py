"""Requests that belong together stay together, as long as that costs little."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ext_proc.admission import Admission
from ext_proc.decision import Placed
from ext_proc.ledger import Ledger
from ext_proc.reservation import Outcome
from ext_proc.sessions import Sessions
from ext_proc.settings import AdmissionSettings, Affinity
from ext_proc.vocabulary import Pick, PickReason, Rank, RequestFacts
from ext_proc.waiting_room import Held
from tests.builders import BUDGET_TOKENS, group, picker, pool, rank, report, request

TOKENS_PER_S = BUDGET_TOKENS / 0.120
CHAT = 7
"""A session."""


def in_session(session: int = CHAT, **fields: object) -> RequestFacts:
    return replace(request(**fields), session=session)  # type: ignore[arg-type]


def picked(ledger: Ledger, facts: RequestFacts, *, bound_s: float = 0.5) -> tuple[Rank, PickReason]:
    affinity = Affinity(session_bound_s=bound_s, adapter_bound_s=bound_s)
    pick = picker(ledger, affinity=affinity).pick(facts, 0.0)
    assert isinstance(pick, Pick)
    return pick.first, pick.reason


def test_a_session_stays_on_its_rank_while_that_costs_little_more() -> None:
    ledger = pool(group("g0", 3))
    ledger.reserve(rank(2), in_session(prompt_tokens=round(0.3 * TOKENS_PER_S)), 0.0)
    assert picked(ledger, in_session()) == (rank(2), PickReason.SESSION)
    assert picked(ledger, in_session(session=8))[0] != rank(2)


def test_a_session_leaves_its_rank_when_that_costs_too_much_more() -> None:
    ledger = pool(group("g0", 3))
    ledger.reserve(rank(2), in_session(prompt_tokens=round(0.8 * TOKENS_PER_S)), 0.0)
    assert picked(ledger, in_session(), bound_s=0.5)[0] != rank(2)
    assert picked(ledger, in_session(), bound_s=1.5) == (rank(2), PickReason.SESSION)


def test_of_equal_ranks_the_sessions_own_is_picked_although_it_was_picked_last() -> None:
    ledger = pool(group("g0", 3))
    ledger.reserve(rank(1), in_session(), 0.0).release(Outcome.CANCELLED, 0.0)
    assert picked(ledger, in_session(), bound_s=0.0) == (rank(1), PickReason.SESSION)


def test_a_session_whose_rank_is_out_of_rotation_goes_elsewhere() -> None:
    ledger = pool([*group("a", 1), *group("b", 1)])
    ledger.reserve(rank(0, group="a"), in_session(), 0.0)
    ledger.set_rotation("a", False)
    assert picked(ledger, in_session()) == (rank(0, group="b"), PickReason.POLICY)


def test_a_session_follows_its_request_to_the_rank_that_served_it() -> None:
    ledger = pool(group("g0", 2))
    reservation = ledger.reserve(rank(0), in_session(), 0.0)
    reservation.move(rank(1).endpoint, 0.1)
    assert picked(ledger, in_session()) == (rank(1), PickReason.SESSION)


def test_a_request_waits_for_its_sessions_rank_only_while_that_is_within_the_bound() -> None:
    """The session's rank has more ahead of it than admission allows, the other rank has nothing."""
    ledger = pool(group("g0", 2), lock_step=False)
    ledger.reserve(rank(0), in_session(prompt_tokens=round(0.4 * TOKENS_PER_S)), 0.0)

    def decided(bound_s: float) -> Placed | Held:
        affinity = Affinity(session_bound_s=bound_s)
        decision = Admission(ledger, picker(ledger, affinity=affinity), AdmissionSettings()).decide(
            in_session(), 0.0
        )
        assert isinstance(decision, Placed | Held)
        return decision

    assert isinstance(decided(0.5), Held)
    elsewhere = decided(0.2)
    assert isinstance(elsewhere, Placed)
    assert elsewhere.pick.first == rank(1)


def test_a_closed_rank_is_not_waited_for_whatever_session_it_served() -> None:
    ledger = pool(group("g0", 2), lock_step=False)
    ledger.reserve(rank(0), in_session(), 0.0)
    ledger.record_report(rank(0), replace(report(0.0, waiting=1), kv_cache_usage=0.99))
    decider = Admission(ledger, picker(ledger, affinity=Affinity(session_bound_s=1e6)), AdmissionSettings())
    decision = decider.decide(in_session(), 0.0)
    assert isinstance(decision, Placed)
    assert (decision.pick.first, decision.pick.reason) == (rank(1), PickReason.POLICY)


def with_adapters(*adapters: str, index: int) -> Ledger:
    """A pool of three ranks of which one runs these adapters."""
    ledger = pool(group("g0", 3), models={"g0": ["base"]})
    ledger.record_report(rank(index), replace(report(0.0), adapters=frozenset(adapters)))
    return ledger


def test_an_adapter_is_asked_of_a_rank_that_runs_it_while_that_costs_little_more() -> None:
    ledger = with_adapters("poet", index=2)
    ledger.reserve(rank(2), request(model="base", prompt_tokens=round(0.3 * TOKENS_PER_S)), 0.0)
    assert picked(ledger, request(model="poet")) == (rank(2), PickReason.ADAPTER)
    assert picked(ledger, request(model="poet"), bound_s=0.2)[1] is PickReason.POLICY
    assert picked(ledger, request(model="base"))[1] is PickReason.POLICY


def test_an_adapter_seen_on_a_rank_belongs_to_the_pool_of_that_ranks_model() -> None:
    models = {"a": ["first"], "b": ["second"], "c": ["second"]}
    ledger = pool([rank(0, group=name) for name in models], models=models)
    assert picked(ledger, request(model="poet"))[0].group == "a"
    ledger.record_report(rank(0, group="b"), replace(report(0.0), adapters=frozenset({"poet"})))
    pick = picker(ledger, pick_list_length=8).pick(request(model="poet"), 0.0)
    assert isinstance(pick, Pick)
    assert {one.group for one in pick.ranks} == {"b", "c"}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=60), st.integers(1, 5))
def test_the_sessions_used_last_are_remembered_and_no_more(noted: list[tuple[int, int]], most: int) -> None:
    accounts = pool(group("g0", 4)).accounts
    sessions = Sessions(most)
    for session, index in noted:
        sessions.note(session, accounts[index])
    newest_first = list(dict.fromkeys(session for session, _ in reversed(noted)))
    last = dict(noted)
    assert len(sessions) == min(most, len(newest_first))
    for position, session in enumerate(newest_first):
        expected = accounts[last[session]] if position < most else None
        assert sessions.last(session) is expected
    assert sessions.last(None) is None
