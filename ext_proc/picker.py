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
from ext_proc.settings import Affinity
from ext_proc.vocabulary import Pick, PickReason, Rank, RankCost, RequestFacts

EXPLAINED_RANKS = 3
"""Ranks whose costs a pick tells."""


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


class Picker:
    """Chooses ranks; reserves nothing."""

    def __init__(
        self,
        ledger: Ledger,
        policy: Policy,
        *,
        pick_list_length: int,
        rng: random.Random,
        affinity: Affinity | None = None,
    ) -> None:
        """Picks name at most `pick_list_length` ranks.

        Args:
            rng: for policies that draw.
            affinity: what a preferred rank may cost more; needs a policy whose costs are seconds.
        """
        self._ledger = ledger
        self.policy = policy
        self._pick_list_length = pick_list_length
        self._rng = rng
        self._affinity = affinity

    def candidates(self, facts: RequestFacts) -> tuple[Sequence[RankAccount], PickReason]:
        """The ranks a request may go to, and the reason of a pick among them."""
        ledger = self._ledger
        return ledger.pools.of(facts.model).candidates(facts.subset, ledger.availability)

    def pick(
        self,
        facts: RequestFacts,
        now_s: float,
        readiness: Readinesses | None = None,
        *,
        explain: bool = False,
    ) -> Pick | Busy | None:
        """The ranks for a request, best first; `None` if there is none or all are closed to it.

        Equal costs go to the rank picked longest ago. A rank that the request has an affinity to goes before
        the cheapest one, if it costs little more.

        Args:
            facts: the request.
            now_s: the time.
            readiness: of each rank; all are ready without it.
            explain: tell what the ranks would cost, too.
        """
        view, reason = self._view(facts, now_s)
        if not view.accounts:
            return None
        parts = self.policy.explain(view) if explain else None
        costs = self.policy.costs(view) if parts is None else [sum(part.values()) for part in parts]
        preferred = self._preferred(view, costs)
        for position in _in_order(costs, view.accounts, None if preferred is None else preferred[0]):
            account = view.accounts[position]
            state = Readiness.READY
            if readiness is not None:
                state = readiness(account, facts.prompt_tokens - view.cached_tokens[position])
            if state is Readiness.READY:
                if preferred is not None and preferred[0] == position:
                    reason = preferred[1]
                ranks = self._with_alternatives(position, costs, view.accounts)
                return Pick(ranks, reason, () if parts is None else _explained(view, parts, position))
            if state is Readiness.BUSY:
                return Busy(account)
        return None

    def costs(self, facts: RequestFacts, now_s: float) -> list[RankCost]:
        """What each rank that a request may go to would cost."""
        view, _ = self._view(facts, now_s)
        return _rank_costs(view, self.policy.explain(view))

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

    def _preferred(self, view: PickView, costs: Sequence[float]) -> tuple[int, PickReason] | None:
        """Position of a rank to be preferred to the cheapest, and why; `None` if there is none."""
        if self._affinity is None:
            return None
        facts, accounts = view.facts, view.accounts
        least = min(costs)
        last = self._ledger.sessions.last(facts.session)
        if last is not None and last in accounts:
            position = accounts.index(last)
            if costs[position] <= least + self._affinity.session_bound_s:
                return position, PickReason.SESSION
        if self._ledger.pools.is_adapter(facts.model):
            running = [
                cost if facts.model in a.adapters else inf for cost, a in zip(costs, accounts, strict=True)
            ]
            if min(running) <= least + self._affinity.adapter_bound_s:
                return _cheapest(running, accounts), PickReason.ADAPTER
        return None

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


def _in_order(
    costs: Sequence[float], accounts: Sequence[RankAccount], preferred: int | None
) -> Iterator[int]:
    """Positions of the ranks: the preferred one, then by cost. Sorted only if somebody asks for a second."""
    first = _cheapest(costs, accounts) if preferred is None else preferred
    yield first
    sequences = (account.pick_sequence for account in accounts)
    for _, _, position in sorted(zip(costs, sequences, range(len(costs)), strict=True)):
        if position != first:
            yield position


def _cheapest(costs: Sequence[float], accounts: Sequence[RankAccount]) -> int:
    """Position of the cheapest rank; of equals, the one picked longest ago."""
    least = min(costs)
    equals = [position for position, cost in enumerate(costs) if cost == least]
    return min(equals, key=lambda position: accounts[position].pick_sequence)


def _explained(view: PickView, parts: Sequence[Mapping[str, float]], picked: int) -> tuple[RankCost, ...]:
    costs = _rank_costs(view, parts)
    others = sorted(costs[:picked] + costs[picked + 1 :], key=lambda one: one.cost)
    return (costs[picked], *others[: EXPLAINED_RANKS - 1])


def _rank_costs(view: PickView, parts: Sequence[Mapping[str, float]]) -> list[RankCost]:
    return [
        RankCost(account.rank, part, cached)
        for account, part, cached in zip(view.accounts, parts, view.cached_tokens, strict=True)
    ]
