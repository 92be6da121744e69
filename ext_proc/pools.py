"""Which ranks a request may go to: the pool of the model it asks for, without what does not serve just now.

A pool is all groups that serve one model. A name that nobody is known to serve goes to the default pool, the
first group's: a rank there answers that it does not know it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ext_proc.accounts import RankAccount
from ext_proc.groups import GroupAccount
from ext_proc.vocabulary import PickReason, Subset

MAX_ADAPTERS = 4_096
"""Adapters remembered that ranks were seen to run."""


class Pool:
    """The groups that serve one model."""

    __slots__ = ("_as_of", "_healthy", "_in_rotation", "_serving", "accounts", "groups")

    def __init__(self, groups: Iterable[GroupAccount]) -> None:
        self.groups = tuple(groups)
        self.accounts: Sequence[RankAccount] = [a for group in self.groups for a in group.accounts]
        """All their ranks."""
        self._healthy: Sequence[RankAccount] = ()
        self._in_rotation: Sequence[RankAccount] = ()
        self._serving: Sequence[GroupAccount] = ()
        self._as_of = -1

    def candidates(
        self, subset: Subset | None, availability: int
    ) -> tuple[Sequence[RankAccount], PickReason]:
        """The ranks that may get a request now, and the reason of a pick among them.

        Those of groups out of rotation are left out; those of groups with a rank that is down too, unless
        that leaves none.

        Args:
            subset: the ranks that the gateway limits the request to.
            availability: changes whenever a group's rotation or health does.
        """
        self._refresh(availability)
        for accounts, reason in (
            (self._healthy, PickReason.POLICY),
            (self._in_rotation, PickReason.NO_HEALTHY_GROUP),
        ):
            allowed = accounts if subset is None else [a for a in accounts if a.rank in subset]
            if allowed:
                return allowed, reason
        return (), PickReason.POLICY

    def serving(self, availability: int) -> Sequence[GroupAccount]:
        """The groups of the ranks that may get a request without a subset now."""
        self._refresh(availability)
        return self._serving

    def _refresh(self, availability: int) -> None:
        if availability == self._as_of:
            return
        self._as_of = availability
        in_rotation = [group for group in self.groups if group.in_rotation]
        healthy = [group for group in in_rotation if group.is_healthy]
        self._in_rotation = [a for group in in_rotation for a in group.accounts]
        self._healthy = [a for group in healthy for a in group.accounts]
        self._serving = healthy or in_rotation


class Pools:
    """The pools of one ledger."""

    def __init__(self, groups: Sequence[GroupAccount]) -> None:
        """Put together the groups that serve the same names; one without names serves them all."""
        names = dict.fromkeys(name for group in groups for name in group.models)
        self._by_name = {
            name: Pool(group for group in groups if name in group.models or not group.models)
            for name in names
        }
        first_names = groups[0].models if groups else ()
        self.default = self._by_name[first_names[0]] if first_names else Pool(groups)
        self._by_adapter: dict[str, Pool] = {}

    def of(self, model: str | None) -> Pool:
        """The pool that serves a model, an alias of it or an adapter to it."""
        if model is None:
            return self.default
        return self._by_name.get(model) or self._by_adapter.get(model) or self.default

    def knows(self, model: str) -> bool:
        """Whether a group is known to serve that name."""
        return model in self._by_name or model in self._by_adapter

    def is_adapter(self, model: str | None) -> bool:
        """Whether a rank was seen to run an adapter of that name."""
        return model in self._by_adapter

    def note_adapters(self, group: GroupAccount, adapters: Iterable[str]) -> None:
        """Ranks of `group` run these adapters, so the group's model is what they adapt."""
        for adapter in adapters:
            if adapter not in self._by_adapter and len(self._by_adapter) < MAX_ADAPTERS:
                self._by_adapter[adapter] = self.of(group.models[0] if group.models else None)
