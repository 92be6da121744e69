"""Which groups are in rotation: each holder can keep a group out, and it is back when no holder does. Pure.

Holders are the gateway's own watch, the supervisors of the group's machines, and operators. What one of them
has taken out, another cannot bring back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

MAX_HOLDERS = 64
"""Of one group; more would be a mistake."""


class TooManyHolders(Exception):
    """No further holder can keep the group out."""


class Rotation:
    """The groups of one gateway."""

    def __init__(self, groups: Iterable[str], on_change: Callable[[str, bool], None]) -> None:
        """All `groups` are in. `on_change` is told a group's name and whether it is in, when that changes."""
        self._holders: dict[str, dict[str, str]] = {group: {} for group in groups}
        self._on_change = on_change

    def __contains__(self, group: str) -> bool:
        return group in self._holders

    def is_in(self, group: str) -> bool:
        """Whether the group may get new requests."""
        return not self._holders[group]

    def held_out_by(self, group: str) -> Mapping[str, str]:
        """Who keeps the group out, and why; empty when it is in."""
        return dict(self._holders[group])

    def take_out(self, group: str, holder: str, reason: str) -> None:
        """`holder` wants no new requests for the group, or gives another reason. Raises TooManyHolders."""
        holders = self._holders[group]
        if holder not in holders and len(holders) >= MAX_HOLDERS:
            raise TooManyHolders(f"{MAX_HOLDERS} others keep group {group} out of rotation already")
        was_in = not holders
        holders[holder] = reason
        if was_in:
            self._on_change(group, False)

    def bring_back(self, group: str, holder: str) -> None:
        """As far as `holder` is concerned, the group may get requests."""
        holders = self._holders[group]
        if holders.pop(holder, None) is not None and not holders:
            self._on_change(group, True)
