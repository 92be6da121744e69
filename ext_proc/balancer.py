"""Pick and reserve in one step: from request facts to an ordered list of ranks and one reservation.

Pure and synchronous: nothing can run between choosing and counting, so two requests never see the same free
slot. Must never await, log or read a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ext_proc.decision import DropReason, Placed, Refused
from ext_proc.ledger import Ledger, RankAccount, Reservation
from ext_proc.vocabulary import Pick, PickReason, RequestFacts


class Policy(Protocol):
    """One module of `ext_proc.policies`."""

    REASON: PickReason

    def costs(self, facts: RequestFacts, ledger: Ledger, now_s: float, /) -> Sequence[float]:
        """Cost of each rank, in the order of `ledger.accounts`; lower is better."""
        ...


class Balancer:
    """Applies a policy to a ledger."""

    def __init__(self, ledger: Ledger, policy: Policy, *, pick_list_length: int) -> None:
        """Balance over the ranks of `ledger`; picks name at most `pick_list_length` ranks."""
        self.ledger = ledger
        self._policy = policy
        self._pick_list_length = pick_list_length

    def decide(self, facts: RequestFacts, now_s: float) -> Placed | Refused:
        """Place a request at once; refuse it if there is no rank that it may go to."""
        if not any(_may_take(account, facts) for account in self.ledger.accounts):
            return Refused(503, DropReason.NO_RANK)
        return Placed(*self.pick_and_reserve(facts, now_s))

    def pick_and_reserve(self, facts: RequestFacts, now_s: float) -> tuple[Pick, Reservation]:
        """Choose the ranks for a request and reserve the first of them."""
        pick = self.pick(facts, now_s)
        return pick, self.ledger.reserve(pick.first, facts, now_s)

    def pick(self, facts: RequestFacts, now_s: float) -> Pick:
        """Choose the ranks for a request, reserving nothing. There must be one that it may go to.

        Ranks of groups with a rank that is down are left out, unless that leaves none. Equal costs go to the
        rank picked longest ago. The second choice is in another group where there is one: when the first
        choice cannot be reached, its group is the likely reason.
        """
        healthy = {
            group.name
            for group in self.ledger.groups
            if self.ledger.is_healthy(group)
            and (facts.subset is None or any(_may_take(account, facts) for account in group.accounts))
        }
        ranked: list[tuple[float, int, RankAccount]] = sorted(
            (
                (cost, account.pick_sequence, account)
                for cost, account in zip(
                    self._policy.costs(facts, self.ledger, now_s), self.ledger.accounts, strict=True
                )
                if (not healthy or account.rank.group in healthy) and _may_take(account, facts)
            ),
            key=lambda entry: entry[:2],
        )
        order = [account.rank for _, _, account in ranked]
        elsewhere = next((i for i, rank in enumerate(order) if rank.group != order[0].group), None)
        if elsewhere is not None:
            order.insert(1, order.pop(elsewhere))
        return Pick(
            ranks=tuple(order[: self._pick_list_length]),
            reason=self._policy.REASON if healthy else PickReason.NO_HEALTHY_GROUP,
        )


def _may_take(account: RankAccount, facts: RequestFacts) -> bool:
    return facts.subset is None or account.rank in facts.subset
