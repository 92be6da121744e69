"""Who keeps which group out of rotation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.rotation import MAX_HOLDERS, Rotation, TooManyHolders


class Scene:
    """Two groups, and what was told of them."""

    def __init__(self) -> None:
        self.told: list[tuple[str, bool]] = []
        self.rotation = Rotation(["a", "b"], lambda group, is_in: self.told.append((group, is_in)))


@pytest.fixture
def scene() -> Scene:
    """Everything in rotation."""
    return Scene()


def test_groups_begin_in_rotation(scene: Scene) -> None:
    assert scene.rotation.is_in("a")
    assert scene.rotation.held_out_by("a") == {}
    assert "c" not in scene.rotation


def test_a_group_is_out_until_its_last_holder_brings_it_back(scene: Scene) -> None:
    scene.rotation.take_out("a", "gateway", "rank a/0 hangs")
    scene.rotation.take_out("a", "operator", "maintenance")
    scene.rotation.bring_back("a", "gateway")
    assert not scene.rotation.is_in("a")
    scene.rotation.bring_back("a", "operator")
    assert scene.rotation.is_in("a")
    assert scene.told == [("a", False), ("a", True)]


def test_other_groups_are_not_touched(scene: Scene) -> None:
    scene.rotation.take_out("a", "gateway", "x")
    assert scene.rotation.is_in("b")


def test_a_holder_may_change_its_reason(scene: Scene) -> None:
    scene.rotation.take_out("a", "gateway", "hangs")
    scene.rotation.take_out("a", "gateway", "dead")
    assert scene.rotation.held_out_by("a") == {"gateway": "dead"}
    assert scene.told == [("a", False)]


def test_bringing_back_what_one_does_not_hold_changes_nothing(scene: Scene) -> None:
    scene.rotation.take_out("a", "gateway", "x")
    scene.rotation.bring_back("a", "operator")
    scene.rotation.bring_back("b", "operator")
    assert scene.told == [("a", False)]


def test_holders_are_bounded(scene: Scene) -> None:
    for number in range(MAX_HOLDERS):
        scene.rotation.take_out("a", f"holder {number}", "x")
    with pytest.raises(TooManyHolders):
        scene.rotation.take_out("a", "one more", "x")
    scene.rotation.take_out("a", "holder 0", "y")


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("ab"), st.sampled_from("xyz")), max_size=40))
def test_a_group_is_in_exactly_while_nobody_holds_it(calls: list[tuple[bool, str, str]]) -> None:
    scene = Scene()
    holding: dict[str, set[str]] = {"a": set(), "b": set()}
    for take_out, group, holder in calls:
        if take_out:
            scene.rotation.take_out(group, holder, "r")
            holding[group].add(holder)
        else:
            scene.rotation.bring_back(group, holder)
            holding[group].discard(holder)
        assert {name: scene.rotation.is_in(name) for name in holding} == {
            name: not holders for name, holders in holding.items()
        }
    for name in holding:
        told = [is_in for group, is_in in scene.told if group == name]
        assert told == [bool(position % 2) for position in range(len(told))]
