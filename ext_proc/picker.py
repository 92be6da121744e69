"""Applies a policy to the ledger: from one request to an ordered list of ranks. Pure.

A policy may be somebody else's code, so what it does wrong must never cost a request.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import inf, isnan

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
        on_policy_failure: Callable[[Exception], None] = lambda _error: None,
    ) -> None:
        """Picks name at most `pick_list_length` ranks.

        Args:
            rng: for policies that draw.
            affinity: what a preferred rank may cost more; needs a policy whose costs are seconds.
            on_policy_failure: told what the policy has raised, or what is wrong with its costs.
        """
        self._ledger = ledger
        self.policy = policy
        self._pick_list_length = pick_list_length
        self._rng = rng
        self._affinity = affinity
        self._on_policy_failure = on_policy_failure

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
        waited_s: float = 0.0,
        explain: bool = False,
    ) -> Pick | Busy | None:
        """The ranks for a request, best first; `None` if there is none or all are closed to it.

        Equal costs go to the rank picked longest ago. A rank that the request has an affinity to goes before
        the cheapest one, if it costs little more.

        Args:
            facts: the request.
            now_s: the time.
            readiness: of each rank; all are ready without it.
            waited_s: how long it has been held.
            explain: tell what the ranks would cost, too.
        """
        view, reason = self._view(facts, now_s, waited_s)
        costs, parts = self._evaluate(view, explain=explain)
        return self._choose(view, reason, costs, parts, readiness)

    def prospect(
        self, facts: RequestFacts, now_s: float, readiness: Readinesses | None = None
    ) -> tuple[Pick | Busy | None, list[RankCost]]:
        """What `pick` says, and what each rank that the request may go to costs by the same reckoning."""
        view, reason = self._view(facts, now_s, waited_s=0.0)
        costs, parts = self._evaluate(view, explain=True)
        outcome = self._choose(view, reason, costs, parts, readiness)
        return outcome, _rank_costs(view, _loads(view) if parts is None else parts)

    def _choose(
        self,
        view: PickView,
        reason: PickReason,
        costs: Sequence[float] | None,
        parts: Sequence[Mapping[str, float]] | None,
        readiness: Readinesses | None,
    ) -> Pick | Busy | None:
        if not view.accounts:
            return None
        if costs is None:
            parts = _loads(view)
            costs, preferred, reason = _sums(parts), None, PickReason.POLICY_FAILED
        else:
            preferred = self._preferred(view, costs)
        for position in _in_order(costs, view.accounts, None if preferred is None else preferred[0]):
            account = view.accounts[position]
            state = Readiness.READY
            if readiness is not None:
                state = readiness(account, view.facts.prompt_tokens - view.cached_tokens[position])
            if state is Readiness.READY:
                if preferred is not None and preferred[0] == position:
                    reason = preferred[1]
                ranks = self._with_alternatives(position, costs, view.accounts)
                return Pick(ranks, reason, () if parts is None else _explained(view, parts, position))
            if state is Readiness.BUSY:
                return Busy(account)
        return None

    def _evaluate(
        self, view: PickView, *, explain: bool
    ) -> tuple[Sequence[float] | None, Sequence[Mapping[str, float]] | None]:
        """Costs, and their parts if `explain`; neither if the policy fails."""
        if not view.accounts:
            return (), ()
        try:
            parts = self.policy.explain(view) if explain else None
            costs = list(map(float, self.policy.costs(view))) if parts is None else _sums(parts)
            if len(costs) != len(view.accounts) or isnan(sum(costs)):
                raise ValueError(f"costs of {len(view.accounts)} ranks: {costs}")
        except Exception as error:
            self._on_policy_failure(error)
            return None, None
        return costs, parts

    def _view(self, facts: RequestFacts, now_s: float, waited_s: float) -> tuple[PickView, PickReason]:
        ledger = self._ledger
        accounts, reason = self.candidates(facts)
        view = PickView(
            facts=facts,
            now_s=now_s,
            waited_s=waited_s,
            accounts=accounts,
            foreign_requests=ledger.foreign_requests(accounts, now_s),
            cached_tokens=ledger.cached_tokens_each(accounts, facts),
            expected_output_tokens=ledger.output_lengths.expected(facts),
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


def _sums(parts: Sequence[Mapping[str, float]]) -> list[float]:
    return [sum(part.values()) for part in parts]


def _loads(view: PickView) -> list[Mapping[str, float]]:
    """What stands for the costs where the policy has none."""
    return [
        {"requests": account.reservations + foreign}
        for account, foreign in zip(view.accounts, view.foreign_requests, strict=True)
    ]


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
