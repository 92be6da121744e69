"""Which ranks a request may go to, by the model it asks for."""

from __future__ import annotations

from ext_proc.decision import DropReason, Placed, Refused
from ext_proc.ledger import Ledger
from ext_proc.vocabulary import Pick, PickReason, RankState
from tests.builders import (
    DOWN_AFTER_FAILURES,
    balancer,
    group,
    picker,
    pool,
    rank,
    report,
    request,
)


def two_models() -> Ledger:
    """Groups a and c serve `large`, b serves `small`, which clients also call `mini`."""
    return pool(
        [*group("a", 2), *group("b", 2), *group("c", 1)],
        models={"a": ["large"], "b": ["small", "mini"], "c": ["large"]},
    )


def groups_for(ledger: Ledger, model: str | None) -> set[str]:
    pick = picker(ledger, pick_list_length=8).pick(request(model=model), 0.0)
    assert isinstance(pick, Pick)
    return {one.group for one in pick.ranks}


def test_a_model_is_served_by_all_groups_that_have_it_and_no_other() -> None:
    assert groups_for(two_models(), "large") == {"a", "c"}
    assert groups_for(two_models(), "small") == {"b"}


def test_a_group_is_known_by_all_its_names() -> None:
    assert groups_for(two_models(), "mini") == {"b"}


def test_an_unknown_model_and_none_at_all_go_to_the_first_groups_pool() -> None:
    assert groups_for(two_models(), "no such model") == {"a", "c"}
    assert groups_for(two_models(), None) == {"a", "c"}


def test_a_group_without_names_serves_every_model() -> None:
    ledger = pool([*group("a", 1), *group("any", 1)], models={"a": ["large"]})
    assert groups_for(ledger, "large") == {"a", "any"}
    assert groups_for(pool(group("g0", 2)), "whatever") == {"g0"}


def test_no_rank_of_another_pool_stands_in_when_a_pool_is_out() -> None:
    ledger = two_models()
    ledger.set_rotation("b", False)
    refused = balancer(ledger).decide(request(model="small"), 0.0)
    assert isinstance(refused, Refused)
    assert (refused.status, refused.reason) == (503, DropReason.NO_RANK)
    assert refused.retry_after_s is not None
    assert isinstance(balancer(ledger).decide(request(model="large"), 0.0), Placed)


def test_a_pool_whose_groups_are_all_down_is_still_tried() -> None:
    ledger = two_models()
    for _ in range(DOWN_AFTER_FAILURES):
        ledger.record_failed_scrape(rank(1, group="b"))
    pick = picker(ledger).pick(request(model="small"), 0.0)
    assert isinstance(pick, Pick)
    assert ({one.group for one in pick.ranks}, pick.reason) == ({"b"}, PickReason.NO_HEALTHY_GROUP)
    ledger.record_report(rank(1, group="b"), report(1.0))
    assert ledger.state(ledger.accounts[3], 1.0) is RankState.FRESH
    pick = picker(ledger).pick(request(model="small"), 1.0)
    assert isinstance(pick, Pick)
    assert pick.reason is PickReason.POLICY


def test_what_others_do_in_one_pool_says_nothing_of_another() -> None:
    ledger = two_models()
    for index in range(2):
        ledger.record_report(rank(index, group="b"), report(0.0, running=50))
    large = ledger.pools.of("large").accounts
    assert ledger.foreign_requests(large, 1.0) == [0.0, 0.0, 0.0]
