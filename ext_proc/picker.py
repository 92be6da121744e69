"""Applies a policy to the ledger: from one request to an ordered list of ranks. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import inf

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
        """The ranks a request may go to, and the reason of a pick among them."""
        ledger = self._ledger
        return ledger.pools.of(facts.model).candidates(facts.subset, ledger.availability)

    def pick(
        self, facts: RequestFacts, now_s: float, readiness: Readinesses | None = None
    ) -> Pick | Busy | None:
        """The ranks for a request, best first; `None` if there is none or all are closed to it.

        Equal costs go to the rank picked longest ago.
        """
        view, reason = self._view(facts, now_s)
        if not view.accounts:
            return None
        costs = self.policy.costs(view)
        for position in _in_order(costs, view.accounts):
            account = view.accounts[position]
            state = Readiness.READY
            if readiness is not None:
                state = readiness(account, facts.prompt_tokens - view.cached_tokens[position])
            if state is Readiness.READY:
                return Pick(self._with_alternatives(position, costs, view.accounts), reason)
            if state is Readiness.BUSY:
                return Busy(account)
        return None

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
        view = PickView(
            facts=facts,
            now_s=now_s,
            accounts=accounts,
            foreign_requests=ledger.foreign_requests(accounts, now_s),
            cached_tokens=ledger.cached_tokens_each(accounts, facts),
            expected_output_tokens=ledger.output_lengths.expected(facts),
            pick_number=ledger.picks,
            rng=self._rng,
        )
        return view, reason

    def _with_alternatives(
        self, first: int, costs: Sequence[float], accounts: Sequence[RankAccount]
    ) -> tuple[Rank, ...]:
        """The rank at `first` and the cheapest of the others, but for those that cost infinitely much.

        The second choice is in another group where there is one: when the first choice cannot be reached, its
        group is the likely reason.
        """
        chosen = [first]
        left = list(costs)
        group = accounts[first].group
        while len(chosen) < min(self._pick_list_length, len(accounts)):
            left[chosen[-1]] = inf
            among = left
            if len(chosen) == 1:
                elsewhere = [c if a.group is not group else inf for c, a in zip(left, accounts, strict=True)]
                among = elsewhere if min(elsewhere) < inf else left
            if min(among) == inf:
                break
            chosen.append(_cheapest(among, accounts))
        return tuple(accounts[position].rank for position in chosen)


def _in_order(costs: Sequence[float], accounts: Sequence[RankAccount]) -> Iterator[int]:
    """Positions of the ranks, the cheapest first. They are sorted only if somebody asks for a second."""
    first = _cheapest(costs, accounts)
    yield first
    for _, _, position in sorted(
        zip(costs, (a.pick_sequence for a in accounts), range(len(costs)), strict=True)
    ):
        if position != first:
            yield position


def _cheapest(costs: Sequence[float], accounts: Sequence[RankAccount]) -> int:
    """Position of the cheapest rank; of equals, the one picked longest ago."""
    least = min(costs)
    equals = [position for position, cost in enumerate(costs) if cost == least]
    return min(equals, key=lambda position: accounts[position].pick_sequence)
