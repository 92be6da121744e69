"""When a request is placed: now, or held (for a phase, a backlog or KV memory), or refused.

The pick is made when a request is let go, not when it arrives, so it knows what has happened meanwhile. Pure:
the caller tells the time, calls again when `next_wake_s` says, and passes the decisions on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from ext_proc.accounts import RankAccount
from ext_proc.decision import DropReason, Placed, Refused
from ext_proc.groups import GroupAccount
from ext_proc.ledger import Ledger
from ext_proc.openings import Openings
from ext_proc.phases import PhaseGate
from ext_proc.picker import Busy, Picker, Readiness, Readinesses
from ext_proc.settings import AdmissionSettings
from ext_proc.vocabulary import Pick, RankCost, RequestFacts
from ext_proc.waiting_room import Held, WaitingRoom

TICK_S = 0.005
"""How often held requests are looked at again."""
LOOK_AGAIN_S = 0.25
"""How long a request that found no rank waits for what it would take before all are compared again."""
LOOKS_AT_ONCE = 8
"""How many are compared again at once: it bounds the time that a long queue takes."""
VAIN_LOOKS_AT_ONCE = 4 * LOOKS_AT_ONCE
"""After so many that found no rank the others wait for the next tick."""
OVERDUE_AT_ONCE = 64
"""How many that have waited long enough are decided at once, for the same reason: a portion."""
PORTION_S = 2 * TICK_S
"""So much earlier, for each portion of requests that wait, the first is decided, that the last one does not
wait too long either: a tick's work may take as long as the pause after it."""


@dataclass(frozen=True, slots=True)
class Prospect:
    """What would be decided about a request."""

    outcome: Pick | Busy | Refused | None
    """`Busy`: held for that rank; `None`: held until a phase, or until a rank is open to it."""
    ranks: tuple[tuple[RankCost, Readiness], ...]
    """Of all ranks it may go to, the cheapest first."""


class Admission:
    """Lets requests go to the ranks of one ledger."""

    def __init__(self, ledger: Ledger, picker: Picker, settings: AdmissionSettings) -> None:
        self._ledger = ledger
        self._picker = picker
        self._settings = settings if picker.policy.holds else settings.never_holding()
        self._gates: dict[GroupAccount, PhaseGate] = {
            group: PhaseGate(group, self._settings.phases_from_requests_per_rank)
            for group in ledger.groups
            if self._settings.phases and group.lock_step
        }
        self._decided: list[Held] = []
        self._waiting = WaitingRoom(
            max_requests=settings.max_held_requests, max_tokens=settings.max_held_tokens
        )

    @property
    def held_requests(self) -> int:
        """Requests waiting now."""
        return len(self._waiting)

    @property
    def held_tokens(self) -> int:
        """Their prompt tokens."""
        return self._waiting.tokens

    def decide(self, facts: RequestFacts, now_s: float) -> Placed | Refused | Held:
        """Decide about a request that has just arrived, or hold it."""
        accounts, _ = self._picker.candidates(facts)
        if not accounts:
            return self._no_rank(facts)
        if not self._waiting.has_room(facts):
            # Those that wait come first, to whatever has become free since they were last looked at.
            self.advance(now_s)
        if not self._waiting.has_room(facts):
            return self._place_past_the_others(facts, now_s)
        held = self._waiting.enter(facts, now_s)
        try:
            held.uncached_tokens = self._least_uncached(facts, accounts)
            self.advance(now_s)
        except BaseException:
            # Nobody would ever take it out again.
            held.withdraw(now_s)
            raise
        if held.decision is None:
            return held
        self._decided.remove(held)
        return held.decision

    def advance(self, now_s: float) -> None:
        """Decide what can be decided now: to be called at `next_wake_s`."""
        self._ledger.pass_time(now_s)
        self._ledger.assume_progress(now_s)
        if self._waiting:
            self._let_go(now_s)
        portions = len(self._waiting) // OVERDUE_AT_ONCE + 1
        arrived_by_s = now_s + portions * PORTION_S - self._settings.max_hold_s
        overdue = (one for one in self._waiting if one.arrived_s < arrived_by_s)
        if some := list(islice(overdue, OVERDUE_AT_ONCE)):
            openings = self._openings(now_s)
            for held in some:
                self._decide_overdue(held, now_s, openings)

    def prospect(self, facts: RequestFacts, now_s: float) -> Prospect:
        """What would be decided about a request now, and why. It is neither held nor reserved."""
        self._ledger.pass_time(now_s)
        accounts, _ = self._picker.candidates(facts)
        if not accounts:
            return Prospect(self._no_rank(facts), ())
        readiness = self._openings(now_s).readiness
        outcome: Pick | Busy | Refused | None
        outcome, costs = self._picker.prospect(facts, now_s, readiness)
        ranks = [
            (cost, readiness(account, facts.prompt_tokens - cost.cached_tokens))
            for cost, account in zip(costs, accounts, strict=True)
        ]
        if not isinstance(outcome, Pick) and not self._waiting.has_room(facts):
            outcome = self._full()
        return Prospect(outcome, tuple(sorted(ranks, key=lambda entry: entry[0].cost)))

    def take_decided(self) -> list[Held]:
        """Held requests that have been decided since the last call."""
        decided, self._decided = self._decided, []
        return decided

    def next_wake_s(self, now_s: float) -> float | None:
        """When to call `advance` again, unless that has been said already; `None`: not at all."""
        return now_s + TICK_S if self._waiting else None

    # --- Letting go ----------------------------------------------------------------------------------

    def _place_past_the_others(self, facts: RequestFacts, now_s: float) -> Placed | Refused:
        """Place a request that could not be held: those that wait, wait for other ranks or more room."""
        readiness = self._openings(now_s).readiness
        pick = self._picker.pick(facts, now_s, readiness, explain=self._explains(facts))
        if not isinstance(pick, Pick):
            return self._full()
        return Placed(pick, self._ledger.reserve(pick.first, facts, now_s))

    def _let_go(self, now_s: float) -> None:
        """Place all whose rank is ready, in order; one that is not does not keep the others from it.

        Only who may find a rank by now is compared with all ranks: that is what takes time.
        """
        openings = self._openings(now_s)
        if not openings.is_any():
            return
        due = self._due(now_s)
        vain_looks = 0
        candidates = (one for one in self._waiting if one in due or self._may_go(one, openings))
        for held in self._in_order(candidates, now_s):
            if held not in due and not self._may_go(held, openings):
                continue
            outcome = self._pick(held, now_s, openings.readiness)
            if isinstance(outcome, Pick):
                openings.note_placed(self._place(held, outcome, now_s))
                if not openings.is_any():
                    return
            else:
                longest = self._longest_tokens(held, openings)
                held.waits_for = outcome.account if outcome is not None else None
                held.waits_for_more_than_tokens = -1.0 if longest is None else longest
                held.look_again_s = now_s + LOOK_AGAIN_S
                vain_looks += 1
                if vain_looks == VAIN_LOOKS_AT_ONCE:
                    return

    def _may_go(self, held: Held, openings: Openings) -> bool:
        """Whether what kept it from going when it was compared with all ranks has changed."""
        if held.waits_for is not None:
            return openings.is_ready(held.waits_for)
        longest = self._longest_tokens(held, openings)
        return longest is not None and held.waits_for_more_than_tokens < longest >= held.uncached_tokens

    def _longest_tokens(self, held: Held, openings: Openings) -> float | None:
        """The longest prompt that a rank of its pool takes."""
        pool = self._ledger.pools.of(held.facts.model)
        return openings.longest_tokens(pool.serving(self._ledger.availability))

    def _due(self, now_s: float) -> set[Held]:
        """The first ones that have not been compared with all ranks for long."""
        return set(islice((one for one in self._waiting if now_s >= one.look_again_s), LOOKS_AT_ONCE))

    def _decide_overdue(self, held: Held, now_s: float, openings: Openings) -> None:
        """At the end of the longest hold only a full rank is closed; phases and backlogs count no more."""
        outcome = self._pick(
            held,
            now_s,
            lambda account, _: Readiness.CLOSED if openings.is_full(account) else Readiness.READY,
        )
        if isinstance(outcome, Pick):
            self._place(held, outcome, now_s)
        elif not self._picker.candidates(held.facts)[0]:
            self._settle(held, self._no_rank(held.facts))
        else:
            self._settle(held, Refused(503, DropReason.SATURATED, self._settings.max_hold_s))

    def _full(self) -> Refused:
        return Refused(429, DropReason.QUEUE_FULL, self._settings.max_hold_s)

    def _no_rank(self, facts: RequestFacts) -> Refused:
        """Trying again helps only if ranks for the request exist, but are out of rotation for now."""
        subset = facts.subset
        ranks = (account.rank for account in self._ledger.pools.of(facts.model).accounts)
        exists = any(subset is None or rank in subset for rank in ranks)
        return Refused(503, DropReason.NO_RANK, self._settings.max_hold_s if exists else None)

    def _pick(self, held: Held, now_s: float, readiness: Readinesses) -> Pick | Busy | None:
        waited_s, explain = now_s - held.arrived_s, self._explains(held.facts)
        return self._picker.pick(held.facts, now_s, readiness, waited_s=waited_s, explain=explain)

    def _explains(self, facts: RequestFacts) -> bool:
        return self._settings.explains_all or facts.wants_explanation

    def _place(self, held: Held, pick: Pick, now_s: float) -> RankAccount:
        reservation = self._ledger.reserve(pick.first, held.facts, now_s)
        self._settle(held, Placed(pick, reservation, now_s - held.arrived_s))
        return reservation.account

    def _settle(self, held: Held, decision: Placed | Refused) -> None:
        self._waiting.leave(held)
        held.decision = decision
        self._decided.append(held)

    def _openings(self, now_s: float) -> Openings:
        return Openings(self._ledger, self._gates, self._settings, now_s)

    def _in_order(self, waiting: Iterable[Held], now_s: float) -> list[Held]:
        """Of these, those first that can still have their first token in time.

        Serving one that is late anyway before one that is not yet would only make both late.
        """
        rate = max(group.prefill_tokens_per_s for group in self._ledger.groups)

        def is_late(held: Held) -> bool:
            return now_s + held.uncached_tokens / rate > held.arrived_s + self._settings.targets.ttft_s

        return sorted(waiting, key=lambda held: (held.priority, is_late(held), held))

    def _least_uncached(self, facts: RequestFacts, accounts: Sequence[RankAccount]) -> int:
        return facts.prompt_tokens - max(self._ledger.cached_tokens_each(accounts, facts))
