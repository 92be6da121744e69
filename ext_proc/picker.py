"""Applies a policy to the ledger: from one request to an ordered list of ranks. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from ext_proc.accounts import RankAccount
from ext_proc.ledger import Ledger
from ext_proc.policy import PickView, Policy
from ext_proc.vocabulary import Pick, PickReason, Rank, RequestFacts


class Readiness(Enum):
    """Whether a rank may be given a request now."""

    READY = auto()
    BUSY = auto()
    """Not yet: a request that is best placed here should wait."""
    CLOSED = auto()
    """Not for this request: it may go to the next best rank."""


Readinesses = Callable[[RankAccount, int], Readiness]
"""The readiness of a rank for so many uncached tokens."""


@dataclass(frozen=True, slots=True)
class Busy:
    """No pick now: the best rank should be waited for."""

    account: RankAccount


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a pick would be and what each rank would cost."""

    pick: Pick | None
    """`None` if the request would be held."""
    costs: Mapping[Rank, Mapping[str, float]]
    cached_tokens: Mapping[Rank, int]


class Picker:
    """Chooses ranks; reserves nothing."""

    def __init__(self, ledger: Ledger, policy: Policy, *, pick_list_length: int, rng: random.Random) -> None:
        """Picks name at most `pick_list_length` ranks; `rng` is for policies that draw."""
        self._ledger = ledger
        self.policy = policy
        self._pick_list_length = pick_list_length
        self._rng = rng

    def candidates(self, facts: RequestFacts) -> tuple[Sequence[RankAccount], PickReason]:
        """The ranks a request may go to, and the reason of a pick among them.

        Those of groups out of rotation are left out; those of groups with a rank that is down too, unless
        that leaves none.
        """
        ledger, subset = self._ledger, facts.subset
        open_groups = [group for group in ledger.groups if ledger.is_in_rotation(group)]
        healthy = [group for group in open_groups if ledger.is_healthy(group)]
        if subset is None and len(healthy) == len(ledger.groups):
            return ledger.accounts, PickReason.POLICY
        for groups, reason in ((healthy, PickReason.POLICY), (open_groups, PickReason.NO_HEALTHY_GROUP)):
            allowed = [
                account
                for group in groups
                for account in group.accounts
                if subset is None or account.rank in subset
            ]
            if allowed:
                return allowed, reason
        return [], PickReason.POLICY

    def pick(
        self, facts: RequestFacts, now_s: float, readiness: Readinesses | None = None
    ) -> Pick | Busy | None:
        """The ranks for a request, best first; `None` if there is none or all are closed to it.

        Equal costs go to the rank picked longest ago. The second choice is in another group where there is
        one: when the first choice cannot be reached, its group is the likely reason.
        """
        view, reason = self._view(facts, now_s)
        if not view.accounts:
            return None
        ranked = sorted(
            zip(self.policy.costs(view), view.accounts, view.cached_tokens, strict=True),
            key=lambda entry: (entry[0], entry[1].pick_sequence),
        )
        first = 0
        while readiness is not None:
            if first == len(ranked):
                return None
            _, account, cached = ranked[first]
            state = readiness(account, facts.prompt_tokens - cached)
            if state is Readiness.READY:
                break
            if state is Readiness.BUSY:
                return Busy(account)
            first += 1
        order = [account.rank for _, account, _ in ranked]
        order.insert(0, order.pop(first))
        elsewhere = next((i for i, rank in enumerate(order) if rank.group != order[0].group), None)
        if elsewhere is not None:
            order.insert(1, order.pop(elsewhere))
        return Pick(tuple(order[: self._pick_list_length]), reason)

    def explain(self, facts: RequestFacts, now_s: float, readiness: Readinesses | None = None) -> Explanation:
        """What `pick` would say, and why."""
        view, _ = self._view(facts, now_s)
        ranks = [account.rank for account in view.accounts]
        outcome = self.pick(facts, now_s, readiness)
        return Explanation(
            outcome if isinstance(outcome, Pick) else None,
            dict(zip(ranks, self.policy.explain(view), strict=True)),
            dict(zip(ranks, view.cached_tokens, strict=True)),
        )

    def _view(self, facts: RequestFacts, now_s: float) -> tuple[PickView, PickReason]:
        ledger = self._ledger
        accounts, reason = self.candidates(facts)
        foreign = ledger.foreign_requests(now_s)
        if accounts is not ledger.accounts:
            by_account = dict(zip(ledger.accounts, foreign, strict=True))
            foreign = [by_account[account] for account in accounts]
        view = PickView(
            facts=facts,
            now_s=now_s,
            accounts=accounts,
            foreign_requests=foreign,
            cached_tokens=[ledger.cached_tokens(account, facts) for account in accounts],
            expected_output_tokens=ledger.output_lengths.expected(facts),
            pick_number=ledger.picks,
            rng=self._rng,
        )
        return view, reason
